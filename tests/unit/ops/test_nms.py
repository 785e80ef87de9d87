"""Suppression against an obvious loop, and the rules of selection by hand."""

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from ray_yolo.ops import nms
from ray_yolo.ops.nms import Selector, select


def prediction(box: tuple[float, float, float, float], chance: float, *classes: float) -> list[float]:
    """A row [x1, y1, x2, y2, scores...] of a box that holds an object, of each class, with these chances."""
    return [*box, *(chance * each for each in classes)]


def run(rows: list[list[float]], **changes: Any) -> list[list[float]]:
    options: dict[str, Any] = {"confidence": 0.25, "iou": 0.45, "max_detections": 300, "multi_label": False}
    predictions = torch.tensor([rows])
    (detections,) = select(predictions[..., :4], predictions[..., 4:], **(options | changes))
    return [[round(value, 4) for value in row] for row in detections.tolist()]


def overlap(a: list[float], b: list[float]) -> float:
    width = min(a[2], b[2]) - max(a[0], b[0])
    height = min(a[3], b[3]) - max(a[1], b[1])
    both = max(width, 0.0) * max(height, 0.0)
    either = (a[2] - a[0]) * (a[3] - a[1]) + (b[2] - b[0]) * (b[3] - b[1]) - both
    return both / either if either else 0.0


def slow_select(
    rows: Tensor, confidence: float, iou: float, max_detections: int, multi_label: bool, agnostic: bool
) -> list[list[float]]:
    """The rules of selection, one after the other."""
    candidates = []
    for row in rows:
        scores = row[4:].tolist()
        for index in range(len(scores)) if multi_label else [scores.index(max(scores))]:
            if scores[index] > confidence:
                candidates.append([*row[:4].tolist(), scores[index], float(index)])
    candidates.sort(key=lambda c: -c[4])  # stable
    kept: list[list[float]] = []
    for one in candidates[: nms.MAX_CANDIDATES]:
        rivals = [k for k in kept if agnostic or k[5] == one[5]]
        if all(overlap(one, rival) <= iou for rival in rivals):
            kept.append(one)
    return kept[:max_detections]


@settings(max_examples=150, deadline=None)
@given(
    seed=st.integers(0, 2**32 - 1), num=st.integers(0, 80), num_classes=st.integers(1, 4),
    iou=st.sampled_from([0.25, 0.45, 0.6]), max_detections=st.sampled_from([1, 5, 300]),
    multi_label=st.booleans(), agnostic=st.booleans(),
)
def test_selection_equals_the_obvious_loop(
    seed: int, num: int, num_classes: int, iou: float, max_detections: int, multi_label: bool, agnostic: bool
) -> None:
    generator = torch.Generator().manual_seed(seed)
    # Whole coordinates and few scores: many equal boxes, equal scores and overlaps on the threshold.
    corners = torch.randint(-8, 12, (num, 2), generator=generator)
    sizes = torch.randint(1, 12, (num, 2), generator=generator)
    scores = torch.randint(0, 5, (num, num_classes), generator=generator) / 4
    rows = torch.cat([corners, corners + sizes, scores], dim=1)
    options: dict[str, Any] = {"confidence": 0.2, "iou": iou, "max_detections": max_detections,
                               "multi_label": multi_label, "agnostic": agnostic}
    (detections,) = select(rows[None, :, :4], rows[None, :, 4:], **options)
    assert detections.tolist() == slow_select(rows, **options)


@pytest.mark.parametrize("multi_label", [False, True])
def test_a_score_must_exceed_the_confidence(multi_label: bool) -> None:
    assert run([prediction((0, 0, 10, 10), 1.0, 0.25)], multi_label=multi_label) == []
    assert run([prediction((0, 0, 10, 10), 1.0, 0.26)], multi_label=multi_label) == [[0, 0, 10, 10, 0.26, 0]]


def test_only_the_best_class_counts_without_multi_label() -> None:
    row = prediction((0, 0, 10, 10), 1.0, 0.5, 0.75, 0.3)
    assert run([row]) == [[0, 0, 10, 10, 0.75, 1]]
    assert [(d[4], d[5]) for d in run([row], multi_label=True)] == [(0.75, 1), (0.5, 0), (0.3, 2)]


