"""Work that Ray does while the main thread waits for signals."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import Future
from typing import TypeVar

T = TypeVar("T")


def run_aside(work: Callable[[], T], before_end: Callable[[Future[T]], None] = lambda outcome: None) -> T:
    """What `work` returns or raises; it runs in a thread of its own, which ends with the process at the latest.

    In the main thread Ray Train and Ray Tune take Ctrl-C for themselves, and what a signal handler raises inside of
    `ray.get` arrives as an exit with status 1. Here the main thread only waits, and a signal interrupts it at once.

    Args:
        before_end: called with the outcome to be when a signal has interrupted the wait, before that goes on upwards.
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
