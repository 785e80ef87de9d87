"""A training that is told to stop saves the step in hand first, so that nothing is trained twice.

All workers stop after the same step (`engine.loop.train`) and end in order, which gives back what they hold. A second
signal does not wait for that, and `SAVE_SECONDS` are the longest that a first one waits.
"""

from __future__ import annotations

import contextlib
import os
import signal
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from ray_yolo.core.events import EndEvent, Event, PlacementEvent, StartEvent
from ray_yolo.runs.event_log import EVENTS_FILE, follow
from ray_yolo.runs.recorder import STOP_REQUEST

if TYPE_CHECKING:
    import ray
    from ray.actor import ActorHandle

    from ray_yolo.runs.recorder import Recorder

SAVE_SECONDS = 15.0
MESSAGE = "told to stop: the step in hand is finished and saved first (a second signal stops at once)"
_POLL_SECONDS = 0.2

StopRequested = Callable[[], bool]
T = TypeVar("T")


def run_in_background(work: Callable[[], T], before_end: Callable[[Future[T]], None] = lambda outcome: None) -> T:
    """What `work` returns or raises; it runs in a thread of its own, which ends with the process at the latest.

    In the main thread Ray Train and Ray Tune take Ctrl-C for themselves, and what a signal handler raises inside of
    `ray.get` arrives as an exit with status 1. Here the main thread only waits, and a signal interrupts it at once;
    `before_end` is called with the outcome to be before that goes on upwards.
    """
    outcome: Future[T] = Future()

    def run() -> None:
        try:
            outcome.set_result(work())
        except BaseException as error:
            outcome.set_exception(error)

    threading.Thread(target=run, name="ray_yolo aside", daemon=True).start()
    try:
        return outcome.result()
    except (KeyboardInterrupt, SystemExit):
        before_end(outcome)
        raise


@contextlib.contextmanager
def graceful_signals(notify: Callable[[str], None]) -> Iterator[StopRequested]:
    """For a training in this thread: SIGINT and SIGTERM ask it to stop, and do what they always do when it has.

    Handlers can be set in the main thread only; in another one signals stay as they are.
    """
    told: list[tuple[int, threading.Timer]] = []
    here = threading.current_thread() is threading.main_thread()
    handlers = {int(number): handler for number in (signal.SIGINT, signal.SIGTERM)
                if here and callable(handler := signal.getsignal(number))}

    def handle(number: int, frame: Any) -> None:
        if told:
            handlers[number](number, frame)
        told.append((number, threading.Timer(SAVE_SECONDS, os.kill, (os.getpid(), number))))
        told[0][1].start()
        notify(MESSAGE)

    for number in handlers:
        signal.signal(number, handle)
    try:
        yield lambda: bool(told)
    finally:
        for _, again in told:
            again.cancel()
        for number, handler in handlers.items():
            signal.signal(number, handler)
    if told:
        handlers[told[0][0]](told[0][0], None)


def poll_stop_request(recorder: ActorHandle[Recorder], worker: int, workers: int) -> StopRequested:
    """For a worker on Ray: the workers take turns in asking the recorder every moment, without waiting for its answer.

    A recorder that has gone for good leaves nobody to train for.
    """
    import ray.exceptions  # here: a training without Ray stops, too

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
                answer, due = recorder.stop_requested.remote(), time.monotonic() + workers * _POLL_SECONDS
        return False

    return stop_requested


def request_stop(run_dirs: Iterable[Path], notify: Callable[[str], None], ended: Callable[[], bool] = lambda: False
                ) -> None:
    """For a driver: ask trainings whose workers have begun to stop, and wait for that, at most for `SAVE_SECONDS`:
    until their logs, or `ended`, say that all have.
    """
    logs = {folder: follow(folder / EVENTS_FILE) for folder in run_dirs}
    training = {folder for folder, log in logs.items() if _has_begun(next(log))}
    if not training:
        return
    notify(MESSAGE)
    deadline = time.monotonic() + SAVE_SECONDS
    requests = [folder / STOP_REQUEST for folder in training]
    with contextlib.suppress(OSError):  # storage that fails now is no reason to end otherwise
        for request in requests:
            request.touch()
        try:
            while training and not ended() and time.monotonic() < deadline:
                time.sleep(_POLL_SECONDS / 2)
                training -= {folder for folder in training
                             if any(isinstance(event, EndEvent) for event in next(logs[folder]))}
        finally:
            for request in requests:
                request.unlink(missing_ok=True)


def _has_begun(events: Iterable[Event]) -> bool:
    """Whether workers train, by a log: those that were given a place last have started, or others go on meanwhile."""
    told = [event for event in events if isinstance(event, (PlacementEvent, StartEvent, EndEvent))
            and not getattr(event, "instead_of", "")]
    return bool(told) and isinstance(told[-1], StartEvent)
