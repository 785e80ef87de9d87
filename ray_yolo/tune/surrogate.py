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

from ray_yolo.tune.evolution import Gene, Genes, GeneValue, at_share, nearest

REFIT = 10  # rows between two fits
STEPS = 40  # a fit takes this many
MOST = 200  # observations
CANDIDATES = 400
SOFT = 0.2  # share of the best fitness that is added before the logarithm
ADDITIVE = 4.0  # prior sum of the axes' weights, beside a Matern part of weight 1
ROUNDS = 3
SURVIVORS = 8  # this many candidates are left after each round
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
    return nearest(gene, float(f"{at_share(gene, share):.5g}"))


@dataclass(frozen=True)
class Settings:
    """The parameters of a process: of the axes, of the levels, and the correlation of neighbouring levels."""

    lengths: np.ndarray
    weights: np.ndarray  # each parabola has one
    noise: np.ndarray  # variance, relative to the signal's
    correlation: float


class Standardised(NamedTuple):
    """Observations as arrays. A value is (log(fitness / best + SOFT) - offset) / scale."""

    points: np.ndarray  # (n, axes) in the unit cube
    levels: np.ndarray  # (n,) numbers of the rungs
    values: np.ndarray  # (n,) of mean 0 and deviation 1
    offset: float
    scale: float
    best: float  # fitness of a whole training


class Surrogate:
    """A fitted process, in units of the standardised fitness of whole trainings."""

    def __init__(self, observations: Sequence[Observation], levels: int, settings: Settings) -> None:
        rows = _standardise(observations, levels)
        self._points, self._levels, self._values = rows.points, rows.levels, rows.values
        self.offset, self.scale, self._best = rows.offset, rows.scale, rows.best
        self._settings = settings
        self._top = levels - 1  # whole trainings
        self._condition()
        self.signal = float((self._half @ self._half + 2.0) / (len(self._values) + 2.0))

    def _condition(self) -> None:
        """Factorise the covariance K = L L' of the observations; keep L^-1 and L^-1 times the values."""
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
        explained = (cross**2).sum(axis=0)
        variance = self.signal * np.maximum(prior - explained, 1e-9)  # rounding may make it negative at an observation
        return self._half @ cross, np.sqrt(variance)

    def gain(self, place: Sequence[float], other: Sequence[float]) -> tuple[float, float]:
        """The gain in fitness of whole trainings at one position over another: mean and standard deviation."""
        points, levels = np.array([place, other]), np.full(2, self._top)
        cross = self._cross(points, levels)
        prior = _kernel(points, levels, points, levels, self._settings)
        covariance = self.signal * (prior - cross.T @ cross)
        shifted = np.exp(self._half @ cross * self.scale + self.offset) * self._best  # fitness + SOFT x best
        slope = shifted * self.scale * [1, -1]  # of the difference in fitness by the two values: the delta method
        variance = float(slope @ covariance @ slope)
        return float(shifted[0] - shifted[1]), math.sqrt(max(variance, 0.0))

    @property
    def noise(self) -> float:
        """The fitted standard deviation of the best fitness of a whole training, as a share of it."""
        return float(np.sqrt(self._settings.noise[self._top] * self.signal)) * self.scale * (1 + SOFT)

    def correlation(self, level: int) -> float:
        """The fitted correlation of the fitness at a rung with that of the whole training, without noise."""
        return float(self._settings.correlation) ** (self._top - level)

    def believe(self, points: np.ndarray, levels: np.ndarray) -> Surrogate:
        """The process conditioned on these trainings, each with its expected fitness."""
        expected = self._half @ self._cross(points, levels)
        other = copy(self)
        other._points = np.vstack([self._points, points])
        other._levels = np.r_[self._levels, levels]
        other._values = np.r_[self._values, expected]
        other._condition()
        return other


