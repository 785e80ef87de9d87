"""All annotations of a split: every image and label file checked once, in parallel; and what there is, in numbers."""

from __future__ import annotations

import os
import sys
import warnings
from collections.abc import Sequence
from concurrent.futures import Executor, ProcessPoolExecutor, ThreadPoolExecutor
from dataclasses import replace
from itertools import chain, compress
from multiprocessing import get_context
from typing import NamedTuple

import numpy as np

from ray_yolo.core.errors import DatasetError
from ray_yolo.core.events import SplitCounts
from ray_yolo.core.structures import AnnotationIndex, Finding
from ray_yolo.data import index_cache
from ray_yolo.data.dataset_yaml import DatasetDescription
from ray_yolo.data.image_cache import loaded_sizes
from ray_yolo.data.images import UnreadableImageError, check_image
from ray_yolo.data.label_files import LabelSources
from ray_yolo.data.labels import NO_LABELS, ImageLabels, UnreadableLabelsError, box_areas

_MANY = 4000  # images whose check takes longer than the start of processes
_PART = 256  # images that a reader takes at once
_TOLD = 10  # findings that an error lists


class Checked(NamedTuple):
    """One image file: its upright size, or none if it has to be left out; what its labels are, or none without a file;
    and what there was to say."""

    size: tuple[int, int] | None
    found: ImageLabels | None
    findings: tuple[Finding, ...]


def read_index(description: DatasetDescription, split: str, *, single_cls: bool = False, strict: bool = False,
               num_readers: int = 0) -> AnnotationIndex:
    """Every usable image of a split, sorted by path, with its labels and what the check found.

    Args:
        split: train, val or test.
        single_cls: make every label class 0, called "item".
        strict: refuse the data set if any image or label has to be left out.
        num_readers: threads, or processes where there are many images; 0 means one for each CPU, eight at most.

    Raises:
        DatasetError: for a split without a usable image, or (strict) anything left out.
    """
    sources = LabelSources(description, split)
    files = chain.from_iterable((path, *sources.label_files(path)) for path in sources.paths)
    key = index_cache.content_key(files, index_cache.FORMAT, description.names)
    index = index_cache.recall(key, sources.paths, description.names)
    if index is None:
        checked = _check_all(sources, num_readers or min(8, os.cpu_count() or 1))
        index = build_index(sources.paths, checked, description.names)
        index_cache.keep(key, index, sources.paths)
    index = replace(index, findings=(*sources.findings, *index.findings), looked_for=sources.looked_for,
                    snapshot=description.snapshot)
    dropped = [finding for finding in index.findings if finding.dropped]
    if strict and dropped:
        raise DatasetError(f"{description.file}: {split}: {len(dropped)} findings: {listed(dropped)}; correct the "
                           "files or drop --strict")
    if not len(index):
        raise DatasetError(f"{description.file}: {split}: none of its images can be used: {listed(dropped)}")
    if not single_cls:
        return index
    return replace(index, classes=np.zeros_like(index.classes), names=("item",),
                   crowds=index.crowds * (np.arange(7) != 1))


def only_classes(index: AnnotationIndex, classes: Sequence[int]) -> AnnotationIndex:
    """The same images with the labels of some classes; the others are background. Numbers and names stay."""
    kept, owners = np.isin(index.classes, classes), np.arange(len(index)).repeat(np.diff(index.offsets))
    counts = np.bincount(owners[kept], minlength=len(index))
    polygons = {image: tuple(compress(outlines, kept[index.offsets[image]:].tolist()))
                for image, outlines in index.polygons.items()}
    return replace(
        index, offsets=np.concatenate([[0], np.cumsum(counts)]).astype(np.int64), classes=index.classes[kept],
        boxes=index.boxes[kept], polygons={image: outlines for image, outlines in polygons.items() if outlines},
        areas=None if index.areas is None else index.areas[kept],
        crowds=index.crowds[np.isin(index.crowds[:, 1], classes)])


