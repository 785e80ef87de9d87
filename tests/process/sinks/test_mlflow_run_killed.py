"""A training whose MLflow server is killed half-way and comes back."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from mlflow import MlflowClient

from ray_yolo.core.events import WarningEvent
from ray_yolo.engine import loop
from ray_yolo.runs.event_log import EVENTS_FILE, best_row, epoch_rows, read_events
from ray_yolo.runtime.trainer import fit
from ray_yolo.sinks.metric_names import metrics, terms_of
from ray_yolo.sinks.mlflow_client import read_run_file
from tests.support.jobs import make_config
from tests.support.servers import MlflowServer

EPOCHS = 6


@pytest.mark.slow
@pytest.mark.record_process
def test_a_server_that_is_killed_in_a_training_and_comes_back_has_everything(
        tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    server, killed = MlflowServer(tmp_path), list[int]()
    (tmp_path / "storage").mkdir()
    config = make_config(tmp_path / "storage", 0, {"mlflow_uri": server.uri}, epochs=EPOCHS, noval=False)
    run_dir = tmp_path / "storage" / "runs" / "train" / "exp"
    finish_step: Callable[..., Any] = loop.finish_step

    def warned() -> bool:
        return any(isinstance(event, WarningEvent) and "MLflow" in event.message
                   for event in read_events(run_dir / EVENTS_FILE))

    def finish(learner: Any, team: Any, launched: Any) -> Any:
        result = finish_step(learner, team, launched)
        epoch = launched.summed.number // len(list(learner.plan.steps(0)))
        if epoch == 2 and not killed:
            wait_until(lambda: read_run_file(run_dir))
            server.kill()
            killed.append(epoch)
        if epoch == 4 and killed == [2]:
            wait_until(warned)
            server.start()
            server.wait_until_up()
            killed.append(epoch)
        return result

    monkeypatch.setenv("MLFLOW_HTTP_REQUEST_TIMEOUT", "5")
    monkeypatch.setattr(loop, "finish_step", finish)
    try:
        server.wait_until_up()
        assert fit(config, quiet=True).run_dir == run_dir
        client, about = MlflowClient(tracking_uri=server.uri), read_run_file(run_dir)
        assert killed == [2, 4]
        assert about
        run = client.get_run(about["run_id"])
        rows = epoch_rows(read_events(run_dir / EVENTS_FILE))
        for metric in metrics(terms_of(rows)):
            history = client.get_metric_history(run.info.run_id, metric.name)
            of_epochs = [point for point in history if point.timestamp < run.info.end_time]
            assert sorted((point.step, point.value) for point in of_epochs) == [
                (row.epoch + 1, metric.of(row)) for row in rows if metric.of(row) is not None]
        best = best_row(rows)
        assert best
        assert run.data.metrics["metrics/mAP50-95"] == (best.metrics or {})["mAP50-95"]
        assert run.info.status == "FINISHED"
        assert {file.path for file in client.list_artifacts(run.info.run_id, "weights")} == {
            "weights/best.pt", "weights/last.pt"}
    finally:
        server.kill()


def wait_until(condition: Callable[[], object]) -> None:
    deadline = time.monotonic() + 90
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.05)
