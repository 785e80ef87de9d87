"""Graceful stop: an interrupted training first saves the current step, so that no step is repeated.

All workers stop after the same step (`engine.loop.train`) and exit normally, which frees their resources. After the
first signal, this takes at most `SAVE_SECONDS`. What follows it has one deadline (`core.deadline`). A second signal
stops at once, except for SIGHUP: the end of a terminal sends it more than once.
"""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future
from enum import Enum, auto
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from ray_yolo.core import deadline
from ray_yolo.core.events import CheckpointEvent, EndEvent, PlacementEvent, ResourcesEvent, StartEvent
from ray_yolo.core.signals import STOPS, exit_on_hangup, exit_status_of, leave_terminal
from ray_yolo.core.threads import run_in_thread
from ray_yolo.runs.event_log import EVENTS_FILE, follow, read_events
from ray_yolo.runs.recorder import STOP_REQUEST, RecorderClient

if TYPE_CHECKING:
    import ray

SAVE_SECONDS = 11.0  # for the current step and its save
FAILED_SECONDS = 12.5  # from the signal to the end of the command, if the step could not be saved
END_SECONDS = 10.0  # for everything that follows a save, so that the command ends 22 s after the signal at the latest
MESSAGE = "stopping: the current step is finished and saved first (a second signal stops at once)"
_POLL_SECONDS = 0.2

StopRequested = Callable[[], bool]
T = TypeVar("T")


def run_in_background(work: Callable[[], T], before_end: Callable[[Future[T]], None] = lambda outcome: None) -> T:
    """Run `work` in another thread, and return or raise its outcome.

    In the main thread, Ray Train and Ray Tune handle Ctrl-C themselves. If a signal handler raises inside `ray.get`,
    the process exits with status 1. Here the main thread only waits, so a signal interrupts it at once. `before_end`
    gets the pending result before the interruption propagates.
    """
    result = run_in_thread(work, "background")
    with _exit_on_hangup():
        try:
            return result.result()
        except (KeyboardInterrupt, SystemExit) as stop:
            deadline.start(FAILED_SECONDS, exit_status_of(stop))
            before_end(result)
            raise


@contextlib.contextmanager
def _exit_on_hangup() -> Iterator[None]:
    """Context in which SIGHUP raises SystemExit if it would end the process at once, as in a user's script.

    Afterwards SIGHUP has its usual effect again. If it has come, later ones stay ignored, so that the end of the
    terminal, which sends it twice, does not interrupt the end of the training.
    """
    is_main = threading.current_thread() is threading.main_thread()
    ends_at_once = is_main and signal.getsignal(signal.SIGHUP) is signal.SIG_DFL
    if not ends_at_once:
        yield
        return
    signal.signal(signal.SIGHUP, exit_on_hangup)
    try:
        yield
    finally:
        if signal.getsignal(signal.SIGHUP) is exit_on_hangup:  # else it has come, and set SIG_IGN
            signal.signal(signal.SIGHUP, signal.SIG_DFL)


@contextlib.contextmanager
def graceful_signals(notify: Callable[[str], None]) -> Iterator[StopRequested]:
    """Context of a training in this thread: SIGINT, SIGTERM and SIGHUP request a stop, and have their usual effect at
    its end. A signal that is ignored, as SIGHUP under `nohup`, stays ignored.

    Handlers can be set in the main thread only; in another thread, this context changes nothing.
    """
    handlers: dict[int, Any] = {}
    if threading.current_thread() is threading.main_thread():
        for stop in STOPS:
            handler = signal.getsignal(stop)
            if handler not in (signal.SIG_IGN, None):  # None: not set by Python
                handlers[stop.value] = handler
    received: list[int] = []
    has_timed_out = threading.Event()

    def give_up() -> None:
        has_timed_out.set()
        os.kill(os.getpid(), received[0])

    timer = threading.Timer(SAVE_SECONDS, give_up)

    def take_effect(number: int, frame: Any) -> None:
        handler = handlers[number]
        if callable(handler):
            handler(number, frame)
        else:  # by default it would end the process before its `finally` blocks
            sys.exit(128 + number)

    def handle(number: int, frame: Any) -> None:
        if number == signal.SIGHUP:
            leave_terminal()
        if not received:
            received.append(number)
            deadline.start(FAILED_SECONDS, 128 + number)
            timer.start()
            notify(MESSAGE)
        elif number != signal.SIGHUP or has_timed_out.is_set():
            take_effect(number, frame)

    for number in handlers:
        signal.signal(number, handle)
    try:
        yield lambda: bool(received)
    finally:
        timer.cancel()
        for number, usual in handlers.items():
            signal.signal(number, usual)
    if received:
        take_effect(received[0], None)


