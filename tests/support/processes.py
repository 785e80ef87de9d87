"""Processes that a test has started, with all that they have started themselves."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
from pathlib import Path


def kill(process: subprocess.Popen[bytes]) -> None:
    """kill -9 of a process and of all that it has started."""
    for pid in (process.pid, *_descendants(process.pid)):
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
    process.communicate()


def _descendants(pid: int) -> list[int]:
    children = [int(child) for task in Path(f"/proc/{pid}/task").iterdir()
                for child in (task / "children").read_text().split()]
    return children + [grand for child in children for grand in _descendants(child)]