def fit_surrogate(observations: Sequence[Observation], levels: int) -> Surrogate:
    """The process fitted to these observations, in the order in which they were counted."""
    first = max(REFIT, len(observations) // REFIT * REFIT)
    settings = _fit(tuple(select(observations[:first])), levels)
    return Surrogate(select(observations), levels, settings)


def select(observations: Sequence[Observation]) -> Sequence[Observation]:
    """At most `MOST` observations, in their order: those of the first trial (the default), the best, and the newest.

    The first two kinds are half of them: of the default, those that were counted first, then the highest rungs, and the
    highest fitness within a rung. A small space proposes the default again and again.
    """
    if len(observations) <= MOST:
        return observations
    numbers = range(len(observations))
    of_default = [number for number in numbers if observations[number].place == observations[0].place]
    kept = set(of_default[:MOST // 2])
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
    pool = tops[rng.integers(len(tops), size=CANDIDATES)]
    size = 0.4  # a move is this large in the unit cube
    for _ in range(ROUNDS):
        pool = _with_neighbours(genes, pool, size, rng)
        mean, spread = process.predict(pool)
        improvement = _improvement(mean - best, spread)
        ranked = pool[np.argsort(-improvement, kind="stable")]
        # A later round is finer and smaller: each survivor several times, with other neighbours.
        pool = ranked[np.arange(CANDIDATES // 8) % SURVIVORS]
        size /= 3
    return decode(genes, ranked[0])


def _improvement(ahead: np.ndarray, spread: np.ndarray) -> np.ndarray:
    """The expected improvement E max(0, x) of normal values x with mean `ahead` and deviation `spread`."""
    z = ahead / spread
    density = np.exp(-0.5 * z**2) / math.sqrt(2 * math.pi)
    probability = np.array([0.5 * math.erfc(-value / math.sqrt(2)) for value in z])
    return ahead * probability + spread * density


def _with_neighbours(genes: Sequence[Gene], origins: np.ndarray, size: float, rng: np.random.Generator) -> np.ndarray:
    """The positions, and one neighbour of each, moved along a few axes or all axes."""
    count, axes = origins.shape
    # Which axes move: of each position about two, about a third, or all, and at least one.
    shares = np.array([2 / axes, 0.3, 1.0])
    share = shares[rng.integers(3, size=(count, 1))]
    moves = rng.random((count, axes)) < share
    moves[np.arange(count), rng.integers(axes, size=count)] = True

    # A range moves by a normal step. The power makes small steps more frequent.
    reach = size * rng.random((count, 1)) ** 1.5
    steps = reach * rng.standard_normal((count, axes))
    stepped = np.clip(origins + steps, 0.0, 1.0)

    # A choice has no near values: it is drawn again.
    choices = np.array([len(gene.values) if gene.kind == "choice" else 0 for gene in genes])
    drawn = np.floor(rng.random((count, axes)) * choices) / np.maximum(choices - 1, 1)

    others = np.where(choices > 0, drawn, stepped)
    return np.vstack([origins, np.where(moves, others, origins)])


def _standardise(observations: Sequence[Observation], levels: int) -> Standardised:
    """Observations with values that are scaled to whole trainings, and standardised."""
    points = np.array([row.place for row in observations])
    level = np.array([row.level for row in observations])
    fitness = np.array([np.nan if row.fitness is None else row.fitness for row in observations])
    fitness = fitness * _factors_to_whole(observations, levels)[level]
    has_failed = np.isnan(fitness)
    if has_failed.any():  # it counts as the worst result
        worst = 0.0 if has_failed.all() else np.nanmin(fitness)
        fitness = np.where(has_failed, worst, fitness)
    best = max(float(fitness.max()), 1e-9)
    logarithms = np.log(np.maximum(fitness, 0.0) / best + SOFT)  # losses of genes multiply
    offset = float(logarithms.mean())
    scale = float(logarithms.std()) or 1.0
    return Standardised(points, level, (logarithms - offset) / scale, offset, scale, best)


def _factors_to_whole(observations: Sequence[Observation], levels: int) -> np.ndarray:
    """(levels,) the fitness of a whole training as a multiple of that at each rung.

    The step from a rung to the next one is the quotient of sums over the positions that have results at both.
    """
    by_place: dict[tuple[float, ...], dict[int, float]] = {}
    for row in observations:
        if row.fitness is not None:
            by_place.setdefault(row.place, {})[row.level] = row.fitness
    factors = np.ones(levels)
    for lower in reversed(range(levels - 1)):
        upper = lower + 1
        both = [results for results in by_place.values() if lower in results and upper in results]
        growth = 1.0
        if both:
            before = sum(results[lower] for results in both)
            after = sum(results[upper] for results in both)
            growth = after / max(before, 1e-9)
        factors[lower] = factors[upper] * growth
    return factors


def _kernel(left: np.ndarray, left_levels: np.ndarray, right: np.ndarray, right_levels: np.ndarray,
            settings: Settings) -> np.ndarray:
    """(left, right) covariance in units of the signal: (parabolas + Matern 5/2) x correlation of the rungs."""
    distance = math.sqrt(5) * np.sqrt(_squares(left / settings.lengths, right / settings.lengths))
    matern = (1 + distance + distance**2 / 3) * np.exp(-distance)
    parabolas = (_features(left) * np.tile(settings.weights, 2)) @ _features(right).T
    apart = np.abs(left_levels[:, None] - right_levels[None])
    return (parabolas + matern) * settings.correlation**apart


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
    """(n, 2 axes) the two terms of each axis's parabola, which is centred in the cube."""
    centred = 2 * points - 1
    return np.hstack([centred, centred**2])


def _squares(left: np.ndarray, right: np.ndarray) -> np.ndarray:
    """(left, right) squared distances, as a^2 + b^2 - 2 a b: without an array of (left, right, axes)."""
    squares = (left**2).sum(1)[:, None] + (right**2).sum(1)[None] - 2 * left @ right.T
    return np.maximum(squares, 0.0)  # rounding may make one negative


class _Theta(NamedTuple):
    """The fitted parameters: exponentials of the entries of one vector, in this order."""

    lengths: np.ndarray  # (axes,)
    weights: np.ndarray  # (axes,)
    noise: np.ndarray  # (levels,)
    rate: float  # neighbouring levels have the correlation exp(-rate)


def _unpack(theta: np.ndarray, axes: int) -> _Theta:
    lengths, weights, noise = np.split(np.exp(theta[:-1]), [axes, 2 * axes])
    return _Theta(lengths, weights, noise, math.exp(theta[-1]))


@lru_cache(maxsize=8)
def _fit(observations: tuple[Observation, ...], levels: int) -> Settings:
    """The parameters that maximise the posterior density, found by resilient propagation from the priors' centres.

    Resilient propagation (Riedmiller and Braun 1993) uses only the sign of a slope. A parameter's step grows while the
    sign stays. If the sign changes, the step shrinks, and the parameter stays where it is for one round.
    """
    likelihood = _Likelihood(_standardise(observations, levels), levels)
    axes = likelihood.axes
    # Normal priors of the logarithms. Without information lengths and weights follow the number of axes.
    centre = np.r_[np.full(axes, 0.5 * math.log(axes) - 0.5), np.full(axes, math.log(ADDITIVE / axes)),
                   np.full(levels, math.log(0.1)), -2.0]
    width = np.r_[np.full(axes, 1.0), np.full(axes, 1.5), np.full(levels, 1.0), 1.0]

    theta = centre.copy()
    step = np.full(len(centre), 0.2)
    before = np.zeros(len(centre))  # the slope of the last round; 0 after a change of its sign
    for _ in range(STEPS):
        slope = likelihood.slope(theta) - (theta - centre) / width**2
        same = slope * before
        factor = np.where(same > 0, 1.2, np.where(same < 0, 0.5, 1.0))
        step = np.clip(step * factor, 1e-3, 0.5)
        before = np.where(same < 0, 0.0, slope)
        theta = theta + np.sign(before) * step
    fitted = _unpack(theta, axes)
    return Settings(fitted.lengths, fitted.weights, fitted.noise + 1e-6, math.exp(-fitted.rate))


class _Likelihood:
    """The logarithm of the likelihood of the parameters, given the observations."""

    def __init__(self, rows: Standardised, levels: int) -> None:
        self.axes = rows.points.shape[1]
        self._points, self._levels, self._values = rows.points, rows.levels, rows.values
        self._num_levels = levels
        # The parts that do not depend on the parameters.
        self._apart = np.abs(rows.levels[:, None] - rows.levels[None])
        self._features = _features(rows.points)
        self._noise_correlation = _noise_correlation(rows.points)

    def slope(self, theta: np.ndarray) -> np.ndarray:
        """The gradient by the logarithms of the parameters.

        Let C be the covariance without the signal, K its inverse, and a = K values. For a parameter p the slope is
        1/2 sum((a a' / signal - K) dC/dp), element by element. The signal is the most probable one.
        """
        axes, count = self.axes, len(self._values)
        lengths, weights, noise, rate = _unpack(theta, axes)
        scaled = self._points / lengths
        distance = math.sqrt(5) * np.sqrt(_squares(scaled, scaled))
        fade = np.exp(-rate * self._apart)
        decay = np.exp(-distance) * fade
        parabolas = (self._features * np.tile(weights, 2)) @ self._features.T * fade
        kernel = parabolas + (1 + distance + distance**2 / 3) * decay
        variance = self._noise_correlation * _products(self._levels, noise)

        inverse = np.linalg.inv(kernel + variance + 1e-6 * np.eye(count))
        alpha = inverse @ self._values
        signal = (self._values @ alpha + 2.0) / (count + 2.0)
        outer = np.outer(alpha, alpha) / signal - inverse

        slope = np.empty_like(theta)
        # Matern 5/2 has the derivative 5/3 (1 + distance) exp(-distance) (x - x')^2 by the logarithm of a length. By
        # symmetry, half of the sum over (x - x')^2 = x^2 - 2 x x' + x'^2 is the sum over x^2 - x x'.
        pull = outer * (5 / 3) * (1 + distance) * decay
        slope[:axes] = pull.sum(1) @ scaled**2 - ((pull @ scaled) * scaled).sum(0)
        by_feature = (((outer * fade) @ self._features) * self._features).sum(0)
        slope[axes:2 * axes] = 0.5 * weights * by_feature.reshape(2, axes).sum(0)
        by_noise = outer * variance  # a pair's variance has one half of its derivative at each of its two levels
        slope[2 * axes:-1] = [0.5 * by_noise[self._levels == level].sum() for level in range(self._num_levels)]
        slope[-1] = -0.5 * rate * (outer * kernel * self._apart).sum()
        return slope
