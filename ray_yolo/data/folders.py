"""Which files lie below a folder or match a pattern, where links may run in circles.

Every real folder is looked into once, so that no arrangement of links makes the search endless. Hidden files and
folders are left out. The order of names decides, so that the same tree gives the same paths on any file system.
"""

from __future__ import annotations

import glob
import os
import re
from collections.abc import Iterator

from ray_yolo.errors import DatasetError

_ANY_DEPTH = re.compile(r"(?:^|(?<=/))(?:\*\*(?:/+|$))+")


def files_below(folder: str) -> list[str]:
    """Files at any depth, through links too."""
    return [os.path.join(here, name) for here, names in _walk(folder) for name in names]


def matching(pattern: str) -> list[str]:
    """What a shell pattern matches; `**` stands for any number of folders. May name a path twice."""
    if len(parts := _ANY_DEPTH.split(pattern, maxsplit=1)) == 1:
        return glob.glob(pattern)
    head, tail = parts
    folders = (here for top in (glob.glob(head) if head else ["."]) for here, _ in _walk(top))
    return [path for folder in folders for path in matching(os.path.join(glob.escape(folder), tail or "*"))]


def _walk(top: str) -> Iterator[tuple[str, list[str]]]:
    """Each folder from `top` down with the names of its files.

    Raises:
        DatasetError: for a folder that may not be read: a data set that is silently smaller trains silently worse.
    """
    seen = set()
    for here, folders, names in os.walk(top, followlinks=True, onerror=_refuse):
        real = os.path.realpath(here)
        folders[:] = [] if real in seen else sorted(name for name in folders if not name.startswith("."))
        if real not in seen:
            seen.add(real)
            yield here, [name for name in names if not name.startswith(".")]


def _refuse(error: OSError) -> None:
    if isinstance(error, PermissionError):
        raise DatasetError(f"{error.filename}: may not be read; give this user the right to, or move it away") from None