def test_the_better_of_two_overlapping_boxes_stays() -> None:
    assert run([prediction((0, 0, 10, 10), 0.5, 1.0), prediction((0, 0, 10, 9), 0.75, 1.0)]) == [[0, 0, 10, 9, 0.75, 0]]


def test_a_suppressed_box_suppresses_nothing() -> None:
    first, second, third = (0, 0, 10, 10), (0, 4, 10, 14), (0, 8, 10, 18)  # IoU 0.43 with the next, 0.11 over one
    rows = [prediction(first, 0.9, 1.0), prediction(second, 0.8, 1.0), prediction(third, 0.7, 1.0)]
    assert [d[1] for d in run(rows, iou=0.4)] == [0, 8]


def test_overlap_equal_to_the_threshold_is_kept() -> None:
    assert len(run([prediction((0, 0, 10, 10), 0.9, 1.0), prediction((0, 0, 10, 5), 0.8, 1.0)], iou=0.5)) == 2


def test_classes_do_not_suppress_each_other_unless_agnostic() -> None:
    rows = [prediction((0, 0, 10, 10), 0.9, 1.0, 0.0), prediction((0, 0, 10, 10), 0.8, 0.0, 1.0)]
    assert len(run(rows)) == 2
    assert len(run(rows, agnostic=True)) == 1


def test_classes_stay_apart_where_boxes_are_wider_than_any_fixed_offset() -> None:
    wide = (-20_000.0, 0.0, 20_000.0, 10.0)
    rows = [prediction(wide, 0.9, 1.0, 0.0), prediction((-27_680.0, -7_680, 12_320.0, -7_670.0), 0.8, 0.0, 1.0)]
    assert len(run(rows)) == 2


def test_the_last_of_many_classes_is_suppressed_like_the_first() -> None:
    """An offset in single precision would round these half-pixel boxes of class 79."""
    probabilities = torch.eye(80)[79].tolist()
    boxes = [(0.0, 0.0, 0.55, 0.55), (0.11, 0.0, 0.66, 0.55)]  # IoU 2/3
    rows = [prediction(box, score, *probabilities) for box, score in zip(boxes, (0.9, 0.8), strict=True)]
    filler = prediction((0.0, 0.0, 7_000.0, 7_000.0), 0.3, *torch.eye(80)[0].tolist())
    assert len(run([*rows, filler], iou=0.66)) == 2
    assert len(run([*rows, filler], iou=0.67)) == 3


def test_the_limit_counts_what_survives_not_what_enters() -> None:
    copies = [prediction((0, 0, 10, 10), 0.9 - i / 1000, 1.0) for i in range(50)]
    other = prediction((20, 0, 30, 10), 0.3, 1.0)
    assert [d[0] for d in run([*copies, other], max_detections=2)] == [0, 20]


def test_equal_scores_keep_the_order_of_the_predictions() -> None:
    rows = [prediction((20 * i, 0, 20 * i + 10, 10), 0.5, 1.0) for i in range(40)]
    assert [d[0] for d in run(rows)] == [20 * i for i in range(40)]


