"""Boxes drawn into pictures at their full size, for `predict`: fast enough for every frame of a video."""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from pathlib import Path

import numpy as np
from PIL import Image, ImageDraw, ImageFont

from ray_yolo.plots.style import COLOURS

_LONGEST_NAME = 24  # characters


def draw_detections(image: np.ndarray, detections: np.ndarray, names: Sequence[str]) -> np.ndarray:
    """A copy of an image (height, width, 3) uint8 RGB with a box, name and score for each detection, best on top."""
    picture = Image.fromarray(image)
    canvas = ImageDraw.Draw(picture)
    line_px = max(2, round(min(image.shape[:2]) / 200))
    font = _font(max(10, round(min(image.shape[:2]) / 40)))
    for left, top, right, bottom, score, kind in detections[::-1].tolist():
        colour = COLOURS[int(kind) % len(COLOURS)]
        canvas.rectangle((left, top, right, bottom), outline=colour, width=line_px)
        text = f"{' '.join(names[int(kind)].split())[:_LONGEST_NAME]} {score:.2f}"
        _, _, width, height = canvas.textbbox((0, 0), text, font=font)
        corner = (max(0, min(left, image.shape[1] - width)), top - height if top >= height else top)
        canvas.rectangle((*corner, corner[0] + width, corner[1] + height), fill=colour)
        canvas.text(corner, text, fill="white", font=font)
    return np.asarray(picture)


@lru_cache
def _font(size_px: int) -> ImageFont.FreeTypeFont:
    """Matplotlib's own font, which knows more alphabets than Pillow's."""
    import matplotlib

    return ImageFont.truetype(str(Path(matplotlib.get_data_path()) / "fonts" / "ttf" / "DejaVuSans.ttf"), size_px)