def drawn(index: AnnotationIndex, fraction: float, seed: int) -> AnnotationIndex:
    """A part of the images, one at least, drawn by the seed; in their order."""
    chosen = np.sort(np.random.default_rng(seed).permutation(len(index))[: max(round(fraction * len(index)), 1)])
    labels = np.concatenate([np.arange(index.offsets[image], index.offsets[image + 1]) for image in chosen])
    crowds = index.crowds[np.isin(index.crowds[:, 0], chosen)].copy()
    crowds[:, 0] = np.searchsorted(chosen, crowds[:, 0])
    return replace(
        index, paths=tuple(index.paths[image] for image in chosen), sizes=index.sizes[chosen],
        offsets=np.concatenate([[0], np.cumsum(np.diff(index.offsets)[chosen])]).astype(np.int64),
        classes=index.classes[labels], boxes=index.boxes[labels], crowds=crowds,
        polygons={place: index.polygons[image] for place, image in enumerate(chosen.tolist())
                  if image in index.polygons},
        areas=None if index.areas is None else index.areas[labels])


def _check_all(sources: LabelSources, num_readers: int) -> list[Checked]:
    parts = [sources.part(sources.paths[first:first + _PART]) for first in range(0, len(sources.paths), _PART)]
    with warnings.catch_warnings(), _readers(num_readers, len(sources.paths)) as pool:
        # Pillow's about odd files. Set here and not where they arise: filters belong to the process, not to a thread.
        warnings.simplefilter("ignore")
        return list(chain.from_iterable(pool.map(_check_part, parts)))


def _readers(number: int, num_images: int) -> Executor:
    """Threads; processes for many images, because most of the work is Python's, of which threads share one core.

    Processes import their parent's main module, and a user's script may do everything again then: only our commands,
    and sessions without a file, have them. They are spawned, since a process starts one fork server, and loader
    processes need one that has imported torch.
    """
    main = sys.modules["__main__"]
    ours = not hasattr(main, "__file__") or getattr(main.__spec__, "name", "").startswith("ray_yolo.")
    if num_images < _MANY or number < 2 or not ours:
        return ThreadPoolExecutor(number)
    return ProcessPoolExecutor(number, get_context("spawn"), warnings.simplefilter, ("ignore",))


def _check_part(sources: LabelSources) -> list[Checked]:
    return [_check(sources, path) for path in sources.paths]


def _check(sources: LabelSources, path: str) -> Checked:
    findings: tuple[Finding, ...] = ()
    try:
        size = check_image(path)
        found = sources.read_labels(path, size)
        findings = tuple(found.findings) if found else ()
        if not (found and not len(found.labels.classes) and any(finding.dropped for finding in findings)):
            return Checked(size, found, findings)
        problem = Finding(path, "no row of its labels can be used, so nobody knows what it shows", dropped=True)
    except UnreadableLabelsError as error:
        problem = error.finding
    except UnreadableImageError as error:
        problem = Finding(path, str(error), dropped=True)
    except OSError as error:
        problem = Finding(path, f"cannot be read: {error.strerror}", dropped=True)
    return Checked(None, None, (*findings, replace(problem, image=True)))


def build_index(paths: Sequence[str], checked: Sequence[Checked], names: tuple[str, ...]) -> AnnotationIndex:
    """The flat arrays of all images that were not left out, in the given order."""
    used = [(path, item) for path, item in zip(paths, checked, strict=True) if item.size]
    found = [item.found or ImageLabels(NO_LABELS) for _, item in used]
    labels, crowds, areas = [each.labels for each in found], [each.crowds for each in found], None
    if any(each.areas is not None for each in found):  # as files give them, else of the boxes
        areas = np.concatenate([box_areas(each.labels.boxes) if each.areas is None else each.areas for each in found])
    return AnnotationIndex(
        paths=tuple(path for path, _ in used),
        sizes=np.array([item.size for _, item in used], np.int32).reshape(-1, 2),
        offsets=np.concatenate([[0], np.cumsum([len(each.classes) for each in labels])]).astype(np.int64),
        classes=np.concatenate([NO_LABELS.classes, *(each.classes for each in labels)]),
        boxes=np.concatenate([NO_LABELS.boxes, *(each.boxes for each in labels)]),
        names=names,
        polygons={number: each.polygons for number, each in enumerate(labels) if each.polygons},
        findings=tuple(finding for item in checked for finding in item.findings),
        areas=areas,
        crowds=np.concatenate([np.zeros((0, 7)), *(np.insert(each, 0, number, axis=1)
                                                   for number, each in enumerate(crowds) if len(each))]),
        num_without_file=sum(item.found is None for _, item in used))