def extend_if_saved(run_dirs: Iterable[Path]) -> None:
    """Give the end of interrupted trainings `END_SECONDS`, if one of them has saved its step since the signal. If none
    has, storage probably does not answer, and what follows would wait for it, too."""
    for folder in run_dirs:
        events = read_events(folder / EVENTS_FILE)
        if any(isinstance(event, CheckpointEvent) and event.time >= deadline.started() for event in events):
            deadline.extend(END_SECONDS)
            return


def poll_stop_request(recorder: RecorderClient, worker: int, workers: int) -> StopRequested:
    """For workers on Ray: they poll the recorder one after another, without waiting for its reply.

    If the recorder is gone for good, training stops.
    """
    import ray.exceptions  # here: a training without Ray uses this module, too

    answer: ray.ObjectRef[bool] | None = None
    due = time.monotonic() + worker * _POLL_SECONDS

    def stop_requested() -> bool:
        nonlocal answer, due
        with contextlib.suppress(ray.exceptions.RayError):
            if answer is not None and ray.wait([answer], timeout=0)[0]:
                reference, answer = answer, None
                try:
                    if ray.get(reference):
                        return True
                except ray.exceptions.ActorDiedError:
                    return True
            if answer is None and time.monotonic() >= due:
                answer, due = recorder.stop_requested(), time.monotonic() + workers * _POLL_SECONDS
        return False

    return stop_requested


def request_stop(run_dirs: Iterable[Path], notify: Callable[[str], None], ended: Callable[[], bool] = lambda: False
                ) -> None:
    """For a driver: stop running trainings, and wait until all have ended, according to their logs or `ended`. The wait
    is at most `SAVE_SECONDS`.

    A training that begins meanwhile stops after its first step.
    """
    logs = {folder: _FollowedLog(folder / EVENTS_FILE) for folder in run_dirs}

    def is_any_training() -> bool:
        return any(log.phase is _Phase.TRAINING for log in logs.values())

    if not is_any_training():
        return
    notify(MESSAGE)
    until = time.monotonic() + SAVE_SECONDS
    asked = set()
    with contextlib.suppress(OSError):  # failing storage must not prevent the usual exit
        try:
            while is_any_training() and time.monotonic() < until and not ended():
                for folder, log in logs.items():
                    if log.phase in (_Phase.STARTING, _Phase.TRAINING):
                        asked.add(folder)
                        (folder / STOP_REQUEST).touch()  # again: a recorder that starts removes an earlier request
                time.sleep(_POLL_SECONDS / 2)
                for log in logs.values():
                    log.read_on()
        finally:
            for folder in asked:
                (folder / STOP_REQUEST).unlink(missing_ok=True)
    extend_if_saved(asked)


class _Phase(Enum):
    """What a training does, according to its log."""

    NONE = auto()  # it has no log yet
    STARTING = auto()  # workers are placed, or start up: nothing is there to save
    TRAINING = auto()
    ENDED = auto()


class _FollowedLog:
    """The phase of a training, after the events that its log has so far."""

    def __init__(self, path: Path) -> None:
        self.phase = _Phase.NONE
        self._batches = follow(path)
        self._groups: set[str] = set()  # placement groups, by id
        self.read_on()

    def read_on(self) -> None:
        """Read the events since the last call."""
        for event in next(self._batches):
            if isinstance(event, PlacementEvent):
                # A new group instead of another one, and a group that gets a lost worker again: others train meanwhile.
                is_start = not event.instead_of and event.group not in self._groups
                self._groups.add(event.group)
                if is_start:
                    self.phase = _Phase.STARTING
            elif isinstance(event, ResourcesEvent):  # the first event of each start of a driver or of a trial
                self.phase = _Phase.STARTING
            elif isinstance(event, StartEvent):
                self.phase = _Phase.TRAINING
            elif isinstance(event, EndEvent):
                self.phase = _Phase.ENDED
