import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ray_yolo.data.geometry import cut, join, mirror, move, move_boxes, still_visible, stretch
from ray_yolo.labels.rows import NO_LABELS, Labels

SHIFT = np.array([[1.0, 0, 5], [0, 1, -3], [0, 0, 1]])
HALF = np.diag([0.5, 0.5, 1])
QUARTER_TURN = np.array([[0.0, -1, 100], [1, 0, 0], [0, 0, 1]])  # (x, y) -> (100 - y, x)
TRIANGLE = np.array([[10, 10], [30, 10], [10, 50]], np.float32)


def boxed(*boxes: tuple[float, float, float, float], polygons: tuple[np.ndarray, ...] = ()) -> Labels:
    return Labels(np.arange(len(boxes)), np.array(boxes, np.float32).reshape(-1, 4), polygons)


def cut_one(outline: np.ndarray, size: tuple[int, int]) -> np.ndarray:
    return cut(outline, np.zeros(len(outline), int), size)[0]


def equal(first: Labels, second: Labels) -> bool:
    return (np.array_equal(first.classes, second.classes) and np.allclose(first.boxes, second.boxes, atol=1e-4)
            and len(first.polygons) == len(second.polygons)
            and all(np.allclose(a, b, atol=1e-4) for a, b in zip(first.polygons, second.polygons, strict=True)))


@pytest.mark.parametrize("mirrored", [(True, False), (False, True), (True, True)])
def test_mirroring_twice_is_identity(mirrored: tuple[bool, bool]) -> None:
    labels = boxed((10, 10, 30, 50), polygons=(TRIANGLE,))
    once = mirror(labels, mirrored, (90, 100))
    assert equal(mirror(once, mirrored, (90, 100)), labels)
    assert not equal(once, labels)


def test_mirrored_boxes_by_hand() -> None:
    labels = boxed((10, 20, 30, 60))
    assert mirror(labels, (True, False), (80, 100)).boxes.tolist() == [[70, 20, 90, 60]]
    assert mirror(labels, (False, True), (80, 100)).boxes.tolist() == [[10, 20, 30, 60]]
    assert mirror(labels, (False, True), (100, 80)).boxes.tolist() == [[10, 40, 30, 80]]


def test_an_outline_stays_inside_its_box_under_every_change() -> None:
    labels = boxed((10, 10, 30, 50), polygons=(TRIANGLE,))
    for changed in (mirror(labels, (True, False), (64, 64)), mirror(labels, (False, True), (64, 64)),
                    stretch(labels, (2, 3), (5, 7)),
                    move(labels, SHIFT, 1, (100, 100), (100, 100)),
                    move(labels, QUARTER_TURN, 1, (99, 99), (100, 100))):
        (outline,), (box,) = changed.polygons, changed.boxes
        assert np.allclose([*outline.min(axis=0), *outline.max(axis=0)], box)


def test_stretching_by_hand() -> None:
    assert stretch(boxed((1, 2, 3, 4)), (10, 100), (5, 7)).boxes.tolist() == [[15, 207, 35, 407]]


def test_joining_gives_boxes_without_outline_an_empty_one() -> None:
    joined = join([boxed((0, 0, 9, 9)), boxed((10, 10, 30, 50), polygons=(TRIANGLE,)), NO_LABELS])
    assert joined.classes.tolist() == [0, 0]
    assert [len(outline) for outline in joined.polygons] == [0, 3]
    assert join([boxed((0, 0, 9, 9)), NO_LABELS]).polygons == ()


def test_moved_boxes_by_hand() -> None:
    box = np.array([[10.0, 20, 30, 60]])
    assert move_boxes(box, SHIFT).tolist() == [[15, 17, 35, 57]]
    assert move_boxes(box, HALF).tolist() == [[5, 10, 15, 30]]
    assert move_boxes(box, QUARTER_TURN).tolist() == [[40, 10, 80, 30]]
    diamond = np.array([[1, -1, 0], [1, 1, 0], [0, 0, np.sqrt(2)]])  # a turn by 45 degrees
    assert np.allclose(move_boxes(np.array([[0.0, 0, 2, 2]]), diamond), [[-np.sqrt(2), 0, np.sqrt(2), 2 * np.sqrt(2)]])


def test_boxes_beyond_the_horizon_are_dropped() -> None:
    horizon = np.array([[1.0, 0, 0], [0, 1, 0], [-0.02, 0, 1]])  # x = 50 is infinitely far away
    assert len(move(boxed((60, 10, 90, 40)), horizon, 1, (100, 100), (100, 100)).classes) == 0


def test_a_box_is_kept_by_sides_and_area() -> None:
    before = np.array([[0.0, 0, 40, 40]])
    for after, kept in [
        ((0, 0, 40, 40), True), ((0, 0, 2, 40), False), ((0, 0, 2.1, 78), True), ((0, 0, 40, 2), False),
        ((0, 0, 0.4 * 40, 0.24 * 40), False), ((0, 0, 0.4 * 40, 0.26 * 40), True), ((5, 5, 5, 5), False),
    ]:
        assert still_visible(before, np.array([after]), 1.0, np.array([False])).tolist() == [kept], after


