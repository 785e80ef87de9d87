from itertools import product

import cv2
import numpy as np

from ray_yolo.config.sections import AugmentConfig
from ray_yolo.data.augment import GREY, draw_affine
from ray_yolo.data.geometry import move_points
from ray_yolo.data.mosaic import Tile, corner, enclosing_range, render, snap
from tests.support.pictures import smooth_picture

QUADRANTS = ((True, True), (False, True), (True, False), (False, False))


def seen(tiles: list[Tile[np.ndarray]], seam: tuple[int, int], canvas: tuple[int, int], matrix: np.ndarray,
         size: tuple[int, int]) -> np.ndarray:
    """What `render` writes; outside of the rows that it names there is grey."""
    out = np.zeros((*size, 3), np.uint8)
    rows = render(out, tiles, seam, canvas, matrix)
    assert (np.delete(out, rows, axis=0) == GREY).all()
    return out


def lay_out(tiles: list[Tile[np.ndarray]], seam: tuple[int, int], canvas: tuple[int, int]) -> np.ndarray:
    """The canvas itself, which the product never makes."""
    shown = np.full((*canvas, 3), GREY, np.uint8)
    for tile in tiles:
        x, y = corner(tile.image.shape[:2], tile.before, seam)
        height, width = tile.image.shape[:2]
        left, above, right, below = max(x, 0), max(y, 0), min(x + width, canvas[1]), min(y + height, canvas[0])
        shown[above:below, left:right] = tile.image[above - y:below - y, left - x:right - x]
    return shown


def warp(canvas: np.ndarray, matrix: np.ndarray, size: tuple[int, int]) -> np.ndarray:
    """The canvas through the matrix, by OpenCV (whose pixel centres lie on whole numbers)."""
    half = np.array([[1, 0, 0.5], [0, 1, 0.5], [0, 0, 1]])
    return cv2.warpPerspective(canvas, np.linalg.inv(half) @ matrix @ half, size[::-1], flags=cv2.INTER_LINEAR,
                               borderMode=cv2.BORDER_CONSTANT, borderValue=(GREY,) * 3)


def near_an_edge(canvas: np.ndarray, tiles: list[Tile[np.ndarray]], seam: tuple[int, int], matrix: np.ndarray,
                 size: tuple[int, int]) -> np.ndarray:
    """Output pixels within about a pixel of a picture's edge or the seam, where the two ways may differ."""
    marks = np.zeros(canvas.shape[:2], np.uint8)
    for number, tile in enumerate(tiles):
        x, y = corner(tile.image.shape[:2], tile.before, seam)
        cv2.rectangle(marks, (x, y), (x + tile.image.shape[1] - 1, y + tile.image.shape[0] - 1), 60 * (number + 1), -1)
    wider = np.array([[1, 0, 4], [0, 1, 4], [0, 0, 1]]) @ matrix  # an edge just outside the output matters too
    shown = warp(np.repeat(marks[..., None], 3, axis=2), wider, (size[0] + 8, size[1] + 8))[..., 0]
    return (cv2.dilate(shown, np.ones((5, 5))) != cv2.erode(shown, np.ones((5, 5))))[4:-4, 4:-4]


def test_direct_rendering_equals_rendering_through_the_canvas() -> None:
    size, canvas = (96, 96), (192, 192)
    settings = (AugmentConfig(), AugmentConfig(scale=0.9, translate=0.4), AugmentConfig(degrees=45, shear=10),
                AugmentConfig(degrees=180, scale=0.9, perspective=0.0004))
    for augment, seed in product(settings, range(12)):
        rng = np.random.default_rng(seed)
        seam = tuple(rng.integers(48, 145, 2).tolist())
        shapes = [(96, 72), (60, 96), (96, 96), (96, 33)]
        tiles = [Tile(smooth_picture(*shape, seed=10 * seed + number), before)
                 for number, (shape, before) in enumerate(zip(shapes, QUADRANTS, strict=True))]
        matrix = snap(draw_affine(rng, augment, canvas, size)[0], seam)
        straight = seen(tiles, seam, canvas, matrix, size).astype(int)
        laid_out = lay_out(tiles, seam, canvas)
        difference = np.abs(straight - warp(laid_out, matrix, size)).max(axis=2)
        inside = ~near_an_edge(laid_out, tiles, seam, matrix, size)
        assert inside.mean() > 0.3, (augment, seed)
        assert difference[inside].max() <= 3, (augment, seed)


