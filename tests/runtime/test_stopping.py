"""A signal takes effect after the step in hand, which is saved; a second one, or a step without end, at once."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from ray_yolo.engine.events import EventLog
from ray_yolo.runtime import stopping
from ray_yolo.runtime.recorder import SAVE_REQUEST, Recorder
from ray_yolo.runtime.stopping import MESSAGE, Heed, heeding_signals, save_before_end


class TerminatedError(Exception):
    """What the handler of SIGTERM raises here."""


def terminate(number: int, frame: object) -> None:
    raise TerminatedError


@pytest.fixture(autouse=True)
def handlers() -> Iterator[None]:
    """Handlers as a command has them, whoever started the tests."""
    before = {signal.SIGINT: signal.default_int_handler, signal.SIGTERM: terminate}
    before = {number: signal.signal(number, handler) for number, handler in before.items()}
    yield
    for number, handler in before.items():
        signal.signal(number, handler)


def tell_myself(number: int) -> None:
    os.kill(os.getpid(), number)


def train(work: Callable[[Heed], None], tell: Callable[[str], None] = lambda text: None) -> None:
    with heeding_signals(tell) as heed:
        work(heed)


@pytest.mark.parametrize(("number", "raised"), [(signal.SIGINT, KeyboardInterrupt), (signal.SIGTERM, TerminatedError)])
def test_the_step_in_hand_is_finished_and_saved(number: int, raised: type[BaseException]) -> None:
    told: list[str] = []
    done: list[str] = []

    def work(heed: Heed) -> None:
        heed(lambda: done.append("too early"))
        tell_myself(number)
        done.append("rest of the step")
        heed(lambda: done.append("saved"))
        done.append("next step")

    with pytest.raises(raised):
        train(work, told.append)
    assert done == ["rest of the step", "saved"]
    assert told == [MESSAGE]
    assert [signal.getsignal(each) for each in (signal.SIGINT, signal.SIGTERM)] == [
        signal.default_int_handler, terminate]


def test_a_second_signal_stops_at_once() -> None:
    def work(heed: Heed) -> None:
        tell_myself(signal.SIGINT)
        tell_myself(signal.SIGTERM)
        pytest.fail("it went on")

    with pytest.raises(TerminatedError):
        train(work)


def test_a_step_that_takes_too_long_is_not_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    def work(heed: Heed) -> None:
        tell_myself(signal.SIGINT)
        time.sleep(5)
        pytest.fail("it went on")

    monkeypatch.setattr(stopping, "SAVE_SECONDS", 0.1)
    with pytest.raises(KeyboardInterrupt):
        train(work)


def test_nothing_comes_after_the_training_has_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stopping, "SAVE_SECONDS", 0.1)
    with heeding_signals(lambda text: None):
        tell_myself(signal.SIGINT)
    time.sleep(0.3)


def test_in_another_thread_signals_stay_as_they_are() -> None:
    seen: list[object] = []

    def work() -> None:
        with heeding_signals(lambda text: None) as heed:
            seen.append(signal.getsignal(signal.SIGTERM))
            heed(lambda: seen.append("saved"))

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    assert seen == [terminate]


def save_when_asked(folder: Path, log: EventLog) -> None:
    """Stands for a training: half a second after it is asked to, it saves."""
    def work() -> None:
        while not (folder / SAVE_REQUEST).exists():
            time.sleep(0.01)
        time.sleep(0.5)
        log.append("checkpoint", step=5)

    threading.Thread(target=work, daemon=True).start()


@pytest.mark.parametrize(("events", "saves", "asked", "seconds"), [
    ((), True, False, 0.0), (("placement",), True, False, 0.0),  # workers that have not begun have nothing to save
    (("placement", "start", "placement"), True, False, 0.0), (("placement", "start", "end"), True, False, 0.0),
    (("placement", "start"), True, True, 0.5), (("placement", "start", "checkpoint"), False, True, 2.0),
])
def test_the_driver_waits_for_new_checkpoints_but_not_for_ever(
        tmp_path: Path, monkeypatch: pytest.MonkeyPatch, events: tuple[str, ...], saves: bool, asked: bool,
        seconds: float) -> None:
    monkeypatch.setattr(stopping, "SAVE_SECONDS", 2.0)
    (tmp_path / "calm").mkdir()
    log, calm = EventLog(tmp_path / "events.jsonl"), EventLog(tmp_path / "calm" / "events.jsonl")
    for event in events:
        log.append(event)
    if saves:
        save_when_asked(tmp_path, log)
    told: list[str] = []
    began = time.monotonic()
    save_before_end([tmp_path, calm.path.parent, tmp_path / "none"], told.append)
    assert told == [MESSAGE] * asked
    assert seconds <= time.monotonic() - began < seconds + 1.0
    assert not list(tmp_path.rglob(SAVE_REQUEST))


def test_a_request_to_an_earlier_driver_is_void(tmp_path: Path) -> None:
    (tmp_path / SAVE_REQUEST).touch()
    recorder = Recorder(str(tmp_path / "events.jsonl"))
    assert not recorder.save_asked()
    (tmp_path / SAVE_REQUEST).touch()
    assert recorder.save_asked()
