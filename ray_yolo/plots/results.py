"""The course of a training from its epoch events."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ray_yolo.plots.style import COLOURS, GREY, INK, count_along_x, dress, new_figure, save

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

Row = Mapping[str, Any]
LOSSES = {"box": "Box loss", "obj": "Objectness loss", "cls": "Class loss", "dfl": "Distance loss"}
RATES = ("biases", "weights", "norms")


def plot_results(rows: Sequence[Row], path: Path) -> Figure:
    """Losses, metrics and learning rates over the epochs, counted from 1 as on the console; the best one is marked.

    Args:
        rows: epoch events; epochs that were not validated have None for `val` and `metrics`.
    """
    figure = new_figure(12, 6.5)
    panels = figure.subplots(2, 3).flatten().tolist()
    for axes, term in zip(panels, rows[0]["train"] if rows else (), strict=False):
        _lines(axes, rows, LOSSES.get(term, f"{term} loss"), {part: (part, term) for part in ("train", "val")})
    _lines(panels[3], rows, "Precision and recall", {key: ("metrics", key) for key in ("precision", "recall")})
    _lines(panels[4], rows, "Average precision", {key: ("metrics", key) for key in ("mAP50", "mAP50-95")})
    _lines(panels[5], rows, "Learning rate", {name: ("lr", index) for index, name in enumerate(RATES)})
    for axes in panels[3:]:
        axes.set_ylim(bottom=0.0)
    if best := [row for row in rows if row["best"] and row["metrics"] is not None]:
        epoch, value = best[-1]["epoch"] + 1, best[-1]["metrics"]["mAP50-95"]
        panels[4].axvline(epoch, color=GREY, linewidth=1.0, linestyle=":")
        panels[4].set_title(f"best: {value:.4g} in epoch {epoch}", fontsize=8, color=INK, loc="right")
    return save(figure, path)


def _lines(axes: Axes, rows: Sequence[Row], title: str, lines: Mapping[str, tuple[str, str | int]]) -> None:
    """One line per entry (label: the two keys of its values), of the rows that have it."""
    dress(axes, title=title, x="Epoch (counted from 1)")
    # Rates of weights and norms are mostly the same: a dashed line lets the one below it show.
    for (label, (part, key)), colour, dash in zip(lines.items(), COLOURS, ("-", "-", "--"), strict=False):
        points = [(row["epoch"] + 1, row[part][key]) for row in rows if row[part] is not None]
        if points:
            marker = "o" if len(points) <= 20 else ""
            axes.plot(*zip(*points, strict=True), color=colour, linestyle=dash, label=label, linewidth=1.6,
                      marker=marker, markersize=3)
    count_along_x(axes)
    if axes.lines:
        axes.legend(frameon=False, fontsize=8, labelcolor=INK)
