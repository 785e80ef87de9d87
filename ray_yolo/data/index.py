"""The annotations of a split and their statistics. Every image and label file is checked once, in parallel."""

from __future__ import annotations

import os
import sys
import warnings
from collections.abc import Sequence
from concurrent.futures import Executor, ProcessPoolExecutor, ThreadPoolExecutor
from contextlib import suppress
from dataclasses import replace
from itertools import chain, compress
from multiprocessing import get_context

import numpy as np

from ray_yolo.config.class_names import SINGLE_CLASS
from ray_yolo.config.recipe import Recipe
from ray_yolo.core.errors import DatasetError
from ray_yolo.core.events import SplitCounts
from ray_yolo.core.files import is_broken_link
from ray_yolo.core.structures import AnnotationIndex, Finding
from ray_yolo.core.system import end_with_parent
from ray_yolo.data import index_cache
from ray_yolo.data.dataset_yaml import read_description
from ray_yolo.data.geometry import box_areas
from ray_yolo.data.image_cache import loaded_sizes
from ray_yolo.data.images import (
    DAMAGED_SHARE,
    DECODERS,
    ImageFacts,
    UnreachableImageError,
    UnreadableImageError,
    has_too_many,
    inspect_image,
)
from ray_yolo.data.pixels import as_read, join_values, range_of
from ray_yolo.labels.description import DatasetDescription
from ray_yolo.labels.label_files import LabelSources
from ray_yolo.labels.notes import notes, unused_notes
from ray_yolo.labels.remarks import SPECK_PX, combine, count_of, judge
from ray_yolo.labels.rows import DEFAULT_OPTIONS, NO_LABELS, ImageLabels, LabelOptions, UnreadableLabelsError
from ray_yolo.labels.rules import Code
from ray_yolo.labels.twins import find_twins

_MANY = 4000  # The check of so many images takes longer than the start of processes.
_PART = 256  # A task of a reader has so many images.
_LISTED = 10  # An error lists so many findings.
_Checked = tuple[ImageFacts | None, ImageLabels]
"""An image after its check; without facts, it is left out."""


def read_index(description: DatasetDescription, split: str, *, strict: bool = False,
               options: LabelOptions = DEFAULT_OPTIONS) -> AnnotationIndex:
    """Every usable image of a split, sorted by path, with its labels and the findings of the check.

    Args:
        split: train, val or test.
        strict: refuse the data set if any image or label is unusable, or if files are not used.
        options: the user's decisions about labels.

    Raises:
        DatasetError: for a split without a usable image, for what `strict` refuses, or if storage fails.
    """
    where = f"{description.file}: {split}"
    try:
        return _read_index(description, split, where, strict=strict, options=options)
    except OSError as error:  # A folder could not be listed in any of several tries.
        raise DatasetError(f"{where}: {error.filename} cannot be read: {error.strerror}; check the storage, and run "
                           "the same command again") from error


def _read_index(description: DatasetDescription, split: str, where: str, *, strict: bool, options: LabelOptions
                ) -> AnnotationIndex:
    sources = LabelSources(description, split, options)

    def key_by(states: index_cache.FileStates) -> str:
        files = chain.from_iterable((path, *sources.label_files(path)) for path in sources.paths)
        return states.key(files, index_cache.FORMAT, DECODERS, description.names, description.keypoints, options)

    states = index_cache.FileStates()
    key = key_by(states)
    index = index_cache.load(key, sources.paths, description.names)
    if index is None:
        index = build_index(sources.paths, _check_all(sources, where), description.names)
        if key_by(index_cache.FileStates()) == key:  # else a file has changed, before or after its check
            index_cache.save(key, index, sources.paths)
    index = replace(index, findings=(*sources.findings, *index.findings), looked_for=sources.looked_for,
                    snapshot=description.snapshot, other_files=sources.other_files,
                    pixel_range=range_of(index.pixel_values),
                    # The version of a data set in a store says it all, and each download has other times.
                    pictures="" if description.snapshot else states.fingerprint(sources.paths))
    dropped = [finding for finding in index.findings if finding.dropped]
    if strict and dropped:
        raise DatasetError(f"{where}: {len(dropped)} findings: {listed(dropped)}; correct the "
                           "files or drop --strict")
    if strict and (unused := unused_notes(index)):
        raise DatasetError(f"{where}: {'; '.join(unused)}; move these files away or drop --strict")
    if not len(index):
        raise DatasetError(f"{where}: none of its images can be used: {listed(dropped)}")
    return index


