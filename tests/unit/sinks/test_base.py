"""Every sink of a driver has a thread with a guard of its own: what one raises is a warning, and no more."""

from __future__ import annotations

import io
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from ray_yolo.config.recipe import Recipe
from ray_yolo.core.errors import InputError
from ray_yolo.core.events import EndEvent, EpochEvent, Event, StartEvent, StepEvent, WarningEvent
from ray_yolo.runs.event_log import EVENTS_FILE, measure_goodput
from ray_yolo.runs.recorder import LocalRecorder
from ray_yolo.sinks.base import History, Sink, Sinks, SinkThread
from ray_yolo.sinks.callbacks import Callbacks
from ray_yolo.sinks.console import Console
from ray_yolo.sinks.run_logger import finalize_abandoned_run
from tests.support import run_log


def wait_until(condition: Callable[[], object], seconds: float = 5.0) -> None:
    deadline = time.monotonic() + seconds
    while not condition() and time.monotonic() < deadline:
        time.sleep(0.005)
    assert condition()


class Work(Sink):
    """A sink whose update is a function."""

    name, interval_seconds = "work", 0.001

    def __init__(self, work: Callable[[], object]) -> None:
        self._work = work
        self.events: list[Event] = []
        self.rounds: list[tuple[int, bool]] = []
        """Of each update that succeeded: events known, whether it was said to be the last."""
        self.is_finished = False

    def event(self, event: Event) -> None:
        self.events.append(event)

    def update(self, last: bool = False) -> None:
        self._work()
        self.rounds.append((len(self.events), last))

    def finish(self) -> None:
        self.is_finished = True


class Running:
    """It, running."""

    def __init__(self, folder: Path, work: Callable[[], object]) -> None:
        self.warnings: list[str] = []
        self.sink = Work(work)
        self._thread = SinkThread(self.sink, folder / EVENTS_FILE, self.warnings.append)

    def finish(self, limit_seconds: float = 5.0) -> None:
        self.sink.limit_seconds = limit_seconds
        self._thread.finish()
        assert self.sink.is_finished


def refuse(*_: Any, **__: Any) -> None:
    raise OSError("no")


class TestThread:
    def test_work_is_repeated_and_done_a_last_time_after_the_end_was_asked_for(self, tmp_path: Path) -> None:
        running = Running(tmp_path, lambda: None)
        wait_until(lambda: len(running.sink.rounds) >= 3)
        running.finish()
        assert [last for _, last in running.sink.rounds].count(True) == 1
        assert running.sink.rounds[-1] == (0, True)
        assert running.warnings == []

    def test_an_end_requested_during_a_round_still_gets_a_last_update_with_the_whole_log(
            self, tmp_path: Path) -> None:
        entered, go = threading.Event(), threading.Event()
        running = Running(tmp_path, lambda: entered.set() or go.wait(5))
        run_log.write(tmp_path / EVENTS_FILE, [run_log.start()])
        wait_until(entered.is_set)
        run_log.write(tmp_path / EVENTS_FILE, [run_log.step(1), run_log.epoch(0)])
        threading.Timer(0.2, go.set).start()
        running.finish()
        assert [last for _, last in running.sink.rounds] == [False] * (len(running.sink.rounds) - 1) + [True]
        assert running.sink.rounds[-1] == (3, True)

    def test_a_failure_costs_one_warning_and_the_work_goes_on(self, tmp_path: Path) -> None:
        left = iter(range(3))

        def work() -> None:
            if next(left, None) is not None:
                raise ConnectionError("https://ann:s3cr3t@host is away\nsecond line")

        running = Running(tmp_path, work)
        wait_until(lambda: running.sink.rounds)
        running.finish()
        assert running.warnings == [
            "work: ConnectionError: https://***@host is away. Training continues; this is tried again."]

    def test_an_error_without_a_message_is_reported_too(self, tmp_path: Path) -> None:
        def work() -> None:
            raise ValueError

        running = Running(tmp_path, work)
        running.finish()
        # At the end there is no further attempt; on a busy machine the first one may be before the end.
        assert running.warnings[0].removesuffix(". Training continues; this is tried again.") == "work: ValueError: "

    def test_an_error_of_this_package_is_reported_at_once_and_not_retried(self, tmp_path: Path) -> None:
        rounds: list[int] = []

        def work() -> None:
            rounds.append(0)
            raise InputError("it is no database; move it away")

        running = Running(tmp_path, work)
        wait_until(lambda: running.warnings)
        running.finish()
        assert len(rounds) == 1
        assert running.warnings == ["work: it is no database; move it away. Training continues without."]

    def test_work_that_hangs_is_waited_for_no_longer_than_its_limit_and_reported(self, tmp_path: Path) -> None:
        release = threading.Event()
        running = Running(tmp_path, release.wait)
        began = time.monotonic()
        running.finish(0.1)
        assert time.monotonic() - began < 1.0
        release.set()
        assert running.warnings == ["work: not complete after 0.1 s"]

    def test_a_thread_that_fails_ends_with_its_run(self, tmp_path: Path) -> None:
        before = threading.active_count()
        Running(tmp_path, refuse).finish()
        wait_until(lambda: threading.active_count() <= before)


