"""What lies in a folder, to be compared with what lies there later."""

from __future__ import annotations

import os
import stat
from pathlib import Path

Snapshot = dict[str, tuple[int, int, bytes]]


def snapshot(root: Path, without: tuple[Path, ...] = ()) -> Snapshot:
    """Of everything below a folder: kind and mode, time of change, and bytes (a link's: where it points).

    without: folders that are left out.
    """
    found: Snapshot = {}
    for here, folders, names in os.walk(root):
        folders[:] = [name for name in folders if Path(here, name) not in without]
        for path in (Path(here, name) for name in (".", *folders, *names)):
            status = path.lstat()
            kind = stat.S_IFMT(status.st_mode)
            content = path.read_bytes() if kind == stat.S_IFREG else b""
            content = os.fsencode(os.readlink(path)) if kind == stat.S_IFLNK else content
            found[str(path)] = (status.st_mode, status.st_mtime_ns, content)
    return found
