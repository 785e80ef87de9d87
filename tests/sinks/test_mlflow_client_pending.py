"""A delivery that failed is noted as pending, and made by sync or by the next training."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from mlflow import MlflowClient

from ray_yolo import sync
from ray_yolo.core.errors import InputError
from ray_yolo.runs.event_log import EVENTS_FILE
from ray_yolo.runs.folders import lock_file
from ray_yolo.sinks.completion import complete_records, start_completion
from ray_yolo.sinks.mlflow_client import OWED_FILE, RUN_FILE, note_pending, pending_runs, read_pending
from ray_yolo.sinks.mlflow_run import Delivery, Mlflow, synchronise
from tests.support import run_log
from tests.support.tracking import Tracking

STORY = [run_log.start(), *run_log.trained_epoch(0), run_log.end(10)]
AWAY = "http://user:s3cr3t@127.0.0.1:1"


@pytest.fixture(scope="module")
def storage(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a database: making one takes seconds."""
    return tmp_path_factory.mktemp("storage")


@pytest.fixture(scope="module")
def uri(storage: Path) -> str:
    return f"sqlite:///{storage}/mlflow.db"


@pytest.fixture(scope="module")
def client(uri: str) -> MlflowClient:
    return MlflowClient(tracking_uri=uri)


def begin(folder: Path, finished: bool = True) -> Path:
    """A run folder with a training of its own."""
    folder.mkdir(parents=True)
    run_log.write(folder / EVENTS_FILE, [run_log.run(run_id=str(folder)), *STORY])
    if finished:
        (folder / "finished").touch()
    return folder


def delivered(client: MlflowClient, folder: Path) -> list[str]:
    """Ids of the MLflow runs of a run folder."""
    experiments = [experiment.experiment_id for experiment in client.search_experiments()]
    found = client.search_runs(experiments, filter_string=f"tags.`ray_yolo.run_id` = '{folder}'")
    return [run.info.run_id for run in found if run.info.status == "FINISHED"]


def test_what_a_server_has_not_got_is_noted_without_secrets_until_it_has(tmp_path: Path) -> None:
    run = begin(tmp_path / "exp")
    assert Tracking(run, AWAY, lambda _: None, tags={"a": "b"}).finish(patience_seconds=0.5) is not None
    assert read_pending(run, AWAY) == {"uri": "http://***@127.0.0.1:1", "parent_run_id": None, "tags": {"a": "b"}}
    assert "s3cr3t" not in (run / OWED_FILE).read_text()


