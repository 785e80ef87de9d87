"""Boxes as distances from points to their four sides, each distance as a distribution over whole cells.

Source: Li et al. 2020, "Generalized Focal Loss", arXiv:2006.04388.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

BINS = 16  # distances 0 .. 15, in cells


def flatten_levels(levels: Sequence[Tensor]) -> tuple[Tensor, Tensor]:
    """Logits in float32 of all points, which run over levels, rows, columns.

    Args:
        levels: (B, 4 x BINS + classes, h, w) each.

    Returns:
        Logits of the distances left, top, right, bottom, (B, N, 4, BINS), and of the classes, (B, N, classes).
    """
    points = torch.cat([level.float().permute(0, 2, 3, 1).flatten(1, 2) for level in levels], 1)
    return points[..., : 4 * BINS].unflatten(2, (4, BINS)), points[..., 4 * BINS:]


def grid_points(levels: Sequence[Tensor], strides: Sequence[int]) -> tuple[Tensor, Tensor]:
    """Of every point its place, (N, 2) as (x, y) in pixels at the centre of its cell, and its stride, (N, 1)."""
    places, sides = [], []
    for level, stride in zip(levels, strides, strict=True):
        height, width = level.shape[2:4]
        rows, columns = torch.arange(height, device=level.device), torch.arange(width, device=level.device)
        cells = torch.stack(torch.meshgrid(columns, rows, indexing="xy"), 2).flatten(0, 1)
        places.append((cells + 0.5) * stride)
        sides.append(torch.full((height * width, 1), float(stride), device=level.device))
    return torch.cat(places), torch.cat(sides)


def expected_boxes(distances: Tensor, places: Tensor, strides: Tensor) -> Tensor:
    """Boxes (B, N, 4), xyxy in pixels: each point -/+ the expectation of its distances' distributions x stride."""
    bins = torch.arange(BINS, device=distances.device, dtype=distances.dtype)
    expected = (distances.softmax(3) * bins).sum(3) * strides
    return torch.cat((places - expected[..., :2], places + expected[..., 2:]), 2)