@pytest.mark.parametrize(("side", "kept"), [(2.0, False), (2.1, True)])
def test_a_side_of_two_pixels_is_too_little_to_see(side: float, kept: bool) -> None:
    before, plain = np.array([[0.0, 0, 10, 40]]), np.array([False])
    assert still_visible(before, np.array([[0, 0, side, 40]]), 1.0, plain).tolist() == [kept]


def test_aspect_ends_at_a_hundred_and_outlines_are_kept_to_a_hundredth() -> None:
    before, plain = np.array([[0.0, 0, 400, 10]]), np.array([False])
    assert still_visible(before, np.array([[0.0, 0, 299, 3]]), 1.0, plain).tolist() == [True]
    assert still_visible(before, np.array([[0.0, 0, 301, 3]]), 1.0, plain).tolist() == [False]
    small = np.array([[0.0, 0, 9, 9]])
    assert still_visible(before, small, 1.0, plain).tolist() == [False]
    assert still_visible(before, small, 1.0, np.array([True])).tolist() == [True]


def test_zooming_out_alone_drops_nothing() -> None:
    """Compared with the unscaled old area, a box zoomed to a tenth would have a hundredth left and be dropped."""
    zoom = np.diag([0.1, 0.1, 1])
    assert len(move(boxed((0, 0, 100, 100)), zoom, 0.1, (200, 200), (200, 200)).classes) == 1
    assert len(move(boxed((0, 0, 100, 100)), zoom, 1.0, (200, 200), (200, 200)).classes) == 0


def test_only_the_part_on_the_canvas_counts() -> None:
    labels = boxed((-400, 0, 20, 20), (-400, 0, 1, 20))
    assert move(labels, np.eye(3), 1, (50, 50), (50, 50)).boxes.tolist() == [[0, 0, 20, 20]]


def test_a_cut_outline_gives_a_tighter_box_than_its_cut_box() -> None:
    """The right half of this triangle has no lower part."""
    labels = boxed((10, 10, 30, 50), polygons=(TRIANGLE,))
    left_20_gone = np.array([[1.0, 0, -20], [0, 1, 0], [0, 0, 1]])
    assert np.allclose(move(labels, left_20_gone, 1, (100, 100), (100, 100)).boxes, [[0, 10, 10, 30]])
    assert np.allclose(move(boxed((10, 10, 30, 50)), left_20_gone, 1, (100, 100), (100, 100)).boxes, [[0, 10, 10, 50]])


def test_the_seen_part_of_a_triangle_has_its_own_box() -> None:
    """Its right angle at (10, 10), its ends at (10, 90) and (90, 10); right of x = 50 only y < 50 is left of it."""
    triangle = np.array([[10, 10], [90, 10], [10, 90]], np.float32)
    labels = boxed((10, 10, 90, 90), polygons=(triangle,))
    left_50_gone = np.array([[1.0, 0, -50], [0, 1, 0], [0, 0, 1]])
    assert move(labels, left_50_gone, 1, (100, 100), (100, 100)).boxes.tolist() == [[0, 10, 40, 50]]
    assert move(labels, np.eye(3), 1, (100, 30), (100, 100)).boxes.tolist() == [[10, 10, 30, 90]]


def test_cutting_by_hand() -> None:
    square = np.array([[-5.0, -5], [15, -5], [15, 15], [-5, 15]])
    inside = cut_one(square, (10, 8))
    assert inside.min(axis=0).tolist() == [0, 0]
    assert inside.max(axis=0).tolist() == [8, 10]
    assert len(cut_one(square + 100, (10, 8))) == 0


def test_polygons_are_cut_one_by_one() -> None:
    """However many are cut at once; the second one lies outside."""
    shapes = [TRIANGLE.astype(float), TRIANGLE + 100.0, TRIANGLE[::-1] + 7.5, TRIANGLE[:, ::-1] * 1.5]
    points, rings = cut(np.concatenate(shapes), np.repeat(range(4), 3), (35, 25))
    for number, shape in enumerate(shapes):
        assert np.array_equal(points[rings == number], cut_one(shape, (35, 25)))
    assert (rings == 1).sum() == 0
    assert len(points) > 9


@given(st.lists(st.tuples(st.floats(-50, 150), st.floats(-50, 150)), min_size=3, max_size=8))
def test_a_cut_outline_lies_inside_and_cutting_again_changes_nothing(points: list[tuple[float, float]]) -> None:
    once = cut_one(np.array(points), (100, 80))
    if len(once):
        assert once.min() >= -1e-9
        assert (once.max(axis=0) <= np.array([80, 100]) + 1e-9).all()
        twice = cut_one(once, (100, 80))
        assert np.allclose(twice.min(axis=0), once.min(axis=0))
        assert np.allclose(twice.max(axis=0), once.max(axis=0))
