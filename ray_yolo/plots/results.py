"""The course of a training from its epoch events."""

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

LOSSES = {"box": "Box loss", "obj": "Objectness loss", "cls": "Class loss", "dfl": "Distance loss"}
FEW = 20  # epochs that are marked one by one
SPIKE, AROUND = 3.0, 4  # times the median of so many epochs before and after
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
    """One line per entry (label: what gives a row's value), interrupted where there is no number."""
    dress(axes, title=title, x="Epoch (counted from 1)")
    epochs = np.arange(rows[0].epoch, rows[-1].epoch + 1) if rows else np.zeros(0, int)
    # Rates of weights and norms are mostly the same: a dashed line lets the one below it show.
    for (label, value), colour, dash in zip(lines.items(), COLOURS, ("-", "-", "--"), strict=False):
        known = {row.epoch: number for row in rows if (number := value(row)) is not None}
        numbers = np.array([known.get(epoch, math.nan) for epoch in epochs.tolist()])
        if known:
            beside = np.pad(np.isfinite(numbers), 1)
            alone = beside[1:-1] & ~beside[:-2] & ~beside[2:]  # no line goes there
            axes.plot(epochs + 1, numbers, color=colour, linestyle=dash, label=label, linewidth=1.6, marker="o",
                      markersize=3, markevery=np.flatnonzero(alone | (len(known) <= FEW)).tolist())
    count_along_x(axes)
    if axes.lines:
        axes.legend(frameon=False, fontsize=8, labelcolor=INK)


def _cut_spikes(axes: Axes) -> None:
    """End the panel above what is no spike: the highest of these is told, and those beyond are marked at the edge."""
    lines = [np.asarray(line.get_xydata()) for line in axes.lines]  # (epochs, 2) each
    spikes = [_spikes(line[:, 1]) for line in lines]
    calm = [line[~high & np.isfinite(line[:, 1]), 1] for line, high in zip(lines, spikes, strict=True)]
    if not any(high.any() for high in spikes) or not any(map(len, calm)):
        return
    low, top = min(part.min(initial=math.inf) for part in calm), max(part.max(initial=-math.inf) for part in calm)
    edge = top + 0.1 * ((top - low) or abs(top) or 1.0)
    axes.set_ylim(low - 0.05 * (edge - low), edge)
    for drawn, line, high in zip([*axes.lines], lines, spikes, strict=True):
        if (beyond := line[high & (line[:, 1] > edge), 0]).size:
            axes.plot(beyond, np.full(beyond.size, edge), color=drawn.get_color(), linestyle="", marker="^",
                      clip_on=False)
    everything = np.concatenate(lines)
    epoch, highest = everything[np.nanargmax(everything[:, 1])]
    axes.set_title(f"beyond: {highest:.3g} in epoch {epoch:.0f}", fontsize=8, color=INK, loc="right")


def _spikes(numbers: np.ndarray) -> np.ndarray:
    """Where a line is far above the median of the epochs around."""
    padded = np.pad(numbers, AROUND, constant_values=math.nan)
    windows = np.lib.stride_tricks.sliding_window_view(padded, 2 * AROUND + 1)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="All-NaN slice")
        return numbers > SPIKE * np.nanmedian(windows, axis=1)
