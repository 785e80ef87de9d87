"""Locks of files, which the kernel lets go when their holder dies."""

from __future__ import annotations

import fcntl
from typing import IO, Any


def try_lock(file: int | IO[Any], kind: int = fcntl.LOCK_EX) -> bool:
    """Lock an open file until it is closed. False if another process has it.

    Raises:
        OSError: if its file system has no locks.
    """
    try:
        fcntl.flock(file, kind | fcntl.LOCK_NB)
    except (BlockingIOError, PermissionError):
        return False
    return True
