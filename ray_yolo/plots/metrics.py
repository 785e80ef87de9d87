"""Figures of a validation: precision, recall and F1 curves, and the confusion matrix."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from ray_yolo.ops.average_precision import GRID, Metrics
from ray_yolo.ops.confusion import CONFIDENCE, IOU
from ray_yolo.plots.style import GREY, INK, LINES, dress, new_figure, plain, save

if TYPE_CHECKING:
    from matplotlib.figure import Figure

Floats = NDArray[np.float64]
_CHARACTER_INCHES = 0.075  # the width of a character of a label in 8 pt
READABLE = 30  # largest number of classes with numbers in the cells of a matrix


def plot_all_curves(metrics: Metrics, names: Sequence[str], folder: Path) -> list[Figure]:
    """Write PR_curve.png, F1_curve.png, P_curve.png and R_curve.png of the classes that have labels."""
    labelled = np.flatnonzero(metrics.num_labels).tolist()
    labelled_names = [names[kind] for kind in labelled]
    curves = metrics.curves
    reported = int(np.abs(GRID - metrics.confidence).argmin())  # place on the grid of confidences
    peak = int(curves.f1[labelled].mean(axis=0).argmax()) if labelled else reported

    def plot_over_confidence(values: Floats, name: str, file: str, word: str, marked: int) -> Figure:
        return plot_curves(values[labelled], values[labelled, marked], labelled_names, folder / file,
                           title=f"{name} at IoU 0.5", x="Confidence", y=name, mark=(word, float(GRID[marked])))

    return [
        plot_curves(curves.precision_at_recall[labelled], metrics.ap[labelled, 0], labelled_names,
                    folder / "PR_curve.png", title="Precision and recall at IoU 0.5", x="Recall", y="Precision"),
        plot_over_confidence(curves.f1, "F1", "F1_curve.png", "highest", peak),
        plot_over_confidence(curves.precision, "Precision", "P_curve.png", "reported", reported),
        plot_over_confidence(curves.recall, "Recall", "R_curve.png", "reported", reported)]


def plot_curves(values: Floats, summary: Floats, names: Sequence[str], path: Path, *, title: str, x: str, y: str,
                mark: tuple[str, float] | None = None) -> Figure:
    """One line per class and one for their mean.

    Args:
        values: (classes, 1000) on the grid of recalls or confidences.
        summary: (classes,) numbers for the legend.
        mark: a word and the confidence to mark. It is that of the highest mean F1, or that of the reported precision
        and recall (the peak of the smoothed mean F1).
    """
    figure = new_figure(9, 6)
    axes = dress(figure.add_subplot(), title=title, x=x, y=y)
    if len(values) <= len(LINES):
        for row, name, number, (dash, colour) in zip(values, names, summary, LINES, strict=False):
            axes.plot(GRID, row, linewidth=1.2, label=f"{plain(name)}  {number:.3f}", color=colour, linestyle=dash)
    else:  # too many to tell apart: the lines show the spread
        lines = axes.plot(GRID, values.T, linewidth=0.5, color=GREY, alpha=0.6)
        lines[0].set_label("single classes")
    if len(values) > 1:
        mean = f"mean of {len(names)} classes  {summary.mean():.3f}"
        axes.plot(GRID, values.mean(axis=0), linewidth=2.8, color=INK, label=mean)
    if len(values):
        figure.legend(loc="outside right upper", frameon=False, fontsize=8, labelcolor=INK)
    if mark is not None:
        word, confidence = mark
        axes.axvline(confidence, color=GREY, linewidth=1.0, linestyle=":")
        side, shift = ("left", 4) if confidence < 0.6 else ("right", -4)
        axes.annotate(f"{word} at confidence {confidence:.3f}", (confidence, 0.02), xytext=(shift, 0),
                      textcoords="offset points", ha=side, fontsize=8, color=INK)
    axes.set(xlim=(0, 1), ylim=(0, 1.02))
    return save(figure, path)


def plot_confusion(matrix: NDArray[np.int64], names: Sequence[str], path: Path, *, normalised: bool) -> Figure:
    """Detected versus labelled classes, as counts or as shares of each labelled class (column).

    Args:
        matrix: (classes + 1, classes + 1), [detected, labelled], the background last: of `ops.confusion`.
    """
    shares = matrix / np.maximum(matrix.sum(axis=0), 1)
    labels = [*(plain(name, 18) for name in names), "background"]
    side = min(4.0 + 0.55 * len(labels), 16.0)
    figure = new_figure(side + 1.2, side)
    thresholds = f"confidence > {CONFIDENCE:g}, IoU > {IOU:g}"
    title = f"Detections by labelled class{', share of each column' if normalised else ''}\n{thresholds}"
    axes = dress(figure.add_subplot(), title=title, x="Labelled", y="Detected")
    axes.grid(visible=False)
    # Colours show shares in both variants: counts would mainly show which classes are frequent.
    picture = axes.imshow(shares, cmap="Blues", vmin=0.0, vmax=1.0)
    bar = figure.colorbar(picture, ax=axes, shrink=0.6, aspect=30)
    bar.set_label("Share of the labelled class", fontsize=9, color=INK)
    bar.ax.tick_params(labelsize=8)
    bar.outline.set_visible(False)
    size = 8 if len(names) <= READABLE else 5
    widest = _CHARACTER_INCHES * max(map(len, labels))
    do_overlap = widest > 0.7 * side / len(labels)  # the picture has some 0.7 of the figure
    axes.set_xticks(range(len(labels)), labels, rotation=90 if do_overlap else 0, fontsize=size)
    axes.set_yticks(range(len(labels)), labels, fontsize=size)
    if len(names) <= READABLE:
        for row, column in zip(*np.nonzero(matrix), strict=True):
            text = f"{shares[row, column]:.2f}" if normalised else str(matrix[row, column])
            colour = "white" if shares[row, column] > 0.5 else INK
            axes.text(column, row, text, ha="center", va="center", fontsize=8, color=colour)
    return save(figure, path)