def test_candidates_beyond_the_stated_number_are_the_worst_and_the_last(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(nms, "MAX_CANDIDATES", 3)
    scores = [0.5, 0.9, 0.5, 0.5, 0.3]
    rows = [prediction((20 * i, 0, 20 * i + 10, 10), score, 1.0) for i, score in enumerate(scores)]
    assert [d[0] for d in run(rows)] == [20, 0, 40]


def test_images_do_not_know_of_each_other() -> None:
    generator = torch.Generator().manual_seed(1)
    corners = torch.rand(3, 60, 2, generator=generator) * 50
    boxes, scores = torch.cat([corners, corners + 20], dim=2), torch.rand(3, 60, 4, generator=generator)
    scores[1] = 0.0
    options: dict[str, Any] = {"confidence": 0.1, "iou": 0.5, "max_detections": 30, "multi_label": True}
    together = select(boxes, scores, **options)
    assert together[1].shape == (0, 6)
    for index, detections in enumerate(together):
        (alone,) = select(boxes[index:index + 1], scores[index:index + 1], **options)
        assert torch.equal(alone, detections)


@settings(max_examples=30, deadline=None)
@given(seed=st.integers(0, 2**32 - 1), limit=st.integers(1, 40), agnostic=st.booleans())
def test_without_suppression_the_best_pairs_of_a_box_and_a_class_are_detected(
        seed: int, limit: int, agnostic: bool) -> None:
    generator = torch.Generator().manual_seed(seed)
    boxes, scores = torch.rand(1, 12, 4, generator=generator), torch.rand(1, 12, 3, generator=generator)
    [found] = select(boxes, scores, confidence=0.3, iou=None, max_detections=limit, multi_label=False,
                     agnostic=agnostic)
    pairs = [(float(scores[0, box, kind]), box, kind) for box in range(12) for kind in range(3)
             if scores[0, box, kind] > 0.3 and (not agnostic or kind == int(scores[0, box].argmax()))]
    best = sorted(pairs, key=lambda pair: -pair[0])[:limit]
    assert [[*row[:4], row[4], row[5]] for row in found.tolist()] == [
        [*boxes[0, box].tolist(), score, kind] for score, box, kind in best]


@settings(max_examples=200, deadline=None)
@given(
    seed=st.integers(0, 2**32 - 1), images=st.integers(0, 3), num=st.integers(0, 60), num_classes=st.integers(1, 4),
    values=st.sampled_from(["few", "many", "none", "not finite"]), confidence=st.sampled_from([0.0, 0.2, 0.75]),
    iou=st.sampled_from([None, 0.25, 0.45, 1.0]), max_detections=st.sampled_from([1, 5, 300]),
    multi_label=st.booleans(), agnostic=st.booleans(), most=st.sampled_from([1, 7, 30, 30_000]),
)
def test_candidates_of_static_shape_give_the_same_bits(
    seed: int, images: int, num: int, num_classes: int, values: str, confidence: float, iou: float | None,
    max_detections: int, multi_label: bool, agnostic: bool, most: int
) -> None:
    """The way of a GPU against that of a CPU: equal scores, no candidates, more than `MAX_CANDIDATES`, NaN."""
    generator = torch.Generator().manual_seed(seed)
    corners = torch.randint(-8, 12, (images, num, 2), generator=generator)
    boxes = torch.cat([corners, corners + torch.randint(0, 12, (images, num, 2), generator=generator)], dim=2).float()
    shape = (images, num, num_classes)
    few = torch.randint(0, 5, shape, generator=generator) / 4  # 0 and 1 among them
    scores = {"few": few, "many": torch.rand(shape, generator=generator), "none": torch.zeros(shape),
              "not finite": torch.where(few == 0.5, torch.nan, few)}[values]
    if values == "not finite":
        boxes[torch.rand(images, num, generator=generator) < 0.1] = torch.nan
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(nms, "MAX_CANDIDATES", most)
        selector = Selector(confidence, iou, max_detections, multi_label, agnostic)
        expected = selector.detections(selector.candidates(boxes, scores))
        found = selector.detections(selector.padded_candidates(boxes, scores))
    for rows, same in zip(found, expected, strict=True):
        assert rows.numpy().tobytes() == same.numpy().tobytes()
        assert rows.shape == same.shape


def test_candidates_of_static_shape_are_cut_in_the_middle_of_equal_scores() -> None:
    """More than `MAX_CANDIDATES` of one score: the first enter, in order."""
    num = nms.MAX_CANDIDATES + 10
    boxes = torch.arange(num)[None, :, None] + torch.tensor([0.0, 0.0, 1.0, 1.0])
    scores = torch.full((1, num, 1), 0.5)
    scores[0, -1] = 0.75
    [rows] = Selector(0.25, 0.5, 300, multi_label=True).padded_candidates(boxes, scores)
    assert rows[:, 0].tolist() == [num - 1, *range(nms.MAX_CANDIDATES - 1)]
