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

from ray_yolo.data import index_cache
from ray_yolo.data.dataset_yaml import DatasetDescription
from ray_yolo.data.images import UnreadableImageError, check_image
from ray_yolo.data.labels import NO_LABELS, box_areas
from ray_yolo.data.rows import ImageLabels, UnreadableLabelsError
from ray_yolo.data.sources import Sources
from ray_yolo.data.survey import listed
from ray_yolo.errors import DatasetError
from ray_yolo.structures import AnnotationIndex, Finding


class Checked(NamedTuple):
    """One image file: its upright size, or none if it has to be left out; what its labels are, or none without a file;
    and what there was to say."""

    size: tuple[int, int] | None
    found: ImageLabels | None
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
        DatasetError: for a split without a usable image, or (strict) anything left out.
    """
    sources = Sources(description, split)
    files = chain.from_iterable((path, *sources.label_files(path)) for path in sources.paths)
    key = index_cache.content_key(files, description.names)
    index = index_cache.recall(key, sources.paths, description.names)
    if index is None:
        checked = _check_all(sources, num_threads or min(8, os.cpu_count() or 1))
        index = build_index(sources.paths, checked, description.names)
        index_cache.keep(key, index, sources.paths)
    index = replace(index, findings=(*sources.findings, *index.findings), looked_for=sources.looked_for)
    _judge(index, description, split, strict)
    return _as_one_class(index) if single_cls else index


def _as_one_class(index: AnnotationIndex) -> AnnotationIndex:
    crowds = index.crowds * (np.arange(7) != 1)
    return replace(index, classes=np.zeros_like(index.classes), names=("item",), crowds=crowds)


def _check_all(sources: Sources, num_threads: int) -> list[Checked]:
    with warnings.catch_warnings(), ThreadPoolExecutor(num_threads) as pool:
        # Pillow's about odd files. Set here and not where they arise: filters belong to the process, not to a thread.
        warnings.simplefilter("ignore")
        return list(pool.map(lambda path: _check(sources, path), sources.paths))


def _check(sources: Sources, path: str) -> Checked:
    try:
        size = check_image(path)
        found = sources.read_labels(path, size)
    except UnreadableLabelsError as error:
        return Checked(None, None, (replace(error.finding, image=True),))
    except UnreadableImageError as error:
        return Checked(None, None, (Finding(path, str(error), dropped=True, image=True),))
    except OSError as error:
        return Checked(None, None, (Finding(path, f"cannot be read: {error.strerror}", dropped=True, image=True),))
    findings = tuple(found.findings) if found else ()
    if found and not len(found.labels.classes) and any(finding.dropped for finding in findings):
        what = "no row of its labels can be used, so nobody knows what it shows"
        return Checked(None, None, (*findings, Finding(path, what, dropped=True, image=True)))
    return Checked(size, found, findings)


def build_index(paths: Sequence[str], checked: Sequence[Checked], names: tuple[str, ...]) -> AnnotationIndex:
    """The flat arrays of all images that were not left out, in the given order."""
    kept = [(path, item.size, item.found or ImageLabels(NO_LABELS))
            for path, item in zip(paths, checked, strict=True) if item.size]
    labels = [found.labels for _, _, found in kept]
    boxes = np.concatenate([NO_LABELS.boxes, *(each.boxes for each in labels)])
    return AnnotationIndex(
        paths=tuple(path for path, _, _ in kept),
        sizes=np.array([size for _, size, _ in kept], np.int32).reshape(-1, 2),
        offsets=np.concatenate([[0], np.cumsum([len(each.classes) for each in labels])]).astype(np.int64),
        classes=np.concatenate([NO_LABELS.classes, *(each.classes for each in labels)]),
        boxes=boxes,
        names=names,
        polygons={number: each.polygons for number, each in enumerate(labels) if each.polygons},
        findings=tuple(finding for item in checked for finding in item.findings),
        areas=_areas([found for _, _, found in kept]),
        crowds=np.concatenate([np.zeros((0, 7)), *(np.insert(found.crowds, 0, number, axis=1)
                                                   for number, (_, _, found) in enumerate(kept) if len(found.crowds))]),
        num_without_file=sum(item.found is None for item in checked if item.size))


def _areas(found: Sequence[ImageLabels]) -> np.ndarray | None:
    """Areas as files give them, else of the boxes; None where no file gives any."""
    if all(item.areas is None for item in found):
        return None
    return np.concatenate([box_areas(item.labels.boxes) if item.areas is None else item.areas for item in found])


def _judge(index: AnnotationIndex, description: DatasetDescription, split: str, strict: bool) -> None:
    dropped = [finding for finding in index.findings if finding.dropped]
    if strict and dropped:
        raise DatasetError(f"{description.file}: {split}: {len(dropped)} findings: {listed(dropped)}; correct the "
                           "files or drop --strict")
    if not len(index):
        raise DatasetError(f"{description.file}: {split}: none of its images can be used: {listed(dropped)}")
