"""The course of a training from its epoch events."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from ray_yolo.events import METRICS, EpochEvent, Number
from ray_yolo.plots.style import COLOURS, GREY, INK, count_along_x, dress, new_figure, save

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

LOSSES = {"box": "Box loss", "obj": "Objectness loss", "cls": "Class loss", "dfl": "Distance loss"}
RATES = ("biases", "weights", "norms")


def plot_results(rows: Sequence[EpochEvent], path: Path) -> Figure:
    """Losses, metrics and learning rates over the epochs, counted from 1 as on the console; the best one is marked.

    Args:
        rows: one for each epoch.
    """
    figure = new_figure(12, 6.5)
    panels = figure.subplots(2, 3).flatten().tolist()
    for axes, term in zip(panels, rows[0].train if rows else (), strict=False):
        _lines(axes, rows, LOSSES.get(term, f"{term} loss"), {
            "train": lambda row, term=term: row.train[term], "val": lambda row, term=term: (row.val or {}).get(term)})
    measured = {name: lambda row, name=name: (row.metrics or {}).get(name) for name in METRICS}
    _lines(panels[3], rows, "Precision and recall", {name: measured[name] for name in METRICS[:2]})
    _lines(panels[4], rows, "Average precision", {name: measured[name] for name in METRICS[2:]})
    _lines(panels[5], rows, "Learning rate", {
        name: lambda row, group=group: row.lr[group] for group, name in enumerate(RATES)})
    for axes in panels[3:]:
        axes.set_ylim(bottom=0.0)
    if best := [(row.epoch + 1, row.metrics["mAP50-95"]) for row in rows if row.best and row.metrics is not None]:
        epoch, value = best[-1]
        panels[4].axvline(epoch, color=GREY, linewidth=1.0, linestyle=":")
        panels[4].set_title(f"best: {value:.4g} in epoch {epoch}", fontsize=8, color=INK, loc="right")
    return save(figure, path)


def _lines(axes: Axes, rows: Sequence[EpochEvent], title: str, lines: Mapping[str, Callable[..., Number]]) -> None:
    """One line per entry (label: what gives a row's value), of the rows that have one."""
    dress(axes, title=title, x="Epoch (counted from 1)")
    # Rates of weights and norms are mostly the same: a dashed line lets the one below it show.
    for (label, value), colour, dash in zip(lines.items(), COLOURS, ("-", "-", "--"), strict=False):
        points = [(row.epoch + 1, number) for row in rows if (number := value(row)) is not None]
        if points:
            marker = "o" if len(points) <= 20 else ""
            axes.plot(*zip(*points, strict=True), color=colour, linestyle=dash, label=label, linewidth=1.6,
                      marker=marker, markersize=3)
    count_along_x(axes)
    if axes.lines:
        axes.legend(frameon=False, fontsize=8, labelcolor=INK)
