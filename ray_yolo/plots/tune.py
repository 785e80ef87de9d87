"""A search over hyper-parameters: what each gene did, and how the best result grew."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from ray_yolo.plots.style import COLOURS, GREY, INK, count_along_x, dress, new_figure, plain, save

if TYPE_CHECKING:
    from matplotlib.figure import Figure

Floats = NDArray[np.float64]
COLUMNS = 5


def plot_genes(genes: Mapping[str, Sequence[float]], fitness: Sequence[float], path: Path) -> Figure:
    """Fitness against each gene, later trials darker, the best one marked. Trials without a fitness (NaN) are left out.

    Args:
        genes: values of each gene, one per trial in the order of the trials.
    """
    heights = np.asarray(fitness, dtype=float)
    done = np.isfinite(heights)
    rows = max(math.ceil(len(genes) / COLUMNS), 1)
    figure = new_figure(2.6 * COLUMNS, 2.4 * rows)
    panels = figure.subplots(rows, COLUMNS, squeeze=False, sharey=True).flatten()
    for axes in panels[len(genes):]:
        axes.set_axis_off()
    for axes, (name, values) in zip(panels, genes.items(), strict=False):
        at = np.asarray(values, dtype=float)
        dress(axes, title=plain(name, 28))
        shade = {"c": np.flatnonzero(done), "cmap": "Blues", "vmin": -0.4 * len(at), "vmax": len(at)}
        axes.scatter(at[done], heights[done], s=14, **shade)
        if done.any():
            best = int(np.nanargmax(heights))
            axes.scatter(at[best], heights[best], marker="x", s=50, linewidth=1.8, color=COLOURS[1])
            axes.set_title(f"{at[best]:.4g}", fontsize=8, color=COLOURS[1], loc="right")
    for axes in panels[::COLUMNS]:
        axes.set_ylabel("Fitness", fontsize=9, color=INK)
    return save(figure, path)


def plot_progress(fitness: Sequence[float], path: Path) -> Figure:
    """Fitness of each trial and the best one so far. Trials without a fitness (NaN) stand at the bottom as crosses."""
    heights = np.asarray(fitness, dtype=float)
    done = np.isfinite(heights)
    trials = np.arange(len(heights))
    figure = new_figure(8, 4.5)
    axes = dress(figure.add_subplot(), title="Fitness over the search", x="Trial", y="Fitness")
    axes.scatter(trials[done], heights[done], s=16, color=GREY, label="trial")
    if done.any():
        best = np.maximum.accumulate(np.where(done, heights, -np.inf))
        known = best > -np.inf
        axes.step(trials[known], best[known], where="post", color=COLOURS[0], linewidth=2, label="best so far")
    if not done.all():
        bottom = np.full((~done).sum(), heights[done].min(initial=0.0))
        axes.scatter(trials[~done], bottom, marker="x", s=22, color=COLOURS[1], label="without result")
    count_along_x(axes)
    if axes.has_data():
        axes.legend(frameon=False, fontsize=8, labelcolor=INK)
    return save(figure, path)