def with_single_class(index: AnnotationIndex) -> AnnotationIndex:
    """The same index with every label and crowd of class 0, named "item"."""
    crowds = index.crowds.copy()
    crowds[:, 1] = 0  # column of the class
    return replace(index, classes=np.zeros_like(index.classes), names=(SINGLE_CLASS,), crowds=crowds)


def read_splits(recipe: Recipe) -> tuple[DatasetDescription, AnnotationIndex, AnnotationIndex]:
    """The data set of a recipe: its description, and the labels of all its training and validation images.

    Raises:
        DatasetError: if it cannot be read as described.
    """
    description = read_description(recipe.data)
    options = LabelOptions(recipe.labels_with_confidence, recipe.keep_difficult, recipe.keep_repeats)
    train, val = (read_index(description, split, strict=recipe.strict, options=options) for split in ("train", "val"))
    return description, train, as_training_reads(val, train)


def as_training_reads(index: AnnotationIndex, train: AnnotationIndex) -> AnnotationIndex:
    """Another split with the range of the training images' values, and its twins among the training images."""
    return replace(index, pixel_range={**index.pixel_range, **train.pixel_range},
                   twins=find_twins(train.paths, index.paths))


def select_part(recipe: Recipe, train: AnnotationIndex, val: AnnotationIndex
                ) -> tuple[AnnotationIndex, AnnotationIndex]:
    """What a recipe trains with of `read_splits`: some classes, all of them as one, a fraction of the images."""
    if recipe.classes is not None:
        train, val = only_classes(train, recipe.classes), only_classes(val, recipe.classes)
    if recipe.single_cls:
        train, val = with_single_class(train), with_single_class(val)
    if recipe.fraction < 1:
        train = sample_images(train, recipe.fraction, recipe.seed)
    return train, val


def only_classes(index: AnnotationIndex, classes: Sequence[int]) -> AnnotationIndex:
    """The same images with only the labels of some classes. Class numbers and names stay."""
    part = _part(index, np.arange(len(index)), np.isin(index.classes, classes))
    return replace(part, crowds=part.crowds[np.isin(part.crowds[:, 1], classes)])


def sample_images(index: AnnotationIndex, fraction: float, seed: int) -> AnnotationIndex:
    """A random subset of at least one image, by the seed, in the original order."""
    count = max(round(fraction * len(index)), 1)
    shuffled = np.random.default_rng(seed).permutation(len(index))
    chosen = np.sort(shuffled[:count])
    return _part(index, chosen, np.isin(index.owners, chosen))


def _part(index: AnnotationIndex, images: np.ndarray, kept: np.ndarray) -> AnnotationIndex:
    """Some images, by ascending number, with those of their labels where `kept` (labels,) holds."""
    counts = np.bincount(index.owners[kept], minlength=len(index))[images]  # the number of labels of each image
    polygons = {}
    for position, image in enumerate(images.tolist()):
        if image not in index.polygons:
            continue
        labels = slice(index.offsets[image], index.offsets[image + 1])
        outlines = tuple(compress(index.polygons[image], kept[labels].tolist()))
        if outlines:  # an image without outlines has no entry
            polygons[position] = outlines
    # `searchsorted` gives each image its new number.
    crowds = index.crowds[np.isin(index.crowds[:, 0], images)]
    crowds[:, 0] = np.searchsorted(images, crowds[:, 0])
    without_file = np.searchsorted(images, np.intersect1d(index.without_file, images))
    return replace(
        index,
        paths=tuple(index.paths[image] for image in images),
        sizes=index.sizes[images],
        offsets=np.concatenate([[0], np.cumsum(counts)]).astype(np.int64),
        classes=index.classes[kept],
        boxes=index.boxes[kept],
        polygons=polygons,
        areas=None if index.areas is None else index.areas[kept],
        crowds=crowds,
        without_file=without_file)


