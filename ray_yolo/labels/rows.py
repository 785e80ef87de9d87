"""The labels of one image, built from the rows of a label file.

Coordinates are continuous: an image spans 0..width, and its first pixel's centre is at 0.5. In every format an unusable
row is left out and reported; the other rows of the file are kept.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from typing import NamedTuple, TypeVar

import numpy as np

from ray_yolo.core.structures import Finding
from ray_yolo.labels.remarks import CLIPPED_PX, SPECK_PX, Format, combine
from ray_yolo.labels.rules import Code, Remark, RemarkValue

Item = TypeVar("Item")
Box = tuple[float, float, float, float]  # xyxy in pixels
NO_OUTLINE = np.zeros((0, 2), np.float32)
_ROUNDED_PX = 0.5  # two boxes of one object that differ by no more were rounded differently, if this is also
_OF_OUTLINES = (Code.OUTLINE, Code.MAY_BE_KEYPOINTS, Code.MAY_BE_MORE)
_ROUNDED = 0.02  # no more than this share of their extent


class Labels(NamedTuple):
    """Classes (n,) int64, boxes (n, 4) float32 xyxy in pixels, and outlines as in `Annotation`."""

    classes: np.ndarray
    boxes: np.ndarray
    polygons: tuple[np.ndarray, ...] = ()  # () or one (k, 2) float32 per box; k = 0 for a box without outline


NO_LABELS = Labels(np.zeros(0, np.int64), np.zeros((0, 4), np.float32))


class UnreadableLabelsError(Exception):
    """A row or a whole file is unusable; `finding` has the place and the reason."""

    def __init__(self, code: Code, place: str, *values: RemarkValue) -> None:
        self.finding = code.finding(place, *values)
        super().__init__(f"{place}: {self.finding.what}")


class LabelOptions(NamedTuple):
    """What a user decides about labels whose files leave it open."""

    with_confidence: bool = False  # YOLO rows may end with a confidence, which is not used
    keep_difficult: bool = False  # VOC objects marked difficult are labels too
    keep_repeats: bool = False  # an image counts as often as the sources of the training split have it


DEFAULT_OPTIONS = LabelOptions()


class LabelRules(NamedTuple):
    """How the label files of a data set are read."""

    names: tuple[str, ...]
    keypoints: tuple[int, int] | None = None  # their number and their dimensions in each YOLO row
    options: LabelOptions = DEFAULT_OPTIONS


class LabelRow(NamedTuple):
    """One box of a label file."""

    place: str  # the row's place in words, for messages
    key: tuple[float, ...]  # rows with equal keys are one label
    kind: int
    box: Box  # inside the image
    outline: np.ndarray = NO_OUTLINE  # (k, 2) pixels; k = 0 for a box without outline
    area: float = 0.0  # square pixels, if the file has it
    remarks: tuple[Code, ...] = ()


class ImageLabels(NamedTuple):
    """The labels of one image with findings, remarks, areas and crowds."""

    labels: Labels = NO_LABELS
    findings: Sequence[Finding] = ()
    areas: np.ndarray | None = None  # (n,) float64 square pixels, if the file has them
    crowds: np.ndarray = np.zeros((0, 6))  # rows [class, x1, y1, x2, y2, area] of regions that are no single object
    has_file: bool = True  # whether there is a label file
    remarks: Sequence[Remark] = ()


def read_rows(items: Iterable[Item], read: Callable[[Item], LabelRow]) -> tuple[list[LabelRow], list[Finding]]:
    """The usable rows, and the findings about the others.

    A row is left out if `read` raises UnreadableLabelsError. It is also left out if its box has no area in float32, the
    type of labels (1e-9 px at 30 px is no width). Rows with equal keys count once. The finding about a repeated row
    does not say that it was dropped, because its label is kept.
    """
    kept: dict[tuple[float, ...], LabelRow] = {}
    findings = []
    for item in items:
        try:
            row = read(item)
        except UnreadableLabelsError as error:
            findings.append(error.finding)
            continue
        left, top, right, bottom = np.array(row.box, np.float32)
        if row.key in kept:
            findings.append(Code.REPEATED.finding(row.place))
        elif right <= left or bottom <= top or (right - left) * (bottom - top) == 0:  # the product may underflow
            findings.append(Code.EMPTY_BOX.finding(row.place))
        else:
            kept[row.key] = row
    return list(kept.values()), findings


def labels_of(rows: Sequence[LabelRow], findings: Sequence[Finding], name: Format) -> ImageLabels:
    """The labels of a file's usable rows, in order, with remarks and the given findings; `name` is its format."""
    remarks = _remarks_on(rows, name)
    if not rows:
        return ImageLabels(NO_LABELS, findings, remarks=remarks)
    classes = np.array([row.kind for row in rows], np.int64)
    boxes = np.array([row.box for row in rows], np.float32)
    polygons = tuple(row.outline.astype(np.float32) for row in rows)
    if not any(len(polygon) for polygon in polygons):
        polygons = ()
    return ImageLabels(Labels(classes, boxes, polygons), findings, remarks=remarks)


