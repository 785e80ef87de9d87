"""All annotations of a split, read and checked in parallel once and then kept in the user's cache.

The kept copy is named by what it was made from (paths, sizes and times of every image and label file), so a
changed data set is read again, and any number of processes may read or write it. The data set's own folder
is never written to.
"""

from __future__ import annotations

import glob
import hashlib
import json
import logging
import os
import warnings
import zipfile
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

import numpy as np

from ray_yolo.data.description import DatasetDescription
from ray_yolo.data.images import SUFFIXES, UnreadableImageError, check_image
from ray_yolo.data.labels import NO_LABELS, Labels
from ray_yolo.data.user_cache import cache_folder, publish_file
from ray_yolo.data.yolo_txt import UnreadableLabelsError, label_path, parse_labels
from ray_yolo.errors import DatasetError
from ray_yolo.structures import AnnotationIndex, Finding

FORMAT = 1  # of the kept copy; raise it when a rule of reading changes
_log = logging.getLogger(__name__)


class _Checked(NamedTuple):
    """One image file: its size and labels, or no size if it has to be left out."""

    size: tuple[int, int] | None
    labels: Labels
    findings: tuple[Finding, ...]


def read_index(description: DatasetDescription, split: str, *, single_cls: bool = False, strict: bool = False,
               num_threads: int = 0) -> AnnotationIndex:
    """Every usable image of a split, sorted by path, with its labels and what the check found.

    Args:
        split: train, val or test.
        single_cls: make every label class 0, called "item".
        strict: refuse the data set if any image or label has to be left out.
        num_threads: readers; 0 means one for each CPU, eight at most.

    Raises:
        DatasetError: for an empty split, a label whose class has no name, or (strict) anything left out.
    """
    paths = list_images(description, split)
    key = _content_key(paths, len(description.names))
    index = _recall(key, paths, description.names)
    if index is None:
        index = _read_all(paths, description.names, num_threads or min(8, os.cpu_count() or 1))
        _keep(key, index, paths)
    _judge(index, description, split, strict)
    if single_cls:
        index = replace(index, classes=np.zeros_like(index.classes), names=("item",))
    return index


def list_images(description: DatasetDescription, split: str) -> list[str]:
    """Absolute paths of a split's image files in sorted order, each once.

    Raises:
        DatasetError: if the split is not described, a source is missing, or there are no images.
    """
    sources = description.split(split)
    paths = sorted({path for source in sources for path in _images_of(source, description)})
    if not paths:
        raise DatasetError(f"{description.file}: {split}: no images in {', '.join(sources)} "
                           f"(looked for {', '.join(sorted(SUFFIXES))})")
    return paths


def _images_of(source: str, description: DatasetDescription) -> list[str]:
    if os.path.isdir(source):
        found = [os.path.join(folder, name) for folder, _, names in os.walk(source, followlinks=True)
                 for name in names]
    elif source.lower().endswith(".txt") and os.path.isfile(source):
        return _listed(Path(source), description.root)
    elif os.path.isfile(source):
        found = [source]
    else:
        found = [path for path in glob.glob(source, recursive=True) if os.path.isfile(path)]
    return [os.path.normpath(path) for path in found if Path(path).suffix.lower() in SUFFIXES]


def _listed(file: Path, root: Path) -> list[str]:
    """Image paths in a list file; relative ones are below the file's folder or the data set's root."""
    paths = []
    try:
        text = file.read_text("utf-8-sig")
    except UnicodeDecodeError:
        raise DatasetError(f"{file}: is not a text file; expected one image path per line") from None
    for number, line in enumerate(text.splitlines(), 1):
        if not line.strip():
            continue
        places = [os.path.normpath(folder / line.strip()) for folder in (file.parent, root)]
        path = next((place for place in places if os.path.isfile(place)), None)
        if path is None:
            raise DatasetError(f"{file}:{number}: no such image: {line.strip()!r} (looked in "
                               f"{' and '.join(dict.fromkeys(map(str, (file.parent, root))))})")
        paths.append(path)
    return paths


def _content_key(paths: Sequence[str], num_classes: int) -> str:
    """Name of the kept copy: a hash over every image and label file's path, size and time of change."""
    digest = hashlib.sha256(f"{FORMAT} {num_classes}".encode())
    for path in paths:
        for file in (path, label_path(path)):
            try:
                status = os.stat(file)
                digest.update(f"{file}\0{status.st_size}\0{status.st_mtime_ns}\n".encode("utf-8", "surrogateescape"))
            except OSError:
                digest.update(f"{file}\0-\n".encode("utf-8", "surrogateescape"))
    return digest.hexdigest()[:32]


def _read_all(paths: Sequence[str], names: tuple[str, ...], num_threads: int) -> AnnotationIndex:
    with warnings.catch_warnings(), ThreadPoolExecutor(num_threads) as pool:
        # Filters belong to the process, not to a thread; images beyond the limit are judged by `check_image`.
        warnings.simplefilter("ignore")
        checked = list(pool.map(lambda path: _check(path, len(names)), paths, chunksize=16))
    return build_index(paths, checked, names)


