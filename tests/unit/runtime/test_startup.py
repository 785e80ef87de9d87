"""The live line of a start."""

from __future__ import annotations

import io
from pathlib import Path

import pytest

from ray_yolo.core.events import WorkerEvent
from ray_yolo.runs.event_log import EVENTS_FILE, EventLog
from ray_yolo.runs.status import STARTUP_FILE, read_startup
from ray_yolo.runtime.startup import StartupStatus
from tests.support import run_log


class Stream(io.StringIO):
    """A stream that is a terminal, or is not."""

    def __init__(self, terminal: bool) -> None:
        super().__init__()
        self._terminal = terminal

    def isatty(self) -> bool:
        return self._terminal


class Clock:
    """A clock that the test sets."""

    now = 0.0

    def __call__(self) -> float:
        return self.now


def status_on(*, terminal: bool, quiet: bool = False) -> tuple[StartupStatus, Stream, Clock]:
    stream, clock = Stream(terminal), Clock()
    return StartupStatus(stream, quiet=quiet, clock=clock), stream, clock


def test_on_a_terminal_a_phase_is_one_live_line_with_its_seconds() -> None:
    status, stream, clock = status_on(terminal=True)
    status.phase("starting Ray")
    clock.now = 3.0
    status.update()
    status.print("warning: a clock")
    status.close()
    status.update()
    erase = "\r\x1b[2K"
    assert stream.getvalue() == (
        f"{erase}starting Ray, 0 s\r{erase}starting Ray, 3 s\r{erase}warning: a clock\n{erase}")


def test_elsewhere_only_a_long_phase_is_printed_and_seldom() -> None:
    status, stream, clock = status_on(terminal=False)
    status.phase("reading the data set")
    clock.now = 9.0
    status.phase("starting Ray")
    for second in range(10, 70):
        clock.now = float(second)
        status.update()
    assert stream.getvalue().splitlines() == ["starting Ray, 10 s", "starting Ray, 40 s"]


def test_a_quiet_start_prints_no_phases_but_warnings() -> None:
    status, stream, clock = status_on(terminal=True, quiet=True)
    status.phase("starting Ray")
    clock.now = 60.0
    status.update()
    status.print("warning: a clock")
    assert stream.getvalue() == "warning: a clock\n"


@pytest.mark.parametrize("again", [False, True])
def test_workers_are_counted_until_the_first_step(tmp_path: Path, again: bool) -> None:
    log = EventLog(tmp_path / EVENTS_FILE)
    if again:  # an earlier start's
        log.append(WorkerEvent(worker=0, node="n1", pid=1))
        log.append(run_log.step(3))
    status, stream, _ = status_on(terminal=True)
    status.watch_workers(tmp_path, 2)
    lines = []
    for event in (None, WorkerEvent(worker=1, node="n1", pid=2), WorkerEvent(worker=0, node="n1", pid=3),
                  run_log.step(4)):
        if event:
            log.append(event)
        stream.truncate(0)
        stream.seek(0)
        status._observe()
        lines.append(stream.getvalue().replace("\r\x1b[2K", "").strip())
    assert lines == ["starting workers: 0 of 2 up, 0 s", "starting workers: 1 of 2 up, 0 s",
                     "preparing the first step, 0 s", ""]


def test_the_phase_and_what_it_waits_for_are_written_for_others_until_the_first_step(tmp_path: Path) -> None:
    log, answers = EventLog(tmp_path / EVENTS_FILE), iter(["waiting for 2 CPU", ""])
    status, _, clock = status_on(terminal=False)
    status.watch_workers(tmp_path, 2, lambda: next(answers))
    shown = []
    for clock.now, started in ((0.0, ()), (9.0, ()), (11.0, ()), (22.0, ()), (24.0, (0,)), (60.0, (1,))):
        for worker in started:
            log.append(WorkerEvent(worker=worker, node="n1", pid=2))
        status._observe()
        status._write()
        state = read_startup(tmp_path)
        assert state
        shown.append((state.phase, state.seconds, state.waits_for))
    assert shown == [
        ("starting workers: 0 of 2 up", 0, ""), ("starting workers: 0 of 2 up", 9, ""),
        ("starting workers: 0 of 2 up", 11, "waiting for 2 CPU"), ("starting workers: 0 of 2 up", 22, ""),
        ("starting workers: 1 of 2 up", 0, ""), ("preparing the first step", 0, "")]
    log.append(run_log.step(4))
    status._observe()
    status._write()
    assert not (tmp_path / STARTUP_FILE).exists()
