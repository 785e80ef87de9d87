"""Pixels of views as slow, obvious arithmetic: what `ops.render_kernel` has to give, bit for bit."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
from numpy.typing import NDArray

UNIT = 2**29  # a pixel of the canvas
GREY = 114


def pixel(held: Callable[[int], int], view: Sequence[int], row: int, column: int) -> list[int]:
    """The three levels of a pixel before colours change.

    Args:
        held: the byte at a place among those of all images.
    """
    _, _, seam_x, seam_y, a, b, c, d, *tiles = view
    across, down = 2 * (column - seam_x) + 1, 2 * (row - seam_y) + 1
    x, y = a * across + b * down, c * across + d * down
    quadrant = (0 if y < 0 else 2) + (0 if x < 0 else 1)
    start, height, width, reach_x, reach_y = tiles[5 * quadrant:5 * quadrant + 5]
    if abs(x) >= reach_x * UNIT or abs(y) >= reach_y * UNIT:
        return [GREY] * 3
    columns = neighbours(x + width * UNIT if x < 0 else x, width)
    rows = neighbours(y + height * UNIT if y < 0 else y, height)
    levels = []
    for channel in range(3):
        total = 0
        for each_row, of_row in rows:
            for each_column, of_column in columns:
                total += of_row * of_column * held(start + 3 * (each_row * width + each_column) + channel)
        levels.append((total + 2**21) // 2**22)
    return levels


def neighbours(place: int, length: int) -> list[tuple[int, int]]:
    """The two pixels along an axis around a place, and their weights, out of 2048."""
    from_first_centre = min(max(place - UNIT // 2, 0), (length - 1) * UNIT)
    first, rest = divmod(from_first_centre, UNIT)
    weight = (rest * 2048 + UNIT // 2) // UNIT
    return [(first, 2048 - weight), (min(first + 1, length - 1), weight)]


def picture(held: NDArray[np.uint8], view: NDArray[np.int64]) -> NDArray[np.uint8]:
    """All pixels of a view, (height, width, 3)."""
    numbers = view.tolist()
    height, width = numbers[:2]
    levels = [[pixel(lambda place: int(held[place]), numbers, row, column) for column in range(width)]
              for row in range(height)]
    return np.array(levels, np.uint8)
