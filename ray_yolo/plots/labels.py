"""The label statistics of a dataset as a figure."""

from __future__ import annotations

import math
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from ray_yolo.core.structures import AnnotationIndex
from ray_yolo.plots.style import COLOURS, INK, count_along_x, dress, new_figure, plain, save

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

CELLS = 50  # per side of a heat map; most bars of a histogram
NAMED = 40  # largest number of classes with names at the bars


def plot_labels(index: AnnotationIndex, path: Path) -> Figure:
    """Labels per class and per image, and positions and sizes of boxes as fractions of the image."""
    from matplotlib.ticker import MaxNLocator

    per_image = np.diff(index.offsets)
    height, width = np.repeat(index.sizes, per_image, axis=0).T.astype(float)
    left, top, right, bottom = index.boxes.T
    figure = new_figure(11, 9)
    classes, images, centres, sizes = figure.subplots(2, 2).flatten()
    _bars(classes, index)
    _per_image(images, per_image)
    for axes in (classes, images):
        axes.yaxis.set_major_locator(MaxNLocator(integer=True, min_n_ticks=1))
    _heat(centres, (left + right) / 2 / width, (top + bottom) / 2 / height, "Box centres", ("x", "y"))
    centres.invert_yaxis()  # y points down, as in the images
    _heat(sizes, (right - left) / width, (bottom - top) / height, "Box sizes", ("Width", "Height"))
    return save(figure, path)


def _bars(axes: Axes, index: AnnotationIndex) -> None:
    counts = np.bincount(index.classes, minlength=len(index.names))
    dress(axes, title=f"{counts.sum():,} labels in {len(index.names)} classes", y="Labels")
    bars = axes.bar(range(len(counts)), counts, color=COLOURS[0])
    axes.grid(visible=False, axis="x")
    if len(counts) <= NAMED:
        names = [plain(name, 18) for name in index.names]
        axes.set_xticks(range(len(counts)), names, rotation=90 if len(counts) > 5 else 0)
    else:
        axes.set_xlabel("Class number")
    if len(counts) <= 12:
        axes.bar_label(bars, fmt="{:,.0f}", fontsize=8, color=INK)


def _per_image(axes: Axes, per_image: np.ndarray) -> None:
    title = f"{len(per_image):,} images, {(per_image == 0).sum():,} without labels"
    dress(axes, title=title, x="Labels in the image", y="Images")
    most = int(per_image.max(initial=0))
    step = math.ceil((most + 1) / CELLS)  # counts in a bar
    edges = [edge - 0.5 for edge in range(0, most + step + 1, step)]  # between whole numbers
    axes.hist(per_image, bins=edges, rwidth=0.85, color=COLOURS[0])
    axes.grid(visible=False, axis="x")
    count_along_x(axes)


def _heat(axes: Axes, x: np.ndarray, y: np.ndarray, title: str, labels: tuple[str, str]) -> None:
    dress(axes, title=title, x=f"{labels[0]} (share of the image)", y=f"{labels[1]} (share of the image)")
    axes.grid(visible=False)
    axes.hist2d(x, y, bins=CELLS, range=((0, 1), (0, 1)), cmap="Blues")
    axes.set_aspect("equal")
