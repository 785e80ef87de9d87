"""Mosaics: images around a seam, warped directly into the output.

The canvas of twice the size is virtual: each image is resampled with the composed matrix and clipped to its part of the
canvas. Every output pixel is therefore computed once.
"""

from __future__ import annotations

import math
from typing import Generic, NamedTuple, TypeVar

import cv2
import numpy as np

from ray_yolo.data.augment import GREY
from ray_yolo.data.geometry import move_points

Shown = TypeVar("Shown")
"""Pixels (height, width, 3) uint8, or the number of an image."""
Quadrant = tuple[bool, bool]
"""Where an image lies, per (x, y): left of / above the seam, else right of / below it."""


class Tile(NamedTuple, Generic[Shown]):
    """An image on the virtual canvas; one of its corners is at the seam."""

    image: Shown
    before: Quadrant


def corner(size: tuple[int, int], before: Quadrant, seam: tuple[int, int]) -> tuple[int, int]:
    """(x, y) of the upper left corner on the canvas of an image of `size` (height, width)."""
    return seam[0] - size[1] * before[0], seam[1] - size[0] * before[1]


def room(before: Quadrant, seam: tuple[int, int], canvas: tuple[int, int]) -> tuple[int, int]:
    """(x, y) lengths of the canvas (height, width) on an image's side of the seam: beyond them it is cut."""
    across, down = (seam[axis] if before[axis] else canvas[1 - axis] - seam[axis] for axis in (0, 1))
    return across, down


def snap(matrix: np.ndarray, seam: tuple[int, int]) -> np.ndarray:
    """The matrix, shifted by at most half a pixel so that the seam is between output pixels.

    Images without rotation can then be resized, four times as fast as a warp and without a shift.
    """
    point = move_points(np.array(seam, float), matrix)
    shift = np.eye(3)
    shift[:2, 2] = np.rint(point) - point
    return shift @ matrix


def render(out: np.ndarray, tiles: list[Tile[np.ndarray]], seam: tuple[int, int], canvas: tuple[int, int],
         matrix: np.ndarray) -> range:
    """Render the canvas with its tiles through a snapped `matrix` into `out`, (height, width, 3) uint8.

    seam is (x, y); canvas is (height, width). Returns the rows outside of which everything is grey.
    """
    out.fill(GREY)
    if matrix[0, 1] == matrix[1, 0] == matrix[2, 0] == matrix[2, 1] == 0:  # neither rotation, shear nor perspective
        return enclosing_range([_resize_into(out, tile, seam, canvas, matrix) for tile in tiles])
    for tile in tiles:
        _warp_into(out, tile, seam, canvas, matrix)
    return range(len(out))


def enclosing_range(rows: list[range]) -> range:
    """The smallest range around all."""
    return range(min(each.start for each in rows), max(each.stop for each in rows))


class _Span(NamedTuple):
    """One axis of a resized image, as far as the output shows it."""

    num_needed: int
    """So many source pixels at the seam's end are resized."""
    num_resized: int
    """They become so many pixels."""
    visible: slice
    """This part of the resized pixels is visible."""
    target: slice
    """The visible pixels have this position in the output."""


def _span(axis: int, out: np.ndarray, tile: Tile[np.ndarray], seam: tuple[int, int], canvas: tuple[int, int],
          matrix: np.ndarray) -> _Span:
    """The pixels of an image along an axis, 0 for x and 1 for y."""
    before = tile.before[axis]
    length, out_length = tile.image.shape[1 - axis], out.shape[1 - axis]
    zoom = float(matrix[axis, axis])
    start = round(float(matrix[axis, axis] * seam[axis] + matrix[axis, 2]))  # the place of the seam in the output

    # Distances are counted from the seam outwards, in pixels of the output.
    if before:
        shown_from, shown_to = start - out_length, start
    else:
        shown_from, shown_to = -start, out_length - start
    first = max(0, shown_from)
    end = min(round(min(length, room(tile.before, seam, canvas)[axis]) * zoom), shown_to)
    num_needed = _resizable(max(1, math.ceil(end / zoom)), zoom)
    num_resized = round(num_needed * zoom)
    if before:
        return _Span(num_needed, num_resized, slice(num_resized - end, num_resized - first),
                     slice(start - end, start - first))
    return _Span(num_needed, num_resized, slice(first, end), slice(start + first, start + end))


