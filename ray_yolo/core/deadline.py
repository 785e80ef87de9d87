"""The deadline of an interrupted command: what follows the save of the current step must not outlast it.

A scheduler kills a job some time after SIGTERM, often 30 s. A signal therefore starts a deadline, and everything that
waits at the end of a command (records, uploads, leases) waits for `seconds_left` at most. In a process that is a
command, a thread ends the process shortly after the deadline: a request to a storage that does not answer cannot be
interrupted. Each command also ends at once after its `atexit` functions: to take down an interpreter with torch and Ray
takes one to three seconds, in which a user waits at the prompt, and libraries that then wait for lost processes cannot
be limited otherwise.
"""

from __future__ import annotations

import atexit
import math
import os
import sys
import threading
import time
from collections.abc import Callable
from concurrent.futures import wait
from typing import NoReturn, TypeVar

from ray_yolo.core.threads import run_in_thread

T = TypeVar("T")

_GRACE_SECONDS = 1.0  # The last steps of an orderly exit may take so long.

_at = math.inf  # a moment of time.monotonic
_started = math.inf  # a moment of time.time, as in event logs
_exit_status: int | None = None  # what the signal asks for; None: no deadline has started
_final_status: int | None = None  # what a command that leaves returns; None: it has not come to its end
_ends_process = False
_changed = threading.Condition()


def end_process_at_deadline() -> None:
    """State that this process is a command, which ends with its deadline. Called before Ray is imported."""
    global _ends_process
    if not _ends_process:
        _ends_process = True
        atexit.register(_end_at_once)  # the first one registered is called last


def start(seconds: float, exit_status: int) -> None:
    """Start the deadline, unless it has been started.

    Args:
        exit_status: of the command if it has not ended by then.
    """
    global _at, _started, _exit_status
    with _changed:
        if _exit_status is not None:
            return
        _at, _started, _exit_status = time.monotonic() + seconds, time.time(), exit_status
    if _ends_process:
        threading.Thread(target=_end_process, name="ray_yolo deadline", daemon=True).start()


def end_with(exit_status: int) -> None:
    """Note the status of a command that has come to its end, although it was interrupted."""
    global _exit_status
    if _exit_status is not None:
        _exit_status = exit_status


def leave(exit_status: int) -> NoReturn:
    """Exit from a process that is a command: at once after its `atexit` functions."""
    global _final_status
    _final_status = exit_status
    sys.exit(exit_status)


def extend(seconds: float) -> None:
    """Move a started deadline to some seconds from now, if that is later."""
    global _at
    with _changed:
        if _exit_status is not None:
            _at = max(_at, time.monotonic() + seconds)
            _changed.notify_all()


def clear() -> None:
    """End the deadline, in a process that continues after an interrupted training."""
    global _at, _started, _exit_status
    if not _ends_process:
        with _changed:
            _at, _started, _exit_status = math.inf, math.inf, None


def started() -> float:
    """The time of the signal in Unix seconds; infinite without one."""
    return _started


def seconds_left(limit: float = math.inf) -> float:
    """Seconds until the deadline, but at most `limit`; infinite without either."""
    return min(limit, max(_at - time.monotonic(), 0.0))


def wait_for(work: Callable[[], T], name: str) -> T | None:
    """The result of `work`, which runs until the deadline at most; None if it has not ended by then."""
    if _exit_status is None:
        return work()
    result = run_in_thread(work, name)
    wait([result], seconds_left())
    return result.result() if result.done() else None


def end(release: Callable[[], object] | None) -> None:
    """Release what a command holds, until the deadline at most, and end the deadline.

    It also ends if another Ctrl-C interrupts the release: in a notebook, the next training has no deadline.
    """
    try:
        if release:
            wait_for(release, "release")
    finally:
        clear()


def _end_process() -> None:
    """End the process after the deadline, which may be extended meanwhile."""
    with _changed:
        while (seconds := _at + _GRACE_SECONDS - time.monotonic()) > 0:
            _changed.wait(min(seconds, threading.TIMEOUT_MAX))
    _end_at_once()


def _end_at_once() -> None:
    """End the process with the status of its command, without the interpreter's end.

    The interpreter's end follows if the status is not known, as after an unknown SystemExit, and if the output of a
    command without a deadline cannot be written: Python then has a message and a status of its own.
    """
    status = _final_status if _exit_status is None else _exit_status
    if status is None:
        return
    for stream in (sys.stdout, sys.stderr):
        try:
            stream.flush()
        except Exception:  # of any kind of stream
            if _exit_status is None:
                return
    os._exit(status)
