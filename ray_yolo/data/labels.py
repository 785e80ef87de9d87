"""The labels of one image: built from the rows of a label file, and transformed with the image.

Coordinates are continuous: an image spans 0..width, and its first pixel's centre is at 0.5. In every format an unusable
row is left out and reported; the other rows of the file are kept.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from itertools import chain, compress
from typing import NamedTuple, TypeVar

import numpy as np

from ray_yolo.core.structures import Finding
from ray_yolo.data.remarks import CLIPPED_PX, SPECK_PX, Format, Kind, Remark, combine

Item = TypeVar("Item")
Box = tuple[float, float, float, float]  # xyxy in pixels
NO_OUTLINE = np.zeros((0, 2), np.float32)
_ROUNDED_PX = 0.5  # two boxes of one object that differ by no more were rounded differently, if this is also
_ROUNDED = 0.02  # no more than this share of their extent
_MIN_SIDE_PX = 2.0
_MAX_ASPECT = 100.0
_MIN_AREA_LEFT = 0.1
_MIN_AREA_LEFT_OUTLINED = 0.01  # the box of a rotated outline is tight, that of a rotated box is not


class Labels(NamedTuple):
    """Classes (n,) int64, boxes (n, 4) float32 xyxy in pixels, and outlines as in `Annotation`."""

    classes: np.ndarray
    boxes: np.ndarray
    polygons: tuple[np.ndarray, ...] = ()  # () or one (k, 2) float32 per box; k = 0 for a box without outline


NO_LABELS = Labels(np.zeros(0, np.int64), np.zeros((0, 4), np.float32))


class UnreadableLabelsError(Exception):
    """A row or a whole file is unusable; `finding` has the place and the reason."""

    def __init__(self, where: str, what: str, *, unknown_class: int | None = None) -> None:
        super().__init__(f"{where}: {what}")
        self.finding = Finding(where, what, dropped=True, unknown_class=unknown_class)


class LabelOptions(NamedTuple):
    """What a user decides about labels whose files leave it open."""

    with_confidence: bool = False  # YOLO rows may end with a confidence, which is not used
    keep_difficult: bool = False  # VOC objects marked difficult are labels too
    keep_repeats: bool = False  # an image counts as often as a list file of the training split has it


DEFAULT_OPTIONS = LabelOptions()


class LabelRules(NamedTuple):
    """How the label files of a data set are read."""

    names: tuple[str, ...]
    keypoints: tuple[int, int] | None = None  # of each YOLO row: their number and their dimensions
    options: LabelOptions = DEFAULT_OPTIONS


class LabelRow(NamedTuple):
    """One box of a label file."""

    place: str  # for messages
    key: tuple[float, ...]  # rows with equal keys are one label
    kind: int
    box: Box  # inside the image
    outline: np.ndarray = NO_OUTLINE  # (k, 2) pixels; k = 0 for a box without outline
    area: float = 0.0  # square pixels, if the file has it
    remarks: tuple[Kind, ...] = ()


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
            findings.append(Finding(row.place, "repeats an earlier row; counted once", dropped=False))
        elif right <= left or bottom <= top or (right - left) * (bottom - top) == 0:  # the product may underflow
            findings.append(Finding(row.place, "the box is empty; the row is left out", dropped=True))
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
    remarks = [Remark(Kind("near repeat", name), row.place) for row in _near_repeats(rows)]
    for row in rows:
        left, above, right, below = row.box
        kinds = [Kind("box", name)]
        if min(right - left, below - above) < SPECK_PX:
            kinds.append(Kind("speck", name))
        remarks += [Remark(kind, row.place) for kind in (*kinds, *row.remarks)]
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


def edge_remarks(box: Box, size: tuple[int, int], name: Format) -> tuple[Kind, ...]:
    """The remark that an unclipped box reaches out of its image by more than rounding."""
    left, above, right, below = box
    outside = max(-left, -above, right - size[1], below - size[0])
    return (Kind("clipped", name),) if outside > CLIPPED_PX else ()


def join(parts: Sequence[Labels]) -> Labels:
    """All labels of the parts, in order."""
    classes = np.concatenate([part.classes for part in parts])
    boxes = np.concatenate([part.boxes for part in parts])
    polygons: tuple[np.ndarray, ...] = ()
    if any(part.polygons for part in parts):  # then each box has an entry, those of the other parts an empty one
        polygons = tuple(chain.from_iterable(outlines(part) for part in parts))
    return Labels(classes, boxes, polygons)


def outlines(labels: Labels) -> tuple[np.ndarray, ...]:
    """One outline per box, empty for a box without one."""
    return labels.polygons or (NO_OUTLINE,) * len(labels.classes)


def stretch(labels: Labels, factors: tuple[float, float], corner: tuple[float, float] = (0, 0)) -> Labels:
    """The labels scaled by `factors` (a negative one mirrors), then shifted by `corner`; both (x, y)."""
    scales, shifts = np.array(factors, np.float32), np.array(corner, np.float32)
    corners = labels.boxes.reshape(-1, 2, 2) * scales + shifts
    corners.sort(axis=1)  # a mirror exchanges lower and upper corner
    polygons = tuple(polygon * scales + shifts for polygon in labels.polygons)
    return Labels(labels.classes, corners.reshape(-1, 4), polygons)


def mirror(labels: Labels, mirrored: tuple[bool, bool], size: tuple[int, int]) -> Labels:
    """The labels of an image of `size` (height, width) after mirroring along (x, y)."""
    along_x, along_y = mirrored
    return stretch(labels, (1 - 2 * along_x, 1 - 2 * along_y), (size[1] * along_x, size[0] * along_y))


def move(labels: Labels, matrix: np.ndarray, zoom: float, canvas: tuple[int, int], size: tuple[int, int]) -> Labels:
    """The labels that remain after a canvas is transformed by a matrix.

    Boxes are clipped to the canvas, transformed by their corners (or their outline), and clipped to the output.
    `still_visible` decides which boxes remain. `canvas` and `size` are (height, width).
    """
    if not len(labels.classes):
        return NO_LABELS  # not `labels`, whose arrays may be read-only memory of Ray: torch warns of that
    before = np.clip(labels.boxes, 0, canvas[::-1] * 2)  # (width, height) twice: for both corners
    after = np.clip(move_boxes(before, matrix), 0, size[::-1] * 2)
    outlined = np.array([len(outline) > 0 for outline in outlines(labels)])
    polygons: tuple[np.ndarray, ...] = ()
    if labels.polygons:
        points, rings = _move_polygons(labels.polygons, matrix, canvas, size)
        # One array for each polygon: all points are cut where the next polygon begins, two times at one place where a
        # polygon has left the output.
        begins = np.searchsorted(rings, np.arange(1, len(labels.polygons)))
        polygons = tuple(np.split(points.astype(np.float32), begins))
        after[outlined] = 0  # an outline that has left the output has no box
        # The box of an outline is that of its points. `reduceat` takes the points from one start to the next one, so
        # only polygons that have points may have a start.
        visible, starts = np.unique(rings, return_index=True)
        after[visible, :2] = np.minimum.reduceat(points, starts)
        after[visible, 2:] = np.maximum.reduceat(points, starts)
    kept = still_visible(before, after, zoom, outlined)
    return Labels(labels.classes[kept], after[kept].astype(np.float32), tuple(compress(polygons, kept.tolist())))


def _move_polygons(polygons: Sequence[np.ndarray], matrix: np.ndarray, canvas: tuple[int, int], size: tuple[int, int]
                   ) -> tuple[np.ndarray, np.ndarray]:
    """The points of all polygons in the output, and the polygon of each point, as in `cut`."""
    rings = np.repeat(np.arange(len(polygons)), [len(polygon) for polygon in polygons])
    points, rings = cut(np.concatenate(polygons), rings, canvas)
    return cut(move_points(points, matrix), rings, size)


def move_points(points: np.ndarray, matrix: np.ndarray) -> np.ndarray:
    """Points (..., 2) transformed by a 3 x 3 matrix; points beyond its horizon become (0, 0)."""
    moved = points @ matrix[:, :2].T + matrix[:, 2]
    depth = moved[..., 2:]
    return np.divide(moved[..., :2], depth, out=np.zeros_like(moved[..., :2]), where=depth > 1e-6)


def move_boxes(boxes: np.ndarray, matrix: np.ndarray) -> np.ndarray:
    """The boxes (n, 4) around the transformed corners of boxes (n, 4)."""
    corners = boxes[:, [0, 1, 2, 3, 0, 3, 2, 1]].reshape(-1, 4, 2)  # all four, (n, 4, 2)
    corners = move_points(corners, matrix)
    return np.concatenate([corners.min(axis=1), corners.max(axis=1)], axis=1)


def still_visible(before: np.ndarray, after: np.ndarray, zoom: float, outlined: np.ndarray) -> np.ndarray:
    """Which boxes (n,) to keep: sides above 2 px, aspect below 100, more than a tenth of the area left.

    The remaining area is relative to the old area at the new zoom, so that zooming out alone drops no box. With an
    outline a hundredth is enough.
    """
    old = (before[:, 2] - before[:, 0]) * (before[:, 3] - before[:, 1]) * zoom**2
    width, height = after[:, 2] - after[:, 0], after[:, 3] - after[:, 1]
    short, long = np.minimum(width, height), np.maximum(width, height)
    least = np.where(outlined, _MIN_AREA_LEFT_OUTLINED, _MIN_AREA_LEFT)
    return (short > _MIN_SIDE_PX) & (long < _MAX_ASPECT * short) & (short * long > least * old)


def box_areas(boxes: np.ndarray) -> np.ndarray:
    """Areas (n,) float64 of boxes (n, 4)."""
    return (boxes[:, 2:] - boxes[:, :2]).astype(np.float64).prod(axis=1)


def covered(boxes: np.ndarray, by: np.ndarray) -> np.ndarray:
    """Fraction of each box's area (n,) that one other box (4,) covers."""
    low, high = np.maximum(boxes[:, :2], by[:2]), np.minimum(boxes[:, 2:], by[2:])  # of the common part
    common = np.clip(high - low, 0, None).prod(axis=1)
    return common / (boxes[:, 2:] - boxes[:, :2]).prod(axis=1)


