"""Where derived files are kept: a cache folder of the user, never the data set's own folder.

Everything written here can be made again, is keyed by its content, and appears whole or not at all:
any number of processes may make the same entry at the same time, and the first one to finish wins.
"""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Callable
from pathlib import Path


def cache_folder() -> Path:
    """RAY_YOLO_CACHE if set, else ray_yolo under XDG_CACHE_HOME, else ~/.cache/ray_yolo. Not created here."""
    own = os.environ.get("RAY_YOLO_CACHE")
    if own:
        return Path(own).expanduser()
    base = os.environ.get("XDG_CACHE_HOME")
    return (Path(base) if base else Path.home() / ".cache") / "ray_yolo"


def publish_folder(target: Path, make: Callable[[Path], None]) -> Path:
    """`target`, made by `make(temporary folder)` and renamed into place, unless it is there already."""
    if target.is_dir():
        return target
    target.parent.mkdir(parents=True, exist_ok=True)
    temporary = Path(tempfile.mkdtemp(prefix=f".{target.name}-", dir=target.parent))
    try:
        make(temporary)
        temporary.chmod(0o755)
        temporary.rename(target)
    except OSError:
        if not target.is_dir():  # not the race that another maker won
            raise
    finally:
        shutil.rmtree(temporary, ignore_errors=True)
    return target


def publish_file(target: Path, make: Callable[[Path], None]) -> Path:
    """`target`, made by `make(temporary path)` and renamed into place; replaces what was there."""
    target.parent.mkdir(parents=True, exist_ok=True)
    handle, name = tempfile.mkstemp(prefix=f".{target.name}-", dir=target.parent)
    os.close(handle)
    temporary = Path(name)
    try:
        make(temporary)
        temporary.replace(target)
    finally:
        temporary.unlink(missing_ok=True)
    return target
