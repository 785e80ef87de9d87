"""Task-aligned assignment against the rules written as loops, and one label by hand."""

from __future__ import annotations

from unittest.mock import patch

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from ray_yolo.ops import assign
from ray_yolo.ops.assign import AlignRule, align
from ray_yolo.ops.boxes import complete_iou
from tests.support.peak_memory import PeakMemory


def slow_align(boxes: Tensor, scores: Tensor, places: Tensor, targets: Tensor
               ) -> tuple[dict[tuple[int, int], tuple[int, float]], set[int]]:
    """(label, weight) by (image, point), one label and one point after the other.

    Also the images in which it is open who takes what: of the points inside of it that it is not aligned with, a label
    takes any, as they are worth no more than those outside, and one may be taken by another label, too.
    """
    aligned: list[dict[int, tuple[float, float]]] = []  # by label: point inside of it -> (t, u)
    takers: dict[tuple[int, int], list[int]] = {}
    perhaps: dict[tuple[int, int], set[int]] = {}
    for image, kind, x1, y1, x2, y2 in targets.tolist():
        found = {}
        for point, (x, y) in enumerate(places.tolist()):
            if min(x - x1, y - y1, x2 - x, y2 - y) > 1e-9:
                truth = torch.tensor([[x1, y1, x2, y2]])
                u = max(float(complete_iou(boxes[int(image), point][None], truth)), 0.0)
                found[point] = (float(scores[int(image), point, int(kind)]) ** 0.5 * u**6, u)
        aligned.append(found)
        best = sorted(found, key=lambda point: -found[point][0])[:10]
        for point in found:
            if found[point][0] == 0:
                perhaps.setdefault((int(image), point), set()).add(len(aligned) - 1)
        for point in best:
            takers.setdefault((int(image), point), []).append(len(aligned) - 1)
    owners: dict[tuple[int, int], int] = {}
    for (image, point), labels in takers.items():
        if len(labels) > 1:
            labels = [label for label, found in enumerate(aligned) if targets[label, 0] == image and point in found]
        owners[image, point] = max(labels, key=lambda label: aligned[label][point][1])
    weights = {}
    for (image, point), label in owners.items():
        own = [aligned[label][p] for (i, p), owner in owners.items() if owner == label]
        top_t, top_u = max(t for t, _ in own), max(u for _, u in own)
        weights[image, point] = label, aligned[label][point][0] * top_u / (top_t + 1e-9)
    return weights, {place[0] for place, labels in perhaps.items() if len(labels | set(takers.get(place, ()))) > 1}


def grid(height: int, width: int) -> Tensor:
    rows, columns = torch.meshgrid(torch.arange(height), torch.arange(width), indexing="ij")
    return (torch.stack((columns, rows), 2).flatten(0, 1) + 0.5) * 8


def assert_as_the_loops(boxes: Tensor, scores: Tensor, places: Tensor, targets: Tensor) -> set[int]:
    """The assignment equals that of the loops; returns the images left out, in which it is open."""
    label, weight = align(boxes, scores, places, targets)
    expected, unclear = slow_align(boxes, scores, places, targets)
    for image in set(range(len(boxes))) - unclear:
        for point in range(len(places)):
            owner, value = expected.get((image, point), (0, 0.0))
            assert weight[image, point].item() == pytest.approx(value, abs=1e-6), (image, point)
            if value > 1e-6:
                assert label[image, point].item() == owner, (image, point)
    return unclear


def draw_targets(generator: torch.Generator, num: int, low: Tensor, size: Tensor) -> Tensor:
    image, kind = (torch.randint(count, (num, 1), generator=generator) for count in (2, 3))
    return torch.cat((image, kind, low, low + size), 1)


