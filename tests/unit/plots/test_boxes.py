"""Images with boxes: as figures, and drawn at their full size."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import ImageDraw

from ray_yolo.plots import boxes
from ray_yolo.plots.boxes import SIDE, TITLE, Picture, draw_detections, plot_pictures, plot_truth_and_detections

NAMES = ["cat", "dog"]
BOXES = np.array([[10.0, 20.0, 30.0, 60.0], [0.0, 0.0, 5.0, 5.0]])


def picture(title: str = "", scores: np.ndarray | None = None) -> Picture:
    return Picture(np.full((80, 100, 3), 200, dtype=np.uint8), BOXES, np.array([1, 0]), scores, title)


@pytest.fixture
def drawn(monkeypatch: pytest.MonkeyPatch) -> list[tuple[np.ndarray, bool]]:
    """What is drawn on each image of a grid: rows, and whether they have scores."""
    calls: list[tuple[np.ndarray, bool]] = []

    def draw(image: np.ndarray, rows: np.ndarray, names: Any, *, scores: bool) -> np.ndarray:
        calls.append((rows, scores))
        return image

    monkeypatch.setattr(boxes, "draw_detections", draw)
    return calls


def test_an_image_of_a_grid_is_scaled_with_its_boxes(tmp_path: Path, drawn: list[tuple[np.ndarray, bool]]) -> None:
    grid = np.asarray(plot_pictures([picture("a.jpg")], NAMES, tmp_path / "grid.png"))
    [(rows, scores)] = drawn
    assert rows[:, :4].tolist() == (4.8 * BOXES).tolist()
    assert (rows[:, 5].tolist(), scores) == ([1, 0], False)
    assert (grid[TITLE : TITLE + 384, :SIDE] == 200).all()
    assert (grid[:TITLE, :SIDE] < 100).any()  # its title
    assert (grid[:, SIDE:] == 255).all()
    assert not (tmp_path / "grid.png.part").exists()


def test_detections_carry_scores_and_stand_beside_their_labels(
        tmp_path: Path, drawn: list[tuple[np.ndarray, bool]]) -> None:
    found = picture("a.jpg", scores=np.array([0.875, 0.5]))
    plot_truth_and_detections([picture("a.jpg")], [found], NAMES, tmp_path / "val.jpg")
    assert [scores for _, scores in drawn] == [False, True]
    assert drawn[1][0][:, 4].tolist() == [0.875, 0.5]
    assert (tmp_path / "val.jpg").read_bytes().startswith(b"\xff\xd8")


def test_the_grid_has_room_for_all_and_leaves_the_rest_white(tmp_path: Path) -> None:
    flat = Picture(np.zeros((20, 100, 3), np.uint8), BOXES[:0], np.zeros(0, np.int64))
    grid = np.asarray(plot_pictures([picture()] * 4 + [flat], NAMES, tmp_path / "grid.png", columns=3))
    filled = (grid != 255).any(2)
    rows, columns = np.flatnonzero(filled.any(1)), np.flatnonzero(filled[400:].any(0))
    assert (rows[0], rows[-1], columns[-1]) == (0, 384 + 4 + 384 - 1, 2 * SIDE + 3)
    assert filled[388:388 + 96, SIDE + 4 : 2 * SIDE + 4].all()
    assert not filled[388 + 96 :, SIDE + 4 :].any()


def test_no_pictures_and_titles_that_are_no_text_make_a_picture(tmp_path: Path) -> None:
    plot_pictures([], NAMES, tmp_path / "none.png")
    plot_pictures([picture("\udcff.jpg")], NAMES, tmp_path / "odd.png")
    assert (tmp_path / "none.png").stat().st_size > 0


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


def labels_of(monkeypatch: pytest.MonkeyPatch, detections: np.ndarray) -> tuple[list[str], np.ndarray]:
    """The texts that `draw_detections` writes into an image of 300 x 400 pixels, and their places (n, 4)."""
    texts: list[str] = []
    places: list[tuple[float, ...]] = []
    draw, fill = ImageDraw.ImageDraw.text, ImageDraw.ImageDraw.rectangle

    def text(self: ImageDraw.ImageDraw, at: Any, words: str, **also: Any) -> None:
        texts.append(words)
        draw(self, at, words, **also)

    def rectangle(self: ImageDraw.ImageDraw, at: Any, **also: Any) -> None:
        if "fill" in also:
            places.append(at)
        fill(self, at, **also)

    monkeypatch.setattr(ImageDraw.ImageDraw, "text", text)
    monkeypatch.setattr(ImageDraw.ImageDraw, "rectangle", rectangle)
    draw_detections(np.zeros((300, 400, 3), np.uint8), detections, ["person", "bicycle"])
    return texts, np.array(places)


def test_labels_of_boxes_on_top_of_each_other_do_not_hide_each_other(monkeypatch: pytest.MonkeyPatch) -> None:
    rng = np.random.default_rng(0)
    low = rng.uniform(40, 80, (30, 2))
    boxes = np.hstack([low, low + rng.uniform(80, 200, (30, 2)), np.linspace(0.9, 0.3, 30)[:, None],
                       rng.integers(0, 2, (30, 1))])
    texts, places = labels_of(monkeypatch, boxes)
    assert len(texts) > 8
    assert texts[0].endswith("0.90")
    assert places.min() >= 0
    assert (places[:, 2] <= 400).all()
    assert (places[:, 3] <= 300).all()
    for number, (left, top, right, bottom) in enumerate(places):
        others = np.delete(places, number, 0)
        hidden = (others[:, 0] < right) & (others[:, 2] > left) & (others[:, 1] < bottom) & (others[:, 3] > top)
        assert not hidden.any()


def test_two_equal_boxes_have_both_labels(monkeypatch: pytest.MonkeyPatch) -> None:
    texts, _ = labels_of(monkeypatch, np.array([[100, 100, 200, 200, 0.9, 0], [100, 100, 200, 200, 0.8, 1]]))
    assert texts == ["person 0.90", "bicycle 0.80"]
