"""Which predictions answer for which targets. Depends on targets and anchors alone, never on predictions.

Shapes depend on the number of targets alone too: every pair of target and anchor yields five candidate cells, and
`valid` says which of them count. So nothing waits for a GPU to tell how many there are.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor


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