@settings(max_examples=40, deadline=None)
@given(seed=st.integers(0, 2**32 - 1), num=st.integers(0, 14))
def test_the_assignment_is_that_of_the_obvious_loops(seed: int, num: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    places = grid(5, 7)
    centres = places + torch.randn(2, 35, 2, generator=generator) * 6
    sides = 4 + torch.rand(2, 35, 2, generator=generator) * 30
    boxes, scores = torch.cat((centres - sides / 2, centres + sides / 2), 2), torch.rand(2, 35, 3, generator=generator)
    low, size = (torch.rand(num, 2, generator=generator) * length for length in (30, 40))
    assert_as_the_loops(boxes, scores, places, draw_targets(generator, num, low, size + 3))


def test_a_label_that_covers_one_cell_by_hand() -> None:
    places = grid(2, 2)  # middles at 4 and 12
    boxes = torch.tensor([[[0.0, 0, 8, 8], [8, 0, 16, 8], [0, 8, 8, 16], [8, 8, 16, 16]]])
    scores = torch.full((1, 4, 2), 0.25)
    label, weight = align(boxes, scores, places, torch.tensor([[0.0, 1, 8, 0, 16, 8]]))
    # u = 1, t = 0.5: the one point inside has the weight t U / (T + 1e-9) = 1
    torch.testing.assert_close(weight, torch.tensor([[0.0, 1, 0, 0]]))
    assert label.eq(0).all()


def test_a_point_on_the_edge_of_a_label_is_outside() -> None:
    places, boxes = torch.tensor([[8.0, 4.0]]), torch.tensor([[[8.0, 0, 16, 8]]])
    _, weight = align(boxes, torch.ones(1, 1, 1), places, torch.tensor([[0.0, 0, 8, 0, 16, 8]]))
    assert weight.eq(0).all()


def test_a_point_that_two_labels_take_goes_to_the_larger_overlap() -> None:
    places, boxes = torch.tensor([[8.0, 8.0]]), torch.tensor([[[0.0, 0, 16, 16]]])
    targets = torch.tensor([[0.0, 0, 0, 0, 20, 20], [0, 1, 0, 0, 17, 16]])
    for order in ([0, 1], [1, 0]):
        label, weight = align(boxes, torch.full((1, 1, 2), 0.5), places, targets[order])
        assert order[int(label[0, 0])] == 1
        assert weight[0, 0].item() == pytest.approx(16 / 17, rel=0.02)  # U of its only point


def test_a_point_that_two_labels_take_goes_to_a_third_that_it_overlaps_more() -> None:
    """A label of a class that the point hardly sees takes ten others, which it sees."""
    places = torch.full((11, 2), 8.0)
    boxes = torch.tensor([0.0, 0, 16, 16]).expand(1, 11, 4).clone()
    boxes[0, 1:, 2:] = 17  # the others overlap the third label a little less
    scores = torch.full((1, 11, 2), 0.5)
    scores[0, 0, 1] = 1e-9
    targets = torch.tensor([[0.0, 0, 0, 0, 20, 20], [0, 0, 0, 0, 21, 21], [0, 1, 0, 0, 16, 16]])
    scores[0, 1:, 0] = 0.0  # so that the first two take the first point
    label, weight = align(boxes, scores, places, targets)
    assert label[0, 0] == 2
    taken = align(boxes, scores, places, targets[2:]).weight[0, 0]
    assert taken == 0  # alone, it does not
    assert weight[0, 0] > 0


def test_a_label_keeps_the_best_aligned_of_its_points() -> None:
    """Two labels want the same point; the loser has its next best among those that it took."""
    places = grid(1, 3)
    boxes = torch.tensor([[[0.0, 0, 24, 8], [0, 0, 22, 8], [0, 0, 20, 8]]])
    scores = torch.tensor([[[0.9, 0.9], [0.8, 0.8], [0.7, 0.7]]])
    targets = torch.tensor([[0.0, 0, 0, 0, 24, 8], [0, 1, 0, 0, 23, 8]])
    label, weight = align(boxes, scores, places, targets, AlignRule(top=7, keep=1))
    kept = {int(label[0, point]): point for point in range(3) if weight[0, point] > 0}
    assert kept == {0: 0, 1: 1}
    assert (align(boxes, scores, places, targets).weight > 0).sum() == 3


def test_the_best_aligned_point_is_not_the_one_of_the_largest_overlap() -> None:
    """t is 0.25^0.5 = 0.5 for the first, 0.81^0.5 (23/24)^6 = 0.70 for the second, by IoU."""
    boxes, scores = torch.tensor([[[0.0, 0, 24, 8], [0, 0, 23, 8]]]), torch.tensor([[[0.25], [0.81]]])
    target = torch.tensor([[0.0, 0, 0, 0, 24, 8]])
    _, weight = align(boxes, scores, grid(1, 2), target, AlignRule(keep=1))
    assert weight[0].gt(0).tolist() == [False, True]


@pytest.mark.parametrize(("floor", "points"), [(0.0, 0), (16.0, 4)])
def test_a_small_label_has_points_of_the_size_that_it_counts_as(floor: float, points: int) -> None:
    """A label of 6 px where four cells of 8 px meet; its overlap is that of its true box."""
    places = grid(4, 4)
    boxes = torch.cat((places - 6, places + 6), 1)[None]
    target = torch.tensor([[0.0, 0, 13, 13, 19, 19]])
    _, weight = align(boxes, torch.ones(1, 16, 1), places, target, AlignRule(floor=floor))
    assert int((weight > 0).sum()) == points
    near = torch.cat((places[5] - 6, places[5] + 6))[None]
    overlap = float(complete_iou(near, target[:, 2:])) if points else 0.0
    assert float(weight.max()) == pytest.approx(overlap * overlap**6 / (overlap**6 + 1e-9), abs=1e-6)


def draw_crowd(seed: int, num: int, num_images: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Predictions of 48 points and labels that overlap each other; some are there twice, some cover no point."""
    generator = torch.Generator().manual_seed(seed)
    places = grid(6, 8)
    centres = places + torch.randn(num_images, 48, 2, generator=generator) * 5
    sides = 4 + torch.rand(num_images, 48, 2, generator=generator) * 30
    boxes = torch.cat((centres - sides / 2, centres + sides / 2), 2)
    scores = torch.rand(num_images, 48, 3, generator=generator)
    low = torch.rand(num, 2, generator=generator) * 50 - 4
    size = torch.rand(num, 2, generator=generator) * 30 + 1
    image, kind = (torch.randint(count, (num, 1), generator=generator) for count in (num_images, 3))
    targets = torch.cat((image, kind, low, low + size), 1)
    return boxes, scores, places, torch.cat((targets, targets[::5]))


@pytest.mark.parametrize("rule", [AlignRule(), AlignRule(floor=16.0), AlignRule(top=7, keep=1), AlignRule(keep=2)])
@settings(max_examples=10, deadline=None)
@given(seed=st.integers(0, 2**32 - 1), num=st.integers(1, 40), num_images=st.integers(1, 3),
       at_once=st.sampled_from([1, 7, 1000]))
def test_the_assignment_of_a_gpu_is_that_of_a_cpu(rule: AlignRule, seed: int, num: int, num_images: int, at_once: int
                                                  ) -> None:
    """A GPU measures all pairs, some labels at once. Values differ by the last bit: vectors round differently."""
    crowd = draw_crowd(seed, num, num_images)
    expected = align(*crowd, rule)
    with patch.object(assign, "selects_pairs", lambda device: False), patch.object(assign, "PAIRS", 48 * at_once):
        found = align(*crowd, rule)
    torch.testing.assert_close(found.weight, expected.weight, rtol=1e-5, atol=1e-6)
    counts = expected.weight > 1e-6
    assert torch.equal(found.label[counts], expected.label[counts])
    assert found.label.max() < len(crowd[3])


def test_the_memory_of_a_crowd_does_not_grow_with_its_labels() -> None:
    """640 px, on tensors without values. Every pair at once took 3.5 GiB."""
    def peak(labels_per_image: int) -> int:
        with torch.device("meta"):
            inputs = (torch.empty(16, 8400, 4), torch.empty(16, 8400, 80), torch.empty(8400, 2),
                      torch.empty(16 * labels_per_image, 6))
        with PeakMemory() as memory:
            align(*inputs)
        return memory.bytes

    crowd = peak(300)
    of_pairs, of_points = 100 * assign.PAIRS, 80 * 16 * 8400  # bytes
    assert crowd < of_pairs + of_points < 1e9
    assert peak(600) < 1.02 * crowd


def test_a_prediction_that_is_not_a_number_gives_no_finite_weights() -> None:
    """The step has to be skipped, whether one label took the point, or several."""
    for num in (1, 2):
        for place in (0, 1):
            boxes, scores = torch.tensor([[[0.0, 0, 16, 16]]]), torch.full((1, 1, 1), 0.5)
            (boxes, scores)[place][0, 0, 0] = torch.nan
            targets = torch.tensor([[0.0, 0, 0, 0, 20, 20], [0, 0, 0, 0, 17, 16]])[:num]
            assert align(boxes, scores, torch.tensor([[8.0, 8.0]]), targets).weight.isnan().all(), (num, place)
