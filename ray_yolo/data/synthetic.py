"""The built-in data sets, drawn from a seed on first use without a network.

They show geometric figures on textured, noisy backgrounds; some overlap, some images are empty, and colour is
independent of class. `shapes` can be learned from scratch on a laptop. `shapes8` is a tiny version for quick trials.
`shapes1k` is larger and harder (six classes, small figures). The same generator version draws the same pixels
everywhere.
"""

from __future__ import annotations

import os
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import NamedTuple

import cv2
import numpy as np

from ray_yolo.core.structures import Annotation
from ray_yolo.data.index_cache import build_in_place, cache_folder
from ray_yolo.data.labels import covered
from ray_yolo.data.yolo_txt import shares_of

VERSION = 2  # raise it when any pixel or label changes: tables of results refer to it
CLASSES = ("circle", "square", "triangle", "star", "ring", "cross")
_SUBPIXEL_BITS = 4
_SPLITS = ("train", "val")


class SyntheticDataset(NamedTuple):
    """The parameters of a built-in data set."""

    seed: int
    num_train: int
    num_val: int
    side_px: int
    num_classes: int
    scale: tuple[float, float]  # figure diameter as a share of the image side
    max_figures: int
    turn_degrees: float  # largest rotation of a figure


BUILT_IN = {
    "shapes": SyntheticDataset(1, 128, 64, 160, 3, (0.28, 0.60), 3, 25),
    "shapes8": SyntheticDataset(8, 8, 8, 160, 3, (0.28, 0.60), 3, 25),
    "shapes1k": SyntheticDataset(1000, 1000, 100, 256, 6, (0.05, 0.40), 8, 180),
}


def ensure_shapes(name: str) -> Path:
    """The data.yaml of a built-in data set, drawn into the user's cache folder on first use."""
    folder = build_in_place(cache_folder() / f"{name}-v{VERSION}", partial(_write, BUILT_IN[name]))
    return folder / "data.yaml"


def draw(drawing: SyntheticDataset, split: int, number: int) -> tuple[np.ndarray, Annotation]:
    """Image `number` of a split (0 train, 1 val): (side, side, 3) uint8 RGB and its annotation."""
    rng = np.random.default_rng([drawing.seed, split, number])
    image = _background(rng, drawing.side_px)
    classes: list[int] = []
    boxes: list[np.ndarray] = []
    count = 0 if rng.random() < 0.06 else int(rng.integers(1, drawing.max_figures + 1))
    for kind in rng.integers(drawing.num_classes, size=count).tolist():
        for _ in range(12):  # attempts to find a position with little overlap
            outline, box = _figure(rng, kind, drawing)
            if all(max(covered(old[None], box), covered(box[None], old)) < 0.25 for old in boxes):
                (left, above), (right, below) = np.floor(box[:2]).astype(int), np.ceil(box[2:]).astype(int)
                _paint(image[above:below, left:right], rng, kind, outline - (left, above))
                classes.append(kind)
                boxes.append(box)
                break
    side = (drawing.side_px, drawing.side_px)
    array = np.array(boxes, np.float32).reshape(-1, 4)
    return image, Annotation(f"{number:06d}.jpg", side, np.array(classes, np.int64), array)


