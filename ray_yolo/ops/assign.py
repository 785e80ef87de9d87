"""Which predictions answer for which targets. Depends on targets and anchors alone, never on predictions.

Shapes depend on the number of targets alone too: every pair of target and anchor yields five candidate cells, and
`valid` says which of them count. So nothing waits for a GPU to tell how many there are.
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
    """How many points a label takes."""

    top: int = TOP
    keep: int = 0  # of those; 0: all
    floor: float = 0.0  # pixels


ONE_TO_MANY = AlignRule()


class Alignment(NamedTuple):
    """For each of N points of B images, the label it answers for."""

    label: Tensor  # (B, N) int64, row of the targets; 0 where there is none, with weight 0
    weight: Tensor  # (B, N) float32, target score of the label's class; 0: the point is background


@torch.no_grad()
def align(boxes: Tensor, scores: Tensor, places: Tensor, targets: Tensor, rule: AlignRule = ONE_TO_MANY) -> Alignment:
    """The task-aligned assignment of a batch.

    With s the score that a point gives a label's class and u the CIoU of its box with the label's, not below 0, a point
    inside of a label's box is aligned with it by t = s^0.5 u^6. Each label takes its `top` best aligned points; a
    point that several take goes to the label of largest u, which may be one that has not taken it. Then each label
    keeps
    the `keep` points of largest t. With T and U the largest t and u of a label's points, the target score of a point is
    t U / (T + 1e-9). For the test whether a point is inside, sides under `floor` pixels count as `floor`.

    Args:
        boxes: (B, N, 4) predicted, xyxy pixels.
        scores: (B, N, classes) predicted, 0..1.
        places: (N, 2) points as (x, y), pixels.
        targets: (n, 6) rows [image, class, x1, y1, x2, y2], pixels; n may be 0.
    """
    images, points = boxes.shape[:2]
    if len(targets) == 0:
        return Alignment(boxes.new_zeros(images, points, dtype=torch.long), boxes.new_zeros(images, points))
    image, kind, truth = targets[:, 0].long(), targets[:, 1].long(), targets[:, 2:]
    margin = ((rule.floor - (truth[:, 2:] - truth[:, :2])) / 2).clamp(min=0)  # (n, 2)
    low, high = truth[:, :2] - margin, truth[:, 2:] + margin
    inside = torch.cat((places - low[:, None], high[:, None] - places), 2).amin(2) > INSIDE  # (n, N)
    overlap, aligned = _measure(boxes, scores, image, kind, truth, inside)

    best = aligned.topk(min(rule.top, points), dim=1).indices
    taken = torch.zeros_like(inside).scatter_(1, best, True) & inside
    place = image[:, None].expand_as(taken)
    rows = torch.arange(len(targets), device=boxes.device)[:, None].expand_as(taken)

    def of_points(start: float, values: Tensor, how: str) -> Tensor:
        """The largest or smallest of all labels' values for each point of each image, (B, N)."""
        return values.new_full((images, points), start).scatter_reduce(0, place, values, how)

    first = of_points(len(targets), torch.where(taken, rows, len(targets)), "amin")
    contested = of_points(-1, torch.where(taken, rows, -1), "amax") > first
    claims = taken | contested[image]
    claim = torch.where(claims, overlap, -1.0)
    wins = claims & (claim == of_points(-1.0, claim, "amax")[image])
    owner = of_points(len(targets), torch.where(wins, rows, len(targets)), "amin")  # of equal overlaps the first label
    wins = owner[image] == rows
    if rule.keep:
        kept = torch.where(wins, aligned, -1.0).topk(min(rule.keep, points), dim=1).indices
        wins &= torch.zeros_like(wins).scatter_(1, kept, True)

    top_aligned, top_overlap = ((value * wins).amax(1, keepdim=True) for value in (aligned, overlap))
    weights = aligned * wins * top_overlap / (top_aligned + EPSILON)  # (n, N)
    weight = of_points(0.0, weights, "amax")
    return Alignment(torch.where(owner < len(targets), owner, 0), weight)


