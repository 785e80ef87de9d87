"""A Gaussian process over genes and the share of a training, which proposes genes for whole trainings.

The logarithm of fitness has a kernel of two parts: a parabola of each gene, and Matern 5/2 with a length scale per
gene. Both are multiplied by the correlation between two rungs; each rung has its own noise. Weights, lengths,
correlation and noise maximise the posterior density. The priors are for many genes and few rows: lengths grow with the
root of the number of genes, as Hvarfner et al. 2024 propose. The fit uses only the first rows, a multiple of `REFIT`,
so most proposals reuse it.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from copy import copy
from dataclasses import dataclass
from functools import lru_cache
from itertools import islice
from typing import NamedTuple

import numpy as np

from ray_yolo.tune.evolution import Gene, Genes, GeneValue, nearest

REFIT = 10  # rows between two fits
STEPS = 40  # of a fit
MOST = 200  # observations
CANDIDATES = 400
SOFT = 0.2  # share of the best fitness that is added before the logarithm
ADDITIVE = 4.0  # prior sum of the axes' weights, beside a Matern part of weight 1
ROUNDS = 3
SHARED = 0.7  # correlation of the noise of two rungs of one training


class Observation(NamedTuple):
    """The fitness of a trial at a rung; None: the trial failed there."""

    place: tuple[float, ...]
    level: int  # number of the rung
    fitness: float | None


def encode(genes: Sequence[Gene], values: Mapping[str, GeneValue]) -> tuple[float, ...]:
    """The position of genes in the unit cube; the values of a choice are evenly spaced."""
    return tuple(_share(gene, values[gene.name]) for gene in genes)


def decode(genes: Sequence[Gene], place: Sequence[float]) -> Genes:
    """The genes at a position, with numbers rounded to five digits."""
    return {gene.name: _value(gene, share) for gene, share in zip(genes, place, strict=True)}


def _share(gene: Gene, value: GeneValue) -> float:
    if gene.kind == "choice":
        return gene.values.index(value) / max(1, len(gene.values) - 1)
    if gene.low == gene.high:
        return 0.0
    if gene.log:
        return math.log(float(value) / gene.low) / math.log(gene.high / gene.low)
    return (float(value) - gene.low) / (gene.high - gene.low)


def _value(gene: Gene, share: float) -> GeneValue:
    if gene.kind == "choice":
        return gene.values[round(share * (len(gene.values) - 1))]
    value = gene.low * (gene.high / gene.low) ** share if gene.log else gene.low + (gene.high - gene.low) * share
    return nearest(gene, float(f"{value:.5g}"))


@dataclass(frozen=True)
class Settings:
    """The parameters of a process: of the axes, of the levels, and the correlation of neighbouring levels."""

    lengths: np.ndarray
    weights: np.ndarray  # of the parabolas
    noise: np.ndarray  # variance, relative to the signal's
    correlation: float


class Surrogate:
    """A fitted process, in units of the standardised fitness of whole trainings."""

    def __init__(self, observations: Sequence[Observation], levels: int, settings: Settings) -> None:
        self._points, self._levels, self._values, self.offset, self.scale, self._best = _prepare(observations, levels)
        self._settings, self._top = settings, levels - 1
        self._condition()
        self.signal = float((self._half @ self._half + 2.0) / (len(self._values) + 2.0))

    def _condition(self) -> None:
        kernel = _kernel(self._points, self._levels, self._points, self._levels, self._settings)
        kernel += noise_covariance(self._points, self._levels, self._settings.noise)
        self._factor = np.linalg.inv(np.linalg.cholesky(kernel))
        self._half = self._factor @ self._values

    def _cross(self, points: np.ndarray, levels: np.ndarray) -> np.ndarray:
        return self._factor @ _kernel(self._points, self._levels, points, levels, self._settings)

    def predict(self, points: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Mean and standard deviation of whole trainings, without noise, in standardised units."""
        cross = self._cross(points, np.full(len(points), self._top))
        prior = 1 + _features(points)**2 @ np.tile(self._settings.weights, 2)
        return self._half @ cross, np.sqrt(self.signal * np.maximum(prior - (cross**2).sum(axis=0), 1e-9))

    def gain(self, place: Sequence[float], other: Sequence[float]) -> tuple[float, float]:
        """The gain in fitness of whole trainings at one position over another: mean and standard deviation."""
        points, levels = np.array([place, other]), np.full(2, self._top)
        cross = self._cross(points, levels)
        covariance = self.signal * (_kernel(points, levels, points, levels, self._settings) - cross.T @ cross)
        shifted = np.exp(self._half @ cross * self.scale + self.offset) * self._best  # fitness + SOFT x best
        slope = shifted * self.scale * [1, -1]
        return float(shifted[0] - shifted[1]), math.sqrt(max(float(slope @ covariance @ slope), 0.0))

    @property
    def noise(self) -> float:
        """The fitted standard deviation of the best fitness of a whole training, as a share of it."""
        return float(np.sqrt(self._settings.noise[self._top] * self.signal)) * self.scale * (1 + SOFT)

    def believe(self, points: np.ndarray, levels: np.ndarray) -> Surrogate:
        """The process conditioned on these trainings, each with its expected fitness."""
        other = copy(self)
        other._values = np.r_[self._values, self._half @ self._cross(points, levels)]
        other._points, other._levels = np.vstack([self._points, points]), np.r_[self._levels, levels]
        other._condition()
        return other


