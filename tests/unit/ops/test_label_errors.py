"""Doubtful labels of scenes that are worked out by hand."""

from __future__ import annotations

import numpy as np
import pytest

from ray_yolo.ops.label_errors import DoubtfulLabel, doubtful_labels

LEFT, MIDDLE, RIGHT = (0.0, 0.0, 10.0, 10.0), (20.0, 0.0, 30.0, 10.0), (40.0, 0.0, 50.0, 10.0)
NEAR_LEFT = (0.0, 0.0, 10.0, 8.0)  # IoU 0.8
FAR_LEFT = (0.0, 0.0, 10.0, 4.0)  # IoU 0.4
Detection = tuple[int, tuple[float, float, float, float], float, int]
Label = tuple[int, tuple[float, float, float, float], int]


def doubts(labels: list[Label], detections: list[Detection], most: int = 99, crowds: list[list[float]] | None = None
           ) -> list[DoubtfulLabel]:
    table = np.array([[image, *box, score, kind, 0] for image, box, score, kind in detections]).reshape(-1, 8)
    return doubtful_labels(
        table, np.array([label[0] for label in labels], np.int64), np.array([label[2] for label in labels], np.int32),
        np.array([label[1] for label in labels], np.float32).reshape(-1, 4),
        np.array(crowds or []).reshape(-1, 7), most)


def test_labels_that_the_detector_confirms_are_not_doubtful() -> None:
    assert doubts([(0, LEFT, 1), (2, MIDDLE, 0)], [(0, NEAR_LEFT, 0.9, 1), (2, MIDDLE, 0.6, 0)]) == []


def test_a_sure_detection_without_a_label_is_a_missing_one() -> None:
    """At 0.4 and below another one of the same object it is none."""
    found = doubts([(0, LEFT, 0)], [(0, LEFT, 0.9, 0), (1, RIGHT, 0.8, 1), (1, RIGHT, 0.7, 0), (1, MIDDLE, 0.4, 0)])
    assert found == [("missing label", 1, RIGHT, None, 1, 0.8)]


def test_a_detection_in_a_crowd_is_not_missing() -> None:
    crowd = [1, 0, 35.0, 0.0, 60.0, 20.0, 500.0]
    assert doubts([], [(1, RIGHT, 0.8, 1)], crowds=[crowd]) == []
    assert len(doubts([], [(1, RIGHT, 0.8, 1), (0, RIGHT, 0.8, 1)], crowds=[crowd])) == 1


def test_a_label_that_the_detector_does_not_see_is_denied() -> None:
    found = doubts([(0, LEFT, 0), (0, RIGHT, 1)], [(0, FAR_LEFT, 0.45, 0), (0, RIGHT, 0.3, 1)])
    assert found == [("denied label", 0, LEFT, 0, None, 1.0),
                     ("denied label", 0, RIGHT, 1, None, pytest.approx(0.7))]


def test_a_label_of_another_class_is_contradicted() -> None:
    """By the difference of the scores of both classes; 0.9 - 0.5 is too little."""
    found = doubts([(0, LEFT, 0), (0, MIDDLE, 0), (0, RIGHT, 0)],
                   [(0, NEAR_LEFT, 0.9, 1), (0, LEFT, 0.2, 0), (0, MIDDLE, 0.9, 1), (0, MIDDLE, 0.5, 0),
                    (0, RIGHT, 0.9, 0)])
    assert found == [("wrong class", 0, LEFT, 0, 1, pytest.approx(0.7))]


def test_the_kinds_take_turns() -> None:
    labels = [(0, LEFT, 0), (1, LEFT, 0), (2, LEFT, 0), (3, LEFT, 0)]
    detections: list[Detection] = [(3, LEFT, 0.8, 1), (4, LEFT, 0.6, 0), (5, LEFT, 0.7, 0)]
    found = doubts(labels, detections)
    assert [(doubt.kind, doubt.image) for doubt in found] == [
        ("missing label", 5), ("denied label", 0), ("wrong class", 3), ("missing label", 4), ("denied label", 1),
        ("denied label", 2)]
    assert doubts(labels, detections, most=2) == found[:2]


def test_boxes_without_area_belong_to_nothing() -> None:
    point = (5.0, 5.0, 5.0, 5.0)
    assert [doubt.kind for doubt in doubts([(0, point, 0)], [(0, point, 0.9, 0)])] == ["missing label", "denied label"]
    assert doubts([], []) == []
