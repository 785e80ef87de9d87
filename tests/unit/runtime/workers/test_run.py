"""Training on Ray workers, whichever kind they are."""

from __future__ import annotations

from pathlib import Path

import pytest

from ray_yolo.core.events import WorkerEvent
from ray_yolo.runs.event_log import EVENTS_FILE, EventLog
from ray_yolo.runtime.workers import run

STARTED = WorkerEvent(worker=0, node="n1", pid=1)


@pytest.mark.parametrize("starts", [False, True])
def test_only_a_worker_of_this_start_has_started(tmp_path: Path, starts: bool) -> None:
    log = EventLog(tmp_path / EVENTS_FILE)
    log.append(STARTED)  # an earlier start's
    has_workers = run._worker_starts(tmp_path)
    if starts:
        log.append(STARTED)
    assert has_workers() is starts
