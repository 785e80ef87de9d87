"""A signal takes effect after the current step, which is saved; a second one, or an endless step, at once."""

from __future__ import annotations

import threading
import time
from pathlib import Path

import pytest

from ray_yolo.core.events import Event, PlacementEvent
from ray_yolo.runs.event_log import EventLog
from ray_yolo.runs.recorder import STOP_REQUEST
from ray_yolo.runtime import graceful_stop
from ray_yolo.runtime.graceful_stop import (
    MESSAGE,
    request_stop,
)
from tests.support import run_log
from tests.unit.runtime.test_graceful_stop import handlers, terminals_left, wait_for_request

__all__ = ["handlers", "terminals_left"]  # fixtures

PLACED, STARTED, AGAIN = PlacementEvent(group="g"), run_log.start(), PlacementEvent(group="h", instead_of="g")


def stop_when_asked(folder: Path, log: EventLog) -> None:
    """Stands for a training: it stops half a second after the request."""
    def work() -> None:
        wait_for_request(folder)
        time.sleep(0.5)
        log.append(run_log.end(5, "stopped"))

    threading.Thread(target=work, daemon=True).start()


@pytest.mark.parametrize(("events", "stops", "asked", "seconds"), [
    ((), True, False, 0.0), ((PLACED,), True, False, 0.0),  # workers that have not begun have nothing to save
    ((PLACED, STARTED, PlacementEvent(group="h")), True, False, 0.0),  # a restart
    ((PLACED, STARTED, run_log.end(5)), True, False, 0.0),
    ((PLACED, STARTED, AGAIN), True, True, 0.5),  # others train meanwhile
    ((PLACED, STARTED, PLACED), True, True, 0.5),  # so they do while the first worker is replaced in its place
    ((PLACED, STARTED), True, True, 0.5), ((PLACED, STARTED, run_log.checkpoint(5)), False, True, 2.0),
])
def test_the_driver_waits_for_trainings_to_stop_but_not_for_ever(
        tmp_path: Path, monkeypatch: pytest.MonkeyPatch, events: tuple[Event, ...], stops: bool, asked: bool,
        seconds: float) -> None:
    monkeypatch.setattr(graceful_stop, "SAVE_SECONDS", 2.0)
    (tmp_path / "calm").mkdir()
    log, uninterrupted = EventLog(tmp_path / "events.jsonl"), EventLog(tmp_path / "calm" / "events.jsonl")
    for event in events:
        log.append(event)
    if stops:
        stop_when_asked(tmp_path, log)
    messages: list[str] = []
    began = time.monotonic()
    request_stop([tmp_path, uninterrupted.path.parent, tmp_path / "none"], messages.append)
    assert messages == [MESSAGE] * asked
    assert seconds <= time.monotonic() - began < seconds + 1.0
    assert not list(tmp_path.rglob(STOP_REQUEST))
