import cv2
import numpy as np
import pytest

from ray_yolo.config.sections import AugmentConfig
from ray_yolo.data.augment import GREY, blend, copy_paste, draw_affine, draw_colour_gains, letterbox, recolour
from ray_yolo.data.geometry import move_points
from ray_yolo.labels.rows import Labels
from tests.support.pictures import smooth_picture

STILL = AugmentConfig(hsv_h=0, hsv_s=0, hsv_v=0, translate=0, scale=0)


def rng(seed: int = 0) -> np.random.Generator:
    return np.random.default_rng(seed)


def test_colour_factors_are_one_plus_gain_times_draw() -> None:
    draws = rng(3).uniform(-1, 1, 3)
    factors = draw_colour_gains(rng(3), AugmentConfig(hsv_h=0.1, hsv_s=0.7, hsv_v=0.4))
    assert np.allclose(factors, 1 + draws * (0.1, 0.7, 0.4))
    assert draw_colour_gains(rng(3), STILL) == (1, 1, 1)


def test_recolouring_equals_a_plain_conversion_at_any_height() -> None:
    for height, gain in ((1, 1.3), (63, 1.3), (700, 0.985), (1500, 1.01), (3001, 1.9)):
        image = smooth_picture(height, 50)
        hsv = cv2.cvtColor(image, cv2.COLOR_RGB2HSV).astype(float)
        hue, saturation = hsv[..., 0] * gain % 180 // 1, np.rint(hsv[..., 1] * 0.7)
        plain = np.stack([hue, saturation, np.rint((hsv[..., 2] * 1.2).clip(0, 255))], axis=-1)
        recolour(image, (gain, 0.7, 1.2))
        expected = cv2.cvtColor(plain.astype(np.uint8), cv2.COLOR_HSV2RGB).astype(int)
        # products that end in a half may be rounded either way
        assert np.abs(image - expected).max() <= 2, (height, gain)


def test_factors_of_one_change_no_pixel() -> None:
    image = smooth_picture(30, 40)
    before = image.copy()
    recolour(image, (1, 1, 1))
    assert np.array_equal(image, before)


@pytest.mark.parametrize("gains", [(1.3, 0.7, 1.2), (0.99, 1.6, 2.3), (1, 1, 0.4)])
def test_grey_rows_are_not_converted(gains: tuple[float, float, float]) -> None:
    image = np.full((40, 64, 3), GREY, np.uint8)
    image[10:25] = smooth_picture(15, 64)
    whole = image.copy()
    recolour(whole, gains)
    recolour(image, gains, range(10, 25))
    assert np.array_equal(image, whole)


def test_without_gains_the_canvas_centre_goes_to_the_output_centre() -> None:
    matrix, zoom = draw_affine(rng(), STILL, (200, 300), (80, 100))
    assert zoom == 1
    assert move_points(np.array([150.0, 100]), matrix).tolist() == [50, 40]
    assert np.array_equal(matrix[:2, :2], np.eye(2))


def test_the_matrix_is_translation_shear_rotation_perspective_centre() -> None:
    """Against each factor written out, for draws that are known."""
    augment = AugmentConfig(degrees=30, translate=0.2, scale=0.4, shear=10, perspective=0.0005)
    draws = rng(7)
    px, py = draws.uniform(-1, 1, 2) * 0.0005
    angle = np.radians(draws.uniform(-1, 1) * 30)
    zoom = 1 + draws.uniform(-1, 1) * 0.4
    sx, sy = np.tan(np.radians(draws.uniform(-1, 1, 2) * 10))
    tx, ty = (0.5 + draws.uniform(-1, 1, 2) * 0.2) * (60, 50)
    expected = (np.array([[1, 0, tx], [0, 1, ty], [0, 0, 1]]) @ np.array([[1, sx, 0], [sy, 1, 0], [0, 0, 1]])
                @ np.array([[zoom * np.cos(angle), zoom * np.sin(angle), 0],
                            [-zoom * np.sin(angle), zoom * np.cos(angle), 0], [0, 0, 1]])
                @ np.array([[1, 0, 0], [0, 1, 0], [px, py, 1]]) @ np.array([[1, 0, -50], [0, 1, -40], [0, 0, 1]]))
    matrix, drawn_zoom = draw_affine(rng(7), augment, (80, 100), (50, 60))
    assert np.allclose(matrix, expected)
    assert drawn_zoom == zoom


