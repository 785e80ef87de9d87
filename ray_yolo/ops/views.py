"""A view: the numbers from which a device renders the picture of a sample (`ops.render_kernel`).

They are integers, and so is all that the device does with them up to the last division. The same draws therefore give
the same bits on any device.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

FRACTION = 28
"""Bits after the point of the inverse matrix in a view: a place 16,384 pixels from the seam is off by 2^-15 pixels."""
_LARGEST = 2**45
"""Limit of the inverse matrix's entries, so that a place at 2^15 half pixels stays below 2^63. Only a picture that a
shear has drawn out to a line exceeds it."""
HEAD, PER_TILE = 8, 5
"""Numbers of a view before its tiles, and of each of its four tiles."""
LENGTH = HEAD + 4 * PER_TILE

RenderedInput = Callable[[Tensor, Tensor | None, tuple[int, int], torch.memory_format], Tensor]
"""The last four arguments of `render_kernel.rendered_input`, and its result."""


class Source(NamedTuple):
    """One image of a view."""

    start: int  # the place of its first byte among those of all images
    size: tuple[int, int]  # (height, width)
    before: tuple[bool, bool]  # (x, y): it lies left of, above the seam; else right of, below it
    room: tuple[int, int]  # (x, y) lengths of the canvas on this side of the seam


def view_of(size: tuple[int, int], sources: Sequence[Source], seam: tuple[int, int], matrix: np.ndarray) -> np.ndarray:
    """The view of a canvas whose images lie around a seam.

    | numbers | meaning |
    |---|---|
    | 0, 1 | height and width of the picture |
    | 2, 3 | x and y of the seam in the picture, whole pixels |
    | 4 to 7 | the inverse of the matrix, row by row, times 2^28: from steps in the picture to steps on the canvas |
    | 8 to 27 | for the image left above the seam, right above, left below and right below: its first byte, height and \
width, and how far it reaches from the seam along x and y; 0 where there is no image |

    Args:
        size: (height, width) of the picture.
        seam: (x, y) on the canvas.
        matrix: 3 x 3, from the canvas to the picture, without perspective; it moves the seam between two pixels
            (`data.mosaic.snap`).

    Returns:
        (28,) int64.
    """
    view = np.zeros(LENGTH, np.int64)
    view[:2] = size
    view[2:4] = np.rint(matrix[:2, :2] @ seam + matrix[:2, 2])
    view[4:HEAD] = _inverse(matrix).reshape(-1)
    for start, (height, width), (is_left, is_above), room in sources:
        place = HEAD + PER_TILE * (2 * (not is_above) + (not is_left))
        view[place:place + PER_TILE] = start, height, width, min(width, room[0]), min(height, room[1])
    return view


def _inverse(matrix: np.ndarray) -> np.ndarray:
    """The inverse of the linear part in units of 2^-28, (2, 2). A matrix without one shows a single point, as OpenCV
    has it."""
    (a, b), (c, d) = matrix[:2, :2].tolist()
    determinant = a * d - b * c
    if determinant == 0:
        return np.zeros((2, 2), np.int64)
    exact = np.array([[d, -b], [-c, a]]) / determinant * 2.0**FRACTION
    return np.rint(exact.clip(-_LARGEST, _LARGEST)).astype(np.int64)


def mirror_view(view: np.ndarray, mirrored: tuple[bool, bool]) -> None:
    """Mirror the picture of a view along (x, y), in place: column x becomes column width - 1 - x."""
    for axis in (0, 1):
        if mirrored[axis]:
            view[2 + axis] = view[1 - axis] - view[2 + axis]
            view[4 + axis:HEAD:2] *= -1
