"""A label index kept in the user's cache, so that the next start need not read a hundred thousand files.

The kept copy is named by what it was made from (paths, sizes and times of every image and label file): a changed
data set has another name and is read again. Plain arrays and JSON; any number of processes may read or write it.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
import zipfile
from collections.abc import Iterable, Sequence
from pathlib import Path

import numpy as np

from ray_yolo.data.user_cache import cache_folder, publish_file
from ray_yolo.structures import AnnotationIndex, Finding

FORMAT = 2  # raise it when a rule of reading or the layout of the copy changes
_log = logging.getLogger(__name__)


def content_key(files: Iterable[str], names: tuple[str, ...]) -> str:
    """Name of the kept copy: a hash over the class names and every file's path, size and time of change."""
    digest = hashlib.sha256(json.dumps([FORMAT, names]).encode())
    seen: dict[str, str] = {}
    for file in files:
        if file not in seen:
            seen[file] = state_of(file)
        digest.update(seen[file].encode("utf-8", "surrogateescape"))
    return digest.hexdigest()[:32]


def state_of(file: str) -> str:
    """A file's path, size and time of change, as a line."""
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
    findings = [[found.where, found.what, found.dropped, found.image] for found in index.findings]
    arrays = {
        "kept": np.array([place[path] for path in index.paths], np.int64), "sizes": index.sizes,
        "offsets": index.offsets, "classes": index.classes, "boxes": index.boxes,
        "outlined": np.array([image for image, _ in outlined], np.int64),
        "lengths": np.array([len(outline) for _, outline in outlined], np.int64),
        "points": np.concatenate([np.zeros((0, 2), np.float32), *(outline for _, outline in outlined)]),
        "findings": np.frombuffer(json.dumps(findings).encode(), np.uint8),
        "crowds": index.crowds, "without_file": np.array(index.num_without_file),
        **({} if index.areas is None else {"areas": index.areas}),
    }

    def write(temporary: Path) -> None:
        with temporary.open("wb") as file:
            np.savez(file, allow_pickle=False, **arrays)

    try:
        publish_file(_file(key), write)
    except OSError as error:
        _log.warning("the label index cannot be kept in %s (%s): it is made anew at every start",
                     cache_folder(), error.strerror)


def recall(key: str, paths: Sequence[str], names: tuple[str, ...]) -> AnnotationIndex | None:
    """The index that was kept, or None if there is none that can be read."""
    try:
        with _file(key).open("rb") as file, np.load(file, allow_pickle=False) as content:
            arrays = {name: content[name] for name in content.files}
        findings = tuple(Finding(*entry) for entry in json.loads(arrays["findings"].tobytes()))
        return AnnotationIndex(
            tuple(paths[number] for number in arrays["kept"].tolist()), arrays["sizes"], arrays["offsets"],
            arrays["classes"], arrays["boxes"], names, _polygons(arrays), findings, arrays.get("areas"),
            arrays["crowds"], int(arrays["without_file"]))
    except (OSError, ValueError, KeyError, TypeError, IndexError, EOFError, zipfile.BadZipFile):
        return None


def _file(key: str) -> Path:
    return cache_folder() / "labels" / f"{key}.npz"


def _polygons(arrays: dict[str, np.ndarray]) -> dict[int, tuple[np.ndarray, ...]]:
    ends = np.cumsum(arrays["lengths"])
    polygons: dict[int, list[np.ndarray]] = {}
    for image, length, end in zip(arrays["outlined"].tolist(), arrays["lengths"].tolist(), ends.tolist(), strict=True):
        polygons.setdefault(image, []).append(arrays["points"][end - length:end])
    return {image: tuple(outlines) for image, outlines in polygons.items()}
