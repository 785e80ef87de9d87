"""A Ray of our own on this machine: in a folder that nobody else can enter, and beyond the signals of a terminal."""

from __future__ import annotations

import atexit
import os
import shutil
import tempfile
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import ray

from ray_yolo.storage.lease import try_lock

_PREFIX = "ray_yolo-"
_LOCK = "lock"
_LONGEST = 40  # characters of a folder, of the 107 that the address of a socket in it may have

_starting = threading.Event()


def session_folder() -> Path:
    """Where Ray may make a folder for its sessions (logs, sockets), which it opens to everyone: in a new one of mode
    0700. That is removed when this process ends; if it was killed, by this user's next call on this machine.
    """
    base = Path(os.environ.get("RAY_TMPDIR") or tempfile.gettempdir())
    if len(str(base)) + len(_PREFIX) + 8 > _LONGEST or not base.is_dir():
        base = Path("/tmp")
    for stale in base.glob(f"{_PREFIX}*"):
        with suppress(OSError):
            _remove_stale(stale)
    folder = Path(tempfile.mkdtemp(prefix=_PREFIX, dir=base))
    new = folder / f"{_LOCK}.new"
    try_lock(os.open(new, os.O_CREAT | os.O_WRONLY))  # until this process ends
    new.rename(folder / _LOCK)  # `_remove_stale` never finds it unlocked before
    atexit.register(_remove, folder)
    return folder / "r"


def _remove(folder: Path) -> None:
    ray.shutdown()
    shutil.rmtree(folder, ignore_errors=True)


def _remove_stale(folder: Path) -> None:
    """Remove a folder of this user whose process has ended."""
    if folder.is_symlink() or folder.stat().st_uid != os.getuid():
        return
    with (folder / _LOCK).open("r+") as lock:
        if try_lock(lock):
            shutil.rmtree(folder, ignore_errors=True)


@contextmanager
def in_own_groups() -> Iterator[None]:
    """Context in which what this process starts by a `preexec_fn`, as Ray does, gets a process group of its own: what a
    terminal or `timeout` sends to the whole group is for this process, which needs Ray to save the step in hand.
    """
    _starting.set()
    try:
        yield
    finally:
        _starting.clear()


def _leave_group() -> None:
    if _starting.is_set():
        os.setpgid(0, 0)


os.register_at_fork(after_in_child=_leave_group)