def _check(path: str, num_classes: int) -> _Checked:
    try:
        size = check_image(path)
    except (UnreadableImageError, OSError) as error:
        return _Checked(None, NO_LABELS, (Finding(path, str(error), dropped=True),))
    file = label_path(path)
    try:
        content = Path(file).read_bytes()
    except FileNotFoundError:
        return _Checked(size, NO_LABELS, ())
    except OSError as error:
        return _Checked(None, NO_LABELS, (Finding(file, f"cannot be read: {error.strerror}", dropped=True),))
    try:
        labels, findings = parse_labels(content, size, num_classes, file)
    except UnreadableLabelsError as error:
        return _Checked(None, NO_LABELS, (error.finding,))
    return _Checked(size, labels, tuple(findings))


def build_index(paths: Sequence[str], checked: Sequence[_Checked], names: tuple[str, ...]) -> AnnotationIndex:
    """The flat arrays of all images that were not left out, in the given order."""
    kept = [(path, item.size, item.labels) for path, item in zip(paths, checked, strict=True) if item.size]
    counts = [len(labels.classes) for _, _, labels in kept]
    return AnnotationIndex(
        paths=tuple(path for path, _, _ in kept),
        sizes=np.array([size for _, size, _ in kept], np.int32).reshape(-1, 2),
        offsets=np.concatenate([[0], np.cumsum(counts, dtype=np.int64)]).astype(np.int64),
        classes=np.concatenate([NO_LABELS.classes, *(labels.classes for _, _, labels in kept)]),
        boxes=np.concatenate([NO_LABELS.boxes, *(labels.boxes for _, _, labels in kept)]),
        names=names,
        polygons={number: labels.polygons for number, (_, _, labels) in enumerate(kept) if labels.polygons},
        findings=tuple(finding for item in checked for finding in item.findings))


def _judge(index: AnnotationIndex, description: DatasetDescription, split: str, strict: bool) -> None:
    dropped = [finding for finding in index.findings if finding.dropped]
    if strict and dropped:
        raise DatasetError(f"{dropped[0].where}: {dropped[0].what} ({len(dropped)} such findings in {split}); "
                           "correct the files or drop --strict")
    if not len(index):
        raise DatasetError(f"{description.file}: {split}: none of its images can be used; "
                           f"the first: {dropped[0].where}: {dropped[0].what}")


def _keep(key: str, index: AnnotationIndex, paths: Sequence[str]) -> None:
    """Write the kept copy; a cache folder that cannot be written only costs the time of reading again."""
    place = {path: number for number, path in enumerate(paths)}
    outlined = [(image, outline) for image, outlines in index.polygons.items() for outline in outlines]
    findings = [[finding.where, finding.what, finding.dropped] for finding in index.findings]
    arrays = {
        "kept": np.array([place[path] for path in index.paths], np.int64), "sizes": index.sizes,
        "offsets": index.offsets, "classes": index.classes, "boxes": index.boxes,
        "outlined": np.array([image for image, _ in outlined], np.int64),
        "lengths": np.array([len(outline) for _, outline in outlined], np.int64),
        "points": np.concatenate([np.zeros((0, 2), np.float32), *(outline for _, outline in outlined)]),
        "findings": np.frombuffer(json.dumps(findings).encode(), np.uint8),
    }

    def write(temporary: Path) -> None:
        with temporary.open("wb") as file:
            np.savez(file, allow_pickle=False, **arrays)

    try:
        publish_file(_kept_copy(key), write)
    except OSError as error:
        _log.warning("the label index cannot be kept in %s (%s): it is read again at every start",
                     cache_folder(), error.strerror)


def _kept_copy(key: str) -> Path:
    return cache_folder() / "labels" / f"{key}.npz"


def _recall(key: str, paths: Sequence[str], names: tuple[str, ...]) -> AnnotationIndex | None:
    """The kept copy of an index, or None if there is none that can be read."""
    try:
        with np.load(_kept_copy(key), allow_pickle=False) as file:
            arrays = {name: file[name] for name in file.files}
        outlines = np.split(arrays["points"], np.cumsum(arrays["lengths"])[:-1]) if len(arrays["lengths"]) else []
        polygons: dict[int, tuple[np.ndarray, ...]] = {}
        for image, outline in zip(arrays["outlined"].tolist(), outlines, strict=True):
            polygons[image] = (*polygons.get(image, ()), outline)
        findings = tuple(Finding(*entry) for entry in json.loads(arrays["findings"].tobytes()))
        return AnnotationIndex(tuple(paths[number] for number in arrays["kept"].tolist()), arrays["sizes"],
                               arrays["offsets"], arrays["classes"], arrays["boxes"], names, polygons, findings)
    except (OSError, ValueError, KeyError, TypeError, IndexError, EOFError, zipfile.BadZipFile):
        return None
