"""Arithmetic of boxes: overlaps, forms, and the way back from a letterboxed input to the original image.

Boxes are xyxy unless a name says otherwise; any unit, as long as it is one. Overlaps of all pairs and greedy
suppression are `torchvision.ops`; here is what it does not have.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

EPSILON = 1e-7  # keeps quotients of degenerate boxes finite; far below one float32 step of a real area


def centre_size(boxes: Tensor) -> Tensor:
    """Boxes (..., 4) as (centre x, centre y, width, height)."""
    low, high = boxes[..., :2], boxes[..., 2:]
    return torch.cat(((low + high) / 2, high - low), -1)


def corners(centre_size_boxes: Tensor) -> Tensor:
    """Boxes (..., 4) given as (centre x, centre y, width, height) as xyxy: the inverse of `centre_size`."""
    centre, size = centre_size_boxes[..., :2], centre_size_boxes[..., 2:]
    return torch.cat((centre - size / 2, centre + size / 2), -1)


def paired_iou(a: Tensor, b: Tensor) -> Tensor:
    """Intersection over union of boxes taken in pairs: row i of `a` with row i of `b`, (n, 4) each -> (n,).

    Raises:
        ValueError: if the shapes differ.
    """
    if a.shape != b.shape:
        raise ValueError(f"boxes are compared in pairs, but there are {tuple(a.shape)} and {tuple(b.shape)}")
    overlap = (torch.minimum(a[:, 2:], b[:, 2:]) - torch.maximum(a[:, :2], b[:, :2])).clamp(min=0).prod(1)
    area_a, area_b = (a[:, 2:] - a[:, :2]).prod(1), (b[:, 2:] - b[:, :2]).prod(1)
    return overlap / (area_a + area_b - overlap + EPSILON)


def complete_iou(a: Tensor, b: Tensor) -> Tensor:
    """Complete IoU of boxes taken in pairs: row i of `a` with row i of `b`.

    Overlap, minus the squared centre distance relative to the enclosing box, minus a penalty for
    different aspect ratios. Equals 1 for equal boxes only; unchanged when both boxes are scaled or swapped.

    Args:
        a, b: (n, 4) boxes, xyxy, both in the same unit, with positive width and height.

    Returns:
        (n,) values in (-1.5, 1]. The aspect weight is treated as a constant in the gradient.

    Raises:
        ValueError: if the shapes differ.

    Source: Zheng et al. 2020, "Distance-IoU Loss", arXiv:1911.08287.
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
    """Angle of the diagonal, which measures the aspect ratio."""
    width, height = (boxes[:, 2:] - boxes[:, :2]).unbind(1)
    return torch.atan(width / (height + EPSILON))


def to_original(boxes: Tensor, ratio: tuple[float, float], pad: tuple[float, float], size: tuple[int, int]) -> Tensor:
    """Boxes of a letterboxed network input as boxes of the original image, clipped to it.

    Args:
        boxes: (n, 4) pixels of the network input.
        ratio: (vertical, horizontal) scale from the original image to the network input.
        pad: (top, left) pixels added around the scaled image.
        size: (height, width) of the original image.

    Returns:
        (n, 4) pixels of the original image.
    """
    x1, y1, x2, y2 = boxes.unbind(1)
    (height, width), (top, left) = size, pad
    columns = ((torch.stack((x1, x2)) - left) / ratio[1]).clamp(0, width)
    rows = ((torch.stack((y1, y2)) - top) / ratio[0]).clamp(0, height)
    return torch.stack((columns[0], rows[0], columns[1], rows[1]), 1)
