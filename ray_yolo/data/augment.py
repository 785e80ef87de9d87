"""Augmentations of training images: random draws, colour, blending and padding.

Pure functions of arrays; all random numbers come from the given generator.
"""

from __future__ import annotations

import math

import cv2
import numpy as np
import torch

from ray_yolo.config.sections import AugmentConfig
from ray_yolo.data.geometry import covered, join, mirror
from ray_yolo.labels.rows import Labels
from ray_yolo.ops.recolour import ColourTables

_MAX_COVERED = 0.30
GREY = 114  # Pixels without an image have this value.
FLIPS = {(True, True): -1, (True, False): 1, (False, True): 0}
"""Mirrored axes (x, y) have this code of `cv2.flip`."""
_BAND_PIXELS = 2**15  # Bands of so many pixels fit the CPU cache and need no new memory.


def draw_colour_gains(rng: np.random.Generator, augment: AugmentConfig) -> tuple[float, float, float]:
    """Factors of hue, saturation and value: 1 + uniform(-1, 1) x gain each."""
    limits = (augment.hsv_h, augment.hsv_s, augment.hsv_v)
    hue, saturation, value = (1 + rng.uniform(-1, 1, 3) * limits).tolist()
    return hue, saturation, value


def recolour(image: np.ndarray, gains: tuple[float, float, float], rows: range | None = None) -> None:
    """Multiply hue (modulo 180), saturation and value of an image (h, w, 3) uint8 RGB in place.

    Gains of 1 are skipped, because the conversion to integer hues and back is not exact.

    Args:
        rows: rows with image content, all by default; the others are `GREY`.
    """
    if gains == (1, 1, 1):
        return
    if rows is None:
        rows = range(len(image))
    grey = cv2.convertScaleAbs(np.full(1, GREY, np.uint8), alpha=gains[2])[0]  # it has neither hue nor saturation
    image[:rows.start] = image[rows.stop:] = grey
    factors, hue_table = _hsv_factors(gains)
    num_rows = max(1, _BAND_PIXELS // image.shape[1])
    for top in rows[::num_rows]:
        band = image[top:min(top + num_rows, rows.stop)]
        cv2.cvtColor(band, cv2.COLOR_RGB2HSV, dst=band)
        _scale_hsv(band, factors, hue_table)
        cv2.cvtColor(band, cv2.COLOR_HSV2RGB, dst=band)


def _hsv_factors(gains: tuple[float, float, float]) -> tuple[np.ndarray, np.ndarray | None]:
    """What `_scale_hsv` needs: (3, 4) for `cv2.transform`, and a table of hues if products exceed a byte.

    Up to 255 OpenCV takes a hue modulo 180 itself.
    """
    factors = np.column_stack([np.diag(gains), (-0.4999, 0, 0)])  # OpenCV rounds; hues are truncated
    if 179 * gains[0] <= 255:
        return factors, None
    factors[0] = (1, 0, 0, 0)  # `transform` keeps the hues of the table
    return factors, (np.arange(256) * gains[0] % 180).astype(np.uint8)


def _scale_hsv(image: np.ndarray, factors: np.ndarray, hue_table: np.ndarray | None) -> None:
    """Multiply hue, saturation and value of an image (h, w, 3) uint8 HSV in place."""
    if hue_table is not None:
        hues = cv2.LUT(cv2.extractChannel(image, 0), hue_table)
        cv2.insertChannel(hues, image, 0)
    cv2.transform(image, factors, dst=image)


def scaled_hsv(gains: tuple[float, float, float]) -> np.ndarray:
    """What `recolour` makes of each hue, saturation and value, (3, 256) uint8: for `ops.recolour`."""
    ramp = np.repeat(np.arange(256, dtype=np.uint8), 3).reshape(1, 256, 3)
    _scale_hsv(ramp, *_hsv_factors(gains))
    return ramp[0].T.copy()


def colour_tables() -> ColourTables:
    """OpenCV's conversions of all colours, as `ops.recolour` needs them."""
    colours = np.empty((256, 256, 256, 3), np.uint8)  # all of them, in ascending order
    for channel, values in enumerate(np.ogrid[:256, :256, :256]):
        colours[..., channel] = values
    image = colours.reshape(4096, 4096, 3)
    tables = []
    for conversion in (cv2.COLOR_RGB2HSV, cv2.COLOR_HSV2RGB):
        converted = cv2.cvtColor(image, conversion).reshape(-1, 3)
        tables.append(torch.from_numpy(converted.astype(np.int32) @ np.array([2**16, 2**8, 1], np.int32)))
    return ColourTables(*tables)


def draw_affine(rng: np.random.Generator, augment: AugmentConfig, canvas: tuple[int, int],
                out: tuple[int, int]) -> tuple[np.ndarray, float]:
    """A 3 x 3 matrix from the canvas's points to the output's, and its zoom; sizes are (height, width).

    M = T S R P C: centre, perspective, rotation with zoom, shear, translation to 0.5 +- translate of the output.
    The number of draws is constant, so that one gain does not change the values of others.
    """
    tilt = rng.uniform(-1, 1, 2) * augment.perspective
    angle = math.radians(rng.uniform(-1, 1) * augment.degrees)
    zoom = 1 + rng.uniform(-1, 1) * augment.scale
    slant = np.tan(np.radians(rng.uniform(-1, 1, 2) * augment.shear))
    shift = (0.5 + rng.uniform(-1, 1, 2) * augment.translate) * (out[1], out[0])
    centre = np.array([[1, 0, -canvas[1] / 2], [0, 1, -canvas[0] / 2], [0, 0, 1]])
    perspective = np.array([[1, 0, 0], [0, 1, 0], [tilt[0], tilt[1], 1]])
    cos, sin = math.cos(angle) * zoom, math.sin(angle) * zoom
    rotation = np.array([[cos, sin, 0], [-sin, cos, 0], [0, 0, 1]])
    shear = np.array([[1, slant[0], 0], [slant[1], 1, 0], [0, 0, 1]])
    translation = np.array([[1, 0, shift[0]], [0, 1, shift[1]], [0, 0, 1]])
    return translation @ shear @ rotation @ perspective @ centre, zoom


def blend(first: np.ndarray, second: np.ndarray, share: float) -> np.ndarray:
    """MixUp: `share` of the first image and the rest of the second."""
    return cv2.addWeighted(first, share, second, 1 - share, 0)


def copy_paste(rng: np.random.Generator, image: np.ndarray, labels: Labels, share: float) -> tuple[np.ndarray, Labels]:
    """The image with `share` of its outlined objects pasted again at mirrored positions, and all labels.

    An object is pasted only if its box covers less than 30 % of every existing box.

    Source: Ghiasi et al. 2021, "Simple Copy-Paste", arXiv:2012.07177; mirrored as in YOLOv5.
    """
    outlined = [number for number, outline in enumerate(labels.polygons) if len(outline)]
    mirrored = mirror(labels, (True, False), image.shape[:2])
    num_chosen = round(share * len(outlined))
    chosen = rng.permutation(outlined)[:num_chosen].tolist()
    is_pasted = np.zeros(image.shape[:2], np.uint8)
    for number in chosen:
        box, outline = mirrored.boxes[number], mirrored.polygons[number]
        if not (covered(labels.boxes, box) < _MAX_COVERED).all():  # An object pasted before may cover it, too.
            continue
        pasted = Labels(mirrored.classes[[number]], mirrored.boxes[[number]], (outline,))
        labels = join([labels, pasted])
        points = np.rint(outline - 0.5).astype(np.int32)  # OpenCV puts pixel centres on whole numbers
        cv2.fillPoly(is_pasted, [points], 1)
    flipped = cv2.flip(image, 1)  # has each pasted object in its place
    return np.where(is_pasted[..., None], flipped, image), labels


def letterbox(image: np.ndarray, shape: tuple[int, int]) -> tuple[np.ndarray, tuple[int, int]]:
    """The image centred on grey of `shape` (height, width), and the (top, left) padding; nothing is resized."""
    top, left = (shape[0] - image.shape[0]) // 2, (shape[1] - image.shape[1]) // 2
    padded = np.full((*shape, 3), GREY, np.uint8)
    padded[top:top + image.shape[0], left:left + image.shape[1]] = image
    return padded, (top, left)
