"""Processes that a test has started, with all that they have started themselves."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path


def kill(process: subprocess.Popen[bytes]) -> None:
    """kill -9 of a process and of all that it has started."""
    for pid in (process.pid, *descendants(process.pid)):
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
    process.communicate()


@contextlib.contextmanager
def on_machine(machine: Path, *words: str | Path) -> Iterator[subprocess.Popen[bytes]]:
    """A program of Python on a machine of its own, which is a cache folder, of which nothing is left after this."""
    environment = {**os.environ, "RAY_YOLO_CACHE": str(machine), "OMP_NUM_THREADS": "1"}
    environment.pop("RAY_ADDRESS", None)
    with subprocess.Popen([sys.executable, *words], env=environment, stdout=subprocess.DEVNULL,
                          stderr=subprocess.PIPE) as process:
        try:
            yield process
        finally:
            if process.poll() is None:
                kill(process)


def children(pid: int) -> list[int]:
    """The processes that a process has started and that live, in the order of their starts; none if it has ended."""
    found: list[int] = []
    for file in Path(f"/proc/{pid}/task").glob("*/children"):
        with contextlib.suppress(FileNotFoundError, ProcessLookupError):  # a thread may have ended meanwhile
            found += map(int, file.read_text().split())
    return found


def descendants(pid: int) -> list[int]:
    """`children`, and theirs."""
    own = children(pid)
    return own + [grand for child in own for grand in descendants(child)]
