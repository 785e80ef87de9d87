"""Plots of a sweep: fitness against each gene, fitness over trials, and the ancestors of the best trial."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from itertools import accumulate
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from ray_yolo.core.formatting import format_count
from ray_yolo.plots.style import COLOURS, GREY, INK, count_along_x, dress, new_figure, plain, save
from ray_yolo.tune.trials import Trial

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure
    from matplotlib.transforms import BboxBase

Floats = NDArray[np.float64]
COLUMNS = 5
BESIDE = ((0, 9), (0, -9), (11, 0), (-11, 0))  # points from a dot to the middle of its number


def draw_plots(folder: Path, trials: Sequence[Trial], best: Trial, results: Mapping[int, Mapping[int, float]]) -> None:
    """Draw evolve.png, progress.png, rungs.png, lineage.png and parallel.png of a sweep.

    Args:
        results: fitness by epochs, by trial, as from `ledger.rung_results`.
    """
    finished = [trial for trial in trials if trial.fitness is not None]
    numeric = [name for name, value in best.genes.items() if isinstance(value, (int, float))]
    plot_genes(_columns(finished, numeric), _fitness(finished), [trial.epochs for trial in finished],
               folder / "evolve.png")
    plot_progress(_fitness(trials), [trial.epochs for trial in trials], folder / "progress.png")

    # Only fitness after equally many epochs is comparable: that of the trials that trained longest.
    longest = max((trial.epochs for trial in finished), default=0)
    whole = [trial for trial in finished if trial.epochs == longest]
    plot_parallel(_columns(whole, numeric), _fitness(whole), folder / "parallel.png")

    pairs: dict[int, tuple[float, float]] = {}
    if best.number:  # the default makes no pairs with itself
        default = next((trial.seeds for trial in trials if trial.number == 0), {})
        for seed in default.keys() & best.seeds.keys():
            pairs[seed] = default[seed], best.seeds[seed]
    plot_rungs(results, pairs, best.number, folder / "rungs.png")

    heights = {trial.number: trial.fitness for trial in finished}
    parents = {}
    for trial in finished:
        parents[trial.number] = [ancestor for ancestor in trial.parents if ancestor in heights]
    plot_lineage(parents, heights, best.number, folder / "lineage.png")


def _columns(trials: Sequence[Trial], names: Sequence[str]) -> dict[str, list[float]]:
    """The values of each of these genes, one per trial."""
    return {name: [float(trial.genes[name]) for trial in trials] for name in names}


def _fitness(trials: Sequence[Trial]) -> list[float]:
    """The fitness of each trial; NaN: it has none."""
    return [math.nan if trial.fitness is None else trial.fitness for trial in trials]


def plot_genes(genes: Mapping[str, Sequence[float]], fitness: Sequence[float], rungs: Sequence[int], path: Path
               ) -> Figure:
    """Fitness against each gene: later trials are darker, the best one is marked, trials without fitness (NaN) omitted.

    Args:
        genes: values of each gene, one per trial in the order of the trials.
        rungs: how far each trial was trained. The best trial has the highest fitness on the highest rung.
    """
    heights = np.asarray(fitness, dtype=float)
    done = np.isfinite(heights)
    columns = min(COLUMNS, max(len(genes), 1))
    rows = max(math.ceil(len(genes) / columns), 1)
    figure = new_figure(2.6 * columns, 2.4 * rows)
    panels = figure.subplots(rows, columns, squeeze=False, sharey=True).flatten()
    for axes in panels[len(genes):]:
        axes.set_axis_off()
    for axes, (name, values) in zip(panels, genes.items(), strict=False):
        at = np.asarray(values, dtype=float)
        dress(axes, title=plain(name, 28))
        shade = {"c": np.flatnonzero(done), "cmap": "Blues", "vmin": -0.4 * len(at), "vmax": len(at)}
        axes.scatter(at[done], heights[done], s=14, **shade)
        if done.any():
            best = max(np.flatnonzero(done).tolist(), key=lambda trial: (rungs[trial], heights[trial]))
            axes.scatter(at[best], heights[best], marker="x", s=50, linewidth=1.8, color=COLOURS[1])
            axes.set_title(f"{at[best]:.4g}", fontsize=8, color=COLOURS[1], loc="right")
    for axes in panels[::columns]:
        axes.set_ylabel("Fitness", fontsize=9, color=INK)
    return save(figure, path)


def plot_parallel(genes: Mapping[str, Sequence[float]], fitness: Sequence[float], path: Path) -> Figure:
    """Each trial as a line over its genes, each scaled to the values that were tried; better trials are darker."""
    names = [name for name, values in genes.items() if len(set(values)) > 1]
    figure = new_figure(max(8.0, 0.8 * len(names)), 4.5)
    axes = dress(figure.add_subplot(), title="Genes of the trials", y="Value, lowest to highest")
    scaled = np.array([_scaled(genes[name]) for name in names])  # (genes, trials)
    if names and len(set(fitness)) > 1:  # the last axis: where a line ends is its trial's fitness
        scaled = np.vstack([scaled, _scaled(fitness)])
        names.append(f"fitness ({min(fitness):.3g} to {max(fitness):.3g})")
    worst_first = np.argsort(fitness).tolist() if names else []  # the best one covers the others
    for place, trial in enumerate(worst_first):
        share = place / len(worst_first)
        style: dict[str, Any] = {"linewidth": 0.9, "color": COLOURS[0], "alpha": 0.1 + 0.5 * share}
        if place == len(worst_first) - 1:
            style = {"linewidth": 2.0, "color": COLOURS[1], "alpha": 1.0}
        axes.plot(range(len(names)), scaled[:, trial], **style)
    axes.set_xticks(range(len(names)), [plain(name, 28) for name in names], rotation=60, ha="right", fontsize=8)
    return save(figure, path)


def _scaled(values: Sequence[float]) -> Floats:
    """Values from 0, the lowest, to 1, the highest; they are not all equal."""
    return np.asarray((np.asarray(values) - min(values)) / np.ptp(values))


def plot_rungs(results: Mapping[int, Mapping[int, float]], pairs: Mapping[int, tuple[float, float]], best: int,
               path: Path) -> Figure:
    """Left: the fitness of each trial at its rungs. Right: the pairs of the claim, the default and the best trial on
    the same seeds.

    Args:
        results: fitness by epochs, by trial.
        pairs: (fitness of the default, fitness of the best trial) by seed.
    """
    figure = new_figure(11, 4.5)
    left, right = figure.subplots(1, 2, width_ratios=(2, 1), sharey=True)
    dress(left, title=f"Rungs of {format_count(len(results), 'trial')}", x="Epochs", y="Fitness")
    for trial, at_rungs in sorted(results.items(), key=lambda item: item[0] == best):
        is_best = trial == best
        epochs = sorted(at_rungs)
        left.plot(epochs, [at_rungs[epoch] for epoch in epochs], marker="o", markersize=3,
                  color=COLOURS[1] if is_best else COLOURS[0], linewidth=2.0 if is_best else 0.9,
                  alpha=1.0 if is_best else 0.4)
    left.set_xticks(sorted({epoch for at_rungs in results.values() for epoch in at_rungs}))
    dress(right, title=f"Claim: {format_count(len(pairs), 'pair')} of equal seeds")
    for default, candidate in pairs.values():
        right.plot([0, 1], [default, candidate], marker="o", markersize=4, color=INK, linewidth=1.0)
    right.set_xticks([0, 1], ["default", f"trial {best}"])
    right.set_xlim(-0.3, 1.3)
    return save(figure, path)


def plot_progress(fitness: Sequence[float], rungs: Sequence[int], path: Path) -> Figure:
    """Fitness of each trial, and of the best one so far, by rung first. Trials without a fitness (NaN) are crosses at
    the bottom.
    """
    heights = np.asarray(fitness, dtype=float)
    done = np.isfinite(heights)
    trials = np.arange(len(heights))
    figure = new_figure(8, 4.5)
    axes = dress(figure.add_subplot(), title="Fitness over the search", x="Trial", y="Fitness")
    axes.scatter(trials[done], heights[done], s=16, color=GREY, label="trial")
    if done.any():
        ranks = zip(np.where(done, rungs, -1), np.where(done, heights, -np.inf), strict=True)
        best = np.array([height for _, height in accumulate(ranks, max)])
        known = best > -np.inf
        axes.step(trials[known], best[known], where="post", color=COLOURS[0], linewidth=2, label="best so far")
    if not done.all():
        bottom = np.full((~done).sum(), heights[done].min(initial=0.0))
        axes.scatter(trials[~done], bottom, marker="x", s=22, color=COLOURS[1], label="without result")
    count_along_x(axes)
    if axes.has_data():
        axes.legend(frameon=False, fontsize=8, labelcolor=INK)
    return save(figure, path)


def plot_lineage(parents: Mapping[int, Sequence[int]], fitness: Mapping[int, float | None], best: int, path: Path
                 ) -> Figure:
    """Fitness of all trials, and the lines from parent to child that lead to the best one.

    Args:
        parents: the parents of each trial; a start has none.
        fitness: of each trial by number. Trials without one (None or NaN) are omitted; parents and the best have one.
    """
    line = [*ancestors(parents, best), best]
    heights = {}
    for trial, height in fitness.items():
        if height is not None and math.isfinite(height):
            heights[trial] = height
    figure = new_figure(8, 4.5)
    axes = dress(figure.add_subplot(), title="How the best trial came about", x="Trial", y="Fitness")
    axes.scatter(list(heights), list(heights.values()), s=16, color=GREY, label="trial")
    segments = []  # from parent to child
    for child in line:
        for parent in parents.get(child, ()):
            segments.append([(parent, heights[parent]), (child, heights[child])])
    ends = np.reshape(segments, (-1, 2, 2))  # (segments, ends, xy), also if there are none
    axes.plot(*ends.T, color=COLOURS[0], linewidth=1.2, alpha=0.5)
    older = line[:-1]
    if older:
        axes.scatter(older, [heights[trial] for trial in older], s=30, color=COLOURS[0], zorder=3, label="ancestor")
    axes.scatter(best, heights[best], marker="x", s=60, linewidth=2, color=COLOURS[1], zorder=3,
                 label=f"best: {best}")
    axes.margins(y=0.08)  # room for numbers
    count_along_x(axes)
    axes.legend(frameon=False, fontsize=8, labelcolor=INK, ncols=3, loc="lower right", bbox_to_anchor=(1, 1))
    along = np.linspace(ends[:, 0], ends[:, 1], 100).reshape(-1, 2)  # points on the segments
    drawn = np.array([*heights.items(), *along])
    _number_dots(figure, axes, {trial: heights[trial] for trial in reversed(line)}, drawn)
    return save(figure, path)


def ancestors(parents: Mapping[int, Sequence[int]], best: int) -> list[int]:
    """The parents of a trial, their parents, and so on; ascending, without the trial itself."""
    visited: set[int] = set()
    unseen = [best]
    while unseen:
        new = set(parents.get(unseen.pop(), ())) - visited
        visited |= new
        unseen += new
    return sorted(visited - {best})


def _number_dots(figure: Figure, axes: Axes, numbered: Mapping[int, float], drawn: Floats) -> None:
    """Write trial numbers beside dots, in order. A number that would cover another one or a point of `drawn`,
    (points, 2), at each position is omitted.
    """
    figure.draw_without_rendering()  # fixes the positions
    points = axes.transData.transform(drawn)
    taken: list[BboxBase] = []
    for trial, height in numbered.items():
        for shift in BESIDE:
            label = axes.annotate(str(trial), (trial, height), shift, textcoords="offset points", ha="center",
                                  va="center", fontsize=8, color=INK, in_layout=False)
            box = label.get_window_extent()
            if not box.count_overlaps(taken) and not box.padded(3).count_contains(points):
                taken.append(box)
                break
            label.remove()
