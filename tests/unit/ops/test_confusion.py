"""The confusion matrix by hand; two classes, so row and column 2 are the background."""

import numpy as np

from ray_yolo.ops.confusion import confusion_matrix

SQUARE = [0.0, 0.0, 10.0, 10.0]
FAR = [50.0, 50.0, 60.0, 60.0]


def confusion(detections: list[list[float]], labels: list[list[float]]) -> list[list[int]]:
    """Rows [image, box, score, class] and [image, class, box]."""
    found, truth = np.array(detections).reshape(-1, 7), np.array(labels).reshape(-1, 6)
    return confusion_matrix(found, truth[:, 0].astype(np.int64), truth[:, 1].astype(np.int64), truth[:, 2:], 2).tolist()


def test_a_right_detection_stands_on_the_diagonal() -> None:
    assert confusion([[0, *SQUARE, 0.9, 1]], [[0, 1, *SQUARE]]) == [[0, 0, 0], [0, 1, 0], [0, 0, 0]]


def test_a_wrong_class_stands_in_its_row_and_the_label_in_its_column() -> None:
    assert confusion([[0, *SQUARE, 0.9, 1]], [[0, 0, *SQUARE]]) == [[0, 0, 0], [1, 0, 0], [0, 0, 0]]


def test_a_missed_label_is_background_and_so_is_a_false_alarm() -> None:
    assert confusion([[0, *FAR, 0.9, 1]], [[0, 0, *SQUARE]]) == [[0, 0, 0], [0, 0, 1], [1, 0, 0]]


def test_false_alarms_count_in_images_without_labels() -> None:
    assert confusion([[3, *FAR, 0.9, 1]], []) == [[0, 0, 0], [0, 0, 1], [0, 0, 0]]


def test_labels_count_in_images_without_detections() -> None:
    assert confusion([], [[3, 1, *FAR]]) == [[0, 0, 0], [0, 0, 0], [0, 1, 0]]


def test_boxes_of_other_images_do_not_match() -> None:
    assert confusion([[0, *SQUARE, 0.9, 0]], [[1, 0, *SQUARE]]) == [[0, 0, 1], [0, 0, 0], [1, 0, 0]]


def test_scores_up_to_the_confidence_do_not_count() -> None:
    assert confusion([[0, *SQUARE, 0.25, 0]], []) == [[0, 0, 0], [0, 0, 0], [0, 0, 0]]


def test_overlap_must_exceed_the_threshold() -> None:
    assert confusion([[0, 0, 0, 10, 4.5, 0.9, 0]], [[0, 0, *SQUARE]]) == [[0, 0, 1], [0, 0, 0], [1, 0, 0]]


def test_the_closest_pair_goes_first_whatever_the_scores() -> None:
    """The label belongs to the detection of class 0 that lies on it; the other one is a false alarm."""
    better = [0.0, 0.0, 0.0, 10.0, 8.0, 0.9, 1.0]
    assert confusion([better, [0, *SQUARE, 0.3, 0]], [[0, 0, *SQUARE]]) == [[1, 0, 0], [0, 0, 1], [0, 0, 0]]


def test_a_detection_whose_best_label_is_taken_gets_the_next_one() -> None:
    labels = [[0, 0, *SQUARE], [0.0, 1.0, 0.0, 3.0, 10.0, 13.0]]
    second = [0.0, 0.0, 1.0, 10.0, 11.0, 0.9, 1.0]
    assert confusion([[0, *SQUARE, 0.9, 0], second], labels) == [[1, 0, 0], [0, 1, 0], [0, 0, 0]]


def test_a_detection_is_used_once() -> None:
    """It overlaps both labels; the second one is missed."""
    labels = [[0, 0, *SQUARE], [0.0, 1.0, 0.0, 1.0, 10.0, 11.0]]
    assert confusion([[0, *SQUARE, 0.9, 0]], labels) == [[1, 0, 0], [0, 0, 0], [0, 1, 0]]


def test_every_label_stands_in_the_matrix_once() -> None:
    rng = np.random.default_rng(0)
    corners = rng.uniform(0, 30, (200, 2))
    rows = np.column_stack([rng.integers(0, 8, 200), corners, corners + 15, rng.random(200), rng.integers(0, 2, 200)])
    matrix = np.array(confusion(rows[:120].tolist(), rows[120:, [0, 6, 1, 2, 3, 4]].tolist()))
    assert matrix[:, :2].sum(axis=0).tolist() == np.bincount(rows[120:, 6].astype(int)).tolist()
    counted = rows[:120][rows[:120, 5] > 0.25, 6].astype(int)
    assert matrix[:2].sum(axis=1).tolist() == np.bincount(counted).tolist()
    assert matrix[2, 2] == 0