def fit_surrogate(observations: Sequence[Observation], levels: int) -> Surrogate:
    """The process fitted to these observations, in the order in which they were counted."""
    first = max(REFIT, len(observations) // REFIT * REFIT)
    settings = _fit(tuple(select(observations[:first])), levels)
    return Surrogate(select(observations), levels, settings)


def select(observations: Sequence[Observation]) -> Sequence[Observation]:
    """At most `MOST` observations, in their order: those of the first trial (the default), the best, and the newest.

    The best are half of them: the highest rungs first, and the highest fitness within a rung.
    """
    if len(observations) <= MOST:
        return observations
    numbers = range(len(observations))
    kept = {number for number in numbers if observations[number].place == observations[0].place}
    best_first = sorted(numbers, key=lambda number: _rank(observations[number]), reverse=True)
    kept.update(best_first[:MOST // 2 - len(kept)])
    newest_first = (number for number in reversed(numbers) if number not in kept)
    kept.update(islice(newest_first, MOST - len(kept)))
    return [observations[number] for number in sorted(kept)]


def _rank(observation: Observation) -> tuple[int, float]:
    """Failed trainings rank lowest."""
    if observation.fitness is None:
        return -1, 0.0
    return observation.level, observation.fitness


def propose_place(process: Surrogate, genes: Sequence[Gene], tops: np.ndarray, running: Sequence[Observation],
                  rng: np.random.Generator) -> Genes:
    """The genes with the highest expected improvement on `tops` (positions) and running trials, near `tops`.

    Running trials are assumed to get their expected fitness.
    """
    best = process.predict(tops)[0].max()
    if running:
        places = np.array([row.place for row in running])
        best = max(best, process.predict(places)[0].max())
        process = process.believe(places, np.array([row.level for row in running]))
    pool, size = tops[rng.integers(len(tops), size=CANDIDATES)], 0.4
    for _ in range(ROUNDS):
        pool = _neighbours(genes, pool, size, rng)
        mean, spread = process.predict(pool)
        ranked = pool[np.argsort(-_improvement(mean - best, spread), kind="stable")]
        pool, size = ranked[np.arange(CANDIDATES // 8) % 8], size / 3
    return decode(genes, ranked[0])


def _improvement(ahead: np.ndarray, spread: np.ndarray) -> np.ndarray:
    z = ahead / spread
    density = np.exp(-0.5 * z**2) / math.sqrt(2 * math.pi)
    return ahead * np.array([0.5 * math.erfc(-value / math.sqrt(2)) for value in z]) + spread * density


def _neighbours(genes: Sequence[Gene], origins: np.ndarray, size: float, rng: np.random.Generator) -> np.ndarray:
    """The positions, and one neighbour of each, moved along a few axes or all axes."""
    count, axes = origins.shape
    share = np.array([2 / axes, 0.3, 1.0])[rng.integers(3, size=(count, 1))]
    moves = rng.random((count, axes)) < share
    moves[np.arange(count), rng.integers(axes, size=count)] = True
    steps = size * rng.random((count, 1)) ** 1.5 * rng.standard_normal((count, axes))
    choices = np.array([len(gene.values) if gene.kind == "choice" else 0 for gene in genes])
    drawn = np.floor(rng.random((count, axes)) * choices) / np.maximum(choices - 1, 1)
    others = np.where(choices > 0, drawn, np.clip(origins + steps, 0.0, 1.0))
    return np.vstack([origins, np.where(moves, others, origins)])


def _prepare(observations: Sequence[Observation], levels: int
             ) -> tuple[np.ndarray, np.ndarray, np.ndarray, float, float, float]:
    """Points, levels and values. Values are scaled to whole trainings by trials that have both, and standardised.

    Also returns the offset and the scale of the logarithms, and the best fitness.
    """
    points = np.array([row.place for row in observations])
    level = np.array([row.level for row in observations])
    values = np.array([np.nan if row.fitness is None else row.fitness for row in observations])
    factors, by_place = np.ones(levels), dict[tuple[float, ...], dict[int, float]]()
    for row in observations:
        if row.fitness is not None:
            by_place.setdefault(row.place, {})[row.level] = row.fitness
    for lower in reversed(range(levels - 1)):
        both = [(rows[lower], rows[lower + 1]) for rows in by_place.values() if lower in rows and lower + 1 in rows]
        ahead = sum(high for _, high in both) / max(sum(low for low, _ in both), 1e-9) if both else 1.0
        factors[lower] = factors[lower + 1] * ahead
    values = values * factors[level]
    values = np.where(np.isnan(values), np.nanmin(values) if np.isfinite(values).any() else 0.0, values)
    best = max(float(values.max()), 1e-9)
    values = np.log(np.maximum(values, 0.0) / best + SOFT)  # losses of genes multiply
    offset, scale = float(values.mean()), float(values.std()) or 1.0
    return points, level, (values - offset) / scale, offset, scale, best


def _kernel(left: np.ndarray, left_levels: np.ndarray, right: np.ndarray, right_levels: np.ndarray,
            settings: Settings) -> np.ndarray:
    distance = math.sqrt(5) * np.sqrt(_squares(left / settings.lengths, right / settings.lengths))
    apart = np.abs(left_levels[:, None] - right_levels[None])
    additive = (_features(left) * np.tile(settings.weights, 2)) @ _features(right).T
    return (additive + (1 + distance + distance**2 / 3) * np.exp(-distance)) * settings.correlation**apart


def noise_covariance(points: np.ndarray, levels: np.ndarray, variance: np.ndarray) -> np.ndarray:
    """Covariance of the noise: a training's rungs share most of it."""
    return _noise_correlation(points) * _products(levels, variance)


def _noise_correlation(points: np.ndarray) -> np.ndarray:
    correlation = SHARED * (points[:, None] == points[None]).all(axis=2)
    np.fill_diagonal(correlation, 1.0)
    return np.asarray(correlation)


def _products(levels: np.ndarray, variance: np.ndarray) -> np.ndarray:
    """The products of the standard deviations of each two observations."""
    deviation = np.sqrt(variance)[levels]
    return np.outer(deviation, deviation)


def _features(points: np.ndarray) -> np.ndarray:
    centred = 2 * points - 1
    return np.hstack([centred, centred**2])


def _squares(left: np.ndarray, right: np.ndarray) -> np.ndarray:
    return np.maximum((left**2).sum(1)[:, None] + (right**2).sum(1)[None] - 2 * left @ right.T, 0.0)


@lru_cache(maxsize=8)
def _fit(observations: tuple[Observation, ...], levels: int) -> Settings:
    """The parameters that maximise the posterior density, found by resilient propagation from the priors' centres."""
    points, level, values, *_ = _prepare(observations, levels)
    axes, count = points.shape[1], len(values)
    centre = np.r_[np.full(axes, 0.5 * math.log(axes) - 0.5), np.full(axes, math.log(ADDITIVE / axes)),
                   np.full(levels, math.log(0.1)), -2.0]
    width = np.r_[np.full(axes, 1.0), np.full(axes, 1.5), np.full(levels, 1.0), 1.0]
    apart = np.abs(level[:, None] - level[None])
    features = _features(points)
    noise_correlation = _noise_correlation(points)
    theta, step, before = centre.copy(), np.full(len(centre), 0.2), np.zeros(len(centre))
    for _ in range(STEPS):
        lengths, weights, noise = np.split(np.exp(theta[:-1]), [axes, 2 * axes])
        rate = math.exp(theta[-1])
        scaled = points / lengths
        distance = math.sqrt(5) * np.sqrt(_squares(scaled, scaled))
        fade = np.exp(-rate * apart)
        decay = np.exp(-distance) * fade
        kernel = (features * np.tile(weights, 2)) @ features.T * fade + (1 + distance + distance**2 / 3) * decay
        variance = noise_correlation * _products(level, noise)
        inverse = np.linalg.inv(kernel + variance + 1e-6 * np.eye(count))
        alpha = inverse @ values
        signal = (values @ alpha + 2.0) / (count + 2.0)
        outer = np.outer(alpha, alpha) / signal - inverse
        pull = outer * (5 / 3) * (1 + distance) * decay
        slope = np.empty_like(theta)
        slope[:axes] = (pull.sum(1) @ scaled**2 - ((pull @ scaled) * scaled).sum(0))
        slope[axes:2 * axes] = 0.5 * weights * (((outer * fade) @ features) * features).sum(0).reshape(2, axes).sum(0)
        slope[2 * axes:-1] = [0.5 * (outer * variance)[level == n].sum() for n in range(levels)]
        slope[-1] = -0.5 * rate * (outer * kernel * apart).sum()
        slope -= (theta - centre) / width**2
        same = slope * before
        step = np.clip(np.where(same > 0, step * 1.2, np.where(same < 0, step * 0.5, step)), 1e-3, 0.5)
        before = np.where(same < 0, 0.0, slope)
        theta = theta + np.sign(before) * step
    lengths, weights, noise = np.split(np.exp(theta[:-1]), [axes, 2 * axes])
    return Settings(lengths, weights, noise + 1e-6, math.exp(-math.exp(theta[-1])))
