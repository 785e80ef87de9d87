"""A private Ray on this machine: its session folder is closed to other users, and terminal signals do not reach it."""

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

from ray_yolo.core.file_lock import try_lock
from ray_yolo.core.system import process_of

PREFIX = "ray_yolo-"
_LOCK = "lock"
_LONGEST = 40  # A folder may have so many of the 107 characters that a socket's path may have.

_starting = threading.Event()


def session_folder() -> Path:
    """A new folder of mode 0700 for Ray's session folders (logs, sockets), which by default all users can enter. It is
    removed when this process exits. If the process was killed, or was interrupted while Ray started, this user's next
    command on this machine removes it.
    """
    base = Path(os.environ.get("RAY_TMPDIR") or tempfile.gettempdir())
    if len(str(base)) + len(PREFIX) + 8 > _LONGEST or not base.is_dir():
        base = Path("/tmp")
    for stale in base.glob(f"{PREFIX}*"):
        with suppress(OSError):
            _remove_stale(stale)
    folder = Path(tempfile.mkdtemp(prefix=PREFIX, dir=base))
    unlocked = folder / f"{_LOCK}.new"
    try_lock(os.open(unlocked, os.O_CREAT | os.O_WRONLY))  # held until this process exits
    unlocked.rename(folder / _LOCK)  # so `_remove_stale` never finds it unlocked

    def remove() -> None:
        ray.shutdown()
        if not _starting.is_set():  # else Ray would make it again, without its lock, and nothing would remove it
            shutil.rmtree(folder, ignore_errors=True)

    atexit.register(remove)
    return folder / "r"


def _remove_stale(folder: Path) -> None:
    """Remove a folder of this user whose process has exited, and end what is left of the Ray in it."""
    if folder.is_symlink() or folder.stat().st_uid != os.getuid():
        return
    with (folder / _LOCK).open("r+") as lock:
        if try_lock(lock):
            _end_processes(folder)
            shutil.rmtree(folder, ignore_errors=True)


def _end_processes(folder: Path) -> None:
    """Kill this user's processes with a path below a session folder among their arguments, such as Ray's.

    Ray's processes end with their driver, but they take a killed driver for alive until it is reaped.
    """
    for process in Path("/proc").glob("[0-9]*"):
        found = process_of(int(process.name))  # before its arguments are read: so they are those of this process
        with suppress(OSError):  # ended, or another user's
            arguments = (process / "cmdline").read_bytes()
            if f"{folder}/".encode() in arguments and process.stat().st_uid == os.getuid():
                found.kill()


@contextmanager
def in_own_groups() -> Iterator[None]:
    """Context in which child processes with a `preexec_fn`, such as Ray's, get their own process group.

    A terminal or `timeout` signals the whole group of this process, but Ray is still needed to save the current step.
    """
    _starting.set()
    try:
        yield
    finally:
        _starting.clear()


def _leave_group() -> None:
    """Runs in each new child process, between `fork` and `exec`."""
    if _starting.is_set():
        os.setpgid(0, 0)


os.register_at_fork(after_in_child=_leave_group)
