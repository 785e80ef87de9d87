"""Training on Ray workers, whichever kind they are."""

from __future__ import annotations

from pathlib import Path

import pytest

from ray_yolo.config.placement import Placement
from ray_yolo.core.events import WorkerEvent
from ray_yolo.runs.event_log import EVENTS_FILE, EventLog
from ray_yolo.runtime import cluster
from ray_yolo.runtime.workers import run

STARTED = WorkerEvent(worker=0, node="n1", pid=1)


@pytest.mark.parametrize(("starts", "text", "expected"), [
    (False, "waiting for 1 workers", ["waiting for 1 workers"]), (False, "", []), (True, "waiting for 1 workers", [])])
def test_a_start_that_waits_for_other_jobs_is_a_warning(
        tmp_path: Path, monkeypatch: pytest.MonkeyPatch, starts: bool, text: str, expected: list[str]) -> None:
    log, warnings = EventLog(tmp_path / EVENTS_FILE), list[str]()
    log.append(STARTED)  # an earlier start's
    monkeypatch.setattr(run.time, "sleep", lambda _: log.append(STARTED) if starts else None)
    monkeypatch.setattr(cluster, "describe_wait", lambda *_: text)
    run._warn_of_wait(Placement(num_workers=1), 0.0, tmp_path, warnings.append)
    assert warnings == expected