def _check_all(sources: LabelSources, where: str) -> list[_Checked]:
    """The check of all images.

    Raises:
        DatasetError: as soon as too many files cannot be read, because storage fails.
    """
    checked: list[_Checked] = []
    failed: list[Finding] = []
    parts = [sources.part(sources.paths[first:first + _PART]) for first in range(0, len(sources.paths), _PART)]
    # Pillow warns of odd files. Its warnings are silenced here, because filters belong to the process, not to a thread.
    with warnings.catch_warnings(action="ignore"), _readers(len(sources.paths)) as pool:
        for part in pool.map(_check_images, parts):
            checked += part
            failed += [finding for _, image in part for finding in image.findings if finding.is_transient]
            if has_too_many(len(failed), len(checked), len(sources.paths)):
                raise DatasetError(f"{where}: {len(failed)} of {len(checked)} images or their labels cannot be read, "
                                   f"more than {DAMAGED_SHARE:.0%}: {listed(failed)}; check the storage, and run the "
                                   "same command again")
    return checked


def _readers(num_images: int) -> Executor:
    """Threads, one for each CPU and eight at most; for many images processes, because the work is mostly Python code,
    which holds the GIL.

    Child processes import the main module, so a user's script may run again. Only our commands and sessions without a
    file therefore use them. They are spawned, because a process has only one fork server, and loader processes need one
    with torch preloaded.
    """
    number = min(8, os.cpu_count() or 1)
    main = sys.modules["__main__"]
    is_session = not hasattr(main, "__file__")
    is_our_command = getattr(getattr(main, "__spec__", None), "name", "").startswith("ray_yolo.")
    if num_images >= _MANY and number >= 2 and (is_session or is_our_command):
        with suppress(OSError):  # their semaphores need a /dev/shm that can be written
            return ProcessPoolExecutor(number, get_context("spawn"), _init_reader)
    return ThreadPoolExecutor(number)


def _init_reader() -> None:
    end_with_parent()
    warnings.simplefilter("ignore")


def _check_images(sources: LabelSources) -> list[_Checked]:
    return [_check_image(sources, path) for path in sources.paths]


def _check_image(sources: LabelSources, path: str) -> _Checked:
    """One image with its labels. What cannot be used is a finding, never an error."""
    findings: Sequence[Finding] = ()
    try:
        facts = inspect_image(path)
        image = sources.read_labels(path, facts.size)
        findings = [*image.findings, *(Code.ABOUT_IMAGE.finding(path, note) for note in facts.notes)]
        dropped = [number for number, finding in enumerate(findings) if finding.dropped]
        if len(image.labels.classes) or not dropped:
            return facts, image._replace(findings=findings)
        # All rows are left out. Without its labels the image would be background, so the last of them takes it along.
        last = findings[dropped[-1]]
        why = f"{last.what}; its image is left out, because no row of its labels is usable"
        findings[dropped[-1]] = replace(last, what=why, image=True, row=True)
        return None, ImageLabels(findings=tuple(findings))
    except UnreadableLabelsError as error:
        problem = error.finding
    except UnreadableImageError as error:
        is_failure = isinstance(error, UnreachableImageError) and not is_broken_link(path)
        code = Code.UNREACHABLE_IMAGE if is_failure else Code.BAD_IMAGE
        problem = code.finding(path, str(error))
    except OSError as error:  # A label file could not be read.
        problem = Code.UNREACHABLE.finding(error.filename or path, str(error.strerror or error))
    return None, ImageLabels(findings=(*findings, replace(problem, image=True)))


