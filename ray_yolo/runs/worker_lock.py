"""The lock that the workers of a run share while they train, so that no second training starts in its folder.

The driver's own lock (`runs/folders.py`) becomes free when the driver is killed. Its workers may train on for a while:
until the end of a step, or for longer where nothing reports the driver's end to Ray.
"""

from __future__ import annotations

import contextlib
import fcntl
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path

from ray_yolo.core.errors import InputError
from ray_yolo.core.file_lock import wait_for_lock
from ray_yolo.core.system import Process, own_process

WORKERS_LOCK = ".workers"
"""File in a run folder. Each worker that has locked it has added a line: the fields of its `Process`."""

WAIT_SECONDS = 30.0  # A killed driver's workers may take so long to save the current step and end.


@contextmanager
def hold_folder(folder: Path) -> Iterator[None]:
    """Context in which this process trains in a run folder. Storage that fails is reported by what needs it."""
    with ExitStack() as stack:
        with suppress(OSError):
            file = stack.enter_context((folder / WORKERS_LOCK).open("a"))
            fcntl.flock(file, fcntl.LOCK_SH)  # waits only for the instant in which another process tries the lock
            file.write("\t".join(map(str, own_process())) + "\n")
            file.flush()
        yield


def await_former_workers(folder: Path, notify: Callable[[str], None], wait_seconds: float = WAIT_SECONDS) -> None:
    """Wait until no worker of an earlier driver trains in a run folder, whose driver's lock the caller holds.

    Raises:
        InputError: if one still trains after `wait_seconds`.
    """
    path = folder / WORKERS_LOCK
    if not path.exists():
        return

    def notice() -> None:
        notify(f"workers of an earlier driver still train this run ({_processes_in(path)}): waiting at most "
               f"{wait_seconds:g} s for their end")

    with path.open("r+") as file:
        if not wait_for_lock(file, wait_seconds, notice=notice):
            raise InputError(f"{folder} is still being trained by workers of a driver that has ended "
                             f"({_processes_in(path)}); end them, then run the same command again")
        file.truncate(0)


def _processes_in(path: Path) -> str:
    """The processes that a lock file lists, without those that are known to have ended."""
    processes = []
    for line in path.read_text(errors="replace").splitlines():
        with contextlib.suppress(ValueError):  # two clients of a network file system may have mixed their lines
            node, space, pid, started = line.split("\t")
            processes.append(Process(node, space, int(pid), int(started)))
    living = [f"process {each.pid} on {each.node}" for each in processes if not each.has_ended]
    return ", ".join(living) or f"unknown ones; {path} is locked"
