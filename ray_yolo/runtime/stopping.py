"""A training that is told to stop saves its last step first, so that nothing is trained twice.

Workers keep equal states between steps: the recording one can save alone. It then waits to be ended. A second signal
ends everything at once, and so does a save that does not come for `SAVE_SECONDS`.
"""

from __future__ import annotations

import contextlib
import os
import signal
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ray_yolo.engine.events import Event, follow
from ray_yolo.engine.results import EVENTS_FILE
from ray_yolo.runtime.recorder import SAVE_REQUEST, Recorder

if TYPE_CHECKING:
    import ray
    from ray.actor import ActorHandle

SAVE_SECONDS = 15.0
MESSAGE = "told to stop: the step in hand is finished and saved first (a second signal stops at once)"
_POLL_SECONDS = 0.2

Heed = Callable[[Callable[[], None]], None]
"""heed(save): called after each step; where the training was told to stop it saves and does not come back."""


@contextlib.contextmanager
def heeding_signals(tell: Callable[[str], None]) -> Iterator[Heed]:
    """For a training in this thread: within, SIGINT and SIGTERM take effect after the next step.

    Handlers can be set in the main thread only; in another one signals stay as they are.
    """
    told: list[tuple[int, threading.Timer]] = []
    replaced = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)
                if threading.current_thread() is threading.main_thread()}
    handlers = {number: handler for number, handler in replaced.items() if callable(handler)}

    def handle(number: int, frame: Any) -> None:
        if told:
            handlers[signal.Signals(number)](number, frame)
        told.append((number, threading.Timer(SAVE_SECONDS, os.kill, (os.getpid(), number))))
        told[0][1].start()
        tell(MESSAGE)

    def heed(save: Callable[[], None]) -> None:
        if told:
            save()
            number = told[0][0]
            handlers[signal.Signals(number)](number, None)

    for number in handlers:
        signal.signal(number, handle)
    try:
        yield heed
    finally:
        for _, again in told:
            again.cancel()
        for number, handler in handlers.items():
            signal.signal(number, handler)


def heeding_driver(recorder: ActorHandle[Recorder]) -> Heed:
    """For the recording worker: asks the recorder every moment, without waiting for its answer."""
    import ray

    answer: ray.ObjectRef[bool] | None = None
    asked = 0.0

    def heed(save: Callable[[], None]) -> None:
        nonlocal answer, asked
        with contextlib.suppress(ray.exceptions.RayError):  # a recorder that has gone asks for nothing
            if answer is not None and ray.wait([answer], timeout=0)[0]:
                told, answer = ray.get(answer), None
                if told:
                    save()
                    time.sleep(4 * SAVE_SECONDS)  # the driver ends this process
            if answer is None and time.monotonic() - asked > _POLL_SECONDS:
                answer, asked = recorder.save_asked.remote(), time.monotonic()

    return heed


def save_before_end(run_dirs: Iterable[Path], tell: Callable[[str], None]) -> None:
    """For a driver: ask the workers of trainings for checkpoints, and wait for them where workers have begun."""
    logs = {folder: follow(folder / EVENTS_FILE) for folder in run_dirs}
    waiting = {folder for folder, log in logs.items() if _has_begun(next(log))}
    if not waiting:
        return
    tell(MESSAGE)
    deadline = time.monotonic() + SAVE_SECONDS
    requests = [folder / SAVE_REQUEST for folder in waiting]
    with contextlib.suppress(OSError):  # storage that fails now is no reason to end otherwise
        for request in requests:
            request.touch()
        try:
            while waiting and time.monotonic() < deadline:
                time.sleep(_POLL_SECONDS / 2)
                waiting -= {folder for folder in waiting
                            if any(event["type"] in ("checkpoint", "end") for event in next(logs[folder]))}
        finally:
            for request in requests:
                request.unlink(missing_ok=True)


def _has_begun(events: Iterable[Event]) -> bool:
    """Whether workers train, by a log: those that were given a place last have started."""
    return [event["type"] for event in events if event["type"] in ("placement", "start", "end")][-1:] == ["start"]
