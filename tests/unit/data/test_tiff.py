"""TIFF files whose pixels would be decoded as others."""

from __future__ import annotations

import io
import struct

import numpy as np
import pytest
from PIL import Image

from ray_yolo.data.images import UnreadableImageError, check_image, read_image
from ray_yolo.data.tiff import tags_of, why_misread
from tests.support.tiff import COLOUR, HEIGHT, WIDTH, tiff


@pytest.mark.parametrize("big", [False, True])
@pytest.mark.parametrize("order", ["<", ">"])
def test_tags_are_read_in_both_byte_orders(order: str, big: bool) -> None:
    tags = tags_of(tiff(16, planar=True, order=order, big=big))
    assert (tags[256], tags[258], tags[284]) == ((WIDTH,), (16, 16, 16), (2,))


@pytest.mark.filterwarnings("ignore:Corrupt EXIF")  # Pillow's, of a big-endian BigTIFF
@pytest.mark.parametrize("big", [False, True])
@pytest.mark.parametrize("order", ["<", ">"])
def test_deep_pixels_in_separate_planes_are_refused(order: str, big: bool) -> None:
    with pytest.raises(UnreadableImageError):
        check_image(tiff(16, planar=True, order=order, big=big))


@pytest.mark.parametrize("big", [False, True])
@pytest.mark.parametrize(("bits", "planar"), [(8, True), (8, False), (16, False)])
def test_other_pixels_are_read(bits: int, planar: bool, big: bool) -> None:
    content = tiff(bits, planar=planar, big=big)
    assert check_image(content) == (HEIGHT, WIDTH)
    pixels = read_image(content, pixel_range={"integer": (0.0, 65535.0)})
    assert np.abs(pixels.reshape(-1, 3).astype(int) - COLOUR).max() <= 1


def test_bands_whose_meaning_is_not_stated_are_bands() -> None:
    """GDAL writes several bands as one and extra samples of no kind."""
    with pytest.raises(UnreadableImageError):
        check_image(tiff(8, planar=False, photometric=1, samples=3, extra=(0, 0)))


@pytest.mark.parametrize("kind", [1, 2])
def test_grey_with_alpha_is_grey(kind: int) -> None:
    assert why_misread(tiff(8, planar=False, photometric=1, samples=2, extra=(kind,))) == ""


@pytest.mark.parametrize("big", [False, True])
def test_alpha_does_not_darken_colours(big: bool) -> None:
    """An alpha of 100 of 255, by which the colours are not multiplied."""
    content = bytearray(tiff(8, planar=False, samples=4, extra=(2,), big=big))
    first = 16 if big else 8
    content[first + 3:first + 4 * WIDTH * HEIGHT:4] = bytes([100]) * (WIDTH * HEIGHT)
    pixels = read_image(bytes(content))
    assert (pixels == COLOUR).all()


def test_deep_pixels_upside_down_are_refused() -> None:
    with pytest.raises(UnreadableImageError):
        check_image(tiff(16, planar=False, photometric=0, samples=1))
    assert why_misread(tiff(8, planar=False, photometric=0, samples=1)) == ""

def test_a_file_that_begins_with_a_preview_is_refused() -> None:
    """As a camera's DNG, whose picture comes after a smaller copy."""
    for kind, refused in ((0, False), (1, True), (2, False)):  # a picture, a smaller copy, a page
        file = io.BytesIO()
        Image.new("RGB", (WIDTH, HEIGHT), COLOUR).save(file, "TIFF", tiffinfo={254: kind})
        assert tags_of(file.getvalue())[254] == (kind,)
        assert why_misread(file.getvalue()).startswith("begins with a preview") == refused


def test_a_tag_without_values_states_nothing() -> None:
    entry = struct.pack("<HHI", 254, 4, 0) + b"\0" * 4
    assert why_misread(struct.pack("<4sIH", b"II*\0", 8, 1) + entry) == ""


def test_what_is_no_tiff_or_is_damaged_states_nothing() -> None:
    whole = tiff(16, planar=True)
    for content in (b"", b"II", whole[:8], whole[:len(whole) - 60], b"II*\0" + b"\xff" * 40):
        assert tags_of(content) == {}
    buffer = io.BytesIO()
    Image.new("RGB", (20, 20)).save(buffer, "PNG")
    assert why_misread(buffer.getvalue()) == ""
