"""The values of a decoded image as 8-bit levels.

Most files have 8 bits per channel, and their values are the levels. Files with more bits (16-bit integers, floats) have
no fixed white: a camera may use 12 of 16 bits, floats may end at 1 or 255. The range of the training split therefore
decides which value is black and which is white. Weights record this range, and everything that uses them reads it.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import cast

import numpy as np

from ray_yolo.core.structures import PixelKind, PixelValues

PixelRange = Mapping[PixelKind, tuple[float, float]]
"""The values that become level 0 and 255, for images of more than 8 bits; a kind without an entry is unknown."""
OWN_RANGE: PixelRange = {}
"""Each image has the range of its own values."""
_WHITES: dict[PixelKind, tuple[int, ...]] = {"integer": (255, 1023, 4095, 16383, 65535),
                                        "float": (1, 255, 1023, 4095, 16383, 65535)}
_USED = 0.5  # of a usual scale; a set that uses less (thermal cameras) has a range of its own


def kind_of(pixels: np.ndarray) -> PixelKind | None:
    """Whether pixels are integers of more than 8 bits or floats; None for levels."""
    if pixels.dtype == np.uint8:
        return None
    return "float" if pixels.dtype.kind == "f" else "integer"


def values_of(pixels: np.ndarray) -> PixelValues | None:
    """The range of pixels; None for levels, and for floats without any finite value."""
    kind = kind_of(pixels)
    finite = pixels[np.isfinite(pixels)] if kind == "float" else pixels
    if kind is None or finite.size == 0:
        return None
    return PixelValues(kind, float(finite.min()), float(finite.max()))


def join_values(parts: Iterable[PixelValues]) -> tuple[PixelValues, ...]:
    """The common range and the count of all images, one entry for each kind."""
    joined: dict[PixelKind, PixelValues] = {}
    for part in parts:
        earlier = joined.get(part.kind, part._replace(num_images=0))
        low, high = min(part.low, earlier.low), max(part.high, earlier.high)
        joined[part.kind] = PixelValues(part.kind, low, high, part.num_images + earlier.num_images)
    return tuple(joined[kind] for kind in sorted(joined))


def black_and_white(values: PixelValues) -> tuple[float, float]:
    """The values that become level 0 and 255.

    0 and the smallest of 1 (floats only), 255, 1023, 4095, 16383 and 65535 that holds all values, if they span half of
    it; otherwise the lowest and the highest value.
    """
    low, high = values.low, values.high
    holding = [white for white in _WHITES[values.kind] if low >= 0 and high <= white]
    if holding:
        white = holding[0]
        if high == low or high - low >= _USED * white:  # uniform pixels have no range of their own
            return 0.0, float(white)
    if high == low:  # the two levels must differ; beyond 2^53, adding 1 changes nothing
        return low, max(low + 1.0, math.nextafter(low, math.inf))
    return low, high


def range_of(values: Iterable[PixelValues]) -> PixelRange:
    """`black_and_white` of each kind."""
    return {each.kind: black_and_white(each) for each in values}


def to_levels(pixels: np.ndarray, pixel_range: PixelRange) -> np.ndarray:
    """Pixels of any type as uint8 levels: round(255 (value - black) / (white - black)), clipped to 0..255.

    Pixels that are levels are returned as they are. NaN is black. Pixels of a kind that `pixel_range` lacks have the
    range of this image alone.
    """
    kind = kind_of(pixels)
    if kind is None:
        return pixels
    if kind in pixel_range:
        black, white = pixel_range[kind]
    else:
        values = values_of(pixels)
        # Without a finite value any range does: NaN becomes 0, infinity 0 or 255.
        black, white = black_and_white(values) if values else (0.0, 1.0)
    gain = 255.0 / (white - black)
    levels = (pixels.astype(np.float64) - black) * gain
    levels = np.nan_to_num(levels, nan=0.0, posinf=255.0, neginf=0.0)
    return np.rint(levels.clip(0.0, 255.0)).astype(np.uint8)


def read_pixel_range(value: object) -> PixelRange:
    """The range in a JSON object, as weights record it. ValueError, TypeError or KeyError for anything else."""
    kinds: tuple[PixelKind, ...] = ("integer", "float")
    recorded = dict(cast(Mapping[PixelKind, Sequence[float]], value))
    pixel_range = {}
    for kind in kinds:
        if kind in recorded:
            pixel_range[kind] = (float(recorded[kind][0]), float(recorded[kind][1]))
    return pixel_range


def three_channels(pixels: np.ndarray) -> np.ndarray:
    """(height, width) or (height, width, 1) pixels as (height, width, 3)."""
    grey = pixels.reshape(*pixels.shape[:2], 1)
    return np.ascontiguousarray(np.repeat(grey, 3, axis=2))


def as_read(values: PixelValues, pixel_range: PixelRange) -> str:
    """How images are read, in words."""
    black, white = pixel_range[values.kind]
    bits = "more than 8 bits per channel" if values.kind == "integer" else "floats"
    clipped = "; values beyond them are clipped" if values.low < black or values.high > white else ""
    images = "1 image" if values.num_images == 1 else f"{values.num_images} images"
    return (f"{images} with {bits} ({values.low:g} to {values.high:g}): {black:g} is read as black, "
            f"{white:g} as white{clipped}")
