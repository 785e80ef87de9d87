import getpass
import json
import shutil
import signal
import socket
import threading
import time
from collections import Counter

import pytest
from mlflow import MlflowClient

from ray_yolo.core.events import ANCHOR_TERMS, RunEvent
from ray_yolo.core.files import atomic_write
from ray_yolo.runs.event_log import EVENTS_FILE
from ray_yolo.sinks.metric_names import metrics
from ray_yolo.sinks.mlflow_client import read_run_file
from ray_yolo.sinks.mlflow_plan import ARTIFACTS, plan_validation
from ray_yolo.sinks.mlflow_run import Delivery
from tests.support import run_log
from tests.support.servers import BrokenServer, MlflowServer
from tests.support.tracking import Tracking, synchronise

STORY = [run_log.run(), run_log.dataset(train="a1", val="b2"), run_log.start(), *run_log.trained_epoch(0),
         *run_log.trained_epoch(1), *run_log.trained_epoch(2), run_log.end(30)]
WEIGHTS = {"weights/best.pt", "weights/last.pt"}


@pytest.fixture(scope="module")
def database(tmp_path_factory):
    """An empty database: making one takes seconds, copying it does not."""
    path = tmp_path_factory.mktemp("storage") / "mlflow.db"
    MlflowClient(tracking_uri=f"sqlite:///{path}").search_experiments()
    return path


@pytest.fixture
def uri(database, tmp_path):
    shutil.copy(database, tmp_path / "mlflow.db")
    return f"sqlite:///{tmp_path}/mlflow.db"


@pytest.fixture
def client(uri):
    return MlflowClient(tracking_uri=uri)


@pytest.fixture
def run_dir(tmp_path):
    folder = tmp_path / "exp"
    (folder / "weights").mkdir(parents=True)
    for name in ("hyp.yaml", "results.csv", "results.png", "weights/best.pt", "weights/last.pt"):
        (folder / name).write_text(name)
    return folder


def notify(run_dir, events):
    """Append to the run's log; every run folder of a test has a training of its own."""
    run_log.write(run_dir / EVENTS_FILE, [
        event.model_copy(update={"run_id": str(run_dir)}) if isinstance(event, RunEvent) else event
        for event in events])


def wait_until(condition):
    deadline = time.monotonic() + 30
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.02)


def test_a_file_that_is_no_database_is_reported_at_once_and_not_tried_again(run_dir, tmp_path):
    (tmp_path / "mlflow.db").write_text("nothing of the kind, but long enough")
    notify(run_dir, STORY)
    warnings = []
    tracking = Tracking(run_dir, f"sqlite:///{tmp_path}/mlflow.db", warnings.append)
    wait_until(lambda: warnings)
    assert tracking.finish(1.0) == ["MLflow"]
    assert warnings == [f"MLflow: {tmp_path}/mlflow.db: is no SQLite database; move it away, or name another one with "
                        "--mlflow-uri. Training continues without."]


def points(client, run_id):
    """How often each (key, epoch) is there."""
    keys = client.get_run(run_id).data.metrics
    return Counter((key, point.step) for key in keys for point in client.get_metric_history(run_id, key))


EXPECTED = Counter((metric.name, epoch) for metric in metrics(ANCHOR_TERMS) for epoch in (1, 2, 3))


