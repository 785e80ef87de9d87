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

CELLS = 50  # a heat map has this many on each side, a histogram at most this many bars
NAMED = 40  # largest number of classes with names at the bars
OVERLAID = 1000  # most boxes that are drawn over each other


def plot_labels(index: AnnotationIndex, path: Path) -> Figure:
    """Labels per class and per image; boxes over each other, and their places and sizes as shares of the image."""
    from matplotlib.ticker import MaxNLocator

    per_image = np.diff(index.offsets)
    height, width = np.repeat(index.sizes, per_image, axis=0).T.astype(float)
    left, top, right, bottom = index.boxes.T
    widths, heights = (right - left) / width, (bottom - top) / height
    figure = new_figure(14, 9)
    panels = figure.subplot_mosaic([["classes", "classes", "images"], ["overlaid", "centres", "sizes"]])
    classes, images, centres, sizes = (panels[name] for name in ("classes", "images", "centres", "sizes"))
    _draw_classes(classes, index)
    _draw_images(images, per_image)
    _draw_boxes(panels["overlaid"], widths, heights, index.classes)
    for axes in (classes, images):
        axes.yaxis.set_major_locator(MaxNLocator(integer=True, min_n_ticks=1))
    _draw_heat(centres, (left + right) / 2 / width, (top + bottom) / 2 / height, "Box centres", ("x", "y"))
    centres.invert_yaxis()  # y points down, as in the images
    _draw_heat(sizes, widths, heights, "Box sizes", ("Width", "Height"))
    return save(figure, path)


def _draw_classes(axes: Axes, index: AnnotationIndex) -> None:
    """A bar for the labels of each class."""
    counts = np.bincount(index.classes, minlength=len(index.names))
    dress(axes, title=f"{counts.sum():,} labels in {len(index.names)} classes", y="Labels")
    colours = [COLOURS[number % len(COLOURS)] for number in range(len(counts))]  # as in the pictures with boxes
    bars = axes.bar(range(len(counts)), counts, color=colours)
    axes.grid(visible=False, axis="x")
    if len(counts) <= NAMED:
        names = [plain(name, 18) for name in index.names]
        axes.set_xticks(range(len(counts)), names, rotation=90 if len(counts) > 5 else 0)
    else:
        axes.set_xlabel("Class number")
    if len(counts) <= 12:
        axes.bar_label(bars, fmt="{:,.0f}", fontsize=8, color=INK)


def _draw_images(axes: Axes, per_image: np.ndarray) -> None:
    """A histogram of the number of labels in an image."""
    title = f"{len(per_image):,} images, {(per_image == 0).sum():,} without labels"
    dress(axes, title=title, x="Labels in the image", y="Images")
    most = int(per_image.max(initial=0))
    step = math.ceil((most + 1) / CELLS)  # counts in a bar
    edges = [edge - 0.5 for edge in range(0, most + step + 1, step)]  # between whole numbers
    axes.hist(per_image, bins=edges, rwidth=0.85, color=COLOURS[0])
    axes.grid(visible=False, axis="x")
    count_along_x(axes)


def _draw_boxes(axes: Axes, widths: np.ndarray, heights: np.ndarray, classes: np.ndarray) -> None:
    """Boxes with their centres at one point, in the colours of their classes; of many, some by lot."""
    from matplotlib.collections import LineCollection

    dress(axes, title="Boxes over each other", x="Width from the centre (share of the image)",
          y="Height from the centre (share of the image)")
    axes.grid(visible=False)
    chosen = np.arange(len(classes))
    if len(chosen) > OVERLAID:
        chosen = np.sort(np.random.default_rng(0).choice(chosen, OVERLAID, replace=False))
        axes.set_title(f"{OVERLAID:,} of {len(classes):,}", fontsize=8, color=INK, loc="right")
    corners = np.array([[-1, -1], [1, -1], [1, 1], [-1, 1], [-1, -1]]) / 2  # of a box around 0
    outlines = corners[None] * np.stack([widths[chosen], heights[chosen]], 1)[:, None]
    colours = [COLOURS[number % len(COLOURS)] for number in classes[chosen].tolist()]
    axes.add_collection(LineCollection(list(outlines), colors=colours, linewidths=0.8, alpha=0.5))
    reach = 0.52 * max(widths.max(initial=0), heights.max(initial=0)) or 0.5
    axes.set_xlim(-reach, reach)
    axes.set_ylim(reach, -reach)  # y points down, as in the images
    axes.set_aspect("equal")


def _draw_heat(axes: Axes, x: np.ndarray, y: np.ndarray, title: str, labels: tuple[str, str]) -> None:
    """How many points are in each cell of the part of the unit square that has any."""
    dress(axes, title=title, x=f"{labels[0]} (share of the image)", y=f"{labels[1]} (share of the image)")
    axes.grid(visible=False)
    axes.hist2d(x, y, bins=CELLS, range=(_reach(x), _reach(y)), cmap="Blues")


def _reach(shares: np.ndarray) -> tuple[float, float]:
    """The shares in twentieths around all of some; (0, 1) for none."""
    if not len(shares):
        return 0.0, 1.0
    low, high = math.floor(20 * shares.min()) / 20, math.ceil(20 * shares.max()) / 20
    return low, max(high, low + 0.05)