def test_without_zoom_the_output_is_the_canvas_itself() -> None:
    tiles = [Tile(smooth_picture(40, 50, seed=number), before) for number, before in enumerate(QUADRANTS)]
    shift = np.array([[1.0, 0, -20], [0, 1, -30], [0, 0, 1]])
    expected = lay_out(tiles, (55, 60), (100, 100))[30:80, 20:70]
    assert np.array_equal(seen(tiles, (55, 60), (100, 100), shift, (50, 50)), expected)


def test_a_seam_outside_the_output_is_allowed() -> None:
    tiles = [Tile(smooth_picture(90, 90, seed=number), before) for number, before in enumerate(QUADRANTS)]
    for x in (-40, 0, 40, 95, 140):
        shift = np.array([[1.0, 0, x - 90], [0, 1, 0], [0, 0, 1]])
        canvas = np.pad(lay_out(tiles, (90, 90), (180, 180)), ((0, 0), (200, 200), (0, 0)), constant_values=GREY)
        expected = canvas[:90, 290 - x:380 - x]
        assert np.array_equal(seen(tiles, (90, 90), (180, 180), shift, (90, 90)), expected)


def test_pictures_are_cut_where_the_canvas_ends() -> None:
    white = np.full((50, 50, 3), 255, np.uint8)
    expected = np.full((60, 60, 3), GREY, np.uint8)
    expected[13:38, 0:15] = 255  # the left 20 px lie left of the canvas; rows 25..75
    expected[38:50, 15:40] = 255  # rows 75..100: the lower 25 px lie below the canvas
    snapped = snap(np.diag([0.5, 0.5, 1.0]), (30, 75))
    out = seen([Tile(white, (True, True)), Tile(white, (False, False))], (30, 75), (100, 100), snapped, (60, 60))
    assert np.array_equal(out[..., 0] == 255, expected[..., 0] == 255)


def test_only_rows_that_a_picture_reaches_are_named() -> None:
    """A strip of 10 rows above the seam and one of 30 below it, which is cut where the output ends."""
    tiles = [Tile(smooth_picture(10, 50), (True, True)), Tile(smooth_picture(30, 50), (False, False))]
    out = np.zeros((60, 60, 3), np.uint8)
    assert render(out, tiles, (30, 40), (60, 60), np.eye(3)) == range(30, 60)
    assert render(out, tiles[:1], (30, 40), (60, 60), np.eye(3)) == range(30, 40)
    assert len(render(out, tiles[:1], (30, 99), (120, 60), np.eye(3))) == 0


def test_the_range_that_encloses_others_ignores_empty_ones() -> None:
    assert enclosing_range([range(9, 0), range(3, 5), range(7, 8)]) == range(3, 8)


def test_snapping_moves_the_seam_between_pixels_and_by_half_a_pixel_at_most() -> None:
    for seed in range(20):
        augment = AugmentConfig(degrees=9, perspective=1e-4)
        matrix, _ = draw_affine(np.random.default_rng(seed), augment, (99, 99), (50, 50))
        before, after = (move_points(np.array([40.0, 60]), each) for each in (matrix, snap(matrix, (40, 60))))
        assert np.allclose(after, np.rint(after), atol=1e-9)
        assert np.abs(after - before).max() <= 0.5


def test_every_pixel_of_a_turned_mosaic_is_covered() -> None:
    """No grey shines through at the seam, where two pictures would each leave half a pixel open."""
    white = np.full((100, 100, 3), 255, np.uint8)
    augment = AugmentConfig(degrees=45, scale=0, translate=0)
    matrix = snap(draw_affine(np.random.default_rng(1), augment, (200, 200), (60, 60))[0], (100, 100))
    out = seen([Tile(white, before) for before in QUADRANTS], (100, 100), (200, 200), matrix, (60, 60))
    assert (out == 255).all()