def test_mlflow_waits_before_it_takes_time_from_a_training_that_may_be_short(
        tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[bool] = []
    monkeypatch.setattr(Delivery, "deliver", lambda self, plan, *, with_files: calls.append(with_files))
    delayed, prompt = Mlflow(tmp_path, AWAY), Mlflow(tmp_path, AWAY, delay_seconds=0.0)
    for mlflow in (delayed, prompt):
        for event in (run_log.run(), *STORY):
            mlflow.event(event)
    delayed.update()
    assert calls == []  # the first step was reported just now
    delayed.update(last=True)
    prompt.update()
    assert calls == [True, False]


def test_after_a_prompt_a_process_delivers_what_is_pending_of_a_finished_run(
        tmp_path: Path, uri: str, client: MlflowClient) -> None:
    unfinished, run = begin(tmp_path / "exp", finished=False), begin(tmp_path / "exp2")
    for folder in (unfinished, run):
        note_pending(folder, uri, parent_run_id=None, tags={})
    complete_records(unfinished, uri)
    assert delivered(client, unfinished) == []
    start_completion(run, uri).wait(120)
    assert len(delivered(client, run)) == 1
    assert read_pending(run, uri) is None


def test_notes_on_one_delivery_add_up(tmp_path: Path) -> None:
    note_pending(tmp_path, AWAY, parent_run_id="p", tags={"a": "b"})
    note_pending(tmp_path, AWAY, registered_name="detector")
    assert read_pending(tmp_path, AWAY) == {"uri": "http://***@127.0.0.1:1", "parent_run_id": "p", "tags": {"a": "b"},
                                            "registered_name": "detector"}


def test_a_pending_model_is_registered_by_sync(
        tmp_path: Path, uri: str, monkeypatch: pytest.MonkeyPatch) -> None:
    run, registered = begin(tmp_path / "exp"), list[tuple[object, ...]]()
    monkeypatch.setattr("ray_yolo.sinks.registry.log_model", lambda *model: registered.append(model))
    note_pending(run, uri, registered_name="detector")
    run_id = synchronise(run, uri)
    assert registered == [(run, uri, run_id, "detector")]
    assert read_pending(run, uri) is None


def test_the_next_training_of_the_project_delivers_it(tmp_path: Path, client: MlflowClient, uri: str) -> None:
    run, later = begin(tmp_path / "exp"), begin(tmp_path / "exp2", finished=False)
    parent = client.create_run("0").info.run_id
    note_pending(run, uri, parent_run_id=parent, tags={"a": "b"})
    assert delivered(client, run) == []
    assert Tracking(later, uri, pytest.fail).finish() is None
    [delivered_run] = delivered(client, run)
    assert client.get_run(delivered_run).data.tags["mlflow.parentRunId"] == parent
    assert client.get_run(delivered_run).data.tags["a"] == "b"
    assert len(delivered(client, later)) == 1
    assert not (run / OWED_FILE).exists()


def test_sync_delivers_it_as_it_was_to_be(tmp_path: Path, client: MlflowClient, uri: str) -> None:
    run = begin(tmp_path / "exp")
    parent = client.create_run("0").info.run_id
    note_pending(run, uri, parent_run_id=parent, tags={})
    assert client.get_run(synchronise(run, uri)).data.tags["mlflow.parentRunId"] == parent
    assert not (run / OWED_FILE).exists()


def test_sync_delivers_to_where_the_run_is_tracked_whatever_folder_it_is_started_in(
        tmp_path: Path, storage: Path, client: MlflowClient, uri: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)
    monkeypatch.chdir(tmp_path)
    pending, tracked, unknown = begin(tmp_path / "a"), begin(tmp_path / "b"), begin(storage / "runs" / "train" / "exp")
    note_pending(pending, uri, parent_run_id=None, tags={})
    (tracked / RUN_FILE).write_text(json.dumps({"run_id": "0" * 32, "uri": uri}))
    for run in (pending, tracked, unknown):  # the last one was killed before it reached any server
        assert sync.main([str(run)]) == 0
        assert len(delivered(client, run)) == 1
    assert not (tmp_path / "mlflow.db").exists()


def test_a_server_whose_secrets_are_not_kept_is_asked_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = begin(tmp_path / "exp")
    note_pending(run, AWAY, parent_run_id=None, tags={})
    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)
    monkeypatch.chdir(tmp_path)
    with pytest.raises(InputError, match=r"the secrets of http://\*\*\*@127.* --mlflow-uri"):
        sync.main([str(run)])
    monkeypatch.setenv("MLFLOW_TRACKING_URI", "off")
    with pytest.raises(SystemExit):
        sync.main([str(run)])


def test_only_finished_runs_with_a_pending_delivery_to_this_server_are_delivered(tmp_path: Path, uri: str) -> None:
    own, other, unfinished = begin(tmp_path / "a"), begin(tmp_path / "b"), begin(tmp_path / "c", finished=False)
    for run, server in ((own, uri), (other, AWAY), (unfinished, uri)):
        note_pending(run, server, parent_run_id=None, tags={})
    assert pending_runs(tmp_path / "new", uri) == [own]
    assert pending_runs(own, uri) == []
    synchronise(other, uri)
    assert read_pending(other, AWAY) is not None


def test_two_trainings_that_begin_at_once_deliver_it_once(tmp_path: Path, client: MlflowClient, uri: str) -> None:
    run, later = begin(tmp_path / "exp"), begin(tmp_path / "exp2")
    note_pending(run, uri, parent_run_id=None, tags={})
    with (run / OWED_FILE).open("r+") as note:
        assert lock_file(note)
        assert Tracking(later, uri, pytest.fail).finish() is None
        assert delivered(client, run) == []
    assert Tracking(later, uri, pytest.fail).finish() is None
    assert len(delivered(client, run)) == 1
