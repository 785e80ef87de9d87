"""Losses, metrics and learning rates of a run as a figure."""

from __future__ import annotations

import math
import warnings
from collections.abc import Mapping, Sequence
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
    loss_panels, (precision_and_recall, average_precision, learning_rate) = panels[:3], panels[3:]
    terms = rows[0].train if rows else ()
    for axes, term in zip(loss_panels, terms, strict=False):
        train = [row.train[term] for row in rows]
        val = [(row.val or {}).get(term) for row in rows]
        _draw_lines(axes, rows, LOSSES.get(term, f"{term} loss"), {"train": train, "val": val})
    metrics = {name: [(row.metrics or {}).get(name) for row in rows] for name in METRICS}
    _draw_lines(precision_and_recall, rows, "Precision and recall", {name: metrics[name] for name in METRICS[:2]})
    _draw_lines(average_precision, rows, "Average precision", {name: metrics[name] for name in METRICS[2:]})
    rates = {name: [row.lr[group] for row in rows] for group, name in enumerate(RATES)}
    _draw_lines(learning_rate, rows, "Learning rate", rates)
    for axes in loss_panels:
        _cut_spikes(axes)
    for axes in (precision_and_recall, average_precision, learning_rate):
        axes.set_ylim(bottom=0.0)
    best = [row.epoch + 1 for row in rows if row.best and row.metrics is not None]
    if best:
        epoch = best[-1]  # each was the best until the next one
        average_precision.axvline(epoch, color=GREY, linewidth=1.0, linestyle=":",
                                  label=f"best fitness: epoch {epoch}")
        average_precision.legend(frameon=False, fontsize=8, labelcolor=INK)
    return save(figure, path)


def _draw_lines(axes: Axes, rows: Sequence[EpochEvent], title: str, lines: Mapping[str, Sequence[Number]]) -> None:
    """One line per entry (label: a number for each row), with gaps for missing numbers."""
    dress(axes, title=title, x="Epoch (counted from 1)")
    epochs = np.arange(rows[0].epoch, rows[-1].epoch + 1) if rows else np.zeros(0, int)
    # The rates of weights and norms often coincide: the dashed line leaves the other one visible.
    for (label, of_rows), colour, dash in zip(lines.items(), COLOURS, ("-", "-", "--"), strict=False):
        known = {row.epoch: number for row, number in zip(rows, of_rows, strict=True) if number is not None}
        if not known:
            continue
        numbers = np.array([known.get(epoch, math.nan) for epoch in epochs.tolist()])
        marked = np.ones(len(numbers), bool) if len(known) <= FEW else _between_gaps(numbers)
        axes.plot(epochs + 1, numbers, color=colour, linestyle=dash, label=label, linewidth=1.6, marker="o",
                  markersize=3, markevery=np.flatnonzero(marked).tolist())
    count_along_x(axes)
    axes.set_xlim(left=max(axes.get_xlim()[0], 0.5))  # there is no epoch 0
    if axes.lines:
        axes.legend(frameon=False, fontsize=8, labelcolor=INK)


def _between_gaps(numbers: np.ndarray) -> np.ndarray:
    """Mask of the numbers between two gaps: no line reaches them, so they need a marker."""
    finite = np.pad(np.isfinite(numbers), 1)  # a gap before the first and after the last
    here, before, after = finite[1:-1], finite[:-2], finite[2:]
    return here & ~before & ~after


def _cut_spikes(axes: Axes) -> None:
    """Limit the panel to values that are no spikes; mark spikes at the edge, and name the highest in the title."""
    drawn = list(axes.lines)  # a copy: marks are lines of the axes too
    points = [np.asarray(line.get_xydata()) for line in drawn]  # rows of epoch and number, for each line
    if not points:
        return
    all_points = np.concatenate(points)
    all_numbers = all_points[:, 1]
    spikes = [_spikes(numbers) for _, numbers in (part.T for part in points)]
    is_spike = np.concatenate(spikes)
    regular = all_numbers[~is_spike & np.isfinite(all_numbers)]
    if not is_spike.any() or not regular.size:
        return
    low, top = regular.min(), regular.max()
    margin = 0.1 * ((top - low) or abs(top) or 1.0)  # all regular numbers may be equal, or 0
    edge = top + margin
    axes.set_ylim(low - 0.05 * (edge - low), edge)
    for line, part, high in zip(drawn, points, spikes, strict=True):
        epochs, numbers = part.T
        beyond = epochs[high & (numbers > edge)]
        if beyond.size:
            axes.plot(beyond, np.full(beyond.size, edge), color=line.get_color(), linestyle="", marker="^",
                      clip_on=False)
    epoch, highest = all_points[np.nanargmax(all_numbers)]
    axes.set_title(f"beyond: {highest:.3g} in epoch {epoch:.0f}", fontsize=8, color=INK, loc="right")


def _spikes(numbers: np.ndarray) -> np.ndarray:
    """Mask of the values far above the median of the surrounding epochs."""
    padded = np.pad(numbers, AROUND, constant_values=math.nan)
    windows = np.lib.stride_tricks.sliding_window_view(padded, 2 * AROUND + 1)  # (epochs, 2 AROUND + 1)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="All-NaN slice")
        return numbers > SPIKE * np.nanmedian(windows, axis=1)
