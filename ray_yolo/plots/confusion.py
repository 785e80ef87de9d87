"""The confusion matrix as a picture."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from ray_yolo.plots.style import INK, dress, new_figure, plain, save

if TYPE_CHECKING:
    from matplotlib.figure import Figure

READABLE = 30  # classes up to which the cells carry their numbers


def plot_confusion(matrix: NDArray[np.int64], names: Sequence[str], path: Path, *, normalised: bool) -> Figure:
    """Detected against labelled classes, as counts or as shares of each labelled class (column).

    Args:
        matrix: (classes + 1, classes + 1), [detected, labelled], the background last.
    """
    shares = matrix / np.maximum(matrix.sum(axis=0), 1)
    labels = [*(plain(name, 18) for name in names), "background"]
    side = min(4.0 + 0.55 * len(labels), 16.0)
    figure = new_figure(side + 1.2, side)
    title = f"Detections by labelled class{', share of each column' if normalised else ''}"
    axes = dress(figure.add_subplot(), title=title, x="Labelled", y="Detected")
    axes.grid(visible=False)
    # Colours are shares in both pictures: counts would show little more than which classes are frequent.
    picture = axes.imshow(shares, cmap="Blues", vmin=0.0, vmax=1.0)
    bar = figure.colorbar(picture, ax=axes, shrink=0.6, aspect=30)
    bar.set_label("Share of the labelled class", fontsize=9, color=INK)
    bar.ax.tick_params(labelsize=8)
    bar.outline.set_visible(False)
    size = 8 if len(labels) <= READABLE else 5
    axes.set_xticks(range(len(labels)), labels, rotation=90 if len(labels) > 6 else 0, fontsize=size)
    axes.set_yticks(range(len(labels)), labels, fontsize=size)
    if len(labels) <= READABLE:
        for row, column in zip(*np.nonzero(matrix), strict=True):
            text = f"{shares[row, column]:.2f}" if normalised else str(matrix[row, column])
            colour = "white" if shares[row, column] > 0.5 else INK
            axes.text(column, row, text, ha="center", va="center", fontsize=8, color=colour)
    return save(figure, path)
