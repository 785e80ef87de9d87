"""The claim of a sweep about its winner, from trainings of the winner and of the default on fresh seeds."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
from pydantic import BaseModel

from ray_yolo.core.formatting import format_count
from ray_yolo.ops.statistics import NORMAL_95, student

NOISE = 0.1  # of one training, as a share of its fitness; that of two recipes on one seed is not correlated
PRIOR_FREEDOM = 3.0  # the prior noise counts as this number of trainings
DOUBT = 1.5  # standard deviations of the exploration that are subtracted
QUANTILES = {1: NORMAL_95, 2: 1.9599640, 3: 2.1280452}
"""Of the normal distribution at 1 - 5 % / candidates, by the number of candidates that are compared."""


class Claim(BaseModel, frozen=True):
    """Better than the default by `gain` +- `margin` (90 %) over `runs` trainings of the candidate; or not better.

    `ahead`: the candidate has the higher mean and a positive gain, so it is the winner. `detectable` is the true gain
    that these runs would detect in half of all sweeps. Numbers are rounded, because their last bits depend on the
    processor.
    """

    better: bool
    ahead: bool = False
    gain: float = 0.0
    margin: float = 0.0
    runs: int = 0
    detectable: float = 0.0

    def __str__(self) -> str:
        seeds = format_count(self.runs, "fresh seed")
        if self.better:
            return f"better than the default by {self.gain:.4g} +- {self.margin:.2g} over {seeds}"
        if not self.runs:
            return "not compared with the default: no training of both finished with a fitness above 0"
        return f"not better than the default; {seeds} could have shown {self.detectable:.2g}"


def judge(candidate: Sequence[float], default: Sequence[float], noise: float = 0.0,
          expected: tuple[float, float] | None = None, candidates: int = 1) -> Claim:
    """The claim from the fitness of a candidate on fresh seeds, and of the default on any seeds.

    The candidate is better if the difference of the means and the gain are both significant (one-sided, 5 %). The gain
    is the mean of this difference and of the exploration's expectation `expected` (mean, standard deviation), weighted
    by 1 / variance. The candidate was selected for its expectation, which is therefore biased upwards: `DOUBT` standard
    deviations are subtracted. If it is the best of several `candidates`, each has its share of the 5 % (Bonferroni).

    Noise is a share of the fitness, the same for candidate and default. It is estimated from all trainings. Its prior
    is the measured noise and the exploration's `noise` (0: unknown).
    """
    if not len(candidate) or not len(default) or max(*candidate, *default) <= 0:
        return Claim(better=False)
    ours, theirs = float(np.mean(candidate)), float(np.mean(default))
    shown = ours - theirs
    share, freedom = _noise(candidate, default, noise)
    error = share * math.sqrt(ours**2 / len(candidate) + theirs**2 / len(default))  # standard error of the difference
    detectable = student(freedom, QUANTILES[candidates]) * error
    gain, margin = shown, detectable
    if expected:
        mean, deviation = expected[0] - DOUBT * expected[1], DOUBT * expected[1]
        trust = deviation**2 / (deviation**2 + error**2)  # in what the fresh seeds have shown
        gain = mean + trust * (shown - mean)
        margin = math.sqrt(trust) * detectable  # the standard error of the weighted mean is sqrt(trust) x error
    return Claim(
        better=shown > detectable and gain > margin,
        ahead=min(shown, gain) > 0,
        gain=_rounded(gain),
        margin=_rounded(margin),
        runs=len(candidate),
        detectable=_rounded(detectable),
    )


def _noise(candidate: Sequence[float], default: Sequence[float], prior: float) -> tuple[float, float]:
    """Noise of a training as a share of its fitness, and the degrees of freedom of this estimate."""
    squares, freedom = 0.0, PRIOR_FREEDOM
    for runs in (candidate, default):
        if max(runs) > 0:
            shares = np.array(runs) / np.mean(runs) - 1
            squares += float(shares @ shares)
            freedom += len(runs) - 1
    before = math.sqrt(NOISE * prior) if prior else NOISE
    return math.sqrt((PRIOR_FREEDOM * before**2 + squares) / freedom), freedom


def _rounded(value: float) -> float:
    return float(f"{value:.6g}")