def cut(points: np.ndarray, rings: np.ndarray, size: tuple[int, int]) -> tuple[np.ndarray, np.ndarray]:
    """The parts of polygons inside an image of `size`; a polygon outside it loses all points.

    Args:
        points: (k, 2) of all polygons, concatenated.
        rings: (k,) ascending polygon number of each point.

    Source: Sutherland and Hodgman 1974, "Reentrant polygon clipping".
    """
    height, width = size
    # Axis, outward direction and position of the left, upper, right and lower edge
    for axis, sign, limit in ((0, -1, 0), (1, -1, 0), (0, 1, width), (1, 1, height)):
        outside_by = sign * (points[:, axis] - limit)
        if (outside_by > 0).any():
            points, rings = _cut_at(points, rings, outside_by)
    return np.clip(points, 0, (width, height)), rings  # new points have rounding errors


def _cut_at(points: np.ndarray, rings: np.ndarray, outside_by: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """The points inside an edge, each preceded by the crossing of its segment with the edge.

    outside_by: (k,) distance of each point from the edge, in pixels, negative inside.
    """
    previous = np.arange(len(points)) - 1  # in the same polygon, so that a segment ends at each point
    firsts = np.flatnonzero(np.diff(rings, prepend=-1))  # first point of each polygon
    ends = np.append(firsts[1:], len(points))
    previous[firsts] = ends - 1  # a polygon is closed: its last point precedes its first one

    previous_by = outside_by[previous]
    crosses = (outside_by > 0) != (previous_by > 0)
    share = np.divide(previous_by, previous_by - outside_by, out=np.zeros_like(outside_by), where=crosses)
    crossings = points[previous] + share[:, None] * (points - points[previous])

    kept = np.stack([crosses, outside_by <= 0], axis=1)  # (k, 2): the crossing, and the point itself
    new_points = np.stack([crossings, points], axis=1)  # (k, 2, 2)
    new_rings = np.stack([rings, rings], axis=1)
    return new_points[kept], new_rings[kept]
