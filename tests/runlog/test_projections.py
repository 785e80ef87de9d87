import io
import socket

import pytest
from mlflow import MlflowClient

from ray_yolo.runlog.event_log import read_events
from ray_yolo.runlog.mlflow import Mlflow
from ray_yolo.runlog.owed import read_run_file
from ray_yolo.runlog.projections import Projections
from ray_yolo.runlog.recorder import LocalRecorder, close_recorder, emitter, flush_recorder
from ray_yolo.runlog.event_log import EVENTS_FILE
from tests.support import run_log


def copy_results(run_dir):
    (run_dir / "results.png").write_text((run_dir / "results.csv").read_text())


def train(run_dir, mlflow_uri, patience_seconds=None, draw_plots=copy_results):
    """What a driver does with its records; returns the console."""
    stream = io.StringIO()
    recorder = LocalRecorder(str(run_dir / EVENTS_FILE))
    emit = emitter(recorder)
    records = Records(run_dir, mlflow_uri, emit, stream)
    for event in [run_log.run(), run_log.start(), run_log.step(1), *run_log.trained_epoch(0), run_log.end(10)]:
        emit(event["type"], **{key: value for key, value in event.items() if key != "type"})
    flush_recorder(recorder)
    records.finish(lambda: draw_plots(run_dir), patience_seconds, lambda: flush_recorder(recorder))
    close_recorder(recorder)
    return stream.getvalue()


def test_console_files_and_mlflow_tell_the_same(tmp_path):
    run_dir = tmp_path / "exp"
    uri = f"sqlite:///{tmp_path}/mlflow.db"
    console = train(run_dir, uri)
    assert "epoch 1/3  box 0.5" in console
    assert "done: 1 epoch in 0:01:00" in console
    assert f"mlflow       mlflow ui --backend-store-uri {uri}" in console
    assert len((run_dir / "results.csv").read_text().splitlines()) == 2
    assert list(run_dir.glob("events.out.tfevents.*"))
    client = MlflowClient(tracking_uri=uri)
    run_id = read_run_file(run_dir)["run_id"]
    assert client.get_run(run_id).info.status == "FINISHED"
    assert {"results.csv", "results.png"} <= {file.path for file in client.list_artifacts(run_id)}


def test_without_tracking_there_is_no_mlflow_and_no_word_of_it(tmp_path):
    console = train(tmp_path / "exp", None)
    assert "mlflow" not in console.lower()
    assert not (tmp_path / "exp" / "mlflow.json").exists()


def test_a_server_that_is_away_is_told_on_the_console(tmp_path, monkeypatch):
    monkeypatch.setenv("MLFLOW_HTTP_REQUEST_BACKOFF_FACTOR", "0")
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        console = train(tmp_path / "exp", f"http://127.0.0.1:{free.getsockname()[1]}", 1.0)
    assert f"python -m ray_yolo.sync {tmp_path / 'exp'}" in console.splitlines()[-1]


def explode(*_):
    raise ValueError("no ink\nleft")


def finish_and_explode(tracking, patience_seconds, finish=Tracking.finish):
    finish(tracking, patience_seconds)  # or its thread would work on in the next test
    explode()


@pytest.mark.parametrize(("name", "broken"), [
    ("pictures", None), ("result files", "engine.results.TensorBoard.close"),
    ("MLflow", "runtime.tracking.Tracking.finish"), ("console", "runtime.records.closing_message"),
])
def test_what_one_of_them_raises_is_a_warning_and_the_others_are_completed(tmp_path, monkeypatch, name, broken):
    if broken:
        monkeypatch.setattr(f"ray_yolo.{broken}", finish_and_explode if name == "MLflow" else explode)
    run_dir, uri = tmp_path / "exp", f"sqlite:///{tmp_path}/mlflow.db"
    console = train(run_dir, uri, draw_plots=copy_results if broken else explode)
    warning = f"{name}: ValueError: no ink"
    assert [event["message"] for event in read_events(run_dir / EVENTS_FILE) if event["type"] == "warning"] == [warning]
    assert (f"WARNING: {warning}" in console) == (name != "console")
    assert ("done: 1 epoch in 0:01:00" in console) == (name != "console")
    assert len((run_dir / "results.csv").read_text().splitlines()) == 2
    assert (run_dir / "results.png").exists() == (name != "pictures")
    if name != "MLflow":
        client = MlflowClient(tracking_uri=uri)
        assert client.get_run(read_run_file(run_dir)["run_id"]).info.status == "FINISHED"
