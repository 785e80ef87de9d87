"""The machine's own metrics in a training's MLflow run."""

from __future__ import annotations

import importlib.util
import socket
from pathlib import Path

import pytest
from mlflow import MlflowClient

from ray_yolo.runs.event_log import EVENTS_FILE
from ray_yolo.sinks.base import Sinks
from ray_yolo.sinks.mlflow_client import read_run_file
from ray_yolo.sinks.mlflow_run import Mlflow, SystemMetrics, system_metrics_enabled
from tests.support import run_log
from tests.support.machines import wait_for

CPU = f"system/{socket.gethostname()}/cpu_utilization_percentage"


@pytest.fixture
def uri(tmp_path: Path) -> str:
    return f"sqlite:///{tmp_path}/mlflow.db"


def steps(uri: str, run_dir: Path) -> list[int]:
    about = read_run_file(run_dir)
    return [point.step for point in MlflowClient(uri).get_metric_history(about["run_id"], CPU)] if about else []


def follow(run_dir: Path, uri: str, warned: list[str]) -> Sinks:
    mlflow = Mlflow(run_dir, uri)
    return Sinks(run_dir / EVENTS_FILE, [SystemMetrics(run_dir, uri, mlflow), mlflow], warned.append)


def test_a_training_that_is_continued_goes_on_with_them(
        tmp_path: Path, uri: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MLFLOW_SYSTEM_METRICS_SAMPLING_INTERVAL", "0.1")
    warned: list[str] = []
    run_log.write(tmp_path / EVENTS_FILE, [run_log.run(), run_log.start(), *run_log.trained_epoch(0)])
    first = follow(tmp_path, uri, warned)
    wait_for(lambda: len(steps(uri, tmp_path)) > 2, 90)
    first.finish()
    before = steps(uri, tmp_path)
    second = follow(tmp_path, uri, warned)
    wait_for(lambda: len(steps(uri, tmp_path)) > len(before), 90)
    second.finish()
    assert steps(uri, tmp_path) == list(range(len(steps(uri, tmp_path))))
    assert not warned


def test_without_what_it_needs_it_says_so_and_the_rest_is_tracked(
        tmp_path: Path, uri: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    warned: list[str] = []
    run_log.write(tmp_path / EVENTS_FILE, [run_log.run(), run_log.start(), *run_log.trained_epoch(0)])
    sinks = follow(tmp_path, uri, warned)
    wait_for(lambda: warned, 90)
    sinks.finish()
    assert warned == ["system metrics: MLFLOW_ENABLE_SYSTEM_METRICS_LOGGING needs pip install psutil. Training "
                      "continues without."]
    assert steps(uri, tmp_path) == []


def test_mlflows_switch_asks_for_them(monkeypatch: pytest.MonkeyPatch) -> None:
    name = "MLFLOW_ENABLE_SYSTEM_METRICS_LOGGING"
    monkeypatch.delenv(name, raising=False)
    assert not system_metrics_enabled()
    for setting, expected in (("false", False), ("true", True), ("True", True)):
        monkeypatch.setenv(name, setting)
        assert system_metrics_enabled() == expected
