from __future__ import annotations

import warnings

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor
from torchvision.ops import box_convert, box_iou, complete_box_iou_loss

from ray_yolo.ops.boxes import complete_iou, corners, grid_points, paired_iou, pairwise_iou, to_original


def random_boxes(num: int, seed: int) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    low = torch.rand(num, 2, generator=generator) * 50
    return torch.cat((low, low + 1 + torch.rand(num, 2, generator=generator) * 50), 1)


def test_corners_of_a_box_given_by_centre_and_size() -> None:
    assert corners(torch.tensor([[5.0, 4.5, 6.0, 1.0]])).tolist() == [[2.0, 4.0, 8.0, 5.0]]


def test_corners_are_those_of_torchvision() -> None:
    boxes = random_boxes(20, seed=0).view(4, 5, 4)
    torch.testing.assert_close(corners(boxes), box_convert(boxes, "cxcywh", "xyxy"))


def test_paired_overlap_is_the_diagonal_of_all_pairs() -> None:
    a, b = random_boxes(50, seed=1), random_boxes(50, seed=2)
    torch.testing.assert_close(paired_iou(a, b), box_iou(a, b).diagonal())


def test_overlap_of_points_is_zero() -> None:
    assert paired_iou(torch.ones(1, 4), torch.ones(1, 4)).item() == 0


def test_complete_iou_of_shifted_squares_worked_by_hand() -> None:
    a, b = torch.tensor([[0.0, 0, 2, 2]]), torch.tensor([[1.0, 0, 3, 2]])
    # overlap 2 of 6; centres 1 apart; the enclosing box is 3 x 2, its diagonal squared 13; same aspect ratio
    assert complete_iou(a, b).item() == pytest.approx(2 / 6 - 1 / 13, abs=1e-6)


def test_iou_of_all_pairs_is_torchvisions_to_the_bit() -> None:
    corners = torch.rand(2, 40, 2, 2, generator=torch.Generator().manual_seed(3)).sort(2).values.flatten(2)
    for a, b in (corners, corners.double() * 640):
        overlaps = pairwise_iou(a.numpy(), b.numpy())
        assert torch.equal(torch.from_numpy(overlaps), box_iou(a, b))
        assert pairwise_iou(a.numpy(), b[:0].numpy()).shape == (40, 0)
    assert pairwise_iou(a[:1].numpy(), a[:1].numpy()).item() == 1
    assert np.isnan(pairwise_iou(np.zeros((1, 4)), np.zeros((1, 4)))).item()


def test_complete_iou_and_its_gradient_are_torchvisions() -> None:
    a, b = random_boxes(200, seed=3).requires_grad_(), random_boxes(200, seed=4)
    ours, theirs = 1 - complete_iou(a, b), complete_box_iou_loss(a, b)
    torch.testing.assert_close(ours, theirs)
    torch.testing.assert_close(torch.autograd.grad(ours.sum(), a), torch.autograd.grad(theirs.sum(), a))


@given(seed=st.integers(0, 1000), factor=st.floats(0.1, 10))
def test_complete_iou_does_not_change_when_both_boxes_are_scaled_or_swapped(seed: int, factor: float) -> None:
    a, b = random_boxes(5, seed), random_boxes(5, seed + 1)
    torch.testing.assert_close(complete_iou(b, a), complete_iou(a, b))
    torch.testing.assert_close(complete_iou(a * factor, b * factor), complete_iou(a, b), rtol=1e-4, atol=1e-5)


@given(seed=st.integers(0, 1000))
def test_complete_iou_is_one_for_equal_boxes_and_less_for_others(seed: int) -> None:
    a, b = random_boxes(5, seed), random_boxes(5, seed + 1)
    torch.testing.assert_close(complete_iou(a, a), torch.ones(5))
    assert (complete_iou(a, b) < 1 - 1e-4).all()
    assert (complete_iou(a, b) > -1.5).all()


def test_gradient_of_boxes_without_area_is_finite() -> None:
    flat = torch.tensor([[1.0, 1, 3, 1], [1, 1, 1, 1]], requires_grad=True)
    complete_iou(flat, torch.tensor([[0.0, 0, 2, 2], [1, 1, 1, 1]])).sum().backward()
    assert flat.grad is not None
    assert flat.grad.isfinite().all()


def test_pairs_of_different_length_are_refused() -> None:
    with pytest.raises(ValueError, match=r"\(2, 4\) and \(3, 4\)"):
        complete_iou(torch.zeros(2, 4), torch.zeros(3, 4))


def test_letterboxed_boxes_return_to_where_they_came_from() -> None:
    # 100 x 200 (height, width) enlarged 1.5 x 2 times with 20 rows above and 7 columns to the left
    original = np.array([[10, 20, 110, 80]], np.float32)
    letterboxed = original * np.array([2, 1.5, 2, 1.5], np.float32) + np.array([7, 20, 7, 20], np.float32)
    found = to_original(letterboxed, (1.5, 2.0), (20, 7), (100, 200))
    assert found.tolist() == original.tolist()
    assert found.dtype == np.float32


def test_boxes_beyond_the_original_image_are_clipped_to_it() -> None:
    boxes = np.array([[-50.0, -60, 5000, 6000]])
    assert to_original(boxes, (1.0, 1.0), (0, 0), (30, 40)).tolist() == [[0, 0, 40, 30]]


def test_no_boxes_remain_no_boxes() -> None:
    none = torch.zeros(0, 4)
    assert complete_iou(none, none).shape == (0,)
    assert to_original(none.numpy(), (1.0, 1.0), (0, 0), (30, 40)).shape == (0, 4)


def test_a_trace_of_points_gives_those_of_any_other_size() -> None:
    """Exported models take images of other sizes than the one that they were traced with."""
    def points(large: Tensor, small: Tensor) -> tuple[Tensor, Tensor]:
        return grid_points((large, small), (8, 16))

    def levels(height: int, width: int) -> tuple[Tensor, Tensor]:
        return torch.zeros(2, 5, 2 * height, 2 * width), torch.zeros(2, 5, height, width)

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch announces TorchScript's end
        traced = torch.jit.trace(points, levels(2, 3))
    for found, expected in zip(traced(*levels(5, 4)), points(*levels(5, 4)), strict=True):
        assert torch.equal(found, expected)
    assert points(*levels(1, 1))[0].tolist() == [[4, 4], [12, 4], [4, 12], [12, 12], [8, 8]]
    assert points(*levels(1, 1))[1].tolist() == [[8]] * 4 + [[16]]
