"""A signal takes effect after the current step, which is saved; a second one, or an endless step, at once."""

from __future__ import annotations

import math
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from ray_yolo.core import deadline, signals
from ray_yolo.engine.collectives import Collectives
from ray_yolo.engine.membership import Rendezvous
from ray_yolo.runs.event_log import EventLog
from ray_yolo.runtime import graceful_stop
from ray_yolo.runtime.graceful_stop import (
    MESSAGE,
    extend_if_saved,
    graceful_signals,
    request_stop,
    run_in_background,
)
from tests.support import run_log


class TerminatedError(Exception):
    """What the handler of SIGTERM raises here."""


def terminate(number: int, frame: object) -> None:
    raise TerminatedError


@pytest.fixture(autouse=True)
def handlers() -> Iterator[None]:
    """Handlers as a command has them, however the tests were started."""
    before = {signal.SIGINT: signal.default_int_handler, signal.SIGTERM: terminate, signal.SIGHUP: terminate}
    before = {number: signal.signal(number, handler) for number, handler in before.items()}
    yield
    for number, handler in before.items():
        signal.signal(number, handler)


def tell_myself(number: int) -> None:
    os.kill(os.getpid(), number)


StopRequested = Callable[[], bool]


def train(work: Callable[[StopRequested], None], notify: Callable[[str], None] = lambda text: None) -> None:
    rendezvous = Rendezvous(Collectives())
    with graceful_signals(notify, rendezvous.stop):
        work(lambda: rendezvous.orders.stop)


