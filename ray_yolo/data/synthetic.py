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

from ray_yolo.core.cache_folder import build_in_place, cache_folder
from ray_yolo.core.structures import Annotation
from ray_yolo.data.geometry import covered
from ray_yolo.labels.yolo_txt import shares_of

VERSION = 2  # Tables of results refer to it; raise it when any pixel or label changes.
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
    scale: tuple[float, float]
    """Figures have diameters in this range, as shares of the image side."""
    max_figures: int
    turn_degrees: float
    """A figure is rotated by at most this angle."""


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
    is_empty = rng.random() < 0.06
    count = 0 if is_empty else int(rng.integers(1, drawing.max_figures + 1))
    for kind in rng.integers(drawing.num_classes, size=count).tolist():
        for _ in range(12):  # attempts to find a position with little overlap
            outline, box = _figure(rng, kind, drawing)
            if any(_overlap(box, earlier) for earlier in boxes):
                continue
            left, above = np.floor(box[:2]).astype(int)
            right, below = np.ceil(box[2:]).astype(int)
            _paint(image[above:below, left:right], rng, kind, outline - (left, above))
            classes.append(kind)
            boxes.append(box)
            break
    size = (drawing.side_px, drawing.side_px)
    array = np.array(boxes, np.float32).reshape(-1, 4)
    return image, Annotation(f"{number:06d}.jpg", size, np.array(classes, np.int64), array)


def _overlap(one: np.ndarray, other: np.ndarray) -> bool:
    """Whether one of two boxes (4,) covers a quarter of the other or more."""
    return bool(covered(one[None], other)[0] >= 0.25 or covered(other[None], one)[0] >= 0.25)


def _background(rng: np.random.Generator, side: int) -> np.ndarray:
    """A smooth random colour field with stripes and noise."""
    coarse = rng.integers(30, 226, (4, 4, 3), dtype=np.uint8)
    # The exact variant computes with integers: the same pixels on each machine.
    field = cv2.resize(coarse, (side, side), interpolation=cv2.INTER_LINEAR_EXACT).astype(np.int16)
    period, phase = int(rng.integers(5, 24)), int(rng.integers(0, 24))  # pixels
    slope = int(rng.integers(-2, 3))
    x = np.arange(side, dtype=np.int64)
    y = x[:, None]
    number = (y * slope + x + phase) // period  # the stripe's number at each pixel (side, side)
    stripes = number % 2 * 24 - 12
    noise = rng.integers(-20, 21, (side, side, 3), dtype=np.int16)
    return np.clip(field + stripes[..., None] + noise, 0, 255).astype(np.uint8)


def _unit_outline(kind: int) -> np.ndarray:
    """Corners of a figure of radius 1 about the origin, (k, 2)."""
    name = CLASSES[kind]
    if name == "cross":
        a = 0.33  # half the width of a bar
        return np.array([(a, 1), (a, a), (1, a), (1, -a), (a, -a), (a, -1), (-a, -1), (-a, -a),
                         (-1, -a), (-1, a), (-a, a), (-a, 1)], float)
    num_corners = {"square": 4, "triangle": 3, "star": 10}.get(name, 64)  # of circle and ring: 64 look round
    corners = np.arange(num_corners)
    first_angle = np.pi / 4 if name == "square" else -np.pi / 2  # upright; y points down
    angles = first_angle + corners * (2 * np.pi / num_corners)
    radii = np.ones(num_corners)
    if name == "star":
        radii[1::2] = 0.42  # every second corner is an inner one
    return np.stack([np.cos(angles), np.sin(angles)], axis=1) * radii[:, None]


def _figure(rng: np.random.Generator, kind: int, drawing: SyntheticDataset) -> tuple[np.ndarray, np.ndarray]:
    """A rotated, slightly stretched outline inside the image, and its box (both in pixels)."""
    smallest, largest = drawing.scale
    scale = smallest + (largest - smallest) * rng.random()
    radius = drawing.side_px * scale / 2
    stretch = np.array([rng.uniform(0.85, 1.18), 1.0])
    angle = np.radians(rng.uniform(-1, 1) * drawing.turn_degrees)
    cos, sin = np.cos(angle), np.sin(angle)
    turn = np.array([[cos, -sin], [sin, cos]])
    outline = (_unit_outline(kind) * stretch * radius) @ turn.T  # about the origin

    # The shifts that put the outline at the image's left and upper edge, and at its right and lower one.
    least, most = -outline.min(axis=0), drawing.side_px - outline.max(axis=0)
    outline += least + (most - least) * rng.random(2)
    box = np.concatenate([outline.min(axis=0), outline.max(axis=0)])
    return outline, box


def _paint(image: np.ndarray, rng: np.random.Generator, kind: int, outline: np.ndarray) -> None:
    """Fill an outline that spans the image with a noisy colour that contrasts with the background."""
    mask = np.zeros(image.shape[:2], np.uint8)
    _fill(mask, outline, 255)
    if CLASSES[kind] == "ring":
        centre = outline.mean(axis=0)
        _fill(mask, centre + (outline - centre) * 0.55, 0)
    inside = mask > 127
    background = image[inside].mean(axis=0) if inside.any() else np.full(3, 127.0)  # (3,)
    colour = rng.integers(0, 256, 3)
    while np.abs(colour - background).max() < 90:  # too similar in all channels
        colour = rng.integers(0, 256, 3)
    noise = rng.integers(-12, 13, image.shape, dtype=np.int16)
    filling = np.clip(colour + noise, 0, 255).astype(np.int32)
    share = mask.astype(np.int32)[..., None]  # the filling's share in 1/255: edges are smooth
    image[:] = (filling * share + image * (255 - share) + 127) // 255  # + 127 rounds


def _fill(mask: np.ndarray, outline: np.ndarray, value: int) -> None:
    # Half a pixel: OpenCV has pixel centres at whole numbers, boxes have pixel edges there.
    points = np.round((outline - 0.5) * 2**_SUBPIXEL_BITS).astype(np.int32)
    cv2.fillPoly(mask, [points], value, lineType=cv2.LINE_AA, shift=_SUBPIXEL_BITS)


def _write(drawing: SyntheticDataset, folder: Path) -> None:
    with ThreadPoolExecutor(min(8, os.cpu_count() or 1)) as pool:
        for split, count in enumerate((drawing.num_train, drawing.num_val)):
            for kind in ("images", "labels"):
                (folder / kind / _SPLITS[split]).mkdir(parents=True)
            written = pool.map(partial(_write_image, drawing, folder, split), range(count))
            list(written)  # waits, and raises the first error
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
    boxes = shares_of(shown.boxes, shown.size)
    rows = []
    for kind, (x, y, width, height) in zip(shown.classes.tolist(), boxes.tolist(), strict=True):
        rows.append(f"{kind} {x:.6f} {y:.6f} {width:.6f} {height:.6f}\n")
    return "".join(rows)
