"""All annotations of a split: every image and label file checked once, in parallel.

The data set's own folder is never written to.
"""

from __future__ import annotations

import os
import warnings
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from itertools import chain
from typing import NamedTuple

import numpy as np

from ray_yolo.data import kept_index
from ray_yolo.data.description import DatasetDescription
from ray_yolo.data.images import UnreadableImageError, check_image
from ray_yolo.data.labels import NO_LABELS, Labels
from ray_yolo.data.sources import Sources
from ray_yolo.data.yolo_txt import UnreadableLabelsError
from ray_yolo.errors import DatasetError
from ray_yolo.structures import AnnotationIndex, Finding


class Checked(NamedTuple):
    """One image file: its upright size and labels, or no size if it has to be left out."""

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
    sources = Sources(description, split)
    files = chain.from_iterable((path, *sources.label_files(path)) for path in sources.paths)
    key = kept_index.content_key(files, description.names)
    index = kept_index.recall(key, sources.paths, description.names)
    if index is None:
        checked = _check_all(sources, num_threads or min(8, os.cpu_count() or 1))
        index = build_index(sources.paths, checked, description.names)
        kept_index.keep(key, index, sources.paths)
    _judge(index, description, split, strict)
    if single_cls:
        index = replace(index, classes=np.zeros_like(index.classes), names=("item",))
    return index


def _check_all(sources: Sources, num_threads: int) -> list[Checked]:
    with warnings.catch_warnings(), ThreadPoolExecutor(num_threads) as pool:
        # Pillow's about odd files. Set here and not where they arise: filters belong to the process, not to a thread.
        warnings.simplefilter("ignore")
        return list(pool.map(lambda path: _check(sources, path), sources.paths))


def _check(sources: Sources, path: str) -> Checked:
    try:
        size = check_image(path)
        labels, findings = sources.read_labels(path, size)
    except UnreadableLabelsError as error:
        return Checked(None, NO_LABELS, (error.finding,))
    except UnreadableImageError as error:
        return Checked(None, NO_LABELS, (Finding(path, str(error), dropped=True),))
    except OSError as error:
        return Checked(None, NO_LABELS, (Finding(path, f"cannot be read: {error.strerror}", dropped=True),))
    return Checked(size, labels, tuple(findings))


def build_index(paths: Sequence[str], checked: Sequence[Checked], names: tuple[str, ...]) -> AnnotationIndex:
    """The flat arrays of all images that were not left out, in the given order."""
    kept = [(path, item.size, item.labels) for path, item in zip(paths, checked, strict=True) if item.size]
    counts = [len(labels.classes) for _, _, labels in kept]
    return AnnotationIndex(
        paths=tuple(path for path, _, _ in kept),
        sizes=np.array([size for _, size, _ in kept], np.int32).reshape(-1, 2),
        offsets=np.concatenate([[0], np.cumsum(counts)]).astype(np.int64),
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