def survey(index: AnnotationIndex) -> SplitCounts:
    """What there is in a split, and where labels were looked for."""
    out = [finding.image for finding in index.findings if finding.dropped]
    without_boxes = int((np.diff(index.offsets) == 0).sum())
    return SplitCounts(
        images=len(index), boxes=len(index.classes), images_left_out=sum(out), rows_left_out=len(out) - sum(out),
        per_class=tuple(np.bincount(index.classes, minlength=len(index.names)).tolist()),
        empty_file=without_boxes - index.num_without_file, no_file=index.num_without_file, looked_for=index.looked_for,
        digest=index.digest)


def require_boxes(index: AnnotationIndex, description: DatasetDescription, split: str) -> None:
    """Refuse a split without any box.

    Raises:
        DatasetError: saying where labels were looked for, and what was left out.
    """
    if len(index.classes):
        return
    dropped = [finding for finding in index.findings if finding.dropped]
    reasons = f"; {len(dropped)} rows and images were left out, the first: {listed(dropped[:1])}" if dropped else ""
    raise DatasetError(f"{description.file}: {split}: none of its {len(index)} images has a box; looked for labels in "
                       f"{first_places(index.looked_for)}{reasons}; correct the paths, or add --allow-empty if that is "
                       "meant")


def refuse_count_from_one(index: AnnotationIndex, description: DatasetDescription) -> None:
    """Refuse labels whose classes look counted from 1: none is 0, and some are as high as the number of classes.

    Raises:
        DatasetError: with the first row whose class is that high.
    """
    number = len(index.names)
    words = tuple(f"has the class {spelled}, but" for spelled in (number, float(number)))
    beyond = next((finding for finding in index.findings if finding.what.startswith(words)), None)
    if beyond and len(index.classes) and index.classes.min() > 0:
        raise DatasetError(f"{description.file}: the classes of the labels look counted from 1: none is 0, and "
                           f"{beyond.where} has {number}; YOLO labels count from 0, so subtract 1 from each class")


def first_places(looked_for: Sequence[str]) -> str:
    """WorkerPool in one line, the first of many."""
    more = len(looked_for) - 4
    return ", ".join(looked_for[:4]) + (f" and {more} more" if more > 0 else "")


def listed(findings: Sequence[Finding]) -> str:
    """Findings in one line, the first of many."""
    more = len(findings) - _TOLD
    lines = [f"{finding.where}: {finding.what}" for finding in findings[:_TOLD]]
    return "; ".join(lines) + (f"; and {more} more" if more > 0 else "")


def class_weights(classes: np.ndarray, num_classes: int) -> np.ndarray:
    """(num_classes,) weights in proportion to 1 / number of labels, with sum 1; absent classes count as one label."""
    counts = np.maximum(np.bincount(classes, minlength=num_classes), 1)
    return (1 / counts) / (1 / counts).sum()


def image_weights(index: AnnotationIndex, average_precisions: np.ndarray) -> np.ndarray:
    """(images,) weights: the sum over an image's labels of class weight x (1 - average precision)^2.

    Uniform where every weight is 0: no labels at all, or nothing left to learn.

    Args:
        average_precisions: (classes,) mAP50-95 of the last validation, 0 before the first one.
    """
    missing = (1 - average_precisions) ** 2
    label_weights = (class_weights(index.classes, len(index.names)) * missing)[index.classes]
    image_of_label = np.arange(len(index)).repeat(np.diff(index.offsets))
    weights = np.bincount(image_of_label, label_weights, minlength=len(index))
    return weights if weights.sum() > 0 else np.ones(len(index))


def label_sizes(index: AnnotationIndex, imgsz: int) -> np.ndarray:
    """(labels, 2) width and height of every box once its image's long side is `imgsz`, pixels."""
    scales = (loaded_sizes(index.sizes, imgsz) / index.sizes).repeat(np.diff(index.offsets), axis=0)
    return (index.boxes[:, 2:] - index.boxes[:, :2]) * scales[:, ::-1]
