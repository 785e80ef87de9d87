"""Views: their numbers, mirrors, and matrices without an inverse."""

from __future__ import annotations

import numpy as np
import pytest

from ray_yolo.ops.views import LENGTH, Source, mirror_view, view_of
from tests.support.rendered import picture

ONE = 2**28
ZOOMED = np.array([[0.5, 0, 3], [0, 0.25, 10], [0, 0, 1]])


def test_the_numbers_of_a_view() -> None:
    sources = [Source(6, (8, 4), (True, False), (20, 3)), Source(2**40, (30, 40), (False, True), (10, 20))]
    view = view_of((48, 64), sources, (10, 8), ZOOMED)
    assert view.tolist() == [48, 64, 8, 12, 2 * ONE, 0, 0, 4 * ONE, *[0] * 5, 2**40, 30, 40, 10, 20, 6, 8, 4, 4, 3,
                             *[0] * 5]
    assert (len(view), view.dtype) == (LENGTH, np.int64)


@pytest.mark.parametrize("mirrored", [(True, False), (False, True), (True, True)])
def test_the_view_of_a_mirrored_picture_shows_it(mirrored: tuple[bool, bool]) -> None:
    held = np.random.default_rng(0).integers(0, 256, 4 * 90, np.uint8)
    sources = [Source(90 * number, (6, 5), before, (9, 9)) for number, before
               in enumerate([(True, True), (False, True), (True, False), (False, False)])]
    turned = np.array([[0.9, 0.6, -1.4], [-0.5, 1.1, 3.3], [0, 0, 1]])
    turned[:2, 2] += np.rint(turned[:2] @ (7, 8, 1)) - turned[:2] @ (7, 8, 1)
    view = view_of((13, 16), sources, (7, 8), turned)
    plain = picture(held, view)
    mirror_view(view, mirrored)
    along_x, along_y = mirrored
    assert np.array_equal(picture(held, view), plain[::-1 if along_y else 1, ::-1 if along_x else 1])
    assert not np.array_equal(plain[::-1], plain)


def test_a_picture_that_is_drawn_out_to_a_line_has_a_view() -> None:
    """A shear by 45 degrees along both axes, exactly or nearly."""
    sources = [Source(0, (1, 1), (False, False), (1, 1))]
    flat = view_of((4, 4), sources, (0, 0), np.array([[1, 1, 0], [1, 1, 0], [0, 0, 1.0]]))
    assert flat[4:8].tolist() == [0, 0, 0, 0]
    nearly = view_of((4, 4), sources, (0, 0), np.array([[1, 1, 0], [1 - 1e-15, 1, 0], [0, 0, 1.0]]))
    assert np.abs(nearly[4:8]).tolist() == [2**45] * 4
    assert picture(np.array([1, 2, 3], np.uint8), nearly).shape == (4, 4, 3)
