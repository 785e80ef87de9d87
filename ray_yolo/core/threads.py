"""Background threads whose results are waited for."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import Future
from typing import TypeVar

T = TypeVar("T")


def run_in_thread(work: Callable[[], T], name: str, *, stays: bool = False) -> Future[T]:
    """Run `work` in a new daemon thread, which ends with the process at the latest. Returns the future result.

    Args:
        stays: whether the thread stays after its work, unless that has failed. A child process that is to end with
            its parent (PR_SET_PDEATHSIG), as Ray's do, ends with the thread that started it.
    """
    result: Future[T] = Future()

    def run() -> None:
        try:
            result.set_result(work())
        except BaseException as error:
            result.set_exception(error)
            return
        if stays:
            threading.Event().wait()

    threading.Thread(target=run, name=f"ray_yolo {name}", daemon=True).start()
    return result
