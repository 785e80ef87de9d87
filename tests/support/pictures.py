"""Small data sets on disk, and pictures whose content tells where they came from."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import cv2
import numpy as np

from ray_yolo.labels.description import DatasetDescription, describe


def smooth_picture(height: int, width: int, seed: int = 0) -> np.ndarray:
    """A soft random picture (height, width, 3) uint8: resampling it in two ways gives nearly the same."""
    coarse = np.random.default_rng(seed).integers(0, 256, (4, 5, 3), dtype=np.uint8)
    return cv2.resize(coarse, (width, height), interpolation=cv2.INTER_CUBIC)


def write_image(path: Path, image: np.ndarray) -> Path:
    """Write RGB pixels in the format of the suffix."""
    path.parent.mkdir(parents=True, exist_ok=True)
    assert cv2.imwrite(str(path), image[..., ::-1] if image.ndim == 3 else image)
    return path


def write_dataset(root: Path, labels: Mapping[str, str | bytes | None], size: tuple[int, int] = (48, 64),
                  names: tuple[str, ...] = ("cat", "dog")) -> DatasetDescription:
    """A data set whose train and val split hold one PNG per entry: name -> label text, None for no label file."""
    for number, (name, text) in enumerate(labels.items()):
        write_image(root / "images" / f"{name}.png", smooth_picture(*size, seed=number))
        if text is not None:
            file = root / "labels" / f"{name}.txt"
            file.parent.mkdir(parents=True, exist_ok=True)
            file.write_bytes(text.encode() if isinstance(text, str) else text)
    return describe({"train": "images", "val": "images", "names": list(names)}, root / "data.yaml")
