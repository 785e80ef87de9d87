"""Matching and average precision: worked by hand, and against the obvious loops."""

import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from ray_yolo.config.sections import ObjectiveConfig
from ray_yolo.ops.average_precision import GRID, IOU_THRESHOLDS, Metrics, evaluate, match
from tests.support.slow_metrics import slow_area, slow_match

SQUARE = [0.0, 0.0, 10.0, 10.0]


def fitness(metrics: Metrics) -> float | None:
    """By the default objective."""
    return ObjectiveConfig().fitness({"mAP50": metrics.map50, "mAP50-95": metrics.map})


def correct_at(detections: list[list[float]], classes: list[int], boxes: list[list[float]]) -> list[list[float]]:
    """Per detection, the thresholds at which it is correct."""
    rows = match(np.array(detections, np.float32), np.array(classes), np.array(boxes, np.float32))
    return [[t for t, good in zip(IOU_THRESHOLDS, row, strict=True) if good] for row in rows.tolist()]


def tall(height: float, score: float, index: int = 0) -> list[float]:
    """A detection whose IoU with `SQUARE` is height / 10."""
    return [0.0, 0.0, 10.0, height, score, float(index)]


def test_thresholds_count_when_reached() -> None:
    assert correct_at([tall(5.5, 0.9)], [0], [SQUARE]) == [[0.5, 0.55]]
    assert correct_at([tall(9.5, 0.9)], [0], [SQUARE]) == [list(IOU_THRESHOLDS)]
    assert correct_at([tall(4.9, 0.9)], [0], [SQUARE]) == [[]]


def test_other_classes_do_not_match() -> None:
    assert correct_at([tall(10, 0.9, index=1)], [0], [SQUARE]) == [[]]


def test_a_label_goes_to_the_higher_score_not_to_the_higher_overlap() -> None:
    close, confident = correct_at([tall(9, 0.3), tall(6, 0.8)], [0], [SQUARE])
    assert confident == [0.5, 0.55, 0.6]
    assert close == [0.65, 0.7, 0.75, 0.8, 0.85, 0.9]


def test_a_label_goes_to_the_first_of_equal_scores() -> None:
    assert correct_at([tall(6, 0.5), tall(9, 0.5)], [0], [SQUARE])[0] == [0.5, 0.55, 0.6]


def test_a_detection_claims_only_the_label_it_overlaps_most() -> None:
    """The second detection overlaps the free label by 0.6 too, but claims the taken one."""
    boxes = [SQUARE, [0.0, 4.0, 10.0, 14.0]]
    found = correct_at([tall(10, 0.9), [0.0, 1.0, 10.0, 11.0, 0.8, 0.0]], [0, 0], boxes)
    assert found == [list(IOU_THRESHOLDS), []]


def test_a_detection_claims_the_first_of_equal_labels() -> None:
    assert correct_at([tall(10, 0.9), tall(10, 0.8)], [0, 0], [SQUARE, SQUARE]) == [list(IOU_THRESHOLDS), []]


def test_boxes_without_area_match_nothing() -> None:
    point = [5.0, 5.0, 5.0, 5.0]
    assert correct_at([[*point, 0.9, 0.0]], [0], [point]) == [[]]


def test_boxes_without_numbers_match_nothing() -> None:
    nowhere = [math.nan, 0.0, math.inf, 10.0, 0.9, 0.0]
    assert correct_at([nowhere, tall(10, 0.3)], [0], [SQUARE]) == [[], list(IOU_THRESHOLDS)]


@pytest.mark.parametrize(("num", "labels"), [(0, 0), (0, 3), (3, 0)])
def test_nothing_matches_nothing(num: int, labels: int) -> None:
    result = match(np.zeros((num, 6), np.float32), np.zeros(labels, np.int64), np.zeros((labels, 4), np.float32))
    assert result.shape == (num, 10)
    assert result.dtype == np.bool_
    assert not result.any()


