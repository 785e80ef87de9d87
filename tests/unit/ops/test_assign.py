from __future__ import annotations

from typing import NamedTuple

import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from ray_yolo.ops.assign import Assignment, assign

GRID, IMAGE_SIZE = (4, 5), (32, 40)  # 8 pixels per cell
UNIT = torch.tensor([[1.0, 1.0]])


def target(x: float, y: float, width: float = 1, height: float = 1, image: int = 0, class_: int = 0) -> list[float]:
    """A target row from centre and size in cells."""
    box = (x - width / 2, y - height / 2, x + width / 2, y + height / 2)
    return [image, class_, *(8 * side for side in box)]


class Found(NamedTuple):
    """The candidates of one level, with the place of each prediction."""

    image: Tensor
    row: Tensor
    column: Tensor
    anchor: Tensor
    boxes: Tensor
    classes: Tensor
    sizes: Tensor  # of the anchors


def places(assignment: Assignment, grid: tuple[int, int], num_anchors: int) -> Found:
    """The place of each prediction, whose number counts images, rows, columns and anchors, the last one fastest."""
    cell, anchor = assignment.prediction // num_anchors, assignment.prediction % num_anchors
    height, width = grid
    return Found(cell // (height * width), cell // width % height, cell % width, anchor, assignment.boxes,
                 assignment.classes, assignment.anchors)


def assigned(*targets: list[float], anchors: Tensor = UNIT, grid: tuple[int, int] = GRID) -> Found:
    rows = torch.tensor(targets).view(-1, 6)
    found = assign(rows, anchors[None], torch.tensor([grid]).float(), IMAGE_SIZE, anchor_t=4.0).kept()
    return places(found, grid, len(anchors))


def cells(found: Found) -> list[tuple[int, int]]:
    """Assigned (column, row), sorted."""
    return sorted(zip(found.column.tolist(), found.row.tolist(), strict=True))


def test_a_target_right_below_the_middle_of_its_cell_takes_three_cells() -> None:
    found = assigned(target(2.25, 1.75))
    boxes = dict(zip(zip(found.column.tolist(), found.row.tolist(), strict=True), found.boxes.tolist(), strict=True))
    assert boxes == {
        (2, 1): [0.25, 0.75, 1, 1],  # holds the centre
        (1, 1): [1.25, 0.75, 1, 1],  # to the left, as 0.25 < 0.5
        (2, 2): [0.25, -0.25, 1, 1],  # below, as 0.75 > 0.5
    }


CENTRES = (
    (2.5, 1.5, [(2, 1)]),  # the very middle: no neighbour is nearer
    (2.75, 1.5, [(2, 1), (3, 1)]),
    (2.5, 1.25, [(2, 0), (2, 1)]),
    (0.25, 1.5, [(0, 1)]),  # outermost cell: nothing to the left
    (1.25, 1.5, [(0, 1), (1, 1)]),  # next to it: the outermost cell takes part
    (4.75, 1.5, [(4, 1)]),
    (3.75, 1.5, [(3, 1), (4, 1)]),
    (2.5, 0.25, [(2, 0)]),
    (2.5, 3.75, [(2, 3)]),
    (2.5, 2.75, [(2, 2), (2, 3)]),
    (1.0, 1.5, [(1, 1), (1, 1)]),  # not beyond 1: nothing to the left; half a cell to the right is the same cell
    (2.0, 1.5, [(1, 1), (2, 1), (2, 1)]),
    (5.0, 1.5, [(4, 1), (4, 1)]),  # on the border of the image: clamped, and its left neighbour is the last cell
    (2.5, 4.0, [(2, 3), (2, 3)]),
)


def test_cells_of_a_centre() -> None:
    for x, y, expected in CENTRES:
        assert cells(assigned(target(x, y))) == expected, (x, y)


def test_a_clamped_target_is_measured_from_the_cell_it_was_clamped_to() -> None:
    assert assigned(target(5.0, 1.5)).boxes[0].tolist() == [1.0, 0.5, 1.0, 1.0]


