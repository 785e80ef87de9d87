"""The twelve COCO numbers: worked by hand, and against two reference implementations."""

import faster_coco_eval
import numpy as np
import pytest

from ray_yolo.ops import coco_metrics as module
from ray_yolo.ops.coco_metrics import CocoMetrics, Detected, Labelled, coco_metrics
from tests.support.coco_oracle import random_case, reference

SQUARE = (0.0, 0.0, 50.0, 50.0)  # medium


def detected(*rows: tuple[int, int, float, tuple[float, ...]]) -> Detected:
    """Rows (image, class, score, box)."""
    return Detected(np.array([r[0] for r in rows], dtype=np.int64), np.array([r[1] for r in rows], dtype=np.int64),
                    np.array([r[2] for r in rows], dtype=float), np.array([r[3] for r in rows]).reshape(-1, 4))


def labelled(*rows: tuple[int, int, tuple[float, ...]], crowd: tuple[int, ...] = ()) -> Labelled:
    """Rows (image, class, box); `crowd` numbers the rows that are regions."""
    boxes = np.array([r[2] for r in rows], dtype=float).reshape(-1, 4)
    return Labelled(np.array([r[0] for r in rows], dtype=np.int64), np.array([r[1] for r in rows], dtype=np.int64),
                    boxes, np.prod(boxes[:, 2:] - boxes[:, :2], axis=1), np.isin(np.arange(len(rows)), crowd))


def test_random_cases_equal_faster_coco_eval() -> None:
    for seed in range(1000, 1100):
        case = random_case(seed)
        expected = reference(*case, faster_coco_eval.COCO, faster_coco_eval.COCOeval_faster)
        assert coco_metrics(*case) == pytest.approx(expected, abs=1e-6), seed


def test_results_do_not_depend_on_how_many_pairs_are_looked_at_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    cases = [random_case(seed) for seed in range(20)]
    before = [coco_metrics(*case) for case in cases]
    monkeypatch.setattr(module, "PAIRS_AT_ONCE", 5)
    assert [coco_metrics(*case) for case in cases] == before


def test_perfect_detections_score_one_in_the_areas_that_have_labels() -> None:
    metrics = coco_metrics(detected((0, 0, 0.9, SQUARE)), labelled((0, 0, SQUARE)))
    assert metrics == CocoMetrics(1, 1, 1, -1, 1, -1, 1, 1, 1, -1, 1, -1)


def test_nothing_detected_is_zero_and_nothing_labelled_is_undefined() -> None:
    some = labelled((0, 0, SQUARE))
    assert coco_metrics(detected(), some) == CocoMetrics(0, 0, 0, -1, 0, -1, 0, 0, 0, -1, 0, -1)
    assert coco_metrics(detected((0, 0, 0.9, SQUARE)), labelled()) == CocoMetrics(*[-1.0] * 12)
    assert coco_metrics(detected(), labelled()) == CocoMetrics(*[-1.0] * 12)


def test_overlap_of_three_quarters_counts_at_six_of_ten_thresholds() -> None:
    metrics = coco_metrics(detected((0, 0, 0.9, (0, 0, 50, 37.5))), labelled((0, 0, SQUARE)))
    assert (metrics.ap50, metrics.ap75) == (1.0, 1.0)
    assert metrics.ap == pytest.approx(0.6)


def test_a_detection_takes_the_last_of_equal_labels() -> None:
    """The first detection overlaps both labels by 38/62, the second only the right one."""
    left, right = (0, 0, (-12.0, 0.0, 38.0, 50.0)), (0, 0, (12.0, 0.0, 62.0, 50.0))
    found = detected((0, 0, 0.9, SQUARE), (0, 0, 0.8, (24.0, 0.0, 74.0, 50.0)))
    assert coco_metrics(found, labelled(right, left)).ap50 == 1.0
    assert coco_metrics(found, labelled(left, right)).ap50 == pytest.approx(51 / 101)


