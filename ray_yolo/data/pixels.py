"""The values of a decoded image as 8-bit levels.

Most files have 8 bits per channel, and their values are the levels. Files with more bits (16-bit integers, floats) have
no fixed white: a camera may use 12 of 16 bits, floats may end at 1 or 255. The range of the training split therefore
decides which value is black and which is white. Weights record this range, and everything that uses them reads it.

A few odd pixels of a sensor, or a value that stands for missing data (-9999), would decide for all images. So neither
counts: of each image, the range is that of the pixels between two percentiles, without values far from all others.
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
CUT = 0.001
"""Share of an image's values, at least a pixel, that are left out at either end."""
_USED = 0.5  # A set that uses less of a usual scale (thermal cameras) has a range of its own.


def kind_of(pixels: np.ndarray) -> PixelKind | None:
    """Whether pixels are integers of more than 8 bits or floats; None for levels."""
    if pixels.dtype == np.uint8:
        return None
    return "float" if pixels.dtype.kind == "f" else "integer"


def values_of(pixels: np.ndarray) -> PixelValues | None:
    """The range of pixels (height, width, 3) without the `CUT` lowest and highest ones, and without values for missing
    data. None for levels, and for floats without any finite value.

    The lowest or the highest value stands for missing data if it is frequent, and farther from the others than those
    are from each other.
    """
    kind = kind_of(pixels)
    values = pixels[np.isfinite(pixels)] if kind == "float" else pixels.reshape(-1)
    if kind is None or values.size == 0:
        return None
    no_data: dict[str, float] = {}  # the value at each end of the range
    for end in ("high", "low", "high"):  # the lowest may hide that the highest is far from the others
        extreme = values.max() if end == "high" else values.min()
        others = values[values != extreme]
        is_frequent = values.size - others.size > _num_cut(values)
        if end in no_data or not is_frequent or not others.size:
            continue
        low, high = _percentiles(others)
        if low < high and max(low - float(extreme), float(extreme) - high) > high - low:
            no_data[end] = float(extreme)
            values = others
    return PixelValues(kind, *_percentiles(values), no_data=tuple(sorted(no_data.values())))


def _num_cut(values: np.ndarray) -> int:
    """The number of values (n,) that are left out at either end."""
    return min(max(3, int(CUT * values.size)), (values.size - 1) // 2)  # a pixel has three values


def _percentiles(values: np.ndarray) -> tuple[float, float]:
    """The lowest and the highest of the values (n,) that are not left out."""
    first = _num_cut(values)
    last = values.size - 1 - first
    ordered = np.partition(values, (first, last))
    return float(ordered[first]), float(ordered[last])


def join_values(parts: Iterable[PixelValues]) -> tuple[PixelValues, ...]:
    """The common range and the count of all images, one entry for each kind.

    An image of a single value has no range, and may be one without data: it counts only if all images are like that.
    """
    of_kind: dict[PixelKind, list[PixelValues]] = {}
    for part in parts:
        of_kind.setdefault(part.kind, []).append(part)
    joined = []
    for kind, images in sorted(of_kind.items()):
        with_range = [image for image in images if image.low < image.high] or images
        no_data = {value for image in images for value in image.no_data}
        joined.append(PixelValues(
            kind, min(image.low for image in with_range), max(image.high for image in with_range),
            sum(image.num_images for image in images), tuple(sorted(no_data))))
    return tuple(joined)


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
    no_data = f"; taken as no data: {', '.join(f'{value:g}' for value in values.no_data)}" if values.no_data else ""
    clipped = "; values beyond them are clipped" if values.low < black or values.high > white else ""
    images = "1 image" if values.num_images == 1 else f"{values.num_images} images"
    return (f"{images} with {bits} ({values.low:g} to {values.high:g} without {CUT:.1%} of the pixels at either end): "
            f"{black:g} is read as black, {white:g} as white{clipped}{no_data}")
