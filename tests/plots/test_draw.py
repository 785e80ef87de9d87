"""Boxes in pictures: where they are drawn, and where nothing is."""

from __future__ import annotations

import numpy as np

from ray_yolo.plots.draw import draw_detections

GREY = np.full((300, 400, 3), 114, np.uint8)
NAMES = ("cat", "dog", "日本語\nの\t長い名前" * 4)


def boxes(*rows: tuple[float, ...]) -> np.ndarray:
    return np.array(rows, np.float32).reshape(-1, 6)


def test_nothing_found_changes_nothing() -> None:
    drawn = draw_detections(GREY, boxes(), NAMES)
    assert np.array_equal(drawn, GREY)
    assert drawn is not GREY


def test_a_box_is_drawn_on_its_edges_and_the_original_stays() -> None:
    drawn = draw_detections(GREY, boxes((50, 100, 250, 200, 0.9, 0)), NAMES)
    changed = (drawn != GREY).any(2)
    assert changed[100:201, 50].all()
    assert changed[100:201, 250].all()
    assert changed[200, 50:251].all()
    assert not changed[110:190, 60:240].any()
    assert not changed[:, :49].any()
    assert (GREY == 114).all()


def test_classes_have_colours_of_their_own_and_the_best_is_on_top() -> None:
    place = (50, 100, 250, 200)
    one, other = (draw_detections(GREY, boxes((*place, 0.9, kind)), NAMES)[150, 50] for kind in (0, 1))
    assert (one != other).any()
    both = draw_detections(GREY, boxes((*place, 0.9, 0), (*place, 0.5, 1)), NAMES)
    assert np.array_equal(both[150, 50], one)


def test_boxes_at_the_border_and_long_foreign_names_are_drawn() -> None:
    for row in ((0, 0, 400, 300, 0.5, 2), (395, 0, 400, 5, 0.5, 2), (0, 0, 0, 0, 1.0, 1)):
        assert (draw_detections(GREY, boxes(row), NAMES) != GREY).any()
    assert draw_detections(GREY[:10, :12], boxes((1, 1, 5, 5, 0.5, 2)), NAMES).shape == (10, 12, 3)
