"""Images with their boxes: what training is fed with, what validation finds beside what is labelled, and at their full
size, fast enough for every frame of a video, what `predict` finds.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
from numpy.typing import NDArray
from PIL import Image, ImageDraw, ImageFont

from ray_yolo.plots.style import COLOURS, INK, new_figure, plain, save

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

SIDE = 3.2  # inches of a picture's width
LONGEST_NAME = 24  # characters


class Picture(NamedTuple):
    """An image and what is drawn on it."""

    image: NDArray[np.uint8]  # (height, width, 3) RGB
    boxes: NDArray[np.floating]  # (n, 4) xyxy in pixels of the image
    classes: NDArray[np.int64]  # (n,)
    scores: NDArray[np.floating] | None = None  # (n,) of detections; labels have none
    title: str = ""


def plot_pictures(pictures: Sequence[Picture], names: Sequence[str], path: Path, *, columns: int = 4) -> Figure:
    """A grid of images with boxes."""
    rows = max(math.ceil(len(pictures) / columns), 1)
    tallest = max((p.image.shape[0] / p.image.shape[1] for p in pictures), default=1.0)
    figure = new_figure(SIDE * columns, (SIDE * min(tallest, 1.5) + 0.2) * rows)
    figure.set_layout_engine("constrained", w_pad=0.02, h_pad=0.02, wspace=0, hspace=0)
    for place, axes in enumerate(figure.subplots(rows, columns, squeeze=False).flatten()):
        axes.set_axis_off()
        if place < len(pictures):
            _draw(axes, pictures[place], names)
    return save(figure, path)


def plot_truth_and_detections(
    truth: Sequence[Picture], detections: Sequence[Picture], names: Sequence[str], path: Path
) -> Figure:
    """Labels beside detections of the same images, two images a row."""
    pairs = [
        picture._replace(title=f"{side}{': ' * bool(picture.title)}{picture.title}")
        for labelled, detected in zip(truth, detections, strict=True)
        for side, picture in (("labelled", labelled), ("detected", detected))
    ]
    return plot_pictures(pairs, names, path)


def _draw(axes: Axes, picture: Picture, names: Sequence[str]) -> None:
    from matplotlib.patches import Rectangle

    axes.imshow(picture.image, interpolation="antialiased")
    axes.set_title(plain(picture.title, 48), fontsize=7, color=INK, loc="left", pad=2)
    for row, (left, top, right, bottom) in enumerate(picture.boxes.tolist()):
        number = int(picture.classes[row])
        colour = COLOURS[number % len(COLOURS)]
        axes.add_patch(Rectangle((left, top), right - left, bottom - top, fill=False, edgecolor=colour, linewidth=1.2))
        score = f" {picture.scores[row]:.2f}" if picture.scores is not None else ""
        inside = top < picture.image.shape[0] / 25  # no room above the box
        axes.text(left, top, plain(names[number], 16) + score, fontsize=5, color="white", clip_on=True,
                  va="top" if inside else "bottom", bbox={"facecolor": colour, "edgecolor": "none", "pad": 0.8})


def draw_detections(image: np.ndarray, detections: np.ndarray, names: Mapping[int, str] | Sequence[str], *,
                    labels: bool = True, scores: bool = True, line_px: int | None = None) -> np.ndarray:
    """A copy of an image (height, width, 3) uint8 RGB with a box for each detection, best on top.

    Args:
        labels, scores: what is written at each box.
        line_px: width of the lines; None: 1/200 of the shorter side.
    """
    picture = Image.fromarray(image)
    canvas = ImageDraw.Draw(picture)
    line_px = line_px or max(2, round(min(image.shape[:2]) / 200))
    font = _font(max(10, round(min(image.shape[:2]) / 40)))
    for left, top, right, bottom, score, kind in detections[::-1].tolist():
        colour = COLOURS[int(kind) % len(COLOURS)]
        canvas.rectangle((left, top, right, bottom), outline=colour, width=line_px)
        name = " ".join(names[int(kind)].split())[:LONGEST_NAME]
        text = " ".join([name] * labels + [f"{score:.2f}"] * scores)
        if text:
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
