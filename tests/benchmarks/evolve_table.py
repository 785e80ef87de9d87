"""A table of recorded trainings, and the surface that is replayed from it.

    {"format": 1, "about": {...}, "space": {...}, "recipe": {...}, "epochs": E, "start_seconds": s,
     "rows": [{"genes": {...}, "seed": 0, "fitness": [E numbers], "seconds": [E numbers]}, ...]}

`space` has the form of `tune_spaces/*.yaml`; the first row is the start of every search. Rows with equal genes and
different seeds are repetitions, from which the noise is taken: of the start, in some tables also of other recipes. A
proposal between the recorded rows gets the curve that a Gaussian process expects there, so that a search meets a
smooth surface that goes through recorded numbers.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from ray_yolo.config.recipe import Recipe
from ray_yolo.tune.evolution import Gene, Genes, GeneValue, Space, mutate
from ray_yolo.tune.space import read_space
from tests.benchmarks.record_curves import FORMAT

LENGTHS = 0.1 * 2.0 ** np.arange(7)  # of the process, in units of a gene's range
JITTER = 1e-8


@dataclass(frozen=True)
class Table:
    """Recorded curves: `curves` (rows, epochs) fitness, `seconds` (epochs,) of one epoch, medians over the rows."""

    space: Space
    genes: tuple[Mapping[str, GeneValue], ...]
    curves: np.ndarray
    epoch_seconds: np.ndarray
    start_seconds: float

    @property
    def epochs(self) -> int:
        """Epochs of a full training."""
        return self.curves.shape[1]


def read_table(path: str | Path) -> Table:
    """The table of a file written by `record_curves.py`."""
    return parse_table(json.loads(Path(path).read_text()))


def parse_table(content: Mapping[str, Any]) -> Table:
    """The table of a file's content; a failed row has fitness 0 throughout."""
    assert content["format"] == FORMAT, f"a table of format {content['format']}, not {FORMAT}"
    rows = content["rows"]
    curves = np.array([row["fitness"] or [0.0] * content["epochs"] for row in rows], float)
    seconds = np.array([row["seconds"] for row in rows if row["fitness"]], float)
    space = read_space(content["space"], Recipe.model_validate(content["recipe"])).space
    return Table(space, tuple(row["genes"] for row in rows), curves, np.median(seconds, axis=0),
                 float(content["start_seconds"]))


def coordinates(genes: Sequence[Gene], values: Mapping[str, GeneValue]) -> np.ndarray:
    """(genes,) place in the unit cube: by logarithm where the gene is drawn so, choices by their number."""
    return np.array([_coordinate(gene, values[gene.name]) for gene in genes])


def _coordinate(gene: Gene, value: GeneValue) -> float:
    if gene.kind == "choice":
        return gene.values.index(value) / max(1, len(gene.values) - 1)
    if gene.log:
        return math.log(float(value) / gene.low) / math.log(gene.high / gene.low)
    return (float(value) - gene.low) / ((gene.high - gene.low) or 1.0)


