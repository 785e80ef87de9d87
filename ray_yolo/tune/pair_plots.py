"""The pictures of a comparison: curves over epochs, and the pairs with the interval after each."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from ray_yolo.plots.style import COLOURS, GREY, INK, count_along_x, dress, new_figure, save
from ray_yolo.runs.event_log import EVENTS_FILE, epoch_rows, read_events, surviving
from ray_yolo.tune.claim import SIDES, Side, judge_pairs
from ray_yolo.tune.pairs import PairResults, training_folder

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

_DASHES = {"A": "-", "B": "--"}  # no figure relies on colour alone
_MARKS = {"A": "o", "B": "s"}
_COLOURS = dict(zip(SIDES, COLOURS, strict=False))


def draw_comparison(folder: Path, results: PairResults, pairs: int) -> None:
    """Draw curves.png and pairs.png of a comparison, whose claim is about so many pairs."""
    draw_curves(read_curves(folder, results), folder / "curves.png")
    draw_pairs(results, pairs, folder / "pairs.png")


def read_curves(folder: Path, results: PairResults) -> dict[tuple[int, Side], dict[int, float]]:
    """The fitness of each ended training by epoch, counted from 1."""
    curves = {}
    for pair, side in sorted(results):
        events = read_events(folder / "trials" / training_folder(pair, side) / EVENTS_FILE)
        rows = epoch_rows(surviving(events))
        curves[pair, side] = {row.epoch + 1: row.fitness for row in rows if row.fitness is not None}
    return curves


def draw_curves(curves: Mapping[tuple[int, Side], Mapping[int, float]], path: Path) -> Figure:
    """Fitness over epochs: a thin line for each training, a thick one for the mean of each side."""
    figure = new_figure(8, 4.5)
    axes = dress(figure.subplots(), title="Fitness of both sides", x="Epoch", y="Fitness")
    for side in SIDES:
        own = [curve for (_, owner), curve in curves.items() if owner == side and curve]
        style: dict[str, Any] = {"color": _COLOURS[side], "linestyle": _DASHES[side]}
        for curve in own:
            axes.plot(list(curve), list(curve.values()), linewidth=0.8, alpha=0.45, **style)
        epochs = sorted(set().union(*own))
        means = []
        for epoch in epochs:
            known = [curve[epoch] for curve in own if epoch in curve]  # a training may have ended early
            means.append(float(np.mean(known)))
        axes.plot(epochs, means, linewidth=2.2, label=f"{side}, mean", marker=_MARKS[side], markersize=3, **style)
    axes.legend(fontsize=8, frameon=False)
    count_along_x(axes)
    return save(figure, path)


def draw_pairs(results: PairResults, pairs: int, path: Path) -> Figure:
    """Left: the fitness of both sides in each pair. Right: the mean difference after each pair, with its interval."""
    numbers = list(range(1, pairs + 1))
    fitness = {side: [results[pair, side].fitness or 0.0 for pair in numbers] for side in SIDES}
    figure = new_figure(10, 4)
    left, right = figure.subplots(1, 2)
    dress(left, title="Best fitness of each training", x="Pair", y="Fitness")
    for side in SIDES:
        left.plot(numbers, fitness[side], _MARKS[side], color=_COLOURS[side], label=side)
    left.legend(fontsize=8, frameon=False)
    dress(right, title="B less A after each pair, with its interval", x="Pairs", y="Difference")
    _draw_looks(right, fitness["A"], fitness["B"])
    for axes in (left, right):
        count_along_x(axes)
    return save(figure, path)


def _draw_looks(axes: Axes, a: Sequence[float], b: Sequence[float]) -> None:
    looks = [judge_pairs(a[:number], b[:number]) for number in range(1, len(a) + 1)]
    axes.axhline(0.0, color=GREY, linewidth=1)
    axes.plot([look.pairs for look in looks], [look.difference for look in looks], "o-", color=INK, linewidth=1)
    for look in looks:
        if look.margin is not None:
            axes.errorbar(look.pairs, look.difference, look.margin, color=INK, capsize=3, linewidth=1)
