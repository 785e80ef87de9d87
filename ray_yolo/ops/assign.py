"""Assignment of targets to predictions: by anchors (`assign`), and task-aligned for anchor-free heads (`align`).

Shapes depend only on the number of targets: candidates that do not count have `valid` False or weight 0. So no
operation waits for a GPU to learn how many there are.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from ray_yolo.ops.boxes import complete_iou

TOP = 10  # points of each label
SCORE_POWER, OVERLAP_POWER = 0.5, 6.0
INSIDE = 1e-9  # px from a label's edge at which a point counts as inside
EPSILON = 1e-9


class AlignRule(NamedTuple):
    """Limits on the points of a label."""

    top: int = TOP  # candidates of each label
    keep: int = 0  # points that it keeps of these; 0: all
    floor: float = 0.0  # pixels; smaller sides count as this long when candidates are chosen


ONE_TO_MANY = AlignRule()


class Alignment(NamedTuple):
    """The assigned label of each of N points of B images."""

    label: Tensor  # (B, N) int64, row of the targets; 0, with weight 0, for background
    weight: Tensor  # (B, N) float32, target score of the label's class; 0: the point is background


@torch.no_grad()
def align(boxes: Tensor, scores: Tensor, points: Tensor, targets: Tensor, rule: AlignRule = ONE_TO_MANY) -> Alignment:
    """Task-aligned assignment of a batch (Feng et al. 2021, TOOD, arXiv:2108.07755).

    Let s be a point's score for a label's class and u the CIoU of its box with the label's, clamped at 0. The alignment
    of a point inside the label's box is t = s^0.5 u^6.

    1. Each label takes its `top` points of largest t. Sides below `floor` pixels count as `floor` in the inside test.
    2. A point that several labels take goes to the label of largest u, even to one that has not taken it.
    3. Each label keeps its `keep` points of largest t.
    4. With T and U the largest t and u of a label's points, the target score of a point is t U / (T + 1e-9).

    Args:
        boxes: (B, N, 4) predicted, xyxy pixels.
        scores: (B, N, classes) predicted, 0..1.
        points: (N, 2) as (x, y), pixels.
        targets: (n, 6) rows [image, class, x1, y1, x2, y2], pixels; n may be 0.
    """
    shape = boxes.shape[:2]
    if len(targets) == 0:
        return Alignment(boxes.new_zeros(shape, dtype=torch.long), boxes.new_zeros(shape))
    image, kind, truth = targets[:, 0].long(), targets[:, 1].long(), targets[:, 2:]
    margin = ((rule.floor - (truth[:, 2:] - truth[:, :2])) / 2).clamp(min=0)  # (n, 2)
    low, high = truth[:, :2] - margin, truth[:, 2:] + margin
    inside = torch.cat((points - low[:, None], high[:, None] - points), 2).amin(2) > INSIDE  # (n, N)
    overlap, aligned = _measure(boxes, scores, image, kind, truth, inside)

    taken = _largest(aligned, rule.top) & inside
    rows = torch.arange(len(targets), device=boxes.device)[:, None].expand_as(taken)

    def reduce_labels(start: float, values: Tensor, how: str) -> Tensor:
        """The largest or smallest of the labels' values (n, N) for each point of each image, (B, N)."""
        return values.new_full(shape, start).scatter_reduce(0, image[:, None].expand_as(values), values, how)

    # A point is contested if the first and the last label that took it differ: then every label of its image competes.
    first = reduce_labels(len(targets), torch.where(taken, rows, len(targets)), "amin")
    contested = reduce_labels(-1, torch.where(taken, rows, -1), "amax") > first
    claims = torch.where(taken | contested[image], overlap, -1.0)
    wins = (claims >= 0) & (claims == reduce_labels(-1.0, claims, "amax")[image])
    owner = reduce_labels(len(targets), torch.where(wins, rows, len(targets)), "amin")  # ties: the first label
    wins = owner[image] == rows
    if rule.keep:
        wins &= _largest(torch.where(wins, aligned, -1.0), rule.keep)

    top_aligned = (aligned * wins).amax(1, keepdim=True)  # (n, 1)
    top_overlap = (overlap * wins).amax(1, keepdim=True)
    weights = aligned * wins * top_overlap / (top_aligned + EPSILON)  # (n, N)
    return Alignment(torch.where(owner < len(targets), owner, 0), reduce_labels(0.0, weights, "amax"))


def _largest(values: Tensor, count: int) -> Tensor:
    """Mask of the `count` largest values of each row, (n, N) bool."""
    indices = values.topk(min(count, values.shape[1]), dim=1).indices
    return torch.zeros_like(values, dtype=torch.bool).scatter_(1, indices, True)