def _resizable(length: int, zoom: float) -> int:
    """The next length whose resized length is nearly an integer.

    `cv2.resize` stretches an image to an integer length; the end away from the seam would be off by up to half a pixel.
    One of 64 lengths is off by less than 0.05 pixels, or nearly so for a zoom close to 1.
    """
    def rounding_error(candidate: int) -> float:
        return abs(candidate * zoom - round(candidate * zoom))

    candidates = range(length, length + 64)
    for candidate in candidates:
        if rounding_error(candidate) < 0.05:
            return candidate
    return min(candidates, key=rounding_error)


def _resize_into(out: np.ndarray, tile: Tile[np.ndarray], seam: tuple[int, int], canvas: tuple[int, int],
                 matrix: np.ndarray) -> range:
    """Resample an image without rotation. Returns the rows that it covers."""
    across = _span(0, out, tile, seam, canvas, matrix)
    down = _span(1, out, tile, seam, canvas, matrix)
    if across.visible.stop <= across.visible.start or down.visible.stop <= down.visible.start:
        return range(len(out), 0)  # no rows, which `enclosing_range` ignores
    is_left, is_above = tile.before
    part = tile.image[:, -across.num_needed:] if is_left else tile.image[:, :across.num_needed]
    part = part[-down.num_needed:] if is_above else part[:down.num_needed]
    missing_x, missing_y = across.num_needed - part.shape[1], down.num_needed - len(part)
    if missing_x or missing_y:  # the resizable length exceeds the image: its outer pixels are repeated
        top, bottom = (missing_y, 0) if is_above else (0, missing_y)
        left, right = (missing_x, 0) if is_left else (0, missing_x)
        part = cv2.copyMakeBorder(part, top, bottom, left, right, cv2.BORDER_REPLICATE)
    part = cv2.resize(part, (across.num_resized, down.num_resized), interpolation=cv2.INTER_LINEAR)
    out[down.target, across.target] = part[down.visible, across.visible]
    return range(down.target.start, down.target.stop)


def _warp_into(out: np.ndarray, tile: Tile[np.ndarray], seam: tuple[int, int], canvas: tuple[int, int],
               matrix: np.ndarray) -> None:
    """Resample a rotated image; output pixels outside it stay unchanged."""
    x, y = corner(tile.image.shape[:2], tile.before, seam)
    hidden_left, hidden_above = max(0, -x), max(0, -y)  # pixels outside the canvas
    part = tile.image[hidden_above:canvas[0] - y, hidden_left:canvas[1] - x]
    # A border of one pixel fills the half pixel that each of two neighbours would leave open at the seam.
    part = cv2.copyMakeBorder(part, 1, 1, 1, 1, cv2.BORDER_REPLICATE)
    left, above = x + hidden_left - 1, y + hidden_above - 1  # where the part with its border begins on the canvas
    to_canvas = np.array([[1, 0, left + 0.5], [0, 1, above + 0.5], [0, 0, 1]])
    centres = np.array([[1, 0, -0.5], [0, 1, -0.5], [0, 0, 1]])  # OpenCV puts pixel centres on whole numbers
    pixels = centres @ matrix @ to_canvas
    out_size = out.shape[1::-1]
    if pixels[2, 0] == pixels[2, 1] == 0:  # without perspective; faster
        cv2.warpAffine(part, pixels[:2], out_size, dst=out, flags=cv2.INTER_LINEAR,
                       borderMode=cv2.BORDER_TRANSPARENT)
    else:
        cv2.warpPerspective(part, pixels, out_size, dst=out, flags=cv2.INTER_LINEAR,
                            borderMode=cv2.BORDER_TRANSPARENT)
