"""Images with their boxes: what training is fed with, and what validation finds beside what is labelled."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
from numpy.typing import NDArray

from ray_yolo.plots.style import COLOURS, INK, new_figure, plain, save

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure


SIDE = 3.2  # inches of a picture's width


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