def _measure(boxes: Tensor, scores: Tensor, image: Tensor, kind: Tensor, truth: Tensor, inside: Tensor
             ) -> tuple[Tensor, Tensor]:
    """Overlap u and alignment t of every label and point, (n, N) each; 0 outside of the label's box."""
    if inside.device.type != "cpu":  # to pick the points inside would wait for it: all are measured
        label, point = (index.flatten() for index in torch.meshgrid(
            *(torch.arange(length, device=inside.device) for length in inside.shape), indexing="ij"))
    else:
        label, point = inside.nonzero(as_tuple=True)
    u = complete_iou(boxes[image[label], point], truth[label]).clamp(min=0) * inside[label, point]
    s = scores[image[label], point, kind[label]]
    nothing = boxes.new_zeros(inside.shape)
    return (nothing.index_put((label, point), u),
            nothing.index_put((label, point), s**SCORE_POWER * u**OVERLAP_POWER))


class Assignment(NamedTuple):
    """The candidates of one level, k = 5 x anchors x targets rows."""

    image: Tensor  # (k,) int64, image in the batch
    anchor: Tensor  # (k,) int64
    row: Tensor  # (k,) int64, cell
    column: Tensor  # (k,) int64, cell
    boxes: Tensor  # (k, 4) centre x and y relative to the cell, width and height, all in cells
    classes: Tensor  # (k,) int64
    valid: Tensor  # (k,) bool; what is False takes no part

    def kept(self) -> Assignment:
        """The valid candidates only (on a GPU: waits for it)."""
        return Assignment(*(field[self.valid] for field in self))


def assign(
    targets: Tensor, anchors: Tensor, grid: tuple[int, int], image_size: tuple[int, int], anchor_t: float
) -> Assignment:
    """The cells and anchors of one level that answer for each target.

    A target goes to every anchor whose sides both differ from its own by a factor strictly below `anchor_t`: to the
    cell that holds its centre and to those that hold its centre moved by half a cell, left and up where the centre
    lies in the first half of its cell, right and down where it lies in the second half, unless it lies in the outermost
    cells on that side. So all assigned predictions can reach the target: a decoded centre spans -0.5..1.5 cells.
    A centre on a cell's very edge counts its cell once more (its move by half a cell ends there again).

    Args:
        targets: (n, 6) rows [image, class, x1, y1, x2, y2], pixels of the network input.
        anchors: (anchors, 2) widths and heights in cells of this level.
        grid: (height, width) of this level in cells.
        image_size: (height, width) of the network input in pixels.
        anchor_t: largest ratio of sides, > 1.

    Returns:
        Candidates, cell indices clamped to the grid.
    """
    height, width = grid
    x1, y1, x2, y2 = targets[:, 2:].unbind(1)
    x, y = (x1 + x2) / 2 * (width / image_size[1]), (y1 + y2) / 2 * (height / image_size[0])
    size = torch.stack(((x2 - x1) * (width / image_size[1]), (y2 - y1) * (height / image_size[0])), 1)
    ratio = size / anchors[:, None]
    fits = torch.maximum(ratio, 1 / ratio).amax(2) < anchor_t  # (anchors, targets)

    centre = torch.ones_like(x, dtype=torch.bool)
    near = torch.stack((centre, _near_edge(x), _near_edge(y), _near_edge(width - x), _near_edge(height - y)))
    column = torch.stack((x, x - 0.5, x, x + 0.5, x)).floor().clamp(0, width - 1)  # (5, targets)
    row = torch.stack((y, y, y - 0.5, y, y + 0.5)).floor().clamp(0, height - 1)
    boxes = torch.cat((torch.stack((x - column, y - row), 2), size.expand(5, -1, -1)), 2)  # (5, targets, 4)

    shape = (5, len(anchors), len(targets))
    anchor = torch.arange(len(anchors), device=targets.device)[:, None]
    return Assignment(
        image=targets[:, 0].long().expand(shape).reshape(-1),
        anchor=anchor.expand(shape).reshape(-1),
        row=row.long()[:, None].expand(shape).reshape(-1),
        column=column.long()[:, None].expand(shape).reshape(-1),
        boxes=boxes[:, None].expand(*shape, 4).reshape(-1, 4),
        classes=targets[:, 1].long().expand(shape).reshape(-1),
        valid=(near[:, None] & fits).reshape(-1),
    )


def _near_edge(distance: Tensor) -> Tensor:
    """Whether a point this many cells from an edge of the grid lies nearer to the next cell towards that edge."""
    return (distance % 1 < 0.5) & (distance > 1)
