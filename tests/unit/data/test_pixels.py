"""Images of more than 8 bits per channel: their values become levels by the range of the training split, everywhere."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import cv2
import numpy as np
import pytest
from PIL import Image

from ray_yolo.core.structures import AnnotationIndex, PixelValues
from ray_yolo.data.image_cache import ImageStore
from ray_yolo.data.images import inspect_image, read_image
from ray_yolo.data.index import as_training_reads, read_index, survey
from ray_yolo.data.pixels import as_read, black_and_white, join_values, range_of, to_levels, values_of
from ray_yolo.labels.description import describe
from tests.support.pictures import smooth_picture, write_image

PICTURE = smooth_picture(48, 64)  # levels from 0 to 255
GREY = np.repeat(PICTURE[..., :1], 3, axis=2)
ROW = "1 0.5 0.5 0.5 0.5\n"


@pytest.fixture(autouse=True)
def _own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RAY_YOLO_CACHE", str(tmp_path / "user-cache"))


@pytest.mark.parametrize(("kind", "low", "high", "expected"), [
    ("float", 0.0, 1.0, (0, 1)), ("float", 0.1, 0.9, (0, 1)), ("float", 0.0, 0.2, (0, 0.2)),
    ("float", 0.0, 255.0, (0, 255)), ("float", -1.0, 1.0, (-1, 1)), ("float", 0.0, 1.5, (0, 1.5)),
    ("float", 280.0, 310.0, (280, 310)), ("float", 0.5, 0.5, (0, 1)), ("float", -2.0, -2.0, (-2, -1)),
    ("float", -(2.0 ** 60), -(2.0 ** 60), (-(2.0 ** 60), -(2.0 ** 60) + 128)),  # the next number
    ("integer", 0, 255, (0, 255)), ("integer", 0, 1, (0, 1)), ("integer", 7, 1000, (0, 1023)),
    ("integer", 10, 4090, (0, 4095)), ("integer", 0, 65535, (0, 65535)), ("integer", 200, 60_000, (0, 65535)),
    ("integer", 20_000, 24_000, (20_000, 24_000)), ("integer", -50, 205, (-50, 205)),
    ("integer", 0, 255_000, (0, 255_000)), ("integer", 40_000, 40_000, (0, 65535)),
])
def test_black_and_white_by_hand(kind: str, low: float, high: float, expected: tuple[float, float]) -> None:
    assert black_and_white(PixelValues(kind, low, high)) == expected


def test_levels_by_hand() -> None:
    values = np.array([[[0, 2048, 4095]]], np.uint16)
    assert to_levels(values, {"integer": (0, 4095)}).tolist() == [[[0, 128, 255]]]
    assert to_levels(values, {"integer": (1000, 3000)}).tolist() == [[[0, 134, 255]]]  # 255 x 1048 / 2000 = 133.6
    assert to_levels(values, {"float": (0, 1)}).tolist() == [[[0, 128, 255]]]  # its own range
    floats = np.array([[[np.nan, np.inf, -np.inf, 0.5, -0.0, 7]]], np.float32)
    assert to_levels(floats, {"float": (0, 1)}).tolist() == [[[0, 255, 0, 128, 0, 255]]]
    assert to_levels(np.full((1, 1, 3), np.nan), {}).tolist() == [[[0, 0, 0]]]
    assert to_levels(PICTURE, {"integer": (0, 1)}) is PICTURE


def test_values_of_several_images_are_joined_by_kind() -> None:
    assert values_of(PICTURE) is None
    floats = np.array([[[np.nan, 0.25, -np.inf]]], np.float32)
    assert values_of(floats) == PixelValues("float", 0.25, 0.25)
    parts = [PixelValues("integer", 5, 900), PixelValues("float", 0, 1), PixelValues("integer", 3, 70)]
    assert join_values(parts) == (PixelValues("float", 0, 1, 1), PixelValues("integer", 3, 900, 2))
    assert range_of(join_values(parts)) == {"float": (0, 1), "integer": (0, 1023)}


ODD = {
    "float": (-9999.0, -3.4e38, 1e20, 7.0, -1.5), "12 bits": (65535, 16000), "thermal": (0, 65535, 30000),
    "32 bits": (-32768, 2**30)}
SCENES: dict[str, Callable[[np.ndarray], np.ndarray]] = {  # the values of a picture from its shades of 0 to 1
    "float": lambda shades: shades.astype(np.float32), "12 bits": lambda shades: (shades * 4000).astype(np.uint16),
    "thermal": lambda shades: (20000 + shades * 3000).astype(np.uint16),
    "32 bits": lambda shades: (shades * 9000).astype(np.int32) - 400}


@pytest.mark.parametrize(("kind", "odd"), [(kind, odd) for kind, values in ODD.items() for odd in values])
@pytest.mark.parametrize("share", [0.0, 0.3, 1.0])  # of a picture's pixels; 0: one pixel
def test_an_odd_picture_moves_no_other_by_more_than_a_few_levels(kind: str, odd: float, share: float) -> None:
    """One pixel of one of six pictures, or many of them of one value, as those of a satellite without data."""
    shades = [smooth_picture(48, 64, seed=seed) / 255 for seed in range(6)]
    pictures = [SCENES[kind](each) for each in shades]
    calm = range_of(join_values(filter(None, map(values_of, pictures))))
    spoilt = pictures[2].copy()
    spoilt.reshape(-1, 3)[:max(1, int(share * 48 * 64))] = odd
    values = join_values(filter(None, map(values_of, [*pictures[:2], spoilt, *pictures[3:]])))
    moved = [np.abs(to_levels(each, range_of(values)).astype(int) - to_levels(each, calm)).max() for each in pictures]
    assert max(moved) <= 3
    if share < 1:  # the range of the picture alone, as in `predict` without a range of the weights
        alone = to_levels(spoilt, {})[30:].astype(int)
        assert np.abs(alone - to_levels(pictures[2], {})[30:]).max() <= 3


def test_values_without_data_by_hand() -> None:
    def deep(*values: float) -> np.ndarray:
        grey = np.array(values, np.float32).repeat(10)
        return np.repeat(grey[None, :, None], 3, axis=2)

    assert values_of(deep(-9999, 0.0, 0.5, 1.0)) == PixelValues("float", 0, 1, 1, (-9999,))
    assert values_of(deep(-9999, 0.0, 1.0, 1e20)) == PixelValues("float", 0, 1, 1, (-9999, float(np.float32(1e20))))
    assert values_of(deep(0, 9.0, 9.5)) == PixelValues("float", 9, 9.5, 1, (0,))  # of a depth camera
    assert values_of(deep(-1, 0.0, 1.0)) == PixelValues("float", -1, 1)  # as near as the others
    assert values_of(deep(1000, 2000)) == PixelValues("float", 1000, 2000)  # a mask
    parts = [PixelValues("float", 0, 1, 1, (-9999,)), PixelValues("float", -9999, -9999), PixelValues("float", 0, 0.5)]
    joined, = join_values(parts)
    assert joined == PixelValues("float", 0, 1, 3, (-9999,))
    assert join_values(parts[1:2]) == (PixelValues("float", -9999, -9999),)
    assert as_read(joined, {"float": (0, 1)}).endswith("0 is read as black, 1 as white; taken as no data: -9999")


def test_data_without_values_are_reported(tmp_path: Path) -> None:
    for number in range(6):
        values = smooth_picture(48, 64, seed=number)[..., 0].astype(np.float32) / 255
        if number == 3:
            values[:20] = -9999
        (tmp_path / "images").mkdir(exist_ok=True)
        float_tiff(tmp_path / "images" / f"{number}.tiff", values)
    description = describe({"train": "images", "names": ["cat"]}, tmp_path / "data.yaml")
    for _ in range(2):  # the second index is a cached one
        index = read_index(description, "train")
        finding, = index.findings
        assert finding.what == "has 1280 pixels of the value -9999, far from all others: taken as no data"
        assert not finding.dropped
        assert index.pixel_range == {"float": (0, 1)}
        assert survey(index).notes[0].endswith("0 is read as black, 1 as white; taken as no data: -9999")
    assert read_image(index.paths[3], 1, index.pixel_range)[:20].max() == 0


def float_tiff(path: Path, pixels: np.ndarray) -> None:
    Image.fromarray(pixels).save(path)


CONTAINERS = {
    "16-bit PNG": (".png", PICTURE.astype(np.uint16) * 257, PICTURE),
    "16-bit PNG with alpha": (".png", np.dstack([PICTURE, GREY[..., :1]]).astype(np.uint16) * 257, PICTURE[..., ::-1]),
    "16-bit grey PNG": (".png", PICTURE[..., 0].astype(np.uint16) * 257, GREY),
    "12 bits in 16": (".png", (PICTURE.astype(np.uint16) * 16 + 15) * (PICTURE > 0), PICTURE),
    "8 bits in 16": (".tiff", PICTURE.astype(np.uint16), PICTURE),
    "16-bit TIFF": (".tiff", PICTURE.astype(np.uint16) * 257, PICTURE),
    "signed 16-bit TIFF": (".tiff", PICTURE[..., 0].astype(np.int16) - 100, GREY),
    "32-bit TIFF": (".tiff", PICTURE[..., 0].astype(np.int32) * 1000, GREY),
    "float TIFF, 0 to 1": (".tiff", PICTURE.astype(np.float32) / 255, PICTURE),
    "float TIFF, 0 to 255": (".tiff", PICTURE.astype(np.float32), PICTURE),
    "grey float TIFF": (".tiff", PICTURE[..., 0].astype(np.float32) / 255, GREY),
    "64-bit float TIFF": (".tiff", PICTURE.astype(np.float64) / 255, PICTURE),
    "16-bit PGM": (".pgm", PICTURE[..., 0].astype(np.uint16) * 257, GREY),
    "PFM": (".pfm", PICTURE.astype(np.float32) / 255, PICTURE),
}


@pytest.mark.parametrize("case", CONTAINERS)
def test_every_container_gives_the_levels_of_its_picture(tmp_path: Path, case: str) -> None:
    suffix, values, expected = CONTAINERS[case]
    path = write_image(tmp_path / "images" / f"a{suffix}", values)
    if "alpha" in case:
        cv2.imwrite(str(path), values)  # as BGRA
    facts = inspect_image(str(path))
    assert facts.size == (48, 64)
    assert facts.values == values_of(values[..., :3] if values.ndim == 3 else values)
    assert np.abs(read_image(str(path)).astype(int) - expected).max() <= 1
    (tmp_path / "labels").mkdir()
    (tmp_path / "labels" / "a.txt").write_text(ROW)
    index = read_index(describe({"train": "images", "names": ["cat", "dog"]}, tmp_path / "data.yaml"), "train")
    for mode in ("none", "disk"):  # full size: 64
        pixels = ImageStore(index, 64, mode, tmp_path / "cache").load(0)
        assert np.abs(pixels.astype(int) - expected).max() <= 1, mode
    note, = survey(index).notes
    assert note.startswith("1 image with ")


def test_the_range_is_the_sets_not_the_images(tmp_path: Path) -> None:
    """A dark image of a 12-bit camera stays dark; the cached index has the same range; labels and range identify it."""
    for name, factor in (("bright", 16), ("dark", 2)):
        write_image(tmp_path / "images" / f"{name}.png", PICTURE.astype(np.uint16) * factor)
    description = describe({"train": "images", "names": ["cat", "dog"]}, tmp_path / "data.yaml")
    for _ in range(2):
        index = read_index(description, "train")
        assert index.pixel_range == {"integer": (0, 4095)}
        assert index.pixel_values == (PixelValues("integer", 0, 4080, 2),)
        store = ImageStore(index, 64)
        assert np.array_equal(store.load(0), np.rint(PICTURE.astype(float) * 16 * 255 / 4095).astype(np.uint8))
        assert np.array_equal(store.load(1), np.rint(PICTURE.astype(float) * 2 * 255 / 4095).astype(np.uint8))
        assert survey(index).notes == (
            "2 images with more than 8 bits per channel (0 to 4080 without 0.1% of the pixels at either end): 0 is "
            "read as black, 4095 as white",)
    write_image(tmp_path / "images" / "dark.png", PICTURE.astype(np.uint16) * 257)
    assert read_index(description, "train").digest != index.digest


def test_pixels_of_8_bits_have_no_range(tmp_path: Path) -> None:
    write_image(tmp_path / "images" / "a.png", PICTURE)
    index = read_index(describe({"train": "images", "names": ["cat"]}, tmp_path / "data.yaml"), "train")
    assert (index.pixel_range, index.pixel_values, survey(index).notes) == ({}, (), ())


def test_pixels_that_are_no_numbers_are_reported(tmp_path: Path) -> None:
    values = PICTURE[..., 0].astype(np.float32) / 255
    values[0, :3] = np.nan
    values[1, 0] = np.inf
    (tmp_path / "images").mkdir()
    float_tiff(tmp_path / "images" / "a.tiff", values)
    float_tiff(tmp_path / "images" / "b.tiff", np.full((48, 64), np.nan, np.float32))
    index = read_index(describe({"train": "images", "names": ["cat"]}, tmp_path / "data.yaml"), "train")
    assert [finding.what for finding in index.findings] == [
        "has 4 pixels that are NaN or infinite; NaN is read as black", "has no pixel with a finite value"]
    pixels = read_image(index.paths[0], 1, index.pixel_range)
    assert pixels[0, :3].max() == 0
    assert pixels[1, 0].min() == 255
    assert np.abs(pixels[2:].astype(int) - GREY[2:]).max() <= 1


def test_the_validation_split_has_the_range_of_the_training_split(tmp_path: Path) -> None:
    def write(split: str, factor: int) -> AnnotationIndex:
        write_image(tmp_path / "images" / split / "a.png", PICTURE.astype(np.uint16) * factor)
        description = describe({split: f"images/{split}", "train": f"images/{split}", "names": ["cat"]},
                               tmp_path / "data.yaml")
        return read_index(description, split)

    train, val = write("train", 16), write("val", 2)
    assert val.pixel_range == {"integer": (0, 510)}
    assert as_training_reads(val, train).pixel_range == {"integer": (0, 4095)}
