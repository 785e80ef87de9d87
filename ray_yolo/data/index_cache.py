"""The user's cache folder, and the label index in it, so that the next start need not read a hundred thousand files.

Everything here can be made again, is named by what it was made from (a changed data set has another name and is read
again), and appears whole or not at all: any number of processes may make the same entry at the same time. Nothing is
ever written into the data set's own folder.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
import tempfile
import zipfile
from collections.abc import Callable, Iterable, Sequence
from dataclasses import astuple
from functools import cache
from pathlib import Path

import numpy as np

from ray_yolo.core.files import replacing
from ray_yolo.core.structures import AnnotationIndex, Finding

FORMAT = 3  # raise it when a rule of reading or the layout of the copy changes
_log = logging.getLogger(__name__)


def cache_folder() -> Path:
    """RAY_YOLO_CACHE if set, else ray_yolo under XDG_CACHE_HOME, else ~/.cache/ray_yolo. Not created here."""
    if own := os.environ.get("RAY_YOLO_CACHE"):
        return Path(own).expanduser()
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "ray_yolo"


def publish(target: Path, make: Callable[[Path], object]) -> Path:
    """`target`, made by `make(temporary path)` and renamed into place; a file replaces another, a folder never does."""
    if target.is_dir():
        return target
    target.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=f".{target.name}-", dir=target.parent) as folder:
        try:
            make(temporary := Path(folder, target.name))
            temporary.replace(target)
        except OSError:
            if not target.is_dir():  # not the race that another maker won
                raise
    return target


def content_key(files: Iterable[str], *made_by: object) -> str:
    """Name of a kept copy: a hash over what decides how it is made and every file's path, size and time of change."""
    digest = hashlib.sha256(json.dumps(made_by).encode())
    state = cache(_state_of)
    for file in files:
        digest.update(state(file).encode("utf-8", "surrogateescape"))
    return digest.hexdigest()[:32]


def _state_of(file: str) -> str:
    try:
        status = os.stat(file)
    except OSError:
        return f"{file}\0-\n"
    return f"{file}\0{status.st_size}\0{status.st_mtime_ns}\n"


def keep(key: str, index: AnnotationIndex, paths: Sequence[str]) -> None:
    """Write the copy; a cache folder that cannot be written only costs the time of reading again.

    paths: the images that the index was made from, of which it may have left some out.
    """
    place = {path: number for number, path in enumerate(paths)}
    outlined = [(image, outline) for image, outlines in index.polygons.items() for outline in outlines]
    arrays = {
        "kept": np.array([place[path] for path in index.paths], np.int64), "sizes": index.sizes,
        "offsets": index.offsets, "classes": index.classes, "boxes": index.boxes,
        "outlined": np.array([image for image, _ in outlined], np.int64),
        "lengths": np.array([len(outline) for _, outline in outlined], np.int64),
        "points": np.concatenate([np.zeros((0, 2), np.float32), *(outline for _, outline in outlined)]),
        "findings": np.frombuffer(json.dumps([astuple(found) for found in index.findings]).encode(), np.uint8),
        "crowds": index.crowds, "without_file": np.array(index.num_without_file),
        **({} if index.areas is None else {"areas": index.areas}),
    }
    try:
        _file(key).parent.mkdir(parents=True, exist_ok=True)
        with replacing(_file(key), durable=False) as temporary:
            np.savez(temporary, allow_pickle=False, **arrays)
    except OSError as error:
        _log.warning("the label index cannot be kept in %s (%s): it is made anew at every start",
                     cache_folder(), error.strerror)


def recall(key: str, paths: Sequence[str], names: tuple[str, ...]) -> AnnotationIndex | None:
    """The index that was kept, or None if there is none that can be read."""
    try:
        with _file(key).open("rb") as file, np.load(file, allow_pickle=False) as content:
            arrays = {name: content[name] for name in content.files}
        findings = tuple(Finding(*entry) for entry in json.loads(arrays["findings"].tobytes()))
        polygons: dict[int, tuple[np.ndarray, ...]] = {}
        outlines = np.split(arrays["points"], np.cumsum(arrays["lengths"]))
        for image, outline in zip(arrays["outlined"].tolist(), outlines, strict=False):  # nothing is behind the last
            polygons[image] = (*polygons.get(image, ()), outline)
        return AnnotationIndex(
            tuple(paths[number] for number in arrays["kept"].tolist()), arrays["sizes"], arrays["offsets"],
            arrays["classes"], arrays["boxes"], names, polygons, findings, arrays.get("areas"), arrays["crowds"],
            int(arrays["without_file"]))
    except (OSError, ValueError, KeyError, TypeError, IndexError, EOFError, zipfile.BadZipFile):
        return None


def _file(key: str) -> Path:
    return cache_folder() / "labels" / f"{key}.npz"