@settings(max_examples=150, deadline=None)
@given(seed=st.integers(0, 2**32 - 1), num=st.integers(1, 30), labels=st.integers(1, 12))
def test_matching_equals_the_obvious_loop(seed: int, num: int, labels: int) -> None:
    generator = torch.Generator().manual_seed(seed)

    def random_boxes(count: int) -> Tensor:
        corner = torch.randint(0, 6, (count, 2), generator=generator)
        return torch.cat([corner, corner + torch.randint(3, 12, (count, 2), generator=generator)], dim=1).float()

    scores = torch.randint(1, 5, (num, 1), generator=generator) / 4
    detections = torch.cat([random_boxes(num), scores, torch.randint(0, 2, (num, 1), generator=generator)], dim=1)
    classes, boxes = torch.randint(0, 2, (labels,), generator=generator), random_boxes(labels)
    found = match(detections.numpy(), classes.numpy(), boxes.numpy())
    assert found.tolist() == slow_match(detections, classes, boxes)


def measure(hits: list[int], scores: list[float], num_labels: int) -> Metrics:
    """Metrics of one class whose detections are right (1) or wrong (0) at every threshold."""
    correct = np.repeat(np.array(hits, dtype=bool)[:, None], 10, axis=1)
    zeros = np.zeros(len(hits), dtype=np.int64)
    return evaluate(correct, np.array(scores), zeros, np.zeros(num_labels, dtype=np.int64), num_classes=1)


PERFECT = 0.995  # the curve falls from (1, 1) to (1, 0), and the last trapezoid of 0.01 loses its half


def test_perfect_detections_score_one_but_for_the_last_trapezoid() -> None:
    metrics = measure([1, 1], [0.9, 0.8], num_labels=2)
    assert (metrics.precision, metrics.recall) == (1.0, 1.0)
    assert metrics.map50 == pytest.approx(PERFECT, abs=1e-12)
    assert metrics.map == pytest.approx(PERFECT, abs=1e-12)
    assert fitness(metrics) == pytest.approx(PERFECT, abs=1e-12)


def test_area_of_a_curve_that_ends_at_half_recall() -> None:
    """Precision 1 up to recall 0.5, then a straight line to (1, 0): 0.5 + 0.25."""
    assert measure([1], [0.9], num_labels=2).map50 == pytest.approx(0.75)


def test_area_takes_the_highest_precision_at_that_recall_or_above() -> None:
    """Right, wrong, wrong, right of two labels: precision 1 at recall 0.5, 1/2 at recall 1.

    The envelope is 1 on [0, 0.5], then falls at once to 1/2. The trapezoid between recalls 0.50 and 0.51 starts from
    the lower end of that step: np.interp takes the last of equal abscissae.
    """
    metrics = measure([1, 0, 0, 1], [0.9, 0.8, 0.7, 0.6], num_labels=2)
    by_hand = 0.49 * 1.0 + 0.01 * 0.75 + 0.49 * 0.5 + 0.01 * 0.25
    assert metrics.map50 == pytest.approx(by_hand)


def test_wrong_detections_below_the_last_right_one_leave_the_area_alone() -> None:
    assert measure([1, 1, 0, 0], [0.9, 0.8, 0.7, 0.6], num_labels=2).map50 == pytest.approx(1.0, abs=0.01)


def test_curves_against_confidence() -> None:
    """Right at 0.8, wrong at 0.4, of two labels. Between them both quantities are interpolated."""
    curves = measure([1, 0], [0.8, 0.4], num_labels=2).curves
    above, between, below = (int(np.searchsorted(GRID, c)) for c in (0.9, 0.6, 0.2))
    assert (curves.precision[0, above], curves.recall[0, above], curves.f1[0, above]) == (1.0, 0.0, 0.0)
    assert curves.precision[0, below] == 0.5
    assert curves.recall[0, below] == 0.5
    assert curves.f1[0, below] == 0.5
    assert curves.precision[0, between] == pytest.approx(0.75, abs=2e-3)
    assert curves.recall[0, between] == pytest.approx(0.5)