def _background(rng: np.random.Generator, side: int) -> np.ndarray:
    """A smooth random colour field with stripes and noise."""
    coarse = rng.integers(30, 226, (4, 4, 3), dtype=np.uint8)
    field = cv2.resize(coarse, (side, side), interpolation=cv2.INTER_LINEAR_EXACT).astype(np.int16)
    period, phase = int(rng.integers(5, 24)), int(rng.integers(0, 24))
    across = np.arange(side, dtype=np.int64)
    stripes = ((across[:, None] * int(rng.integers(-2, 3)) + across + phase) // period % 2) * 24 - 12
    noise = rng.integers(-20, 21, (side, side, 3), dtype=np.int16)
    return np.clip(field + stripes[..., None] + noise, 0, 255).astype(np.uint8)


def _unit_outline(kind: int) -> np.ndarray:
    """Corners of a figure of radius 1 about the origin, (k, 2)."""
    if CLASSES[kind] == "cross":
        a = 0.33
        return np.array([(a, 1), (a, a), (1, a), (1, -a), (a, -a), (a, -1), (-a, -1), (-a, -a),
                         (-1, -a), (-1, a), (-a, a), (-a, 1)], float)
    corners = {"square": 4, "triangle": 3, "star": 10}.get(CLASSES[kind], 64)
    first = np.pi / 4 if CLASSES[kind] == "square" else -np.pi / 2  # upright; y points down
    angles = first + np.arange(corners) * (2 * np.pi / corners)
    radius = np.where(np.arange(corners) % 2, 0.42, 1.0) if CLASSES[kind] == "star" else np.ones(corners)
    return np.stack([np.cos(angles), np.sin(angles)], axis=1) * radius[:, None]


def _figure(rng: np.random.Generator, kind: int, drawing: SyntheticDataset) -> tuple[np.ndarray, np.ndarray]:
    """A rotated, slightly stretched outline inside the image, and its box (both in pixels)."""
    low, high = drawing.scale
    radius = drawing.side_px * (low + (high - low) * rng.random()) / 2
    stretch = np.array([rng.uniform(0.85, 1.18), 1.0])
    angle = np.radians(rng.uniform(-1, 1) * drawing.turn_degrees)
    turn = np.array([[np.cos(angle), -np.sin(angle)], [np.sin(angle), np.cos(angle)]])
    outline = (_unit_outline(kind) * stretch * radius) @ turn.T
    lowest, highest = -outline.min(axis=0), drawing.side_px - outline.max(axis=0)
    outline += lowest + (highest - lowest) * rng.random(2)
    return outline, np.concatenate([outline.min(axis=0), outline.max(axis=0)])


def _paint(image: np.ndarray, rng: np.random.Generator, kind: int, outline: np.ndarray) -> None:
    """Fill an outline that spans the image with a noisy colour that contrasts with the background."""
    mask = np.zeros(image.shape[:2], np.uint8)
    _fill(mask, outline, 255)
    if CLASSES[kind] == "ring":
        centre = outline.mean(axis=0)
        _fill(mask, centre + (outline - centre) * 0.55, 0)
    background = image[mask > 127].mean(axis=0) if (mask > 127).any() else np.full(3, 127.0)
    colour = rng.integers(0, 256, 3)
    while np.abs(colour - background).max() < 90:
        colour = rng.integers(0, 256, 3)
    filling = np.clip(colour + rng.integers(-12, 13, image.shape, dtype=np.int16), 0, 255).astype(np.int32)
    share = mask.astype(np.int32)[..., None]
    image[:] = (filling * share + image * (255 - share) + 127) // 255


def _fill(mask: np.ndarray, outline: np.ndarray, value: int) -> None:
    # Half a pixel: OpenCV has pixel centres at whole numbers, boxes have pixel edges there.
    points = np.round((outline - 0.5) * 2**_SUBPIXEL_BITS).astype(np.int32)
    cv2.fillPoly(mask, [points], value, lineType=cv2.LINE_AA, shift=_SUBPIXEL_BITS)


def _write(drawing: SyntheticDataset, folder: Path) -> None:
    with ThreadPoolExecutor(min(8, os.cpu_count() or 1)) as pool:
        for split, count in enumerate((drawing.num_train, drawing.num_val)):
            for kind in ("images", "labels"):
                (folder / kind / _SPLITS[split]).mkdir(parents=True)
            list(pool.map(partial(_write_image, drawing, folder, split), range(count)))
    names = "".join(f"  {number}: {name}\n" for number, name in enumerate(CLASSES[:drawing.num_classes]))
    (folder / "data.yaml").write_text(f"path: .\ntrain: images/train\nval: images/val\nnames:\n{names}")


def _write_image(drawing: SyntheticDataset, folder: Path, split: int, number: int) -> None:
    image, shown = draw(drawing, split, number)
    file = folder / "images" / _SPLITS[split] / shown.path
    if not cv2.imwrite(str(file), image[..., ::-1], [cv2.IMWRITE_JPEG_QUALITY, 92]):
        raise OSError(f"cannot write {file}")
    (folder / "labels" / _SPLITS[split] / f"{number:06d}.txt").write_text(label_text(shown))


def label_text(shown: Annotation) -> str:
    """YOLO label rows of an annotation: class and centre, width and height as shares of the image."""
    rows = zip(shown.classes.tolist(), shares_of(shown.boxes, shown.size).tolist(), strict=True)
    return "".join(f"{kind} {x:.6f} {y:.6f} {width:.6f} {height:.6f}\n" for kind, (x, y, width, height) in rows)
