"""Images of more than 8 bits per channel: their values become levels by the range of the training split, everywhere."""

from __future__ import annotations

import shutil
from collections.abc import Sequence
from pathlib import Path

import cv2
import numpy as np
import pytest
from PIL import Image

from ray_yolo.config.commands import DetectConfig, ValConfig
from ray_yolo.data.image_cache import ImageStore
from ray_yolo.data.index import survey
from ray_yolo.data.sources import read_source
from ray_yolo.inference.output import detect_frames
from ray_yolo.inference.predictor import ImageDetections, Predictor, build_predictor, load_trained
from ray_yolo.runtime import serving, validator
from ray_yolo.runtime.trainer import fit
from tests.support.jobs import make_config
from tests.support.pictures import write_image
from tests.unit.data.test_pixels import PICTURE, _own_cache

__all__ = ["_own_cache"]  # fixtures


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """The folder of a 12-bit data set, and weights that a training on it has written."""
    folder = tmp_path_factory.mktemp("deep")
    config = make_config(folder, 0, epochs=1)
    for path in (folder / "data" / "images").rglob("*.png"):
        cv2.imwrite(str(path), cv2.imread(str(path)).astype(np.uint16) * 16)  # 0 to 3760
    result = fit(config, quiet=True)
    return folder / "data", result.last


def test_weights_record_the_range_and_every_reader_uses_it(
        run: tuple[Path, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    _, weights = run
    trained = load_trained(weights)
    assert trained.pixel_range == {"integer": (0, 4095)}
    dark = tmp_path / "dark.png"
    values = PICTURE.astype(np.uint16) * 4  # as a picture alone, 0 to 1020, it would be as bright as the others
    write_image(dark, values)
    expected = np.rint(values.astype(float) * 255 / 4095).astype(np.uint8)
    predictor = build_predictor(trained, DetectConfig())
    assert np.array_equal(next(read_source(dark).frames()).read(predictor.pixel_range).pixels, expected)
    assert np.array_equal(serving.read_picture(dark.read_bytes(), predictor.pixel_range), expected)
    with Image.open(write_image(tmp_path / "grey.png", values[..., 0])) as file:  # Pillow reads 16 bits of grey alone
        frame = next(read_source(file).frames()).read(predictor.pixel_range)
    assert np.array_equal(frame.pixels, np.repeat(expected[..., :1], 3, axis=2))
    seen: list[np.ndarray] = []

    def detect(self: Predictor, images: Sequence[np.ndarray]) -> list[ImageDetections]:
        seen.extend(images)
        return [ImageDetections(np.zeros((0, 6), np.float32), {}) for _ in images]

    monkeypatch.setattr(Predictor, "detect", detect)
    list(detect_frames(predictor, read_source(dark).frames(), threads=0))
    assert np.array_equal(seen[0], expected)


def test_validation_reads_with_the_range_of_the_weights(run: tuple[Path, Path], tmp_path: Path) -> None:
    data, weights = run
    other = shutil.copytree(data, tmp_path / "other")
    for path in (other / "images").rglob("*.png"):
        write_image(path, PICTURE.astype(np.uint16) * 257)
    index = validator.check(ValConfig(weights=str(weights), data=str(other / "data.yaml"))).labels
    assert index.pixel_range == {"integer": (0, 4095)}
    assert "4095 as white; values beyond them are clipped" in survey(index).notes[0]
    assert ImageStore(index, 64, smooth=True).load(0).max() == 255
