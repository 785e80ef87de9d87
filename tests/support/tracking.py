"""The MLflow run of a run folder, as the record process makes it."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from ray_yolo.runs.event_log import EVENTS_FILE, read_events
from ray_yolo.sinks.mlflow_client import read_run_file
from ray_yolo.sinks.mlflow_run import MlflowRecord
from ray_yolo.sinks.records import RunRecords


class Tracking:
    """Delivers a run folder to MLflow in a thread, from its construction on."""

    def __init__(self, run_dir: Path, uri: str, warn: Callable[[str], None]) -> None:
        self._records = RunRecords(run_dir, [MlflowRecord(run_dir, uri, warn)], warn)
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._deadline = float("inf")
        self._thread.start()

    def _run(self) -> None:
        while not self._ended.is_set():
            self._records.update(ended=False)
            self._ended.wait(0.05)
        while True:
            self._records.update(ended=True)
            if not self._records.pending or time.monotonic() > self._deadline:
                return
            time.sleep(0.05)

    def finish(self, patience_seconds: float = 60.0) -> list[str]:
        """Deliver the rest. Returns the names of the records that are pending then."""
        self._deadline = time.monotonic() + patience_seconds
        self._ended.set()
        self._thread.join(patience_seconds)
        return self._records.pending


def synchronise(run_dir: Path, uri: str) -> str:
    """The id of the MLflow run of a run folder, made so once."""
    MlflowRecord(run_dir, uri, pytest.fail).update(read_events(run_dir / EVENTS_FILE), ended=True)
    about = read_run_file(run_dir)
    assert about
    return about["run_id"]