def test_one_gain_does_not_change_the_draws_of_another() -> None:
    plain, _ = draw_affine(rng(5), AugmentConfig(), (10, 10), (10, 10))
    sheared, _ = draw_affine(rng(5), AugmentConfig(shear=5), (10, 10), (10, 10))
    assert np.isclose(plain[0, 0], sheared[0, 0])


def test_draws_stay_within_their_gains() -> None:
    zooms = [draw_affine(rng(seed), AugmentConfig(scale=0.3), (10, 10), (10, 10))[1] for seed in range(200)]
    assert 0.7 <= min(zooms) < 0.75
    assert 1.25 < max(zooms) <= 1.3


def test_blending_by_hand() -> None:
    first, second = np.full((2, 2, 3), 200, np.uint8), np.full((2, 2, 3), 100, np.uint8)
    assert (blend(first, second, 0.25) == 125).all()
    assert np.array_equal(blend(first, second, 1.0), first)


def test_letterboxing_centres_and_never_resizes() -> None:
    image = smooth_picture(30, 40)
    padded, (top, left) = letterbox(image, (64, 45))
    assert (top, left) == (17, 2)
    assert np.array_equal(padded[17:47, 2:42], image)
    padded[17:47, 2:42] = GREY
    assert (padded == 114).all()


SQUARE = np.array([[2, 2], [8, 2], [8, 8], [2, 8]], np.float32)


def scene() -> tuple[np.ndarray, Labels]:
    image = np.zeros((20, 40, 3), np.uint8)
    image[2:8, 2:8] = 255
    return image, Labels(np.array([4]), np.array([[2, 2, 8, 8]], np.float32), (SQUARE,))


def test_a_pasted_object_is_the_mirror_image_of_its_original() -> None:
    image, labels = scene()
    pasted, more = copy_paste(rng(), image, labels, 1.0)
    assert more.classes.tolist() == [4, 4]
    assert more.boxes.tolist() == [[2, 2, 8, 8], [32, 2, 38, 8]]
    assert (pasted[2:8, 32:38] == 255).all()
    assert pasted.sum() == 2 * image.sum()
    assert np.array_equal(pasted[:, :20], image[:, :20])


@pytest.mark.parametrize(("cover", "pasted"), [(0.29, True), (0.31, False)])
def test_nothing_is_pasted_over_thirty_percent_of_a_box(cover: float, pasted: bool) -> None:
    image, labels = scene()
    other = np.array([[32 - 10 * (1 - cover), 2, 32 + 10 * cover, 8]], np.float32)
    both = Labels(np.array([4, 5]), np.concatenate([labels.boxes, other]), (SQUARE, np.zeros((0, 2), np.float32)))
    assert (len(copy_paste(rng(), image, both, 1.0)[1].classes) == 3) == pasted


def test_only_the_given_share_of_outlined_objects_is_pasted() -> None:
    image = np.zeros((200, 40, 3), np.uint8)
    outlines = tuple(SQUARE + np.array([0, 20 * number]) for number in range(8))
    boxes = np.array([[*outline.min(axis=0), *outline.max(axis=0)] for outline in outlines], np.float32)
    labels = Labels(np.arange(10), np.concatenate([boxes, [[0, 180, 5, 185], [0, 190, 5, 195]]]).astype(np.float32),
                    (*outlines, np.zeros((0, 2)), np.zeros((0, 2))))
    assert len(copy_paste(rng(), image, labels, 0.5)[1].classes) == 14
    assert len(copy_paste(rng(), image, labels, 0.0)[1].classes) == 10
