"""The user's cache folder: label indexes, image caches, copies of remote data and weights, working copies of runs.

What is in it can be made again, except for files of a run in a bucket that are not stored yet.
"""

from __future__ import annotations

import os
import tempfile
from collections.abc import Callable
from pathlib import Path

from ray_yolo.core.errors import InputError


def cache_folder() -> Path:
    """RAY_YOLO_CACHE if set, else ray_yolo under XDG_CACHE_HOME, else ~/.cache/ray_yolo. Not created here."""
    if own := os.environ.get("RAY_YOLO_CACHE"):
        return Path(own).expanduser()
    return Path(os.environ.get("XDG_CACHE_HOME") or home_folder() / ".cache") / "ray_yolo"


def home_folder() -> Path:
    """The user's home folder; one that is not there if HOME is not set and the user id has no entry of its own, as in a
    container."""
    try:
        return Path.home()
    except RuntimeError:
        return Path("/nonexistent")


def check_cache_folder() -> None:
    """Create RAY_YOLO_CACHE, if it is set.

    Raises:
        InputError: if it cannot be created. Without the other folders a command works, only slower.
    """
    if os.environ.get("RAY_YOLO_CACHE"):
        try:
            cache_folder().mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise _unusable(cache_folder(), error) from None


def build_in_place(target: Path, make: Callable[[Path], object]) -> Path:
    """`target`, made by `make(temporary path)` and renamed into place; a file replaces another, a folder never does.

    Raises:
        InputError: if its folder cannot be written to.
    """
    if target.is_dir():
        return target
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(prefix=f".{target.name}-", dir=target.parent) as folder:
            temporary = Path(folder, target.name)
            make(temporary)
            temporary.replace(target)
    except OSError as error:
        if not target.is_dir():  # another process was faster
            raise _unusable(target.parent, error) from error
    return target


def _unusable(folder: Path, error: OSError) -> InputError:
    return InputError(f"{folder}: the cache cannot be written ({error.strerror or error}); set RAY_YOLO_CACHE to a "
                      "folder that can be")
