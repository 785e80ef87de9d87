"""How often a comparison claims wrongly under many kinds of noise, and how often it claims a true difference.

A claim is wrong if its side wins at most half of all pairs. Each comparison looks after each pair, up to its first
claim. The law is that of `tune.claim.judge_pairs`, vectorised; a check compares both on some comparisons.
"""

from __future__ import annotations

import argparse
import functools
import json
import math
from collections.abc import Callable, Iterator

import numpy as np

from ray_yolo.ops.statistics import student_quantile
from ray_yolo.tune.claim import PAIRS_ERROR, judge_pairs
from ray_yolo.tune.compare_settings import FEWEST_PAIRS

Sides = tuple[np.ndarray, np.ndarray]
Draw = Callable[[np.random.Generator, tuple[int, int]], Sides]


def main(argv: list[str]) -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(prog="comparisons", description=__doc__)
    parser.add_argument("--comparisons", type=int, default=5000)
    parser.add_argument("--pairs", type=int, nargs="+", default=[10, 300])
    options = parser.parse_args(argv)
    wrong: dict[str, list[float]] = {}
    for name, draw, sides in noises():
        rates = []
        for pairs in options.pairs:
            rng = np.random.default_rng(1)
            shape = (options.comparisons * 10 // max(pairs, 10), pairs)
            ends, _ = first_claims(*draw(rng, shape))
            rates.append(round(100 * float(np.isin(ends, sides).mean()), 2))
        wrong[name] = rates
        print(f"{name:<52}" + "".join(f"{rate:8.2f}" for rate in rates))
    power = {}
    for difference in (1.0, 1.5, 2.0, 3.0):
        a, b = normal(1.0)(np.random.default_rng(2), (options.comparisons, 10))
        ends, looks = first_claims(a, b + difference)
        power[difference] = [round(100 * float(((ends == 1) & (looks <= most)).mean()), 1) for most in (5, 10)]
        print(f"{difference} deviations, claimed within 5 and 10 pairs: {power[difference]}")
    print(json.dumps({"pairs": options.pairs, "wrong_percent": wrong, "claimed_percent": power}))


def first_claims(a: np.ndarray, b: np.ndarray) -> Sides:
    """Of each comparison (a row) the first claim: 1 for B, -1 for A, 0 for none; and its number of pairs."""
    n = np.arange(1, a.shape[1] + 1)
    difference = np.cumsum(b - a, axis=1) / n
    first, second, between = variance(a, n), variance(b, n), variance(b - a, n)
    with np.errstate(divide="ignore", invalid="ignore"):
        error = np.sqrt(np.maximum(first + second, between) / n)
        freedom = (n - 1) * (first + second) ** 2 / (first**2 + second**2)
    limits = np.where(n < FEWEST_PAIRS, math.inf, error * quantiles(freedom, n))
    claims = (first + second > 0) & (np.abs(difference) > limits)
    wins = np.where(difference > 0, np.cumsum(b > a, axis=1), np.cumsum(a > b, axis=1))
    claims &= wins >= [fewest_wins(pairs) for pairs in n.tolist()]
    looks = claims.argmax(axis=1)
    signs = np.sign(difference[np.arange(len(a)), looks])
    return np.where(claims.any(axis=1), signs, 0), looks + 1


def variance(values: np.ndarray, n: np.ndarray) -> np.ndarray:
    """Sample variances of the first 1, 2, ... values of each row."""
    centred = values - values[:, :1]  # so that equal values have a variance of 0
    sums, squares = np.cumsum(centred, axis=1), np.cumsum(centred**2, axis=1)
    return np.maximum(squares - sums**2 / n, 0) / np.maximum(n - 1, 1)


def quantiles(freedom: np.ndarray, n: np.ndarray) -> np.ndarray:
    """Student's quantiles of each look that may claim, interpolated over the freedom; 0 elsewhere."""
    found = np.zeros_like(freedom)
    for look, pairs in enumerate(n.tolist()):
        if pairs >= FEWEST_PAIRS:
            found[:, look] = np.interp(freedom[:, look], *quantile_grid(pairs))
    return np.nan_to_num(found)  # without any variance there is no freedom, and no claim


@functools.cache
def quantile_grid(pairs: int) -> Sides:
    """Degrees of freedom that Welch's formula may have after so many pairs, and the quantiles of this look."""
    share = PAIRS_ERROR * (FEWEST_PAIRS - 1) / (pairs * (pairs - 1))
    freedom = np.linspace(pairs - 1, 2 * (pairs - 1), 20)
    return freedom, np.array([student_quantile(share / 2, float(each)) for each in freedom])


@functools.cache
def fewest_wins(pairs: int) -> int:
    """The fewest wins that a claim needs; more than there are pairs if none suffice."""
    total = 0
    for wins in range(pairs, -1, -1):
        total += math.comb(pairs, wins)
        if 4 * pairs * total > 2**pairs:
            return wins + 1
    return 0


def noises() -> Iterator[tuple[str, Draw, list[int]]]:
    """Name, draw, and the signs of wrong claims: of both sides where each wins half of all pairs."""
    both = [-1, 1]
    for ratio in (1.0, 0.5, 0.2, 0.05):
        yield f"normal, deviations 1 : {ratio:g}", normal(ratio), both
    for sigma in (0.5, 1.0):
        for width in (0.05, 0.3, 1.0):
            yield f"lognormal {sigma:g} beside normal {width:g}", skewed(sigma, width), both
        yield f"lognormal {sigma:g} on both sides", alike(lambda rng, shape, s=sigma: rng.lognormal(0, s, shape)), both
    for freedom in (1, 2, 3):
        yield f"Student's t of {freedom}", alike(lambda rng, shape, f=freedom: rng.standard_t(f, shape)), both
    for grid in (0.5, 1.0, 2.0):
        yield f"rounded to {grid:g}", alike(lambda rng, shape, g=grid: np.round(rng.normal(size=shape) / g) * g), both
    for share in (0.02, 0.05, 0.1, 0.2):
        yield f"B collapses in {share:g}, else equal: claims for B", collapsing(share, 0.0), [1]
        mended = 10 / (1 - share) - 10
        yield f"B collapses in {share:g}, equal means: claims for A", collapsing(share, mended), [-1]
    for correlation in (-0.7, -0.3, 0.33, 0.65):
        yield f"correlation {correlation:g} in a pair", dependent(correlation), both


def normal(ratio: float) -> Draw:
    """Normal sides with other deviations."""
    return lambda rng, shape: (rng.normal(size=shape), ratio * rng.normal(size=shape))


def alike(draw: Callable[[np.random.Generator, tuple[int, int]], np.ndarray]) -> Draw:
    """Two sides of one distribution."""
    return lambda rng, shape: (draw(rng, shape), draw(rng, shape))


def skewed(sigma: float, width: float) -> Draw:
    """A lognormal B beside a normal A, shifted so that each wins half of all pairs."""
    both = np.random.default_rng(0).normal(size=(2, 1_000_000))
    shift = float(np.median(np.exp(sigma * both[0]) - width * both[1]))
    return lambda rng, shape: (width * rng.normal(size=shape), rng.lognormal(0, sigma, shape) - shift)


def collapsing(share: float, gain: float) -> Draw:
    """B has a fitness of 0 in a share of its trainings, and is else better by `gain`."""
    def draw(rng: np.random.Generator, shape: tuple[int, int]) -> Sides:
        return 10 + rng.normal(size=shape), np.where(rng.random(shape) < share, 0, 10 + gain + rng.normal(size=shape))
    return draw


def dependent(correlation: float) -> Draw:
    """The two trainings of a pair correlate."""
    def draw(rng: np.random.Generator, shape: tuple[int, int]) -> Sides:
        a, own = rng.normal(size=shape), rng.normal(size=shape)
        return a, correlation * a + math.sqrt(1 - correlation**2) * own
    return draw


def check(comparisons: int = 20, pairs: int = 12) -> None:
    """The vectorised law has the claims of `judge_pairs`."""
    a, b = normal(0.5)(np.random.default_rng(3), (comparisons, pairs))
    b = b + 1.5
    ends, looks = first_claims(a, b)
    for row in range(comparisons):
        claims = [judge_pairs(a[row, :n], b[row, :n]).better for n in range(1, pairs + 1)]
        expected = next(((number, claim) for number, claim in enumerate(claims, 1) if claim), None)
        found = (int(looks[row]), "A-B"[int(ends[row]) + 1]) if ends[row] else None
        assert found == expected, (row, found, expected)
