"""Precision, recall and F1 as curves, one line per class and one for their mean."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from ray_yolo.ops.average_precision import GRID, Metrics
from ray_yolo.plots.style import DISTINCT, GREY, INK, dress, line_style, new_figure, plain, save

if TYPE_CHECKING:
    from matplotlib.figure import Figure

Floats = NDArray[np.float64]


def plot_all_curves(metrics: Metrics, names: Sequence[str], folder: Path) -> None:
    """Write PR_curve.png, F1_curve.png, P_curve.png and R_curve.png of the classes that have labels."""
    labelled = np.flatnonzero(metrics.num_labels).tolist()
    curves, shown = metrics.curves, [names[index] for index in labelled]
    plot_precision_recall(curves.precision_at_recall[labelled], metrics.ap[labelled, 0], shown, folder / "PR_curve.png")
    for quantity, values in (("F1", curves.f1), ("Precision", curves.precision), ("Recall", curves.recall)):
        path = folder / f"{quantity.removesuffix('recision').removesuffix('ecall')}_curve.png"
        plot_against_confidence(values[labelled], quantity, metrics.confidence, shown, path)


def plot_precision_recall(precision: Floats, ap50: Floats, names: Sequence[str], path: Path) -> Figure:
    """Precision against recall at IoU 0.5.

    Args:
        precision: (classes, 1000) on the grid of recalls.
        ap50: (classes,) areas below the curves, for the legend.
    """
    legend = [f"{plain(name)}  {value:.3f}" for name, value in zip(names, ap50, strict=True)]
    mean = f"mean of {len(names)} classes  {ap50.mean() if len(ap50) else 0.0:.3f}"
    return _draw(precision, legend, mean, "Precision and recall at IoU 0.5", ("Recall", "Precision"), None, path)


def plot_against_confidence(
    values: Floats, quantity: str, confidence: float, names: Sequence[str], path: Path
) -> Figure:
    """A quantity (F1, Precision or Recall) against confidence, with a mark at the confidence that is reported.

    Args:
        values: (classes, 1000) on the grid of confidences.
        confidence: where the mean F1 is highest.
    """
    at = int(np.abs(GRID - confidence).argmin())
    legend = [f"{plain(name)}  {value:.3f}" for name, value in zip(names, values[:, at], strict=True)]
    mean = f"mean of {len(names)} classes  {values[:, at].mean() if len(values) else 0.0:.3f}"
    title = f"{quantity} at IoU 0.5"
    return _draw(values, legend, mean, title, ("Confidence", quantity), confidence, path)


def _draw(
    values: Floats, legend: list[str], mean: str, title: str, labels: tuple[str, str], mark: float | None, path: Path
) -> Figure:
    figure = new_figure(9, 6)
    axes = dress(figure.add_subplot(), title=title, x=labels[0], y=labels[1])
    few = len(values) <= DISTINCT
    for index, (row, label) in enumerate(zip(values, legend, strict=True)):
        if few:
            colour, dash = line_style(index)
            axes.plot(GRID, row, linewidth=1.2, label=label, color=colour, linestyle=dash)
        else:  # so many lines show a spread, not single classes
            axes.plot(GRID, row, linewidth=0.5, color=GREY, alpha=0.6, label="single classes" if not index else None)
    if len(values) > 1:
        axes.plot(GRID, values.mean(axis=0), linewidth=2.8, color=INK, label=mean)
    if len(values):
        figure.legend(loc="outside right upper", frameon=False, fontsize=8, labelcolor=INK)
    if mark is not None:
        axes.axvline(mark, color=GREY, linewidth=1.0, linestyle=":")
        side, shift = ("left", 4) if mark < 0.6 else ("right", -4)
        axes.annotate(f"best F1 at confidence {mark:.3f}", (mark, 0.02), xytext=(shift, 0), textcoords="offset points",
                      ha=side, fontsize=8, color=INK)
    axes.set(xlim=(0, 1), ylim=(0, 1.02))
    return save(figure, path)