@dataclass
class Surface:
    """The curve of any genes, with and without noise. Deterministic: equal keys give equal observations."""

    table: Table
    points: np.ndarray = field(init=False)  # (points, genes) distinct recorded places
    lengths: np.ndarray = field(init=False)  # (genes,) how far a recorded curve speaks for its neighbours
    best: float = field(init=False)  # highest fitness, without noise, that any genes reach
    _residuals: np.ndarray = field(init=False)
    """(repetitions, epochs) deviations relative to their recipe's mean curve, scaled so that their squares add up to
    the variance of a training."""

    def __post_init__(self) -> None:
        places = np.array([coordinates(self.table.space.genes, genes) for genes in self.table.genes])
        self.points, owner = np.unique(places, axis=0, return_inverse=True)
        counts = np.bincount(owner)
        curves = np.stack([self.table.curves[owner == point].mean(axis=0) for point in range(len(counts))])
        repeated = [self.table.curves[owner == point] for point in np.flatnonzero(counts > 1)]
        residuals = np.concatenate([_relative_residuals(each) for each in repeated])
        self._residuals = residuals / math.sqrt(len(residuals) - len(repeated))
        self._mean = curves.mean(axis=0)
        final = curves[:, -1] - self._mean[-1]
        spread = final.std() or 1.0
        share = float(np.linalg.norm(self._residuals[:, -1]))  # the standard deviation of a training at its end
        noise = (share * curves[owner[0], -1] / spread) ** 2 / counts + JITTER
        self.lengths = _fit_lengths(self.points, final / spread, noise)
        kernel = _kernel(self.points, self.points, self.lengths) + np.diag(noise)
        self._weights = np.linalg.solve(kernel, curves - self._mean)  # (points, epochs)
        self.best = self._climb()

    def curve(self, genes: Mapping[str, GeneValue]) -> np.ndarray:
        """(epochs,) fitness without noise."""
        place = coordinates(self.table.space.genes, genes)[None]
        return np.maximum(self._mean + _kernel(place, self.points, self.lengths)[0] @ self._weights, 0.0)

    def observe(self, genes: Mapping[str, GeneValue], *key: int) -> np.ndarray:
        """(epochs,) fitness as one training with this key would report it: a draw with the recorded covariance."""
        draw = np.random.default_rng([7, *key]).standard_normal(len(self._residuals))
        noise = draw @ self._residuals
        return np.maximum(self.curve(genes) * (1 + np.clip(noise, -0.9, 0.9)), 0.0)

    def _climb(self) -> float:
        """Highest fitness found by a long noise-free evolution from the best recorded rows."""
        rng = np.random.default_rng(0)
        genes = self.table.space.genes
        ranked = sorted(((float(self.curve(row).max()), number) for number, row in enumerate(self.table.genes)))
        top: list[tuple[float, Genes]] = [(value, dict(self.table.genes[number])) for value, number in ranked[-8:]]
        for _ in range(300):
            child = mutate(genes, top[int(rng.integers(len(top)))][1], rng)
            top.append((float(self.curve(child).max()), child))
            top.sort(key=lambda pair: pair[0])
            del top[0]
        return top[-1][0]


def _relative_residuals(repeats: np.ndarray) -> np.ndarray:
    """(repeats, epochs) deviations from the mean curve, relative to it; at most +-1 where the curve is near 0."""
    mean = repeats.mean(axis=0)
    return np.clip((repeats - mean) / np.maximum(mean, 1e-6), -1.0, 1.0)


def _kernel(left: np.ndarray, right: np.ndarray, lengths: np.ndarray) -> np.ndarray:
    """(left, right) Matern 5/2 covariances of unit variance."""
    distance = np.sqrt((((left[:, None] - right[None]) / lengths) ** 2).sum(axis=2))
    scaled = math.sqrt(5) * distance
    return (1 + scaled + scaled ** 2 / 3) * np.exp(-scaled)


def _fit_lengths(points: np.ndarray, values: np.ndarray, noise: np.ndarray) -> np.ndarray:
    """(genes,) lengths of the highest marginal likelihood, one gene at a time, three rounds."""
    lengths = np.full(points.shape[1], 0.8)
    for gene in list(range(points.shape[1])) * 3:
        options = [np.where(np.arange(len(lengths)) == gene, length, lengths) for length in LENGTHS]
        lengths = max(options, key=lambda option: _log_likelihood(points, values, noise, option))
    return lengths


def _log_likelihood(points: np.ndarray, values: np.ndarray, noise: np.ndarray, lengths: np.ndarray) -> float:
    factor = np.linalg.cholesky(_kernel(points, points, lengths) + np.diag(noise))
    return float(-0.5 * (np.linalg.solve(factor, values) ** 2).sum() - np.log(np.diag(factor)).sum())
