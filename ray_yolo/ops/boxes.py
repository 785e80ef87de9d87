"""Box geometry: overlaps, conversions, mapping from a letterboxed input to the original image, and decoding of
anchor-free predictions.

Boxes are xyxy in any common unit unless a name says otherwise.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

AnyFloats = NDArray[np.floating]

BINS = 16  # A distribution of a distance has so many bins: 0 .. 15 cells.
EPSILON = 1e-7  # keeps quotients of degenerate boxes finite; negligible beside a real area


def corners(centre_size_boxes: Tensor) -> Tensor:
    """Boxes (..., 4) given as (centre x, centre y, width, height) as xyxy."""
    centre, size = centre_size_boxes[..., :2], centre_size_boxes[..., 2:]
    return torch.cat((centre - size / 2, centre + size / 2), -1)


def paired_iou(a: Tensor, b: Tensor) -> Tensor:
    """Intersection over union of row i of `a` with row i of `b`, (n, 4) each -> (n,).

    Raises:
        ValueError: if the shapes differ.
    """
    if a.shape != b.shape:
        raise ValueError(f"boxes are compared in pairs, but there are {tuple(a.shape)} and {tuple(b.shape)}")
    shared_sides = (torch.minimum(a[:, 2:], b[:, 2:]) - torch.maximum(a[:, :2], b[:, :2])).clamp(min=0)
    overlap = _area(shared_sides)
    area_a, area_b = _area(a[:, 2:] - a[:, :2]), _area(b[:, 2:] - b[:, :2])
    return overlap / (area_a + area_b - overlap + EPSILON)


def pairwise_iou(a: AnyFloats, b: AnyFloats) -> AnyFloats:
    """Intersection over union of each box of `a` (n, 4) with each of `b` (m, 4): (n, m), NaN of two without area.

    It is numpy's: for the few boxes of an image, torch's calls take three times as long as the numbers.
    """
    left, top, right, bottom = a.T[:, :, None]  # (n, 1) each
    other_left, other_top, other_right, other_bottom = b.T  # (m,) each
    with np.errstate(all="ignore"):  # boxes of a model that diverged
        width = np.maximum(np.minimum(right, other_right) - np.maximum(left, other_left), 0)
        height = np.maximum(np.minimum(bottom, other_bottom) - np.maximum(top, other_top), 0)
        overlap = width * height
        areas = (right - left) * (bottom - top) + (other_right - other_left) * (other_bottom - other_top)
        return overlap / (areas - overlap)


def _area(sides: Tensor) -> Tensor:
    """The products of (..., 2) sides. The gradient of `prod` has the same bits, but takes two scans of its input."""
    return sides[..., 0] * sides[..., 1]


def complete_iou(a: Tensor, b: Tensor) -> Tensor:
    """Complete IoU of row i of `a` with row i of `b` (Zheng et al. 2020, "Distance-IoU Loss", arXiv:1911.08287).

    IoU, minus the squared centre distance relative to the enclosing box, minus a penalty for different aspect ratios.
    Equals 1 for equal boxes only; invariant under scaling and swapping of both boxes.

    Args:
        a, b: (n, 4) boxes, in the same unit, with positive width and height.

    Returns:
        (n,) values in (-1.5, 1]. The gradient treats the weight of the aspect penalty as a constant.

    Raises:
        ValueError: if the shapes differ.
    """
    iou = paired_iou(a, b)
    enclosing = torch.maximum(a[:, 2:], b[:, 2:]) - torch.minimum(a[:, :2], b[:, :2])
    apart = (b[:, :2] + b[:, 2:] - a[:, :2] - a[:, 2:]) / 2
    distance = apart.square().sum(1) / (enclosing.square().sum(1) + EPSILON)
    aspect = (4 / math.pi**2) * (_angle(a) - _angle(b)).square()
    with torch.no_grad():
        weight = aspect / (1 - iou + aspect + EPSILON)
    return iou - distance - weight * aspect


def _angle(boxes: Tensor) -> Tensor:
    """Angle of the diagonal, a measure of the aspect ratio."""
    width, height = (boxes[:, 2:] - boxes[:, :2]).unbind(1)
    return torch.atan(width / (height + EPSILON))


def to_original(boxes: AnyFloats, ratio: tuple[float, float], pad: tuple[float, float], size: tuple[int, int]
                ) -> AnyFloats:
    """Boxes (n, 4) in pixels of a letterboxed network input -> pixels of the original image, clipped to it.

    Args:
        ratio: (vertical, horizontal) scale from the original image to the network input.
        pad: (top, left) pixels added around the scaled image.
        size: (height, width) of the original image.
    """
    ratios, pads, sizes = (np.array(2 * [x, y], boxes.dtype) for y, x in (ratio, pad, size))
    return np.clip((boxes - pads) / ratios, 0, sizes)


def grid_cells(level: Tensor) -> Tensor:
    """(column, row) of every cell of a level (B, c, h, w, ...), (h, w, 2) int64."""
    rows, columns = (torch.arange(length, device=level.device) for length in level.shape[2:4])
    return torch.stack(torch.meshgrid(columns, rows, indexing="xy"), 2)


def grid_points(levels: Sequence[Tensor], strides: Sequence[int]) -> tuple[Tensor, Tensor]:
    """Cell centres in the order levels, rows, columns: (N, 2) as (x, y) pixels, and their strides, (N, 1)."""
    points, strides_of_points = [], []
    for level, stride in zip(levels, strides, strict=True):
        cells = grid_cells(level).flatten(0, 1)
        points.append((cells + 0.5) * stride)
        strides_of_points.append(torch.full_like(cells[:, :1], float(stride), dtype=torch.float32))
    return torch.cat(points), torch.cat(strides_of_points)


def flatten_levels(levels: Sequence[Tensor], bins: int = BINS) -> tuple[Tensor, Tensor]:
    """Float32 outputs of all points of levels (B, 4 x bins + classes, h, w).

    Returns:
        (B, N, 4, bins) for the distances left, top, right, bottom, and (B, N, classes).
    """
    points = torch.cat([level.float().permute(0, 2, 3, 1).flatten(1, 2) for level in levels], 1)
    return points[..., : 4 * bins].unflatten(2, (4, bins)), points[..., 4 * bins:]


def expected_boxes(distances: Tensor, points: Tensor, strides: Tensor) -> Tensor:
    """Boxes (B, N, 4), xyxy in pixels: each point -/+ its distances x stride.

    A distance, in cells, is the expectation of its bins' distribution; with one bin it is the output itself.
    """
    if distances.shape[3] == 1:
        expected = distances[..., 0] * strides
    else:
        bins = torch.arange(distances.shape[3], device=distances.device, dtype=distances.dtype)
        expected = (distances.softmax(3) * bins).sum(3) * strides
    return torch.cat((points - expected[..., :2], points + expected[..., 2:]), 2)
