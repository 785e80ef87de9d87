"""The device's colours against those of OpenCV on the host."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from ray_yolo.data.augment import GREY, colour_tables, recolour, scaled_hsv
from ray_yolo.ops import recolour as on_device
from ray_yolo.ops.recolour import ColourTables

GAINS = [(1.01, 1.2, 0.8), (0.99, 0.5, 1.3), (1.9, 1.0, 1.0), (1.0, 1.7, 0.61), (0.2, 0.0, 2.0)]


@pytest.fixture(scope="module")
def tables() -> ColourTables:
    return colour_tables()


def recoloured(images: np.ndarray, tables: ColourTables) -> np.ndarray:
    """Images (B, H, W, 3) with GAINS, by the device's function."""
    pixels = torch.from_numpy(images).permute(0, 3, 1, 2)
    scaled = torch.from_numpy(np.stack([scaled_hsv(gains) for gains in GAINS[: len(images)]]))
    changed = on_device.recolour(pixels, scaled, tables)
    assert (changed.dtype, changed.stride()) == (torch.uint8, pixels.stride())
    return changed.permute(0, 2, 3, 1).numpy()


def test_every_colour_is_that_of_the_host(tables: ColourTables) -> None:
    """All 256 greens with 64 reds and 64 blues, in each image in another place; rows are whole vectors of OpenCV."""
    reds, greens, blues = np.meshgrid(np.arange(0, 256, 4), np.arange(256), np.arange(0, 256, 4), indexing="ij")
    colours = np.stack([reds, greens, blues], axis=-1).astype(np.uint8).reshape(1024, 1024, 3)
    images = np.stack([np.roll(colours, number, axis=2) for number in range(len(GAINS))])
    expected = images.copy()
    for image, gains in zip(expected, GAINS, strict=True):
        recolour(image, gains)
    assert np.array_equal(recoloured(images, tables), expected)


def test_rows_without_content_need_no_care(tables: ColourTables) -> None:
    images = np.full((2, 8, 64, 3), GREY, np.uint8)
    images[:, 3:5] = np.random.default_rng(0).integers(0, 256, (2, 2, 64, 3))
    expected = images.copy()
    for image, gains in zip(expected, GAINS, strict=False):
        recolour(image, gains, range(3, 5))
    assert np.array_equal(recoloured(images, tables), expected)


def test_a_row_that_is_no_whole_vector_differs_by_rounding_alone(tables: ColourTables) -> None:
    """OpenCV converts the pixels at its end in another way."""
    images = np.random.default_rng(0).integers(0, 256, (1, 200, 45, 3), np.uint8)
    expected = images.copy()
    recolour(expected[0], GAINS[0])
    assert np.abs(recoloured(images, tables).astype(int) - expected).max() <= 2


def test_a_batch_without_images(tables: ColourTables) -> None:
    empty = on_device.recolour(torch.zeros(0, 3, 4, 4, dtype=torch.uint8), torch.zeros(0, 3, 256, dtype=torch.uint8),
                               tables)
    assert empty.shape == (0, 3, 4, 4)
