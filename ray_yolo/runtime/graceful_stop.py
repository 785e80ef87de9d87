"""Graceful stop: an interrupted training first saves the current step, so that no step is repeated.

All workers stop after the same step (`engine.loop.train`) and exit normally, which frees their resources. After the
first signal, this takes at most `SAVE_SECONDS`. What follows it has one deadline (`core.deadline`). A second signal
stops at once, except for SIGHUP: the end of a terminal sends it more than once.
"""

from __future__ import annotations

import contextlib
import math
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future
from pathlib import Path
from typing import Any, TypeVar

from ray_yolo.core import deadline
from ray_yolo.core.events import CheckpointEvent
from ray_yolo.core.signals import STOPS, exit_on_hangup, exit_status_of, leave_terminal
from ray_yolo.core.threads import run_in_thread
from ray_yolo.runs.event_log import EVENTS_FILE, read_events

SAVE_SECONDS = 11.0  # the current step and its save may take this long
FAILED_SECONDS = 12.5  # the command ends this long after the signal if the step could not be saved
END_SECONDS = 10.0  # what follows a save may take this long: the command ends 22 s after the signal at the latest
MESSAGE = "stopping: the current step is finished and saved first (a second signal stops at once)"
_POLL_SECONDS = 0.1
_REPORT_SECONDS = 0.5  # workers report within, after an order

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
def graceful_signals(notify: Callable[[str], None], stop_training: Callable[[], None]) -> Iterator[None]:
    """Context of a training in this thread: SIGINT, SIGTERM and SIGHUP stop it, and have their usual effect at its
    end. A signal that is ignored, as SIGHUP under `nohup`, stays ignored.

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
            stop_training()
            notify(MESSAGE)
        elif number != signal.SIGHUP or has_timed_out.is_set():
            take_effect(number, frame)

    for number in handlers:
        signal.signal(number, handle)
    try:
        yield
    finally:
        timer.cancel()
        for number, usual in handlers.items():
            signal.signal(number, usual)
    if received:
        take_effect(received[0], None)


@contextlib.contextmanager
def stops_at(end: float, stop: Callable[[], object], is_asked: Callable[[], bool] | None = None) -> Iterator[None]:
    """Context of a training that is ordered to stop when `time.monotonic` reaches `end`, or when `is_asked` says so.
    The order is repeated, because a queue that is restarted meanwhile forgets it."""
    has_ended = threading.Event()

    def watch() -> None:
        pause = 0.0
        while not has_ended.wait(pause):
            left = end - time.monotonic()
            is_due = left <= 0 or bool(is_asked and is_asked())
            if is_due:
                stop()
            pause = _POLL_SECONDS if is_due or (is_asked and left > _POLL_SECONDS) else left

    if end < math.inf or is_asked:
        threading.Thread(target=watch, name="ray_yolo time limit", daemon=True).start()
    try:
        yield
    finally:
        has_ended.set()


def extend_if_saved(run_dirs: Iterable[Path]) -> None:
    """Give the end of interrupted trainings `END_SECONDS`, if one of them has saved its step since the signal. If none
    has, storage probably does not answer, and what follows would wait for it, too."""
    for folder in run_dirs:
        events = read_events(folder / EVENTS_FILE)
        if any(isinstance(event, CheckpointEvent) and event.time >= deadline.started() for event in events):
            deadline.extend(END_SECONDS)
            return


def request_stop(stop: Callable[[], bool], run_dirs: Iterable[Path], notify: Callable[[str], None],
                 ended: Callable[[], bool] | None = None) -> None:
    """For a driver: stop trainings on workers, and wait until they have saved and ended, for at most `SAVE_SECONDS`.

    Args:
        stop: orders the stop, and returns whether workers have steps to save. It is repeated, because a queue that is
            restarted meanwhile forgets it.
        run_dirs: of these trainings.
        ended: whether they have ended; None: when no worker has steps to save any more.
    """
    if not stop():
        # What is known of the workers may be a second old, and they may have begun to train. The order makes them
        # report at once.
        time.sleep(_REPORT_SECONDS)
        if not stop():
            return
    notify(MESSAGE)
    until = time.monotonic() + SAVE_SECONDS
    while time.monotonic() < until:
        time.sleep(_POLL_SECONDS)
        has_steps = stop()
        if ended() if ended else not has_steps:
            break
    extend_if_saved(run_dirs)
