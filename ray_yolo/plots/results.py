"""Losses, metrics and learning rates of a run as a figure."""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from ray_yolo.core.events import METRICS, EpochEvent, Number
from ray_yolo.plots.style import COLOURS, GREY, INK, count_along_x, dress, new_figure, save

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

LOSSES = {"box": "Box loss", "obj": "Objectness loss", "cls": "Class loss", "dfl": "Distance loss",
          "l1": "Distance loss"}
FEW = 20  # largest number of epochs with a marker each
SPIKE, AROUND = 3.0, 4  # a spike exceeds SPIKE x the median of AROUND epochs before and after
RATES = ("biases", "weights", "norms")


def plot_results(rows: Sequence[EpochEvent], path: Path) -> Figure:
    """Losses, metrics and learning rates over the epochs (counted from 1); the best epoch is marked."""
    figure = new_figure(12, 6.5)
    panels = figure.subplots(2, 3).flatten().tolist()
    for axes, term in zip(panels, rows[0].train if rows else (), strict=False):
        _lines(axes, rows, LOSSES.get(term, f"{term} loss"), {
            "train": lambda row, term=term: row.train[term], "val": lambda row, term=term: (row.val or {}).get(term)})
    metrics = {name: lambda row, name=name: (row.metrics or {}).get(name) for name in METRICS}
    _lines(panels[3], rows, "Precision and recall", {name: metrics[name] for name in METRICS[:2]})
    _lines(panels[4], rows, "Average precision", {name: metrics[name] for name in METRICS[2:]})
    _lines(panels[5], rows, "Learning rate", {
        name: lambda row, group=group: row.lr[group] for group, name in enumerate(RATES)})
    for axes in panels[:3]:
        _cut_spikes(axes)
    for axes in panels[3:]:
        axes.set_ylim(bottom=0.0)
    if best := [(row.epoch + 1, row.metrics["mAP50-95"]) for row in rows if row.best and row.metrics is not None]:
        epoch, value = best[-1]
        panels[4].axvline(epoch, color=GREY, linewidth=1.0, linestyle=":")
        panels[4].set_title(f"best: {value:.4g} in epoch {epoch}", fontsize=8, color=INK, loc="right")
    return save(figure, path)


def _lines(axes: Axes, rows: Sequence[EpochEvent], title: str, lines: Mapping[str, Callable[..., Number]]) -> None:
    """One line per entry (label: function of a row), with gaps for missing numbers."""
    dress(axes, title=title, x="Epoch (counted from 1)")
    epochs = np.arange(rows[0].epoch, rows[-1].epoch + 1) if rows else np.zeros(0, int)
    # The rates of weights and norms often coincide: the dashed line leaves the other one visible.
    for (label, value), colour, dash in zip(lines.items(), COLOURS, ("-", "-", "--"), strict=False):
        known = {row.epoch: number for row in rows if (number := value(row)) is not None}
        numbers = np.array([known.get(epoch, math.nan) for epoch in epochs.tolist()])
        if known:
            finite = np.pad(np.isfinite(numbers), 1)
            isolated = finite[1:-1] & ~finite[:-2] & ~finite[2:]  # a point without a line needs a marker
            axes.plot(epochs + 1, numbers, color=colour, linestyle=dash, label=label, linewidth=1.6, marker="o",
                      markersize=3, markevery=np.flatnonzero(isolated | (len(known) <= FEW)).tolist())
    count_along_x(axes)
    if axes.lines:
        axes.legend(frameon=False, fontsize=8, labelcolor=INK)


def _cut_spikes(axes: Axes) -> None:
    """Limit the panel to values that are no spikes; mark spikes at the edge, and name the highest in the title."""
    lines = [np.asarray(line.get_xydata()) for line in axes.lines]  # (epochs, 2) each
    spikes = [_spikes(line[:, 1]) for line in lines]
    regular = [line[~high & np.isfinite(line[:, 1]), 1] for line, high in zip(lines, spikes, strict=True)]
    if not any(high.any() for high in spikes) or not any(map(len, regular)):
        return
    low, top = min(part.min(initial=math.inf) for part in regular), max(part.max(initial=-math.inf) for part in regular)
    edge = top + 0.1 * ((top - low) or abs(top) or 1.0)
    axes.set_ylim(low - 0.05 * (edge - low), edge)
    for drawn, line, high in zip([*axes.lines], lines, spikes, strict=True):
        if (beyond := line[high & (line[:, 1] > edge), 0]).size:
            axes.plot(beyond, np.full(beyond.size, edge), color=drawn.get_color(), linestyle="", marker="^",
                      clip_on=False)
    points = np.concatenate(lines)
    epoch, highest = points[np.nanargmax(points[:, 1])]
    axes.set_title(f"beyond: {highest:.3g} in epoch {epoch:.0f}", fontsize=8, color=INK, loc="right")


def _spikes(numbers: np.ndarray) -> np.ndarray:
    """Mask of the values far above the median of the surrounding epochs."""
    padded = np.pad(numbers, AROUND, constant_values=math.nan)
    windows = np.lib.stride_tricks.sliding_window_view(padded, 2 * AROUND + 1)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="All-NaN slice")
        return numbers > SPIKE * np.nanmedian(windows, axis=1)
