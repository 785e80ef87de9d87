"""What this process does to the world outside: files that it changes and locks, programs that it starts, hosts that it
calls.

Tells what Python code asks for. What libraries do in C (`cv2.imwrite`) passes unseen; compare snapshots for that.
"""

from __future__ import annotations

import fcntl
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

CHANGES = {"os.mkdir": 1, "os.rename": 2, "os.remove": 1, "os.rmdir": 1, "os.link": 2, "os.symlink": 2,
           "os.truncate": 1, "os.chmod": 1, "os.chown": 1, "os.utime": 1}  # and how many of the arguments are paths
STARTS = {"subprocess.Popen", "os.system", "os.exec", "os.posix_spawn", "os.fork", "os.forkpty", "pty.spawn"}
LOCKS = {"fcntl.flock", "fcntl.lockf"}
_LOCK_COMMANDS = {fcntl.F_SETLK, fcntl.F_SETLKW, fcntl.F_OFD_SETLK, fcntl.F_OFD_SETLKW}
CALLS = {"socket.connect", "socket.bind", "socket.getaddrinfo"}
_WRITES = os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_APPEND


class Deeds(NamedTuple):
    """What was done, in order."""

    changed: list[Path]  # files and folders that were written, made, moved or removed
    started: list[str]  # programs
    called: list[str]  # addresses
    locked: list[Path]  # files

    def outside(self, *places: Path) -> list[Path]:
        """What was changed elsewhere than in these folders. Python's compiled modules do not count."""
        return [path for path in self.changed
                if "__pycache__" not in path.parts and not any(path.is_relative_to(place) for place in places)]


_recording: list[Deeds] = []


@contextmanager
def watched() -> Iterator[Deeds]:
    """Records what is done inside of the block, by any thread."""
    deeds = Deeds([], [], [], [])
    _recording.append(deeds)
    try:
        yield deeds
    finally:
        _recording.remove(deeds)


def _hear(event: str, args: tuple[object, ...]) -> None:
    if not _recording:
        return
    paths: tuple[object, ...] = args[: CHANGES.get(event, 0)]
    if event == "open" and isinstance(args[2], int) and args[2] & _WRITES:
        paths = args[:1]
    for deeds in _recording:
        deeds.changed.extend(Path(os.fsdecode(path)).absolute() for path in paths
                             if isinstance(path, str | bytes | os.PathLike) and str(path) != os.devnull)
        if event in STARTS:
            deeds.started.append(str(args[:2]))
        if event in LOCKS or (event == "fcntl.fcntl" and args[1] in _LOCK_COMMANDS):
            deeds.locked.append(Path(os.readlink(f"/proc/self/fd/{args[0]}")))
        if event in CALLS:
            deeds.called.append(f"{event} {args[1:]}")


sys.addaudithook(_hear)  # for good: Python takes no hook back
