"""Images with boxes: as figures, and drawn at their full size."""

from pathlib import Path

import numpy as np

from ray_yolo.plots.boxes import Picture, draw_detections, plot_pictures, plot_truth_and_detections
from tests.support.figures import num_colours, rectangles

NAMES = ["cat", "dog"]
BOXES = np.array([[10.0, 20.0, 30.0, 60.0], [0.0, 0.0, 5.0, 5.0]])


def picture(title: str = "", scores: np.ndarray | None = None) -> Picture:
    return Picture(np.full((80, 100, 3), 200, dtype=np.uint8), BOXES, np.array([1, 0]), scores, title)


def test_each_box_is_a_rectangle_with_its_name(tmp_path: Path) -> None:
    figure = plot_pictures([picture("a.jpg")], NAMES, tmp_path / "grid.jpg")
    axes = figure.axes[0]
    assert rectangles(axes) == [(10, 20, 20, 40), (0, 0, 5, 5)]
    assert [text.get_text() for text in axes.texts] == ["dog", "cat"]
    assert axes.get_title(loc="left") == "a.jpg"
    assert num_colours(tmp_path / "grid.jpg") > 10


def test_names_of_boxes_at_the_upper_edge_stand_inside(tmp_path: Path) -> None:
    below, inside = plot_pictures([picture()], NAMES, tmp_path / "grid.png").axes[0].texts
    assert (below.get_verticalalignment(), inside.get_verticalalignment()) == ("bottom", "top")


def test_detections_carry_scores_and_stand_beside_their_labels(tmp_path: Path) -> None:
    found = picture("a.jpg", scores=np.array([0.875, 0.5]))
    figure = plot_truth_and_detections([picture("a.jpg")], [found], NAMES, tmp_path / "val.png")
    truth, detected = figure.axes[:2]
    assert (truth.get_title(loc="left"), detected.get_title(loc="left")) == ("labelled: a.jpg", "detected: a.jpg")
    assert [text.get_text() for text in detected.texts] == ["dog 0.88", "cat 0.50"]


def test_the_grid_has_room_for_all_and_hides_the_rest(tmp_path: Path) -> None:
    figure = plot_pictures([picture()] * 5, NAMES, tmp_path / "grid.png", columns=3)
    assert [len(axes.images) for axes in figure.axes] == [1, 1, 1, 1, 1, 0]
    assert not any(axes.axison for axes in figure.axes)


def test_no_pictures_make_an_empty_one(tmp_path: Path) -> None:
    plot_pictures([], NAMES, tmp_path / "grid.png")
    assert (tmp_path / "grid.png").stat().st_size > 0


GREY = np.full((300, 400, 3), 114, np.uint8)
LONG_NAMES = ("cat", "dog", "日本語\nの\t長い名前" * 4)


def rows(*rows: tuple[float, ...]) -> np.ndarray:
    return np.array(rows, np.float32).reshape(-1, 6)


def test_nothing_found_changes_nothing() -> None:
    drawn = draw_detections(GREY, rows(), LONG_NAMES)
    assert np.array_equal(drawn, GREY)
    assert drawn is not GREY


def test_a_box_is_drawn_on_its_edges_and_the_original_stays() -> None:
    drawn = draw_detections(GREY, rows((50, 100, 250, 200, 0.9, 0)), LONG_NAMES)
    changed = (drawn != GREY).any(2)
    assert changed[100:201, 50].all()
    assert changed[100:201, 250].all()
    assert changed[200, 50:251].all()
    assert not changed[110:190, 60:240].any()
    assert not changed[:, :49].any()
    assert (GREY == 114).all()


def test_classes_have_colours_of_their_own_and_the_best_is_on_top() -> None:
    place = (50, 100, 250, 200)
    one, other = (draw_detections(GREY, rows((*place, 0.9, kind)), LONG_NAMES)[150, 50] for kind in (0, 1))
    assert (one != other).any()
    both = draw_detections(GREY, rows((*place, 0.9, 0), (*place, 0.5, 1)), LONG_NAMES)
    assert np.array_equal(both[150, 50], one)


def test_boxes_at_the_border_and_long_foreign_names_are_drawn() -> None:
    for row in ((0, 0, 400, 300, 0.5, 2), (395, 0, 400, 5, 0.5, 2), (0, 0, 0, 0, 1.0, 1)):
        assert (draw_detections(GREY, rows(row), LONG_NAMES) != GREY).any()
    assert draw_detections(GREY[:10, :12], rows((1, 1, 5, 5, 0.5, 2)), LONG_NAMES).shape == (10, 12, 3)