@pytest.fixture(autouse=True)
def terminals_left(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The tests keep their terminal."""
    left: list[str] = []
    monkeypatch.setattr(graceful_stop, "leave_terminal", lambda: left.append("left"))
    return left


@pytest.mark.parametrize(("number", "raised"), [
    (signal.SIGINT, KeyboardInterrupt), (signal.SIGTERM, TerminatedError), (signal.SIGHUP, TerminatedError)])
def test_a_signal_asks_and_does_what_it_always_does_when_training_has_stopped(
        number: int, raised: type[BaseException]) -> None:
    messages: list[str] = []
    asked: list[bool] = []

    def work(stop_requested: StopRequested) -> None:
        asked.append(stop_requested())
        tell_myself(number)
        asked.append(stop_requested())

    with pytest.raises(raised):
        train(work, messages.append)
    assert asked == [False, True]
    assert messages == [MESSAGE]
    assert [signal.getsignal(each) for each in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)] == [
        signal.default_int_handler, terminate, terminate]


def test_a_terminal_that_is_lost_hangs_up_more_than_once(terminals_left: list[str]) -> None:
    """The shell and the kernel each send SIGHUP. The second one is no request to stop at once."""
    reached: list[str] = []

    def work(stop_requested: StopRequested) -> None:
        for _ in range(3):
            tell_myself(signal.SIGHUP)
        assert stop_requested()
        reached.append("saved")

    with pytest.raises(TerminatedError):
        train(work)
    assert reached == ["saved"]
    assert terminals_left


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP])
def test_a_script_without_handlers_saves_the_step_too(number: int) -> None:
    signal.signal(number, signal.SIG_DFL)
    asked: list[bool] = []

    def work(stop_requested: StopRequested) -> None:
        tell_myself(number)
        asked.append(stop_requested())

    with pytest.raises(SystemExit) as stop:
        train(work)
    assert asked == [True]
    assert stop.value.code == 128 + number
    assert signal.getsignal(number) == signal.SIG_DFL


def test_a_signal_that_is_ignored_stays_ignored() -> None:
    """As SIGHUP under nohup."""
    signal.signal(signal.SIGHUP, signal.SIG_IGN)

    def work(stop_requested: StopRequested) -> None:
        tell_myself(signal.SIGHUP)
        assert not stop_requested()

    train(work)


def test_a_hangup_that_cannot_save_takes_effect_after_its_time(monkeypatch: pytest.MonkeyPatch) -> None:
    def work(stop_requested: StopRequested) -> None:
        tell_myself(signal.SIGHUP)
        time.sleep(5)
        pytest.fail("it went on")

    monkeypatch.setattr(graceful_stop, "SAVE_SECONDS", 0.1)
    with pytest.raises(TerminatedError):
        train(work)


@pytest.mark.parametrize("saved", [True, False])
def test_what_follows_a_save_has_one_deadline(tmp_path: Path, saved: bool) -> None:
    log, left = EventLog(tmp_path / "events.jsonl"), list[float]()
    log.append(run_log.checkpoint(4))  # before the signal

    def work(stop_requested: StopRequested) -> None:
        left.append(deadline.seconds_left())
        time.sleep(0.05)
        tell_myself(signal.SIGTERM)
        left.append(deadline.seconds_left())
        time.sleep(0.05)
        if saved:
            log.append(run_log.checkpoint(5))
        deadline._at = time.monotonic() + 1.0  # as after a save that took long
        extend_if_saved([tmp_path / "none", tmp_path])

    with pytest.raises(TerminatedError):
        train(work)
    left.append(deadline.seconds_left())
    assert left[0] == math.inf
    assert left[1] == pytest.approx(graceful_stop.FAILED_SECONDS, abs=0.4)
    assert left[2] == pytest.approx(graceful_stop.END_SECONDS if saved else 1.0, abs=0.5)
    assert graceful_stop.SAVE_SECONDS + graceful_stop.END_SECONDS <= 25  # of the 30 s that a job has


def test_a_save_that_did_not_end_leaves_only_the_rest_of_the_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(graceful_stop, "SAVE_SECONDS", 0.3)
    monkeypatch.setattr(graceful_stop, "FAILED_SECONDS", 4.0)

    signalled: list[float] = []

    def work(stop_requested: StopRequested) -> None:
        signalled.append(time.monotonic())
        tell_myself(signal.SIGTERM)
        time.sleep(5)

    with pytest.raises(TerminatedError):
        train(work)
    elapsed = time.monotonic() - signalled[0]
    assert elapsed >= 0.3
    assert deadline.seconds_left() == pytest.approx(4.0 - elapsed, abs=0.1)


def test_a_second_signal_stops_at_once() -> None:
    def work(stop_requested: StopRequested) -> None:
        tell_myself(signal.SIGINT)
        tell_myself(signal.SIGTERM)
        pytest.fail("it went on")

    with pytest.raises(TerminatedError):
        train(work)


def test_a_step_that_takes_too_long_is_not_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    def work(stop_requested: StopRequested) -> None:
        tell_myself(signal.SIGINT)
        time.sleep(5)
        pytest.fail("it went on")

    monkeypatch.setattr(graceful_stop, "SAVE_SECONDS", 0.1)
    with pytest.raises(KeyboardInterrupt):
        train(work)


def test_nothing_comes_after_the_training_has_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(graceful_stop, "SAVE_SECONDS", 0.2)
    with pytest.raises(KeyboardInterrupt):
        train(lambda stop_requested: tell_myself(signal.SIGINT))
    time.sleep(0.4)


def test_in_another_thread_signals_stay_as_they_are() -> None:
    seen: list[object] = []

    def work(stop_requested: StopRequested) -> None:
        seen.extend([signal.getsignal(signal.SIGTERM), stop_requested()])

    thread = threading.Thread(target=train, args=(work,))
    thread.start()
    thread.join()
    assert seen == [terminate, False]


class Workers:
    """A training's workers: they have saved half a second after the order, unless they hang."""

    def __init__(self, folder: Path, *, trains: bool = True, hangs: bool = False) -> None:
        self.log, self.trains, self.hangs = EventLog(folder / "events.jsonl"), trains, hangs
        self.asked_at = 0.0
        self.orders = 0

    def stop(self) -> bool:
        self.orders += 1
        self.asked_at = self.asked_at or time.monotonic()
        return self.trains and not self.has_ended()

    def has_ended(self) -> bool:
        return not self.hangs and time.monotonic() - self.asked_at > 0.5


@pytest.mark.parametrize(("trains", "hangs", "seconds"), [(False, False, 0.5), (True, False, 0.5), (True, True, 1.5)])
@pytest.mark.parametrize("is_asked", [False, True])
def test_the_driver_waits_for_trainings_to_stop_but_not_for_ever(
        tmp_path: Path, monkeypatch: pytest.MonkeyPatch, trains: bool, hangs: bool, seconds: float, is_asked: bool
        ) -> None:
    """Workers that have not begun have nothing to save, as the second answer confirms. The order is repeated, as the
    queue may be restarted."""
    monkeypatch.setattr(graceful_stop, "SAVE_SECONDS", 1.5)
    workers, messages, began = Workers(tmp_path, trains=trains, hangs=hangs), list[str](), time.monotonic()
    request_stop(workers.stop, [tmp_path], messages.append, workers.has_ended if is_asked else None)
    assert seconds <= time.monotonic() - began < seconds + 1.0
    assert messages == [MESSAGE] * trains
    assert workers.orders > 1


def test_workers_that_have_just_begun_save_although_the_first_answer_lacks_it(
        tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What the coordinator knows of them is up to a second old."""
    monkeypatch.setattr(graceful_stop, "_REPORT_SECONDS", 0.1)
    workers, messages = Workers(tmp_path), list[str]()
    answers = iter([False])
    request_stop(lambda: next(answers, workers.stop()), [tmp_path], messages.append)
    assert messages == [MESSAGE]


def test_what_follows_the_stop_has_time_if_a_step_was_saved(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    extended: list[list[Path]] = []
    monkeypatch.setattr(graceful_stop, "extend_if_saved", extended.append)
    request_stop(Workers(tmp_path).stop, [tmp_path], lambda text: None)
    assert extended == [[tmp_path]]


def test_it_gives_back_what_the_work_returns_or_raises() -> None:
    assert run_in_background(threading.get_ident) != threading.get_ident()
    error = ValueError("of the work")

    def fail() -> None:
        raise error

    with pytest.raises(ValueError, match="of the work") as caught:
        run_in_background(fail)
    assert caught.value is error


def test_a_hangup_ends_the_wait_and_the_second_one_has_no_effect(monkeypatch: pytest.MonkeyPatch) -> None:
    """A terminal that closes sends two."""
    monkeypatch.setattr(signals, "leave_terminal", lambda: None)
    signal.signal(signal.SIGHUP, signal.SIG_DFL)
    released = threading.Event()
    threading.Timer(0.1, os.kill, (os.getpid(), signal.SIGHUP)).start()
    with pytest.raises(SystemExit) as stop:
        run_in_background(lambda: released.wait(30))
    released.set()
    assert stop.value.code == 128 + signal.SIGHUP
    assert signal.getsignal(signal.SIGHUP) is signal.SIG_IGN


def test_after_the_wait_a_hangup_has_its_usual_effect() -> None:
    signal.signal(signal.SIGHUP, signal.SIG_DFL)
    run_in_background(lambda: None)
    assert signal.getsignal(signal.SIGHUP) is signal.SIG_DFL


@pytest.fixture
def _stop_requested() -> Iterator[None]:
    """SIGUSR1 raises in the main thread, as the commands' SIGTERM does."""
    def stop(*_: object) -> None:
        raise SystemExit(15)

    before = signal.signal(signal.SIGUSR1, stop)
    yield
    signal.signal(signal.SIGUSR1, before)


@pytest.mark.usefixtures("_stop_requested")
def test_a_signal_interrupts_the_wait_at_once() -> None:
    began, released = time.monotonic(), threading.Event()
    threading.Timer(0.1, os.kill, (os.getpid(), signal.SIGUSR1)).start()
    with pytest.raises(SystemExit):
        run_in_background(lambda: released.wait(30))
    released.set()
    assert time.monotonic() - began < 10
