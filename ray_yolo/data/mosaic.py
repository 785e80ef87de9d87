"""Mosaics: images around a seam, warped directly into the output.

The canvas of twice the size is virtual: each image is resampled with the composed matrix and clipped to its part of the
canvas. Every output pixel is therefore computed once.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import cv2
import numpy as np

from ray_yolo.data.augment import GREY
from ray_yolo.data.labels import move_points


class Tile(NamedTuple):
    """An image on the virtual canvas; one of its corners is at the seam."""

    image: np.ndarray  # (height, width, 3) uint8
    before: tuple[bool, bool]  # per (x, y): left of / above the seam, else right of / below it


def corner(tile: Tile, seam: tuple[int, int]) -> tuple[int, int]:
    """(x, y) of the image's upper left corner on the canvas."""
    height, width = tile.image.shape[:2]
    return seam[0] - width * tile.before[0], seam[1] - height * tile.before[1]


def snap(matrix: np.ndarray, seam: tuple[int, int]) -> np.ndarray:
    """The matrix, shifted by at most half a pixel so that the seam is between output pixels.

    Images without rotation can then be resized, four times as fast as a warp and without a shift.
    """
    point = move_points(np.array(seam, float), matrix)
    shift = np.eye(3)
    shift[:2, 2] = np.rint(point) - point
    return shift @ matrix


def render(out: np.ndarray, tiles: list[Tile], seam: tuple[int, int], canvas: tuple[int, int],
         matrix: np.ndarray) -> range:
    """Render the canvas with its tiles through a snapped `matrix` into `out`, (height, width, 3) uint8.

    seam is (x, y); canvas is (height, width). Returns the rows outside of which everything is grey.
    """
    out.fill(GREY)
    if matrix[0, 1] == matrix[1, 0] == matrix[2, 0] == matrix[2, 1] == 0:
        return enclosing_range([_resize_into(out, tile, seam, canvas, matrix) for tile in tiles])
    for tile in tiles:
        _warp_into(out, tile, seam, canvas, matrix)
    return range(len(out))


def enclosing_range(rows: list[range]) -> range:
    """The smallest range around all."""
    return range(min(each.start for each in rows), max(each.stop for each in rows))


def _span(length: int, room: int, before: bool, start: int, zoom: float, out_px: int) -> tuple[int, int, slice, slice]:
    """The pixels of one axis of a resized image, counted from the seam outwards. Returns the needed source pixels,
    their number after resizing, the visible ones of these, and their position in the output."""
    first, limit = (start - out_px, start) if before else (-start, out_px - start)
    first, end = max(0, first), min(round(min(length, room) * zoom), limit)  # counted from the seam outwards
    needed = _resizable(max(1, math.ceil(end / zoom)), zoom)
    resized = round(needed * zoom)
    if before:
        return needed, resized, slice(resized - end, resized - first), slice(start - end, start - first)
    return needed, resized, slice(first, end), slice(start + first, start + end)


def _resizable(length: int, zoom: float) -> int:
    """The next length whose resized length is nearly an integer.

    `cv2.resize` stretches an image to an integer length; the end away from the seam would be off by up to half a pixel.
    One of 64 lengths is off by less than 0.05 pixels, or nearly so for a zoom close to 1.
    """
    lengths, error = range(length, length + 64), lambda each: abs(each * zoom - round(each * zoom))
    return next((each for each in lengths if error(each) < 0.05), None) or min(lengths, key=error)


def _resize_into(out: np.ndarray, tile: Tile, seam: tuple[int, int], canvas: tuple[int, int],
                 matrix: np.ndarray) -> range:
    """Resample an image without rotation. Returns the rows that it covers."""
    (width, new_width, seen_x, target_x), (height, new_height, seen_y, target_y) = (
        _span(tile.image.shape[1 - axis], seam[axis] if tile.before[axis] else canvas[1 - axis] - seam[axis],
              tile.before[axis], round(float(matrix[axis, axis] * seam[axis] + matrix[axis, 2])),
              float(matrix[axis, axis]), out.shape[1 - axis]) for axis in (0, 1))
    if seen_x.stop <= seen_x.start or seen_y.stop <= seen_y.start:
        return range(len(out), 0)
    part = tile.image[:, -width:] if tile.before[0] else tile.image[:, :width]
    part = part[-height:] if tile.before[1] else part[:height]
    if part.shape[:2] != (height, width):
        missing = ((height - len(part), 0), (width - part.shape[1], 0))  # before the image, or after it
        (top, bottom), (left, right) = (each[:: 1 if before else -1]
                                        for each, before in zip(missing, reversed(tile.before), strict=True))
        part = cv2.copyMakeBorder(part, top, bottom, left, right, cv2.BORDER_REPLICATE)
    part = cv2.resize(part, (new_width, new_height), interpolation=cv2.INTER_LINEAR)
    out[target_y, target_x] = part[seen_y, seen_x]
    return range(target_y.start, target_y.stop)


def _warp_into(out: np.ndarray, tile: Tile, seam: tuple[int, int], canvas: tuple[int, int],
               matrix: np.ndarray) -> None:
    """Resample a rotated image; output pixels outside it stay unchanged."""
    x, y = corner(tile, seam)
    left, above = max(0, -x), max(0, -y)
    part = tile.image[above:canvas[0] - y, left:canvas[1] - x]
    # A border of one pixel fills the half pixel that each of two neighbours would leave open at the seam.
    part = cv2.copyMakeBorder(part, 1, 1, 1, 1, cv2.BORDER_REPLICATE)
    shift = np.array([[1, 0, x + left - 1 + 0.5], [0, 1, y + above - 1 + 0.5], [0, 0, 1]])
    centres = np.array([[1, 0, -0.5], [0, 1, -0.5], [0, 0, 1]])  # OpenCV puts pixel centres on whole numbers
    pixels = centres @ matrix @ shift
    affine = pixels[2, 0] == pixels[2, 1] == 0
    warp, used = (cv2.warpAffine, pixels[:2]) if affine else (cv2.warpPerspective, pixels)
    warp(part, used, out.shape[1::-1], dst=out, flags=cv2.INTER_LINEAR, borderMode=cv2.BORDER_TRANSPARENT)