def build_index(paths: Sequence[str], checked: Sequence[_Checked], names: tuple[str, ...]) -> AnnotationIndex:
    """The flat arrays of all usable images, in the given order."""
    used_paths: list[str] = []
    used_facts: list[ImageFacts] = []
    images: list[ImageLabels] = []
    findings: list[Finding] = []
    for path, (facts, image) in zip(paths, checked, strict=True):
        findings += image.findings
        if facts is not None:
            used_paths.append(path)
            used_facts.append(facts)
            images.append(image)
    labels = [image.labels for image in images]
    areas = None  # if no file has areas; else the area of each label, of its box where its file has none
    if any(image.areas is not None for image in images):
        areas = np.concatenate([box_areas(image.labels.boxes) if image.areas is None else image.areas
                                for image in images])
    crowds = [np.zeros((0, 7))]  # the rows of each image, with its number in front
    for number, image in enumerate(images):
        if len(image.crowds):
            crowds.append(np.insert(image.crowds, 0, number, axis=1))
    counts = [len(each.classes) for each in labels]
    remarks = combine(chain.from_iterable(image.remarks for image in images))
    return AnnotationIndex(
        paths=tuple(used_paths),
        sizes=np.array([facts.size for facts in used_facts], np.int32).reshape(-1, 2),
        offsets=np.concatenate([[0], np.cumsum(counts)]).astype(np.int64),
        # Empty arrays first: there may be no image, and they give the type.
        classes=np.concatenate([NO_LABELS.classes, *(each.classes for each in labels)]),
        boxes=np.concatenate([NO_LABELS.boxes, *(each.boxes for each in labels)]),
        names=names,
        polygons={number: each.polygons for number, each in enumerate(labels) if each.polygons},
        findings=(*judge(remarks), *findings),
        areas=areas,
        crowds=np.concatenate(crowds),
        without_file=np.flatnonzero([not image.has_file for image in images]),
        num_clipped=count_of(remarks, Code.CLIPPED),
        pixel_values=join_values(facts.values for facts in used_facts if facts.values))


def survey(index: AnnotationIndex) -> SplitCounts:
    """The statistics of a split, and its searched label paths."""
    dropped = [finding for finding in index.findings if finding.dropped]
    num_without_boxes = int((np.diff(index.offsets) == 0).sum())
    sides = index.boxes[:, 2:] - index.boxes[:, :2]
    specks = sides.min(axis=1, initial=np.inf) < SPECK_PX
    per_class = np.bincount(index.classes, minlength=len(index.names))
    return SplitCounts(
        images=len(index),
        boxes=len(index.classes),
        images_left_out=sum(finding.image for finding in dropped),
        rows_left_out=sum(finding.row or not finding.image for finding in dropped),
        per_class=tuple(per_class.tolist()),
        empty_file=num_without_boxes - len(index.without_file),
        no_file=len(index.without_file),
        looked_for=index.looked_for,
        digest=index.digest,
        clipped=index.num_clipped,
        specks=int(specks.sum()),
        orphans=len(index.other_files.labels),
        unread=len(index.other_files.images),
        twins=len(index.twins),
        pictures=index.pictures,
        notes=_notes(index))


def _notes(index: AnnotationIndex) -> tuple[str, ...]:
    return notes(index, [as_read(values, index.pixel_range) for values in index.pixel_values])