class TestSynchronise:
    def test_a_finished_training_is_there_whole(self, uri, client, run_dir):
        notify(run_dir, STORY)
        run = client.get_run(synchronise(run_dir, uri))
        assert points(client, run.info.run_id) == EXPECTED
        assert (run.info.status, run.info.run_name) == ("FINISHED", "exp")
        assert client.get_experiment(run.info.experiment_id).name == "train"
        assert run.data.params["optimizer.momentum"] == "0.937"
        assert run.data.tags["ray_yolo.attempts"] == "1"
        assert run.data.tags["mlflow.user"] == getpass.getuser()
        assert {(each.dataset.digest, each.tags[0].value) for each in run.inputs.dataset_inputs} == {
            ("a1", "training"), ("b2", "validation")}
        values = {point.step: point.value for point in client.get_metric_history(run.info.run_id, "metrics/mAP50")}
        assert values == {1: 0.125, 2: 1.125, 3: 2.125}

    def test_a_data_set_that_is_its_own_validation_is_named_once_as_both(self, uri, client, run_dir):
        notify(run_dir, [run_log.run(), run_log.dataset(train="a1", val="a1"), *STORY[2:]])
        (found,) = client.get_run(synchronise(run_dir, uri)).inputs.dataset_inputs
        assert (found.dataset.digest, found.tags[0].value) == ("a1", "training, validation")

    def test_files_are_there_too(self, uri, client, run_dir):
        notify(run_dir, STORY)
        run_id = synchronise(run_dir, uri)
        assert {file.path for file in client.list_artifacts(run_id)} == {
            "hyp.yaml", "results.csv", "results.png", EVENTS_FILE, "weights"}
        assert {file.path for file in client.list_artifacts(run_id, "weights")} == WEIGHTS

    def test_what_a_killed_process_has_left_half_written_is_not_posted(self, uri, client, run_dir):
        for name in (f".{'0a' * 16}.png", f".{'0b' * 16}.jpg"):
            (run_dir / name).write_bytes(b"half")
        notify(run_dir, STORY)
        run_id = synchronise(run_dir, uri)
        assert {file.path for file in client.list_artifacts(run_id)} == {
            "hyp.yaml", "results.csv", "results.png", EVENTS_FILE, "weights"}

    def test_artifacts_lie_beside_the_database(self, uri, client, run_dir):
        notify(run_dir, STORY)
        run = client.get_run(synchronise(run_dir, uri))
        database = uri.removeprefix("sqlite:///")
        assert run.info.artifact_uri.startswith("file://" + database.removesuffix("mlflow.db") + "mlartifacts/")

    def test_a_second_time_adds_nothing(self, uri, client, run_dir, monkeypatch):
        notify(run_dir, STORY)
        run_id = synchronise(run_dir, uri)
        before = client.get_run(run_id).to_dictionary()
        for name in ("log_batch", "log_inputs", "log_artifact", "set_terminated", "update_run", "set_tag",
                     "create_run"):
            monkeypatch.setattr(MlflowClient, name, lambda *args, **kwargs: pytest.fail("posted again"))
        assert synchronise(run_dir, uri) == run_id
        assert client.get_run(run_id).to_dictionary() == before

    def test_a_growing_log_goes_to_one_run(self, uri, client, run_dir):
        runs = set()
        for event in STORY:
            notify(run_dir, [event])
            runs.add(synchronise(run_dir, uri))
        (run_id,) = runs
        assert points(client, run_id) == EXPECTED

    def test_what_may_be_taken_back_is_not_posted(self, uri, client, run_dir):
        notify(run_dir, [*STORY[:5], run_log.epoch(1)])
        assert {epoch for _, epoch in points(client, synchronise(run_dir, uri))} == {1}

    def test_an_interruption_leaves_no_trace_but_the_number_of_attempts(self, uri, client, run_dir):
        notify(run_dir, [*STORY[:7], run_log.epoch(2)])
        first = synchronise(run_dir, uri)
        notify(run_dir, [run_log.end(20, "stopped")])
        synchronise(run_dir, uri)
        assert client.get_run(first).info.status == "KILLED"
        notify(run_dir, [run_log.start(20)])
        synchronise(run_dir, uri)
        assert client.get_run(first).info.status == "RUNNING"
        notify(run_dir, [*run_log.trained_epoch(2), run_log.end(30)])
        assert synchronise(run_dir, uri) == first
        run = client.get_run(first)
        assert (run.info.status, run.data.tags["ray_yolo.attempts"]) == ("FINISHED", "2")
        assert points(client, first) == EXPECTED

    @pytest.mark.parametrize("at", [0, 1, 2, 3])
    @pytest.mark.parametrize("arrived", [False, True])
    def test_a_crash_while_posting_repeats_and_loses_no_point(self, uri, client, run_dir, monkeypatch, at, arrived):
        notify(run_dir, STORY)
        log_batch = MlflowClient.log_batch
        calls = iter(range(10))

        def crash(self, *args, **kwargs):
            crashing = next(calls) == at
            if arrived or not crashing:
                log_batch(self, *args, **kwargs)
            if crashing:
                raise KeyboardInterrupt

        monkeypatch.setattr("ray_yolo.sinks.mlflow_run._METRICS_PER_CALL", 20)
        monkeypatch.setattr(MlflowClient, "log_batch", crash)
        with pytest.raises(KeyboardInterrupt):
            synchronise(run_dir, uri)
        monkeypatch.setattr(MlflowClient, "log_batch", log_batch)
        assert points(client, synchronise(run_dir, uri)) == EXPECTED

    def test_a_crash_between_creation_and_its_note_makes_no_second_run(self, uri, client, run_dir, monkeypatch):
        def crash(*_, **__):
            raise KeyboardInterrupt

        notify(run_dir, STORY)
        monkeypatch.setattr("ray_yolo.sinks.mlflow_run.atomic_write", crash)
        with pytest.raises(KeyboardInterrupt):
            synchronise(run_dir, uri)
        monkeypatch.setattr("ray_yolo.sinks.mlflow_run.atomic_write", atomic_write)
        run_id = synchronise(run_dir, uri)
        experiment = client.get_run(run_id).info.experiment_id
        mine = f"tags.`ray_yolo.run_id` = '{run_dir}'"
        assert [run.info.run_id for run in client.search_runs([experiment], filter_string=mine)] == [run_id]

    def test_a_note_emptied_by_a_power_cut_is_found_again(self, uri, run_dir):
        notify(run_dir, STORY)
        run_id = synchronise(run_dir, uri)
        (run_dir / "mlflow.json").write_text("")
        assert synchronise(run_dir, uri) == run_id

    def test_another_server_gets_everything(self, uri, database, run_dir, tmp_path):
        notify(run_dir, STORY)
        first = synchronise(run_dir, uri)
        other = f"sqlite:///{shutil.copy(database, tmp_path / 'other.db')}"
        second = synchronise(run_dir, other)
        assert first != second
        assert points(MlflowClient(tracking_uri=other), second) == EXPECTED

    def test_a_trial_hangs_under_its_sweep(self, uri, client, run_dir):
        experiment = client.create_experiment("sweep", artifact_location=(run_dir.parent / "sweep").as_uri())
        parent = client.create_run(experiment).info.run_id
        sweep = run_dir.parent / "sweep"
        (sweep / "trials").mkdir(parents=True)
        (sweep / "ledger.jsonl").touch()
        (sweep / "mlflow.json").write_text(json.dumps({"run_id": parent, "uri": uri}))
        run_dir = run_dir.rename(sweep / "trials" / "trial7")
        notify(run_dir, STORY)
        run = client.get_run(synchronise(run_dir, uri))
        assert run.info.experiment_id == experiment
        assert run.data.tags["mlflow.parentRunId"] == parent
        assert {file.path for file in client.list_artifacts(run.info.run_id)} == {
            "hyp.yaml", "results.csv", "results.png", EVENTS_FILE}  # the sweep's has the best trial's weights

    def test_of_files_that_were_made_later_only_those_are_posted(self, uri, client, run_dir, monkeypatch):
        """`sync` while the background draws: the pictures that come later are delivered by the next one."""
        notify(run_dir, STORY)
        run_id, posted = synchronise(run_dir, uri), []
        log_artifact = MlflowClient.log_artifact

        def note(self, run_id, path, *place):
            posted.append(path.rpartition("/")[2])
            log_artifact(self, run_id, path, *place)

        monkeypatch.setattr(MlflowClient, "log_artifact", note)
        (run_dir / "labels.jpg").write_text("drawn later")
        (run_dir / "results.png").write_text("results.pnG")  # of the same size
        assert synchronise(run_dir, uri) == run_id
        assert sorted(posted) == ["labels.jpg", "results.png"]
        assert "labels.jpg" in {file.path for file in client.list_artifacts(run_id)}

    def test_a_file_that_the_server_has_lost_is_posted_again(self, uri, client, run_dir, tmp_path):
        notify(run_dir, STORY)
        run_id = synchronise(run_dir, uri)
        [lost] = (tmp_path / "mlartifacts").rglob("results.png")
        lost.unlink()
        synchronise(run_dir, uri)
        assert "results.png" in {file.path for file in client.list_artifacts(run_id)}

    def test_secrets_reach_neither_server_nor_note(self, uri, client, run_dir):
        placement = run_log.run().placement | {"mlflow_uri": "https://ann:s3cr3t@host"}
        run = run_log.run(placement=placement, command="train --mlflow-uri https://ann:s3cr3t@host")
        notify(run_dir, [run, *STORY[1:]])
        run = client.get_run(synchronise(run_dir, uri))
        assert "s3cr3t" not in str(run.to_dictionary())
        assert "s3cr3t" not in "".join(path.read_text() for path in run_dir.iterdir() if path.is_file())