def _remarks_on(rows: Sequence[LabelRow], name: Format) -> tuple[Remark, ...]:
    """The remarks about usable rows of a file in one format."""
    remarks = [Remark(Code.NEAR_REPEAT, row.place) for row in _near_repeats(rows)]
    for row in rows:
        left, above, right, below = row.box
        codes = [Code.BOX]
        if min(right - left, below - above) < SPECK_PX:
            codes.append(Code.SPECK)
        for code in (*codes, *row.remarks):
            detail = ""
            if code.then == "compare":  # boxes with others of their format, outlines with others of their length
                detail = str(1 + 2 * len(row.outline)) if code in _OF_OUTLINES else name
            remarks.append(Remark(code, row.place, detail))
    return combine(remarks)


def _near_repeats(rows: Sequence[LabelRow]) -> list[LabelRow]:
    """The rows whose box, and outline if both have one, is that of an earlier row of their class but for rounding."""
    by_left: dict[int, list[tuple[float, int]]] = defaultdict(list)  # (left side, number of the row) by class
    for number, row in enumerate(rows):
        by_left[row.kind].append((row.box[0], number))
    repeats = set()
    for boxes in by_left.values():
        boxes.sort()
        for place, (left, number) in enumerate(boxes):
            for other_left, other in boxes[place + 1:]:
                if other_left - left > _ROUNDED_PX:
                    break
                if _equal_but_for_rounding(rows[number], rows[other]):
                    repeats.add(max(number, other))
    return [rows[number] for number in sorted(repeats)]


def _equal_but_for_rounding(one: LabelRow, other: LabelRow) -> bool:
    left, above, right, below = one.box
    across, down = min(_ROUNDED_PX, _ROUNDED * (right - left)), min(_ROUNDED_PX, _ROUNDED * (below - above))
    limits = (across, down, across, down)
    if any(abs(a - b) > limit for a, b, limit in zip(one.box, other.box, limits, strict=True)):
        return False
    if not len(one.outline) or not len(other.outline):
        return True
    is_same_form = len(one.outline) == len(other.outline)
    return is_same_form and bool((np.abs(one.outline - other.outline) <= (across, down)).all())


def cut_box(box: Box, size: tuple[int, int]) -> Box:
    """A box clipped to an image of `size` (height, width).

    Raises:
        ValueError: if a side is not finite or beyond its opposite.
    """
    left, above, right, below = box
    if not all(map(math.isfinite, box)) or right < left or below < above:
        raise ValueError("no box")
    height, width = size
    return (min(max(left, 0.0), width), min(max(above, 0.0), height),
            min(max(right, 0.0), width), min(max(below, 0.0), height))


def box_around(points: np.ndarray) -> Box:
    """The smallest box around points (k, 2), k > 0."""
    left, above = points.min(axis=0).tolist()
    right, below = points.max(axis=0).tolist()
    return left, above, right, below


def edge_remarks(box: Box, size: tuple[int, int]) -> tuple[Code, ...]:
    """The remark that an unclipped box reaches out of its image by more than rounding."""
    left, above, right, below = box
    outside = max(-left, -above, right - size[1], below - size[0])
    return (Code.CLIPPED,) if outside > CLIPPED_PX else ()
