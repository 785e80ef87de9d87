"""The loss without anchors: each term by hand, sums that add up, and no say of the order of labels and images."""

from __future__ import annotations

import math
from dataclasses import dataclass

import pytest
import torch
from torch import Tensor
from torch.nn.functional import binary_cross_entropy_with_logits
from torchvision.ops import complete_box_iou_loss

from ray_yolo.config.sections import LossConfig
from ray_yolo.models.loss_anchor_free import AnchorFreeLoss
from ray_yolo.ops.assign import align

GAINS = LossConfig(box=7.5, cls=0.5, dfl=1.5)


@dataclass
class Head:
    strides: tuple[int, ...]
    bins: int = 16


def build(*strides: int) -> AnchorFreeLoss:
    return AnchorFreeLoss(Head(strides or (8, 16)), GAINS)


def predict(num_images: int, seed: int = 0) -> list[Tensor]:
    """Random raw predictions of two levels for images of 32 x 48 pixels."""
    generator = torch.Generator().manual_seed(seed)
    shapes = [(num_images, 64 + 3, 32 // s, 48 // s) for s in (8, 16)]
    return [torch.randn(shape, generator=generator).requires_grad_() for shape in shapes]


def random_targets(num: int, num_images: int = 2, seed: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    low = torch.rand(num, 2, generator=generator) * torch.tensor([30.0, 20])
    return torch.cat((torch.randint(num_images, (num, 1), generator=generator),
                      torch.randint(3, (num, 1), generator=generator),
                      low, low + 4 + torch.rand(num, 2, generator=generator) * 14), 1)


def one_cell() -> Tensor:
    """Two cells of 8 pixels whose sides are 0 or 1 cells away with even chances, and one class with the score 1/2."""
    level = torch.full((1, 64 + 1, 1, 2), -100.0)
    for side in range(4):
        level[0, 16 * side : 16 * side + 2] = 0.0
    level[0, 64] = 0.0
    return level.requires_grad_()


def test_every_term_of_a_label_that_covers_one_cell_by_hand() -> None:
    """The label's own sides are 1/2 cell away."""
    loss = build(8)
    sums = loss.measure([one_cell()], torch.tensor([[0.0, 0, 8, 0, 16, 8]]), (8, 16))
    # The box is the label: u = 1, s = 1/2, t = s^0.5, weight t U / (T + 1e-9) = 1 = W.
    box, cls, dfl = loss.terms(*sums).tolist()
    assert sums.counts.tolist() == [[pytest.approx(1.0)]] * 3
    assert box == pytest.approx(0.0, abs=1e-5)
    assert cls == pytest.approx(0.5 * 2 * math.log(2), rel=1e-6)  # one score of 1, one of 0, both predicted 1/2
    # distance 1/2 between bins 0 and 1, each with the chance 1/2
    assert dfl == pytest.approx(1.5 * math.log(2), rel=1e-6)


def test_distances_beyond_the_last_bin_are_its() -> None:
    level = torch.zeros(1, 65, 1, 1, requires_grad=True)
    loss = build(8)
    numerators, counts = loss.measure([level], torch.tensor([[0.0, 0, -600, -600, 600, 600]]), (8, 8))
    weight = float(counts[0])
    assert numerators[2].item() == pytest.approx(weight * math.log(16), rel=1e-5)  # all bins alike


def test_a_distance_beyond_the_bins_counts_as_14_99() -> None:
    """Between the last two bins, whose chances differ here, the last one has 99 hundredths."""
    level = torch.zeros(1, 65, 1, 1)
    for side in range(4):
        level[0, 16 * side + 14], level[0, 16 * side + 15] = 2.0, 5.0
    label = torch.tensor([[0.0, 0, 4 - 130, 4 - 130, 4 + 130, 4 + 130]])  # 16.25 cells to each side
    numerators, counts = build(8).measure([level], label, (8, 8))
    total = math.log(14 + math.exp(2) + math.exp(5))
    assert counts[2].item() > 0.5
    assert (numerators[2] / counts[2]).item() == pytest.approx(total - 0.01 * 2 - 0.99 * 5, rel=1e-5)


def test_the_terms_of_two_levels_are_those_of_plain_loops() -> None:
    """Given the assignment. The predicted boxes of both levels have some 120 pixels, the labels 90 to 140 of 160."""
    generator = torch.Generator().manual_seed(0)
    levels = [torch.randn(2, 64 + 3, 160 // stride, 160 // stride, generator=generator) for stride in (8, 16)]
    levels[1][:, :64].view(2, 4, 16, 10, 10)[:, :, 2:6] += 4
    low, size = (torch.rand(6, 2, generator=generator) * length for length in (20, 50))
    kinds = (torch.randint(count, (6, 1), generator=generator) for count in (2, 3))
    targets = torch.cat((*kinds, low, low + size + 90), 1)
    points = [(image, (column + 0.5) * stride, (row + 0.5) * stride, stride, level[image, :, row, column])
              for image in range(2) for stride, level in zip((8, 16), levels, strict=True)
              for row in range(160 // stride) for column in range(160 // stride)]
    boxes, scores = [], []
    for _, x, y, stride, logits in points:
        left, top, right, bottom = (logits[:64].view(4, 16).softmax(1) @ torch.arange(16.0) * stride).tolist()
        boxes.append([x - left, y - top, x + right, y + bottom])
        scores.append(logits[64:].sigmoid().tolist())
    places = torch.tensor([point[1:3] for point in points[: len(points) // 2]])
    label, weight = align(torch.tensor(boxes).view(2, -1, 4), torch.tensor(scores).view(2, -1, 3), places, targets)
    box, cls, dfl = 0.0, 0.0, 0.0
    for (_, x, y, stride, logits), own, row, share in zip(
            points, boxes, label.flatten().tolist(), weight.flatten().tolist(), strict=True):
        x1, y1, x2, y2 = targets[row, 2:].tolist()
        wanted = torch.zeros(3)
        wanted[int(targets[row, 1])] = share
        cls += float(binary_cross_entropy_with_logits(logits[64:], wanted, reduction="sum"))
        box += share * float(complete_box_iou_loss(torch.tensor([own]), targets[row : row + 1, 2:]))
        chances = logits[:64].view(4, 16).log_softmax(1).tolist()
        for side, distance in enumerate(edge / stride for edge in (x - x1, y - y1, x2 - x, y2 - y)):
            place = min(max(distance, 0), 14.99)
            lower = int(place)
            dfl -= share * ((lower + 1 - place) * chances[side][lower]
                            + (place - lower) * chances[side][lower + 1]) / 4
    numerators, counts = build().measure(levels, targets, (160, 160))
    assert (weight.view(2, -1)[:, :400] > 0).any()
    assert (weight.view(2, -1)[:, 400:] > 0).any()
    assert numerators[:, 0].tolist() == pytest.approx([box, cls, dfl], rel=1e-4)
    assert counts[:, 0].tolist() == pytest.approx([float(weight.sum())] * 3, rel=1e-5)


@pytest.mark.parametrize(("small_labels", "points"), [(False, 0), (True, 4)])
def test_a_small_label_between_four_points_has_them_only_if_the_family_says_so(small_labels: bool, points: int) -> None:
    loss = AnchorFreeLoss(Head((8, 16, 32)), GAINS, small_labels=small_labels)
    levels = [torch.zeros(1, 64 + 1, 64 // stride, 64 // stride) for stride in (8, 16, 32)]
    for side in range(4):
        levels[0][0, 16 * side + 1] = 100.0  # boxes of stride 8: 16 px, around each point
    sums = loss.measure(levels, torch.tensor([[0.0, 0, 29, 29, 35, 35]]), (64, 64))
    assert (sums.numerators[0] > 0).item() == (points > 0)
    assert loss.rules[0].floor == (16.0 if small_labels else 0.0)


def test_few_points_count_as_one() -> None:
    numerators = torch.tensor([[1.0], [2.0], [3.0]])
    assert build().terms(numerators, torch.full((3, 1), 0.25)).tolist() == [7.5, 1.0, 4.5]
    assert build().terms(numerators, torch.full((3, 1), 2.0)).tolist() == [3.75, 0.5, 2.25]


def test_sums_of_two_halves_are_those_of_the_whole() -> None:
    loss, levels, targets = build(), predict(4), random_targets(12, 4)
    whole = loss.measure(levels, targets, (32, 48))
    parts = []
    for first in (0, 2):
        mine = targets[(targets[:, 0] >= first) & (targets[:, 0] < first + 2)] - torch.tensor([first, 0, 0, 0, 0, 0])
        parts.append(loss.measure([level[first : first + 2] for level in levels], mine, (32, 48)))
    for together, first, second in zip(whole, *parts, strict=True):
        torch.testing.assert_close(together, first + second, rtol=1e-5, atol=1e-6)


def test_the_order_of_labels_and_images_has_no_say() -> None:
    loss, levels, targets = build(), predict(3), random_targets(10, 3)
    expected = loss.measure(levels, targets, (32, 48))
    shuffled = targets[torch.randperm(10, generator=torch.Generator().manual_seed(1))]
    moved = targets.clone()
    moved[:, 0] = 2 - moved[:, 0]
    for found in (loss.measure(levels, shuffled, (32, 48)),
                  loss.measure([level.flip(0) for level in levels], moved, (32, 48))):
        torch.testing.assert_close(found.numerators, expected.numerators, rtol=1e-5, atol=1e-5)
        torch.testing.assert_close(found.counts, expected.counts, rtol=1e-5, atol=1e-5)


def test_images_without_labels_cost_their_scores_and_reach_every_gradient() -> None:
    loss, levels = build(), predict(2)
    numerators, counts = loss.measure(levels, torch.zeros(0, 6), (32, 48))
    assert counts.eq(0).all()
    assert numerators.detach().flatten().tolist() == [0, pytest.approx(sum(
        float(torch.nn.functional.softplus(level[:, 64:].detach()).sum()) for level in levels), rel=1e-5), 0]
    loss.terms(numerators, counts).sum().backward()
    assert all(level.grad is not None for level in levels)


def test_the_assignment_has_no_gradient() -> None:
    """The class term's gradient is that of a cross-entropy, score minus target, and boxes have none of it."""
    level = one_cell()
    numerators, _ = build(8).measure([level], torch.tensor([[0.0, 0, 8, 0, 16, 8]]), (8, 16))
    (gradient,) = torch.autograd.grad(numerators[1].sum(), level)
    torch.testing.assert_close(gradient[0, 64, 0], torch.tensor([0.5, 0.5 - 1]))
    assert gradient[0, :64].eq(0).all()


def test_no_images_no_numbers() -> None:
    sums = build().measure([level[:0] for level in predict(1)], torch.zeros(0, 6), (32, 48))
    assert sums.numerators.eq(0).all()
    assert sums.counts.eq(0).all()