def test_a_validation_is_a_run_of_its_own_each_time(uri, client, run_dir):
    (run_dir / "results.json").write_text("{}")
    plan = plan_validation(run_dir, {"weights": str(run_dir / "weights" / "best.pt"), "data": "a.yaml"},
                           {"metrics": {"mAP50": 0.5}, "losses": {"box": 0.25}})
    ids = [Delivery(run_dir, uri, fresh=True).deliver(plan) for _ in range(2)]
    assert len(set(ids)) == 2
    assert read_run_file(run_dir) is None
    for run in map(client.get_run, ids):
        assert (run.info.status, run.info.run_name) == ("FINISHED", "exp")
        assert run.data.metrics == {"metrics/mAP50": 0.5, "val/box_loss": 0.25}
        assert run.data.params["data"] == "a.yaml"
        assert {file.path for file in client.list_artifacts(run.info.run_id)} == {"results.json", "results.png"}


@pytest.fixture
def broken_server(monkeypatch):
    monkeypatch.setenv("MLFLOW_HTTP_REQUEST_BACKOFF_FACTOR", "0")
    with BrokenServer() as server:
        yield server


@pytest.fixture
def dead_uri(monkeypatch):
    monkeypatch.setenv("MLFLOW_HTTP_REQUEST_BACKOFF_FACTOR", "0")
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        yield f"http://ann:s3cr3t@127.0.0.1:{free.getsockname()[1]}"


