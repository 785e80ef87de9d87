"""Locks of files, by which processes exclude each other on a machine, and on network file systems that have locks.

A lock ends when its file is closed, also if the process is killed.
"""

from __future__ import annotations

import fcntl
import time
from collections.abc import Callable
from typing import IO, Any

NOTICE_SECONDS = 1.0  # a wait as long as this is reported
_POLL_SECONDS = 0.05


def try_lock(file: int | IO[Any], kind: int = fcntl.LOCK_EX) -> bool:
    """Lock an open file until it is closed. False if another process has locked it.

    Raises:
        OSError: if the file system has no locks.
    """
    try:
        fcntl.flock(file, kind | fcntl.LOCK_NB)
    except (BlockingIOError, PermissionError):
        return False
    return True


def wait_for_lock(file: int | IO[Any], seconds: float, kind: int = fcntl.LOCK_EX,
                  notice: Callable[[], object] | None = None) -> bool:
    """Lock an open file as soon as no other process has locked it. False if one still has after so many seconds.

    Args:
        notice: is called once if the wait takes longer than `NOTICE_SECONDS`.

    Raises:
        OSError: if the file system has no locks.
    """
    start = time.monotonic()
    while not try_lock(file, kind):
        waited = time.monotonic() - start
        if waited >= seconds:
            return False
        if notice and waited >= NOTICE_SECONDS:
            notice()
            notice = None
        time.sleep(_POLL_SECONDS)
    return True
