"""The differences between two versions of a data set: images added, removed, moved, replaced and relabelled."""

from __future__ import annotations

import filecmp
import hashlib
import os
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Literal, NamedTuple

import numpy as np

from ray_yolo.core.structures import AnnotationIndex
from ray_yolo.labels.twins import find_twins

ChangeKind = Literal["added", "removed", "moved", "replaced", "relabelled"]
KINDS: tuple[ChangeKind, ...] = ("added", "removed", "moved", "replaced", "relabelled")

_DECIMALS = 2  # Pixels are compared to so many: one box in two label formats differs in the last bits.
Label = tuple[str, bool, tuple[float, ...], bytes]  # class name, whether it is a crowd, box, outline


class Image(NamedTuple):
    """An image of one version."""

    split: str
    path: str  # relative to the data set's root
    file: str
    labels: Counter[Label]

    @property
    def num_boxes(self) -> int:
        """Labels that are no crowds."""
        return sum(count for label, count in self.labels.items() if not label[1])


class ImageChange(NamedTuple):
    """One difference. An image that was moved and relabelled has two of them."""

    kind: ChangeKind
    split: str  # its split in the new version; '' for a removed image, as the next one
    path: str
    old_split: str  # '' for an added image, as the next one
    old_path: str
    old_boxes: int
    boxes: int
    old_labels: str  # `label_digest`; '' for an added image
    labels: str  # '' for a removed image
    classes: tuple[str, ...]  # their labels differ


def images_of(splits: Mapping[str, AnnotationIndex], root: Path) -> list[Image]:
    """All images of a version, by split, with their labels."""
    images = []
    for split, index in splits.items():
        for number, labels in enumerate(_labels_of(index)):
            file = index.paths[number]
            images.append(Image(split, os.path.relpath(file, root), file, labels))
    return images


def label_digest(labels: Counter[Label]) -> str:
    """Identity of an image's labels: 16 hex digits of SHA-256 over class names, boxes to 0.01 px and outlines. Neither
    the order of the labels nor the numbers of the classes have an effect."""
    return hashlib.sha256(repr(sorted(labels.elements())).encode()).hexdigest()[:16]


def compare_versions(old: Sequence[Image], new: Sequence[Image]) -> list[ImageChange]:
    """The changes from the old to the new version, by split and path.

    Images are matched by split and relative path, then by relative path in another split, then by the content of their
    files. A matched image with another content is `replaced`, also where it was matched by its path in another split.
    """
    pairs = _match(old, new)
    matched_old = {id(one) for one, _ in pairs}  # by identity: the labels of an image are a Counter, without a hash
    matched_new = {id(other) for _, other in pairs}
    changes = [_change("removed", one, None) for one in old if id(one) not in matched_old]
    changes += [_change("added", None, other) for other in new if id(other) not in matched_new]
    with ThreadPoolExecutor(16) as pool:
        same_content = list(pool.map(_has_same_content, pairs))
    for (one, other), is_same in zip(pairs, same_content, strict=True):
        if (one.split, one.path) != (other.split, other.path):
            changes.append(_change("moved", one, other))
        if not is_same:
            changes.append(_change("replaced", one, other))
        if label_digest(one.labels) != label_digest(other.labels):
            changes.append(_change("relabelled", one, other))
    return sorted(changes, key=lambda change: (change.split or change.old_split, change.path or change.old_path))


def count_boxes(images: Iterable[Image]) -> Counter[str]:
    """Boxes of each class by name."""
    counts = Counter[str]()
    for image in images:
        for (name, is_crowd, *_), count in image.labels.items():
            counts[name] += 0 if is_crowd else count
    return counts


def _match(old: Sequence[Image], new: Sequence[Image]) -> list[tuple[Image, Image]]:
    """Pairs of the same image in both versions; each image is in one pair at most."""
    # Most images have the same split and path in both versions.
    by_place = {(image.split, image.path): image for image in old}
    pairs = []
    rest = []
    for image in new:
        same = by_place.pop((image.split, image.path), None)
        if same is None:
            rest.append(image)
        else:
            pairs.append((same, image))
    # Of the others, an image with the same path has gone to another split.
    by_path = _grouped(by_place.values(), "path")
    unmatched = []
    for image in rest:
        if by_path[image.path]:
            pairs.append((by_path[image.path].pop(0), image))
        else:
            unmatched.append(image)
    # What is left has another path: files of equal content are the same image.
    left = [image for group in by_path.values() for image in group]
    by_file = _grouped(left, "file")
    original = dict(find_twins([image.file for image in left], [image.file for image in unmatched]))
    for image in unmatched:
        candidates = _equal_files(original.get(image.file), by_file)
        if candidates:
            pairs.append((candidates.pop(0), image))
    return pairs


def _grouped(images: Iterable[Image], field: Literal["path", "file"]) -> dict[str, list[Image]]:
    groups = defaultdict[str, list[Image]](list)
    for image in images:
        groups[getattr(image, field)].append(image)
    return groups


def _equal_files(file: str | None, by_file: Mapping[str, list[Image]]) -> list[Image]:
    return by_file[file] if file is not None and file in by_file else []


def _has_same_content(pair: tuple[Image, Image]) -> bool:
    one, other = (image.file for image in pair)
    try:
        return os.path.samefile(one, other) or filecmp.cmp(one, other, shallow=False)
    except OSError:
        return False


def _change(kind: ChangeKind, old: Image | None, new: Image | None) -> ImageChange:
    before = old.labels if old else Counter[Label]()
    after = new.labels if new else Counter[Label]()
    differing = (before - after) + (after - before)
    return ImageChange(
        kind,
        split=new.split if new else "", path=new.path if new else "",
        old_split=old.split if old else "", old_path=old.path if old else "",
        old_boxes=old.num_boxes if old else 0, boxes=new.num_boxes if new else 0,
        old_labels=label_digest(before) if old else "", labels=label_digest(after) if new else "",
        classes=tuple(sorted({name for name, *_ in differing})))


def _labels_of(index: AnnotationIndex) -> list[Counter[Label]]:
    """The labels of each image, with the names of their classes instead of the numbers."""
    images = []
    for number in range(len(index)):
        annotation = index[number]
        boxes = np.round(annotation.boxes.astype(np.float64), _DECIMALS).tolist()
        labels = Counter[Label]()
        for row, (kind, box) in enumerate(zip(annotation.classes.tolist(), boxes, strict=True)):
            outline = np.round(annotation.polygons[row], _DECIMALS).tobytes() if annotation.polygons else b""
            labels[index.names[kind], False, tuple(box), outline] += 1
        images.append(labels)
    for image, kind, *box, _ in index.crowds.tolist():
        images[int(image)][index.names[int(kind)], True, tuple(round(side, _DECIMALS) for side in box), b""] += 1
    return images