def _measure(boxes: Tensor, scores: Tensor, image: Tensor, kind: Tensor, truth: Tensor, inside: Tensor
             ) -> tuple[Tensor, Tensor]:
    """Overlap u and alignment t of every label and point, (n, N) each; 0 outside the label's box."""
    if inside.device.type == "cpu":
        label, point = inside.nonzero(as_tuple=True)  # only the pairs inside
    else:  # all pairs, because selecting those inside would synchronise with the GPU
        labels, points = (torch.arange(length, device=inside.device) for length in inside.shape)
        label, point = (index.flatten() for index in torch.meshgrid(labels, points, indexing="ij"))
    u = complete_iou(boxes[image[label], point], truth[label]).clamp(min=0) * inside[label, point]
    s = scores[image[label], point, kind[label]]
    t = s**SCORE_POWER * u**OVERLAP_POWER
    nothing = boxes.new_zeros(inside.shape)
    return nothing.index_put((label, point), u), nothing.index_put((label, point), t)


class Assignment(NamedTuple):
    """The candidates of all levels, one level after the other: k = levels x 5 x anchors x targets rows."""

    prediction: Tensor  # (k,) int64, among those of its level in the order images, rows, columns, anchors
    anchors: Tensor  # (k, 2) width and height in cells
    boxes: Tensor  # (k, 4) centre x and y relative to the cell, width and height, all in cells
    classes: Tensor  # (k,) int64
    valid: Tensor  # (k,) bool; others are ignored
    sizes: tuple[int, ...]  # rows of each level

    def kept(self) -> Assignment:
        """The valid candidates only (synchronises with a GPU)."""
        sizes = tuple(int(valid.sum()) for valid in self.valid.split(self.sizes))
        return Assignment(self.prediction[self.valid], self.anchors[self.valid], self.boxes[self.valid],
                          self.classes[self.valid], self.valid[self.valid], sizes)


def assign(targets: Tensor, anchors: Tensor, grids: Tensor, image_size: tuple[int, int], anchor_t: float) -> Assignment:
    """Cells and anchors of each level assigned to each target. All levels at once: a GPU needs a third of the launches.

    Anchors: those whose sides both differ from the target's by a factor strictly below `anchor_t`.
    Cells: the one with the target's centre, and the nearer horizontal and vertical neighbour, if inside the grid.
    Every assigned prediction can reach the target, because a decoded centre spans -0.5..1.5 cells.
    A centre exactly on the edge of a cell counts this cell twice.

    Args:
        targets: (n, 6) rows [image, class, x1, y1, x2, y2], pixels of the network input.
        anchors: (levels, anchors, 2) widths and heights in cells of their level.
        grids: (levels, 2) float32, heights and widths of the levels in cells.
        image_size: (height, width) of the network input in pixels.
        anchor_t: largest ratio of sides, > 1.

    Returns:
        Candidates, cell indices clamped to the grid.
    """
    num_levels, num_anchors, num_targets = len(anchors), anchors.shape[1], len(targets)
    image, kind, x1, y1, x2, y2 = targets.unbind(1)
    height, width = grids[:, 0, None], grids[:, 1, None]  # (levels, 1)
    cells_per_row, cells_per_column = height / image_size[0], width / image_size[1]  # of a pixel
    x, y = (x1 + x2) / 2 * cells_per_column, (y1 + y2) / 2 * cells_per_row  # (levels, targets)
    size = torch.stack(((x2 - x1) * cells_per_column, (y2 - y1) * cells_per_row), 2)  # (levels, targets, 2)
    ratio = size[:, None] / anchors[:, :, None]
    fits = torch.maximum(ratio, 1 / ratio).amax(3) < anchor_t  # (levels, anchors, targets)

    centre = torch.ones_like(x, dtype=torch.bool)
    near = torch.stack((centre, _near_edge(x), _near_edge(y), _near_edge(width - x), _near_edge(height - y)), 1)
    columns = torch.stack((x, x - 0.5, x, x + 0.5, x), 1).floor().clamp(min=0)  # (levels, 5, targets)
    rows = torch.stack((y, y, y - 0.5, y, y + 0.5), 1).floor().clamp(min=0)
    column = torch.minimum(columns, width[:, None] - 1)
    row = torch.minimum(rows, height[:, None] - 1)
    offsets = torch.stack((x[:, None] - column, y[:, None] - row), 3)
    boxes = torch.cat((offsets, size[:, None].expand(-1, 5, -1, -1)), 3)  # (levels, 5, targets, 4)

    grid_rows, grid_columns = height[:, None].long(), width[:, None].long()
    cell = (image.long() * grid_rows + row.long()) * grid_columns + column.long()
    anchor = torch.arange(num_anchors, device=targets.device)[:, None]
    shape = (num_levels, 5, num_anchors, num_targets)
    return Assignment(
        prediction=(cell[:, :, None] * num_anchors + anchor).reshape(-1),
        anchors=anchors[:, None, :, None].expand(*shape, 2).reshape(-1, 2),
        boxes=boxes[:, :, None].expand(*shape, 4).reshape(-1, 4),
        classes=kind.long().expand(shape).reshape(-1),
        valid=(near[:, :, None] & fits[:, None]).reshape(-1),
        sizes=(5 * num_anchors * num_targets,) * num_levels,
    )


def _near_edge(distance: Tensor) -> Tensor:
    """Whether a point at this distance from an edge of the grid, in cells, is nearer to the next cell towards it."""
    return (distance % 1 < 0.5) & (distance > 1)