class TestHistory:
    def test_merged_steps_keep_the_total_time(self) -> None:
        events = [run_log.start(), *map(run_log.step, range(1, 8)), run_log.epoch(0), run_log.start(4, regrouped=True),
                  run_log.step(5), run_log.step(6)]
        events = [event.model_copy(update={"time": float(second)}) for second, event in enumerate(events)]
        history = History(StartEvent, StepEvent, EpochEvent)
        for event in events:
            history.add(event)
        assert history.events == [
            *events[:2], events[7], events[8].model_copy(update={"per_class": ()}), *events[9:]]
        assert measure_goodput(history.events) == measure_goodput(events)
        assert measure_goodput(events).idle_seconds == 2

    def test_steps_alone_change_nothing_that_is_shown(self) -> None:
        history = History(StepEvent, EpochEvent)
        assert not history.add(run_log.step(1))
        assert not history.add(WarningEvent(message="odd"))
        assert history.add(run_log.epoch(0))


FULL, ODD = OSError(28, "No space left on device"), ValueError("no ink\nleft")
FULL_TEXT, ODD_TEXT = "OSError: [Errno 28] No space left on device", "ValueError: no ink"


def raising(error: Exception) -> Callable[..., Any]:
    def work(*_: Any, **__: Any) -> Any:
        raise type(error)(*error.args)
    return work


class Training:
    """What a driver does with the sinks of a run, over a training that never took place."""

    def __init__(self, folder: Path, hooks: dict[str, Callable[..., Any]] | None = None,
                 stream: io.StringIO | None = None) -> None:
        self.run_dir, self.stream = folder / "exp", stream or io.StringIO()
        self.called: list[str] = []
        self._hooks = {name: lambda *_, name=name: self.called.append(name)
                       for name in ("on_run_start", "on_epoch_end", "on_run_end")} | (hooks or {})

    def run(self) -> None:
        log = self.run_dir / EVENTS_FILE
        recorder = LocalRecorder(str(log))

        def warn(text: str) -> None:
            recorder.emit(WarningEvent(message=text))

        sinks = Sinks(log, [Console(self.run_dir, self.stream), Callbacks(self._hooks, self.run_dir, Recipe(), warn)],
                      warn)
        for event in [run_log.run(), run_log.start(), run_log.step(1), *run_log.trained_epoch(0), run_log.end(10)]:
            recorder.emit(event)
        recorder.flush()
        sinks.finish(recorder.flush)
        recorder.close()

    @property
    def is_printed(self) -> bool:
        return "done: 1 epoch in 0:01:00" in self.stream.getvalue().splitlines()


ALL_CALLED = ["on_run_start", "on_epoch_end", "on_run_end"]


@pytest.mark.parametrize(("error", "text"), [(FULL, FULL_TEXT), (ODD, ODD_TEXT)], ids=["full", "odd"])
@pytest.mark.parametrize("place", ["Console.update", "closing_message"])
def test_what_the_console_raises_is_a_warning_and_the_callbacks_are_complete(
        tmp_path: Path, monkeypatch: pytest.MonkeyPatch, place: str, error: Exception, text: str) -> None:
    training = Training(tmp_path)
    monkeypatch.setattr(f"ray_yolo.sinks.console.{place}", raising(error))
    training.run()
    assert training.called == ALL_CALLED
    assert run_log.messages(training.run_dir) == [f"console: {text}"]


@pytest.mark.parametrize(("error", "text"), [(FULL, FULL_TEXT), (KeyError("mine"), "KeyError: 'mine'")])
@pytest.mark.parametrize("name", ALL_CALLED)
def test_what_a_users_function_raises_is_a_warning_and_the_console_is_complete(
        tmp_path: Path, name: str, error: Exception, text: str) -> None:
    training = Training(tmp_path, hooks={name: raising(error)})
    training.run()
    assert training.is_printed
    assert training.called == [hook for hook in ALL_CALLED if hook != name]
    [message] = run_log.messages(training.run_dir)
    assert message.startswith(f"callbacks: {name}: {text} (test_base.py, line ")


def test_a_console_whose_disk_is_full_stops_nothing_else(tmp_path: Path) -> None:
    class Full(io.StringIO):
        def write(self, text: str) -> int:
            raise FULL

    training = Training(tmp_path, stream=Full())
    training.run()
    assert training.called == ALL_CALLED
    assert run_log.messages(training.run_dir) == [f"console: {FULL_TEXT}"]


def test_without_tracking_there_is_no_word_of_it(tmp_path: Path) -> None:
    training = Training(tmp_path)
    training.run()
    assert training.is_printed
    assert "mlflow" not in training.stream.getvalue().lower()


def test_nothing_to_make_is_no_thread(tmp_path: Path) -> None:
    before = threading.active_count()
    Sinks(tmp_path / EVENTS_FILE, [], pytest.fail).finish()
    assert threading.active_count() <= before  # one of an earlier test's may have ended by now


@pytest.mark.parametrize("killed", [False, True])
def test_a_training_whose_driver_was_killed_gets_an_end(tmp_path: Path, killed: bool) -> None:
    story = [run_log.run(), run_log.start(), *run_log.trained_epoch(0)]
    run_log.write(tmp_path / EVENTS_FILE, story if killed else [*story, run_log.end(10)])
    finalize_abandoned_run(tmp_path)
    ends = run_log.events_of(tmp_path, EndEvent)
    assert [end.status for end in ends] == ["stopped" if killed else "done"]