def test_precision_is_read_at_101_recalls_without_interpolation() -> None:
    """Right, wrong, right of two labels: precision 1 at recalls 0-0.50 (51 points), 2/3 at the other 50."""
    far = (500.0, 500.0, 550.0, 550.0)
    found = detected((0, 0, 0.9, SQUARE), (0, 0, 0.8, (200, 200, 250, 250)), (0, 0, 0.7, far))
    assert coco_metrics(found, labelled((0, 0, SQUARE), (0, 0, far))).ap == pytest.approx((51 + 50 * 2 / 3) / 101)


def test_what_lies_in_a_crowd_region_is_neither_right_nor_wrong() -> None:
    """Any number of boxes may lie in it; the overlap is the share of the detection."""
    region = (100.0, 0.0, 400.0, 300.0)
    inside = [(0, 0, 0.95, (100.0 + 60 * i, 0.0, 150.0 + 60 * i, 50.0)) for i in range(3)]
    found = detected(*inside, (0, 0, 0.5, SQUARE))
    assert coco_metrics(found, labelled((0, 0, SQUARE), (0, 0, region), crowd=(1,))).ap == 1.0
    assert coco_metrics(found, labelled((0, 0, SQUARE), (0, 0, region))).ap < 0.5


def test_a_label_goes_to_the_best_score_and_the_rest_is_wrong() -> None:
    """The first overlaps by 0.6, the second entirely."""
    found = detected((0, 0, 0.9, (0, 0, 50, 30)), (0, 0, 0.8, SQUARE))
    metrics = coco_metrics(found, labelled((0, 0, SQUARE)))
    assert metrics.ap50 == 1.0
    assert metrics.ap75 == pytest.approx(0.5)  # there only the second one is right, after a wrong one


def test_a_detection_takes_the_next_label_when_its_best_is_taken() -> None:
    """Unlike the YOLO protocol: the second detection overlaps the free label by 0.6."""
    found = detected((0, 0, 0.9, SQUARE), (0, 0, 0.8, (0, 5, 50, 55)))
    metrics = coco_metrics(found, labelled((0, 0, SQUARE), (0, 0, (0, 17.5, 50, 67.5))))
    assert metrics.ap50 == 1.0


def test_labels_outside_of_an_area_are_left_out_of_it() -> None:
    """The small box is found, the large one is not."""
    small, large = (0.0, 0.0, 20.0, 20.0), (100.0, 100.0, 300.0, 300.0)
    metrics = coco_metrics(detected((0, 0, 0.9, small)), labelled((0, 0, small), (0, 0, large)))
    assert (metrics.ap_small, metrics.ap_medium, metrics.ap_large) == (1.0, -1.0, 0.0)
    assert (metrics.ar_small, metrics.ar_large, metrics.ar100) == (1.0, 0.0, 0.5)


def test_recall_counts_the_best_so_many_detections_of_each_image_and_class() -> None:
    boxes = [(100.0 * i, 0.0, 100.0 * i + 50, 50.0) for i in range(20)]
    found = detected(*((0, 0, 0.9 - i / 100, box) for i, box in enumerate(boxes)))
    metrics = coco_metrics(found, labelled(*((0, 0, box) for box in boxes)))
    assert (metrics.ar1, metrics.ar10, metrics.ar100) == (0.05, 0.5, 1.0)


def test_detections_beyond_a_hundred_of_an_image_and_class_do_not_exist() -> None:
    boxes = [(100.0 * i, 0.0, 100.0 * i + 50, 50.0) for i in range(200)]
    found = detected(*((0, 0, 0.9 - i / 1000, box) for i, box in enumerate(boxes)))
    metrics = coco_metrics(found, labelled(*((0, 0, box) for box in boxes)))
    assert metrics.ar100 == 0.5
    assert metrics.ap == pytest.approx(51 / 101)