def require_boxes(index: AnnotationIndex, description: DatasetDescription, split: str) -> None:
    """Refuse a split without any box.

    Raises:
        DatasetError: with the searched label paths and the first unusable row or image.
    """
    if len(index.classes):
        return
    reasons = ""
    dropped = [finding for finding in index.findings if finding.dropped]
    if dropped:
        reasons = f"; {len(dropped)} rows and images are unusable, the first: {listed(dropped[:1])}"
    elif index.findings:  # They may say why there is no box: all objects are marked as crowds or as difficult.
        reasons = f"; {listed(index.findings[:2])}"
    others = "".join(f"; {note}" for note in _notes(index))
    raise DatasetError(f"{description.file}: {split}: none of its {len(index)} images has a box; looked for labels in "
                       f"{first_paths(index.looked_for)}{reasons}{others}; correct the paths, or add --allow-empty if "
                       "this is intended")


def require_chosen(index: AnnotationIndex, description: DatasetDescription, split: str,
                   classes: Sequence[int] | None, fraction: float = 1.0) -> None:
    """Refuse a part of a split without any box, where the split has boxes.

    Args:
        index: the part.
        classes: that it has; None: all.
        fraction: of the images that it has.

    Raises:
        DatasetError: naming the settings that have chosen it.
    """
    if len(index.classes):
        return
    settings = [f"classes {' '.join(map(str, classes))}"] if classes is not None else []
    settings += [f"fraction {fraction:g}"] if fraction < 1 else []
    raise DatasetError(f"{description.file}: {split}: has boxes, but none with {' and '.join(settings)}; change this, "
                       "or add --allow-empty if this is intended")


def refuse_count_from_one(index: AnnotationIndex, description: DatasetDescription) -> None:
    """Refuse labels whose classes appear to be counted from 1: none is 0, and some equal the number of classes.

    Raises:
        DatasetError: with the first such row.
    """
    number = len(index.names)
    unknown = [finding for finding in index.findings if finding.code == Code.CLASS_UNKNOWN.name]
    beyond = next((finding for finding in unknown if finding.values[0] == number), None)
    if beyond and len(index.classes) and index.classes.min() > 0:
        raise DatasetError(f"{description.file}: the classes of the labels seem to count from 1: none is 0, and "
                           f"{beyond.where} has {number}; YOLO labels count from 0, so subtract 1 from each class")


def first_paths(looked_for: Sequence[str]) -> str:
    """The first paths, on one line."""
    more = len(looked_for) - 4
    return ", ".join(looked_for[:4]) + (f" and {more} more" if more > 0 else "")


def listed(findings: Sequence[Finding]) -> str:
    """The first findings, on one line."""
    more = len(findings) - _LISTED
    lines = [f"{finding.where}: {finding.what}" for finding in findings[:_LISTED]]
    return "; ".join(lines) + (f"; and {more} more" if more > 0 else "")


def class_weights(classes: np.ndarray, num_classes: int) -> np.ndarray:
    """(num_classes,) weights proportional to 1 / number of labels, with sum 1; absent classes count as one label."""
    counts = np.maximum(np.bincount(classes, minlength=num_classes), 1)
    weights = 1 / counts
    return weights / weights.sum()


def image_weights(index: AnnotationIndex, average_precisions: np.ndarray) -> np.ndarray:
    """(images,) weights: the sum over an image's labels of class weight x (1 - average precision)^2.

    Uniform if all weights are 0: without labels, or if every average precision is 1.

    Args:
        average_precisions: (classes,) mAP50-95 of the last validation, 0 before the first one.
    """
    missing = (1 - average_precisions) ** 2
    of_class = class_weights(index.classes, len(index.names)) * missing
    label_weights = of_class[index.classes]
    weights = np.bincount(index.owners, label_weights, minlength=len(index))
    return weights if weights.sum() > 0 else np.ones(len(index))


def label_sizes(index: AnnotationIndex, imgsz: int) -> np.ndarray:
    """(labels, 2) width and height of every box once its image's long side is `imgsz`, pixels."""
    scales = loaded_sizes(index.sizes, imgsz) / index.sizes  # (images, 2), vertical and horizontal
    scales_xy = scales[index.owners, ::-1]
    return (index.boxes[:, 2:] - index.boxes[:, :2]) * scales_xy
