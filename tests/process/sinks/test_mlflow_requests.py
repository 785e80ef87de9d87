"""What the environment asks of MLflow, and runs and experiments that were deleted there."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
from mlflow import MlflowClient

from ray_yolo import cli
from ray_yolo.core.errors import TrackingError
from ray_yolo.core.events import RunEvent
from ray_yolo.runs.event_log import EVENTS_FILE, read_events
from ray_yolo.sinks.mlflow_plan import plan_run, requested_tracking
from tests.support import run_log
from tests.support.servers import BrokenServer
from tests.support.tracking import synchronise

VARIABLES = ("MLFLOW_EXPERIMENT_NAME", "MLFLOW_EXPERIMENT_ID", "MLFLOW_RUN_ID", "MLFLOW_TRACKING_URI")


@pytest.fixture(autouse=True)
def _no_requests(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in VARIABLES:
        monkeypatch.delenv(name, raising=False)


@pytest.fixture(scope="module")
def database(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An empty database: making one takes seconds, copying it does not."""
    path = tmp_path_factory.mktemp("storage") / "mlflow.db"
    MlflowClient(tracking_uri=f"sqlite:///{path}").search_experiments()
    return path


@pytest.fixture
def uri(database: Path, tmp_path: Path) -> str:
    shutil.copy(database, tmp_path / "mlflow.db")
    return f"sqlite:///{tmp_path}/mlflow.db"


def finished(folder: Path, **tracking: str) -> Path:
    """The folder of a finished training, with these requests in its log."""
    folder.mkdir()
    run_log.write(folder / EVENTS_FILE, [run_log.run(run_id=str(folder), tracking=tracking), run_log.start(),
                                         *run_log.trained_epoch(0), run_log.end(10)])
    return folder


def test_the_experiment_of_the_environment_is_used(
        uri: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    client = MlflowClient(tracking_uri=uri)
    monkeypatch.setenv("MLFLOW_EXPERIMENT_NAME", "mine")
    run = client.get_run(synchronise(finished(tmp_path / "exp"), uri))
    assert client.get_experiment(run.info.experiment_id).name == "mine"


def test_the_log_keeps_what_was_asked_at_the_start(uri: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    client = MlflowClient(tracking_uri=uri)
    monkeypatch.setenv("MLFLOW_EXPERIMENT_NAME", "of the shell of sync")
    run = client.get_run(synchronise(finished(tmp_path / "exp", experiment="first"), uri))
    assert client.get_experiment(run.info.experiment_id).name == "first"


def test_an_experiment_is_requested_by_number(uri: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    client = MlflowClient(tracking_uri=uri)
    number = client.create_experiment("made before")
    monkeypatch.setenv("MLFLOW_EXPERIMENT_ID", number)
    assert client.get_run(synchronise(finished(tmp_path / "exp"), uri)).info.experiment_id == number


def test_the_run_of_the_environment_is_the_parent(uri: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    client = MlflowClient(tracking_uri=uri)
    parent = client.create_run(client.create_experiment("pipeline")).info
    monkeypatch.setenv("MLFLOW_RUN_ID", parent.run_id)
    run = client.get_run(synchronise(finished(tmp_path / "exp"), uri))
    assert run.info.run_id != parent.run_id
    assert run.data.tags["mlflow.parentRunId"] == parent.run_id
    assert run.info.experiment_id == parent.experiment_id


def test_the_parent_of_a_sweep_goes_before_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MLFLOW_RUN_ID", "outer")
    plan = plan_run([run_log.run(), run_log.start()], parent_run_id="sweep")
    assert plan is not None
    assert plan.tags["mlflow.parentRunId"] == "sweep"


def test_only_set_variables_are_requests(monkeypatch: pytest.MonkeyPatch) -> None:
    assert requested_tracking() == {}
    monkeypatch.setenv("MLFLOW_EXPERIMENT_NAME", " ")
    monkeypatch.setenv("MLFLOW_RUN_ID", "ab")
    assert requested_tracking() == {"parent_run_id": "ab"}


def test_older_logs_have_no_requests(tmp_path: Path) -> None:
    folder = finished(tmp_path / "exp")
    [event] = [event for event in read_events(folder / EVENTS_FILE) if isinstance(event, RunEvent)]
    assert (event.tracking, event.notes) == ({}, ())


def test_a_run_that_was_deleted_on_the_server_is_said(uri: str, tmp_path: Path) -> None:
    client, folder = MlflowClient(tracking_uri=uri), finished(tmp_path / "exp")
    run_id = synchronise(folder, uri)
    client.delete_run(run_id)
    with pytest.raises(TrackingError, match=f"the run {run_id} .*was deleted there.*mlflow runs restore"):
        synchronise(folder, uri)
    client.restore_run(run_id)
    assert synchronise(folder, uri) == run_id


def test_sync_answers_each_trouble_with_one_line(
        uri: str, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    client, folder = MlflowClient(tracking_uri=uri), finished(tmp_path / "exp")
    client.delete_experiment(client.create_experiment("train"))

    def trouble(*words: str, code: int = 3) -> str:
        status = cli.run(lambda: cli.sync([str(folder), *words]))
        written = capsys.readouterr()
        assert (status, written.out, len(written.err.splitlines())) == (code, "", 1), written.err
        return written.err

    assert "mlflow experiments restore" in trouble("--mlflow-uri", uri)
    assert "Connection refused; start the server" in trouble("--mlflow-uri", "http://127.0.0.1:9")
    assert "ftp://h is no address of an MLflow server" in trouble("--mlflow-uri", "ftp://h", code=2)
    with BrokenServer() as server:
        assert "500" in trouble("--mlflow-uri", server.uri)
    monkeypatch.setenv("MLFLOW_RUN_ID", "0" * 32)
    assert "check MLFLOW_RUN_ID" in trouble("--mlflow-uri", uri)
