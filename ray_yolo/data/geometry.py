"""The labels of one image, transformed with the image. Coordinates are as in `ray_yolo.labels.rows`."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import chain, compress

import numpy as np

from ray_yolo.labels.rows import NO_LABELS, NO_OUTLINE, Labels

_MIN_SIDE_PX = 2.0
_MAX_ASPECT = 100.0
_MIN_AREA_LEFT = 0.1
_MIN_AREA_LEFT_OUTLINED = 0.01  # the box of a rotated outline is tight, that of a rotated box is not


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
    low, high = np.maximum(boxes[:, :2], by[:2]), np.minimum(boxes[:, 2:], by[2:])  # the corners of the common part
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
    previous = np.arange(len(points)) - 1  # the point before in the same polygon: a segment ends at each point
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