def test_reported_confidence_is_where_the_smoothed_mean_f1_is_highest() -> None:
    generator = np.random.default_rng(3)
    scores, classes = generator.uniform(size=400), generator.integers(0, 3, 400)
    correct = generator.uniform(size=(400, 10)) < scores[:, None]
    metrics = evaluate(correct, scores, classes, generator.integers(0, 3, 300), num_classes=3)
    mean_f1 = metrics.curves.f1.mean(axis=0)
    smooth = [np.mean([mean_f1[min(max(j, 0), 999)] for j in range(i - 50, i + 51)]) for i in range(1000)]
    best = int(np.argmax(smooth))
    assert metrics.confidence == GRID[best]
    assert metrics.precision == pytest.approx(metrics.curves.precision[:, best].mean())
    assert metrics.recall == pytest.approx(metrics.curves.recall[:, best].mean())


def test_smoothing_continues_the_curve_beyond_its_ends() -> None:
    """F1 is 1 from confidence 0 to 0.9, so the first of the best is 0."""
    assert measure([1], [0.9], num_labels=1).confidence == 0.0


def test_classes_without_labels_enter_no_mean() -> None:
    right = np.ones((2, 10), dtype=bool)
    right[1] = False
    metrics = evaluate(right, np.array([0.9, 0.8]), np.array([0, 2]), np.array([0]), num_classes=3)
    assert (metrics.map50, metrics.precision, metrics.recall) == (pytest.approx(PERFECT), 1.0, 1.0)
    assert metrics.num_labels.tolist() == [1, 0, 0]
    assert metrics.ap[1:].max() == 0.0


def test_a_labelled_class_without_detections_pulls_the_mean_down() -> None:
    metrics = evaluate(np.ones((1, 10), dtype=bool), np.array([0.9]), np.array([0]), np.array([0, 1]), num_classes=2)
    assert metrics.map50 == pytest.approx(PERFECT / 2)
    assert metrics.recall == 0.5


@pytest.mark.parametrize(("num", "labels"), [(0, 0), (0, 3), (3, 0)])
def test_nothing_to_find_or_nothing_found_is_zero(num: int, labels: int) -> None:
    zeros = np.zeros(num, dtype=np.int64)
    metrics = evaluate(np.zeros((num, 10), dtype=bool), np.full(num, 0.5), zeros, np.zeros(labels, dtype=np.int64), 2)
    assert (metrics.map, metrics.map50, metrics.precision, metrics.recall, metrics.confidence) == (0, 0, 0, 0, 0)
    assert fitness(metrics) == 0.0
    assert np.isfinite(metrics.ap).all()


def test_fitness_weighs_strict_overlaps_nine_times() -> None:
    correct = np.zeros((1, 10), dtype=bool)
    correct[0, 0] = True
    metrics = evaluate(correct, np.array([0.9]), np.array([0]), np.array([0]), num_classes=1)
    assert metrics.map == pytest.approx(0.1 * PERFECT)
    assert fitness(metrics) == pytest.approx((0.1 * 1.0 + 0.9 * 0.1) * PERFECT)


@settings(max_examples=100, deadline=None)
@given(hits=st.lists(st.booleans(), min_size=1, max_size=40), missed=st.integers(0, 5))
def test_average_precision_equals_the_obvious_loop(hits: list[bool], missed: int) -> None:
    num_labels = max(sum(hits) + missed, 1)
    scores = np.linspace(0.9, 0.1, len(hits)).tolist()
    metrics = measure([int(h) for h in hits], scores, num_labels)
    assert metrics.map50 == pytest.approx(slow_area(hits, num_labels), abs=1e-9)


def test_images_may_be_taken_in_any_order_while_scores_differ() -> None:
    generator = np.random.default_rng(0)
    correct, scores = generator.uniform(size=(500, 10)) < 0.4, generator.permutation(500) / 500
    classes, truth = generator.integers(0, 4, 500), generator.integers(0, 4, 300)
    mixed = generator.permutation(500)
    one = evaluate(correct, scores, classes, truth, 4)
    other = evaluate(correct[mixed], scores[mixed], classes[mixed], truth, 4)
    assert np.array_equal(one.ap, other.ap)
    assert (one.map, one.precision, one.recall) == (other.map, other.precision, other.recall)
