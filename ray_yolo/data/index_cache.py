"""The label index in the user's cache folder, so that later starts need not read all label files.

Entries are reproducible. They are named by a digest of their sources, so a changed data set has a new entry. They
appear atomically, so several processes may create the same entry at the same time. The data set's folder is never
written to.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
import zipfile
from collections.abc import Iterable, Sequence
from dataclasses import astuple
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np

from ray_yolo.core.cache_folder import cache_folder
from ray_yolo.core.files import is_absence, replacing
from ray_yolo.core.structures import AnnotationIndex, Finding, PixelValues
from ray_yolo.labels.files import read_or_refuse

FORMAT = 10  # The version of the cache file; raise it when the check of images, label parsing or the layout changes.
_log = logging.getLogger(__name__)


class FileStates:
    """Sizes and times of files, each of which is looked at once."""

    def __init__(self) -> None:
        self._of = cache(_state)  # a COCO file has the labels of many images

    def key(self, files: Iterable[str], *made_by: object) -> str:
        """The name of a cache entry: a hash of its parameters and of every file's path, size and times. The time of
        change differs also if an archive or `cp -p` has given another file the time of modification of the old one.

        Raises:
            DatasetError: if storage fails.
        """
        digest = hashlib.sha256(json.dumps(made_by).encode())
        for file in files:
            text = "\0".join((file, *map(str, self._of(file) or "-")))
            digest.update(f"{text}\n".encode("utf-8", "surrogateescape"))
        return digest.hexdigest()[:32]

    def fingerprint(self, files: Iterable[str]) -> str:
        """16 hex digits of a hash of the files' sizes and times of modification, which a copy of the folder keeps; ''
        if they are not known of all files."""
        digest = hashlib.sha256()
        for file in files:
            state = self._of(file)
            if state is None:
                return ""
            digest.update(f"{state[:2]}\n".encode())
        return digest.hexdigest()[:16]


def _state(file: str) -> tuple[int, int, int] | None:
    """Size, time of modification and time of change of a file, ns; None if there is none.

    Raises:
        DatasetError: if storage fails in each of several tries, which does not mean that there is no file.
    """
    def look(path: str) -> tuple[int, int, int] | None:
        try:
            status = os.stat(path)
        except OSError as error:
            if is_absence(error):
                return None
            raise
        return status.st_size, status.st_mtime_ns, status.st_ctime_ns

    return read_or_refuse(look, file)


def content_key(files: Iterable[str], *made_by: object) -> str:
    """The key of `FileStates`, of files that are looked at for it alone."""
    return FileStates().key(files, *made_by)


def save(key: str, index: AnnotationIndex, paths: Sequence[str]) -> None:
    """Write an index to the cache. A failure is a warning: the index is then rebuilt at every start.

    An index with the finding of a failed read is not written: the next start may read what this one could not.

    paths: all images of the split; the index may lack unusable ones.
    """
    if any(finding.is_transient for finding in index.findings):
        return
    position = {path: number for number, path in enumerate(paths)}
    outlined: list[int] = []  # image of each outline
    outlines: list[np.ndarray] = []
    for image, polygons in index.polygons.items():
        outlined += [image] * len(polygons)
        outlines += polygons
    arrays = {
        "kept": np.array([position[path] for path in index.paths], np.int64),
        "sizes": index.sizes,
        "offsets": index.offsets,
        "classes": index.classes,
        "boxes": index.boxes,
        "outlined": np.array(outlined, np.int64),
        "lengths": np.array([len(outline) for outline in outlines], np.int64),
        "points": np.concatenate([np.zeros((0, 2), np.float32), *outlines]),
        "findings": _json_array([astuple(finding) for finding in index.findings]),
        "crowds": index.crowds,
        "without_file": index.without_file,
        "clipped": np.array(index.num_clipped),
        "pixel_values": _json_array(index.pixel_values),
    }
    if index.areas is not None:
        arrays["areas"] = index.areas
    try:
        _file(key).parent.mkdir(parents=True, exist_ok=True)
        with replacing(_file(key), durable=False) as temporary:
            np.savez(temporary, allow_pickle=False, **arrays)
    except OSError as error:
        _log.warning("the label index cannot be written to %s (%s): it is rebuilt at every start",
                     cache_folder(), error.strerror or error)


def _json_array(value: Any) -> np.ndarray:
    """A value as the bytes of its JSON: arrays of objects would be pickled."""
    return np.frombuffer(json.dumps(value).encode(), np.uint8)


def load(key: str, paths: Sequence[str], names: tuple[str, ...]) -> AnnotationIndex | None:
    """The cached index, or None if it is missing or unreadable."""
    try:
        with _file(key).open("rb") as file, np.load(file, allow_pickle=False) as content:
            arrays = {name: content[name] for name in content.files}
        findings = json.loads(arrays["findings"].tobytes())
        pixel_values = json.loads(arrays["pixel_values"].tobytes())
        polygons: dict[int, tuple[np.ndarray, ...]] = {}
        outlines = np.split(arrays["points"], np.cumsum(arrays["lengths"]))
        for image, outline in zip(arrays["outlined"].tolist(), outlines, strict=False):  # the last part is empty
            polygons[image] = (*polygons.get(image, ()), outline)
        return AnnotationIndex(
            paths=tuple(paths[number] for number in arrays["kept"].tolist()),
            sizes=arrays["sizes"],
            offsets=arrays["offsets"],
            classes=arrays["classes"],
            boxes=arrays["boxes"],
            names=names,
            polygons=polygons,
            findings=tuple(Finding(*entry) for entry in findings),
            areas=arrays.get("areas"),
            crowds=arrays["crowds"],
            without_file=arrays["without_file"],
            num_clipped=int(arrays["clipped"]),
            pixel_values=tuple(PixelValues(kind, low, high, number, tuple(no_data))
                               for kind, low, high, number, no_data in pixel_values))
    except (OSError, ValueError, KeyError, TypeError, IndexError, EOFError, zipfile.BadZipFile):
        return None


def _file(key: str) -> Path:
    return cache_folder() / "labels" / f"{key}.npz"