def test_every_side_differs_by_strictly_less_than_the_limit() -> None:
    fits = {(1, 1): True, (4, 1): False, (1, 4): False, (0.25, 1): False, (1, 0.25): False, (3.875, 0.375): True,
            (0, 1): False}
    for sides, expected in fits.items():
        assert (len(assigned(target(2.5, 1.5, *sides)).image) > 0) == expected, sides


def test_a_target_takes_every_anchor_it_fits() -> None:
    found = assigned(target(2.5, 1.5, 2, 2), anchors=torch.tensor([[1.0, 1.0], [9.0, 9.0], [3.0, 1.0]]))
    assert sorted(found.anchor.tolist()) == [0, 2]


def test_images_and_classes_go_with_their_targets() -> None:
    found = assigned(target(2.5, 1.5, image=3, class_=7), target(0.5, 0.5, image=1, class_=2))
    rows = zip(found.image.tolist(), found.classes.tolist(), found.column.tolist(), strict=True)
    assert sorted(rows) == [(1, 2, 0), (3, 7, 2)]


def test_pixels_become_cells_on_both_axes() -> None:
    """A grid of other proportions than the image: 16 pixels per cell down, 8 across."""
    found = assigned([0.0, 0, 16, 16, 24, 32], grid=(2, 5))  # 8 x 16 pixels around (20, 24)
    assert found.boxes[0].tolist() == [0.5, 0.5, 1.0, 1.0]
    assert (found.row[0].item(), found.column[0].item()) == (1, 2)


def test_no_targets_no_candidates() -> None:
    assert assigned().boxes.shape == (0, 4)


def test_number_of_candidates_depends_on_the_number_of_targets_alone() -> None:
    """What a GPU need not be waited for."""
    targets = torch.tensor([target(2.25, 1.75), target(0.5, 0.5, 9, 9)])
    found = assign(targets, torch.ones(1, 3, 2), torch.tensor([GRID]).float(), IMAGE_SIZE, anchor_t=4.0)
    assert {len(field) for field in found[:5]} == {5 * 3 * 2}
    assert found.sizes == (5 * 3 * 2,)


def test_all_levels_at_once_are_each_level_alone() -> None:
    draw = torch.Generator().manual_seed(0)
    corners = torch.rand(20, 2, 2, generator=draw) * torch.tensor([40.0, 32.0])
    targets = torch.cat((torch.randint(3, (20, 2), generator=draw).float(), corners.amin(1), corners.amax(1)), 1)
    anchors = torch.rand(3, 2, 2, generator=draw) * 3 + 0.5
    grids = torch.tensor([[8.0, 10], [4, 5], [2, 3]])
    together = assign(targets, anchors, grids, IMAGE_SIZE, anchor_t=4.0).kept()
    alone = [assign(targets, anchors[[level]], grids[[level]], IMAGE_SIZE, anchor_t=4.0).kept() for level in range(3)]
    assert together.sizes == tuple(each.sizes[0] for each in alone)
    assert min(together.sizes) > 0
    for field in ("prediction", "anchors", "boxes", "classes", "valid"):
        assert torch.equal(getattr(together, field), torch.cat([getattr(each, field) for each in alone])), field


def test_each_candidate_has_the_sides_of_its_anchor() -> None:
    anchors = torch.tensor([[1.0, 1.0], [3.0, 1.0]])
    found = assigned(target(2.5, 1.5, 2, 2), anchors=anchors)
    assert torch.equal(found.sizes, anchors[found.anchor])


@given(
    x=st.floats(0, 5, width=32), y=st.floats(0, 4, width=32),
    width=st.floats(2**-7, 20, width=32), height=st.floats(2**-7, 20, width=32),
)
def test_assigned_predictions_can_reach_their_target(x: float, y: float, width: float, height: float) -> None:
    """Decoded centres span -0.5..1.5 cells, decoded sides 0..4 anchors."""
    found = assigned(target(x, y, width, height))
    centre, size = found.boxes[:, :2], found.boxes[:, 2:]
    assert ((centre >= -0.5001) & (centre <= 1.5001)).all()
    assert (size <= 4).all()
    assert ((found.column >= 0) & (found.column < 5) & (found.row >= 0) & (found.row < 4)).all()
