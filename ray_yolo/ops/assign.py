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
PAIRS = 2**23  # A GPU measures so many pairs of a label and a point at once.


OUTSIDE = -1e4  # px: no point and no cell is there


def padded_targets(targets: Tensor, rows: int) -> Tensor:
    """Targets with rows that nothing is assigned to, up to a multiple of `rows`, of which there is at least one.

    Each is an empty box far outside of the first image, of class 0.
    """
    added = -(-max(len(targets), 1) // rows) * rows - len(targets)
    padding = targets.new_full((added, 6), OUTSIDE)
    padding[:, :2] = 0.0
    return torch.cat((targets, padding))


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


class Claims(NamedTuple):
    """How some labels compete for each of N points of B images.

    A label takes its `top` points. The favourite of a point is the first label of its image with the largest u, whether
    it took the point or not.
    """

    first: Tensor  # (B, N) int64, row of the first label that took the point; the number of labels if none has
    last: Tensor  # (B, N) int64, of the last; -1 if none has
    taken: Tensor  # (2, B, N), u and t of the label that took the point, 0 if none has; of no use if several have
    favourite: Tensor  # (B, N) int64, row; of no use for an image without labels, or if u is NaN
    favourite_u: Tensor  # (B, N); -1 for an image without labels
    favourite_t: Tensor  # (B, N)

    def merged(self, later: Claims) -> Claims:
        """The claims of these labels and of later ones."""
        better = later.favourite_u > self.favourite_u  # a tie stays with the first label
        return Claims(
            first=torch.minimum(self.first, later.first),
            last=torch.maximum(self.last, later.last),
            taken=torch.maximum(self.taken, later.taken),
            favourite=torch.where(better, later.favourite, self.favourite),
            favourite_u=torch.maximum(self.favourite_u, later.favourite_u),
            favourite_t=torch.where(better, later.favourite_t, self.favourite_t),
        )


@torch.no_grad()
def align(boxes: Tensor, scores: Tensor, points: Tensor, targets: Tensor, rule: AlignRule = ONE_TO_MANY) -> Alignment:
    """Task-aligned assignment of a batch (Feng et al. 2021, TOOD, arXiv:2108.07755).

    Let s be a point's score for a label's class and u the CIoU of its box with the label's, clamped at 0. The alignment
    of a point inside the label's box is t = s^0.5 u^6.

    1. Each label takes its `top` points of largest t. Sides below `floor` pixels count as `floor` in the inside test.
    2. A point that several labels take goes to the label of largest u, even to one that has not taken it.
    3. Each label keeps its `keep` points of largest t.
    4. With T and U the largest t and u of a label's points, the target score of a point is t U / (T + 1e-9).

    On a GPU, the labels are measured in parts of `PAIRS` pairs of a label and a point. So the peak memory does not grow
    with the number of labels.

    Args:
        boxes: (B, N, 4) predicted, xyxy pixels.
        scores: (B, N, classes) predicted, 0..1.
        points: (N, 2) as (x, y), pixels.
        targets: (n, 6) rows [image, class, x1, y1, x2, y2], pixels; n may be 0.
    """
    shape, num_labels = boxes.shape[:2], len(targets)
    if num_labels == 0:
        return Alignment(boxes.new_zeros(shape, dtype=torch.long), boxes.new_zeros(shape))
    image = targets[:, 0].long()
    parts = _parts(num_labels, shape[1], boxes.device)
    claims = _claim(boxes, scores, points, targets, image, parts[0], rule)
    for part in parts[1:]:
        claims = claims.merged(_claim(boxes, scores, points, targets, image, part, rule))

    # A point is contested if the first and the last label that took it differ: then every label of its image competes.
    contested = claims.last > claims.first
    owner = torch.where(contested, claims.favourite, claims.first)
    measured = torch.where(contested, torch.stack((claims.favourite_u, claims.favourite_t)), claims.taken)  # (2, B, N)
    if rule.keep:
        measured = measured * _kept(owner, measured[1], image, parts, rule.keep)
    label = torch.where(owner < num_labels, owner, 0)

    columns = label.flatten().expand(2, -1)
    largest = measured.new_zeros(2, num_labels).scatter_reduce(1, columns, measured.flatten(1), "amax")
    top_u, top_t = largest[:, label]  # the largest ones among all points of a point's label
    return Alignment(label, measured[1] * top_u / (top_t + EPSILON))


def selects_pairs(device: torch.device) -> bool:
    """Whether only what counts is measured, as pairs of a label and a point inside it. On a GPU, the host would wait
    for their number.
    """
    return device.type == "cpu"


def _parts(num_labels: int, num_points: int, device: torch.device) -> list[slice]:
    """The labels that are measured at once: all, if only the pairs inside a label take memory."""
    size = num_labels if selects_pairs(device) else max(PAIRS // num_points, 1)
    return [slice(first, min(first + size, num_labels)) for first in range(0, num_labels, size)]


def _claim(boxes: Tensor, scores: Tensor, points: Tensor, targets: Tensor, image: Tensor, part: slice, rule: AlignRule
           ) -> Claims:
    """The claims of the labels of a part. `image` is that of each label; other arguments as in `align`."""
    shape, num_labels = boxes.shape[:2], len(targets)
    labels, own_image = targets[part], image[part]
    kind, truth = labels[:, 1].long(), labels[:, 2:]
    margin = ((rule.floor - (truth[:, 2:] - truth[:, :2])) / 2).clamp(min=0)  # (n, 2)
    low, high = truth[:, :2] - margin, truth[:, 2:] + margin
    inside = torch.cat((points - low[:, None], high[:, None] - points), 2).amin(2) > INSIDE  # (n, N)
    u, t = _measure(boxes, scores, own_image, kind, truth, inside)
    rows = torch.arange(part.start, part.stop, device=boxes.device)[:, None]

    top = t.topk(min(rule.top, shape[1]), dim=1).indices  # (n, top)
    takes = inside.gather(1, top)
    places = (own_image[:, None] * shape[1] + top).flatten()  # among all points of all images

    def of_takers(start: float, values: Tensor, how: str) -> Tensor:
        """The largest or smallest of the values (..., n, top) of the labels that took a point, (..., B, N)."""
        values = torch.where(takes, values, start).flatten(-2)
        every_point = values.new_full((*values.shape[:-1], shape.numel()), start)
        return every_point.scatter_reduce(-1, places.expand_as(values), values, how).unflatten(-1, shape)

    def of_labels(start: float, values: Tensor, how: str) -> Tensor:
        """The largest or smallest of the values (n, N) of an image's labels, (B, N)."""
        return values.new_full(shape, start).scatter_reduce(0, own_image[:, None].expand_as(values), values, how)

    last = part.stop - 1
    favourite_u = of_labels(-1.0, u, "amax")
    favourite = of_labels(last, torch.where(u == favourite_u[own_image], rows, last), "amin")
    return Claims(
        first=of_takers(num_labels, rows, "amin"),
        last=of_takers(-1, rows, "amax"),
        taken=of_takers(0.0, torch.stack((u.gather(1, top), t.gather(1, top))), "amax"),
        favourite=favourite,
        favourite_u=favourite_u,
        favourite_t=t.gather(0, favourite - part.start),
    )


def _measure(boxes: Tensor, scores: Tensor, image: Tensor, kind: Tensor, truth: Tensor, inside: Tensor
             ) -> tuple[Tensor, Tensor]:
    """Overlap u and alignment t of every label and point, (n, N) each; 0 outside the label's box."""
    if selects_pairs(inside.device):
        label, point = inside.nonzero(as_tuple=True)
        pair_u = complete_iou(boxes[image[label], point], truth[label]).clamp(min=0)
        pair_t = scores[image[label], point, kind[label]] ** SCORE_POWER * pair_u**OVERLAP_POWER
        nothing = boxes.new_zeros(inside.shape)
        return nothing.index_put((label, point), pair_u), nothing.index_put((label, point), pair_t)
    predicted = boxes[image]  # (n, N, 4)
    true = truth[:, None].expand_as(predicted)
    u = complete_iou(predicted.flatten(0, 1), true.flatten(0, 1)).clamp(min=0).view(inside.shape)
    t = scores[image, :, kind] ** SCORE_POWER * u**OVERLAP_POWER
    return torch.where(inside, u, 0.0), torch.where(inside, t, 0.0)


def _kept(owner: Tensor, t: Tensor, image: Tensor, parts: list[slice], keep: int) -> Tensor:
    """1 for the `keep` points of largest t of each label, else 0, (B, N); `image` is that of each label."""
    num_points = t.shape[1]
    kept = t.new_zeros(t.numel())
    for part in parts:
        own_image = image[part]
        rows = torch.arange(part.start, part.stop, device=t.device)[:, None]
        own = owner[own_image] == rows  # (n, N)
        best = torch.where(own, t[own_image], -1.0).topk(min(keep, num_points), dim=1).indices
        places = own_image[:, None] * num_points + best
        kept = kept.scatter_reduce(0, places.flatten(), own.gather(1, best).flatten().float(), "amax")
    return kept.view_as(t)


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
    cells_per_row, cells_per_column = height / image_size[0], width / image_size[1]  # the size of a pixel in cells
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
