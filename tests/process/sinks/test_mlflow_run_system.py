"""The machine's own metrics in a training's MLflow run."""

from __future__ import annotations

import importlib.util
import socket
from pathlib import Path

import pytest
from mlflow import MlflowClient

from ray_yolo.sinks.mlflow_client import read_run_file
from ray_yolo.sinks.mlflow_run import MlflowRecord, system_metrics_enabled
from tests.support import run_log
from tests.support.machines import wait_for

SWITCH = "MLFLOW_ENABLE_SYSTEM_METRICS_LOGGING"
CPU = f"system/{socket.gethostname()}/cpu_utilization_percentage"


@pytest.fixture
def uri(tmp_path: Path) -> str:
    return f"sqlite:///{tmp_path}/mlflow.db"


def steps(uri: str, run_dir: Path) -> list[int]:
    about = read_run_file(run_dir)
    return [point.step for point in MlflowClient(uri).get_metric_history(about["run_id"], CPU)] if about else []


STORY = [run_log.run(), run_log.start(), *run_log.trained_epoch(0)]


def test_a_training_that_is_continued_goes_on_with_them(
        tmp_path: Path, uri: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(SWITCH, "true")
    monkeypatch.setenv("MLFLOW_SYSTEM_METRICS_SAMPLING_INTERVAL", "0.1")
    before = 0
    for events in (STORY, [*STORY, run_log.start(10)]):
        record = MlflowRecord(tmp_path, uri, pytest.fail)
        record.update(events, ended=False)
        wait_for(lambda before=before: len(steps(uri, tmp_path)) > before + 2, 90)
        record.update(events, ended=True)
        before = len(steps(uri, tmp_path))
    assert steps(uri, tmp_path) == list(range(before))


def test_without_what_it_needs_it_says_so_once_and_the_rest_is_tracked(
        tmp_path: Path, uri: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(SWITCH, "true")
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    warned: list[str] = []
    record = MlflowRecord(tmp_path, uri, warned.append)
    for _ in range(2):
        record.update(STORY, ended=False)
    assert warned == ["system metrics: MLFLOW_ENABLE_SYSTEM_METRICS_LOGGING needs pip install psutil"]
    assert read_run_file(tmp_path)
    assert steps(uri, tmp_path) == []


def test_mlflows_switch_asks_for_them(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(SWITCH, raising=False)
    assert not system_metrics_enabled()
    for setting, expected in (("false", False), ("true", True), ("True", True)):
        monkeypatch.setenv(SWITCH, setting)
        assert system_metrics_enabled() == expected