class TestFollowing:
    def test_everything_is_delivered_and_nothing_is_said(self, uri, client, run_dir):
        warnings = []
        notify(run_dir, STORY[:5])
        tracking = Tracking(run_dir, uri, warnings.append)
        notify(run_dir, STORY[5:])
        assert tracking.finish() == []
        run_id = read_run_file(run_dir)["run_id"]
        assert points(client, run_id) == EXPECTED
        assert "results.csv" in {file.path for file in client.list_artifacts(run_id)}
        assert warnings == []

    def test_files_wait_until_they_are_final(self, uri, client, run_dir):
        notify(run_dir, STORY)
        tracking = Tracking(run_dir, uri, pytest.fail)
        wait_until(lambda: client.search_runs(["1"], filter_string="status = 'FINISHED'"))
        time.sleep(0.5)
        run_id = read_run_file(run_dir)["run_id"]
        assert client.list_artifacts(run_id) == []
        (run_dir / "results.csv").write_text("final")
        assert tracking.finish() == []
        with open(client.download_artifacts(run_id, "results.csv")) as file:
            assert file.read() == "final"

    def test_a_dead_server_costs_one_warning_and_is_pending(self, dead_uri, run_dir):
        warnings = []
        notify(run_dir, STORY)
        began = time.monotonic()
        tracking = Tracking(run_dir, dead_uri, warnings.append)
        assert time.monotonic() - began < 1.0
        wait_until(lambda: warnings)
        assert tracking.finish(patience_seconds=1.0) == ["MLflow"]
        (warning,) = warnings
        assert "s3cr3t" not in warning

    def test_a_failing_server_is_asked_again_and_costs_one_warning(self, broken_server, run_dir):
        warnings = []
        notify(run_dir, STORY)
        assert Tracking(run_dir, broken_server.uri, warnings.append).finish(patience_seconds=5.0) == ["MLflow"]
        assert len(broken_server.requests) > 2
        assert len(warnings) == 1

    def test_a_server_that_comes_back_gets_everything_once(self, uri, client, run_dir, monkeypatch):
        warnings, posted = [], Counter()
        log_batch = MlflowClient.log_batch
        away = threading.Event()

        def maybe(self, *args, **kwargs):
            log_batch(self, *args, **kwargs)
            posted.update((metric.key, metric.step) for metric in kwargs.get("metrics", []))
            if away.is_set() and "metrics" in kwargs:
                raise ConnectionError("the answer got lost")

        monkeypatch.setattr(MlflowClient, "log_batch", maybe)
        notify(run_dir, STORY[:5])
        tracking = Tracking(run_dir, uri, warnings.append)
        wait_until(lambda: posted)
        away.set()
        notify(run_dir, STORY[5:])
        wait_until(lambda: warnings)
        away.clear()
        assert tracking.finish() == []
        assert points(client, read_run_file(run_dir)["run_id"]) == EXPECTED == posted
        assert len(warnings) == 1


@pytest.mark.slow
def test_a_real_server_that_freezes_and_is_killed_gets_everything_once(tmp_path, run_dir, monkeypatch):
    monkeypatch.setenv("MLFLOW_HTTP_REQUEST_TIMEOUT", "2")
    server, warnings = MlflowServer(tmp_path), []
    try:
        server.wait_until_up()
        notify(run_dir, STORY[:5])
        tracking = Tracking(run_dir, server.uri, warnings.append)
        wait_until(lambda: read_run_file(run_dir))
        server.signal(signal.SIGSTOP)
        notify(run_dir, STORY[4:6])
        wait_until(lambda: warnings)
        server.kill()
        notify(run_dir, STORY[6:])
        server.start()
        assert tracking.finish(patience_seconds=90) == []
        client = MlflowClient(tracking_uri=server.uri)
        run_id = read_run_file(run_dir)["run_id"]
        assert points(client, run_id) == EXPECTED
        assert client.get_run(run_id).info.status == "FINISHED"
        assert {file.path for file in client.list_artifacts(run_id, "weights")} == WEIGHTS
        assert len(warnings) == 1
    finally:
        server.kill()


def test_the_run_file_names_the_run_without_secrets(uri, run_dir):
    notify(run_dir, STORY)
    run_id = synchronise(run_dir, uri)
    assert json.loads((run_dir / "mlflow.json").read_text())["run_id"] == run_id


def test_small_files_go_first():
    assert ARTIFACTS[-1] == "weights/last.pt"
