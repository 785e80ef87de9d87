"""The claim of a sweep about its winner, from pairs of trainings: the winner and the default on the same seed."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
from pydantic import BaseModel

from ray_yolo.core.formatting import format_count

NOISE = 0.1  # of one training, as a share of its fitness; that of two recipes on one seed is not correlated
PRIOR_FREEDOM = 3.0  # the prior noise counts as this number of trainings
DOUBT = 1.5  # standard deviations of the exploration that are subtracted


class Claim(BaseModel, frozen=True):
    """Better than the default by `gain` +- `margin` (90 %) over `pairs` pairs, in units of fitness; or not better.

    `ahead`: the candidate has the higher mean over the pairs and a positive gain, so it is the winner. `detectable` is
    the true gain that this number of pairs would detect in half of all sweeps. Numbers are rounded, because their last
    bits depend on the processor.
    """

    better: bool
    ahead: bool = False
    gain: float = 0.0
    margin: float = 0.0
    pairs: int = 0
    detectable: float = 0.0

    def __str__(self) -> str:
        pairs = format_count(self.pairs, "pair")
        if self.better:
            return f"better than the default by {self.gain:.4g} +- {self.margin:.2g} over {pairs}"
        if not self.pairs:
            return "not compared with the default: no pair of trainings finished with a fitness above 0"
        return f"not better than the default; {pairs} could have shown {self.detectable:.2g}"


def judge(candidate: Sequence[float], default: Sequence[float], more: Sequence[float] = (), noise: float = 0.0,
          expected: tuple[float, float] | None = None) -> Claim:
    """The claim from the fitness of the candidate and the default on the same fresh seeds, in the same order.

    The candidate is better if the mean difference of the pairs and the gain are both significant (one-sided, 5 %). The
    gain is the mean of this difference and of the exploration's expectation `expected` (mean, standard deviation),
    weighted by 1 / variance. The candidate was selected for its expectation, which is therefore biased upwards: `DOUBT`
    standard deviations are subtracted.

    Noise is a share of the fitness, the same for candidate and default. It is estimated from all trainings. Its prior
    is the measured noise and the exploration's `noise` (0: unknown). `more` are trainings of the default on other
    seeds.
    """
    pairs = len(candidate)
    if not pairs or max(*candidate, *default) <= 0:
        return Claim(better=False)
    ours, theirs = float(np.mean(candidate)), float(np.mean(default))
    share, freedom = _noise(candidate, [*default, *more], noise)
    error = share * math.sqrt((ours**2 + theirs**2) / pairs)
    shown, detectable = ours - theirs, student(freedom) * error
    gain, margin = shown, detectable
    if expected:
        deviation = DOUBT * expected[1]
        low, trust = expected[0] - deviation, deviation**2 / (deviation**2 + error**2)
        gain, margin = low + trust * (shown - low), math.sqrt(trust) * margin
    return Claim(better=shown > detectable and gain > margin, ahead=min(shown, gain) > 0, gain=_rounded(gain),
                 margin=_rounded(margin), pairs=pairs, detectable=_rounded(detectable))


def _noise(candidate: Sequence[float], default: Sequence[float], prior: float) -> tuple[float, float]:
    """Noise of a training as a share of its fitness, and the degrees of freedom of this estimate."""
    groups = [np.array(runs) / np.mean(runs) - 1 for runs in (candidate, default) if max(runs) > 0]
    freedom = PRIOR_FREEDOM + sum(len(group) - 1 for group in groups)
    before = math.sqrt(NOISE * prior) if prior else NOISE
    return math.sqrt((PRIOR_FREEDOM * before**2 + sum(float(group @ group) for group in groups)) / freedom), freedom


def _rounded(value: float) -> float:
    return float(f"{value:.6g}")


def student(freedom: float) -> float:
    """The 95 % quantile of Student's distribution, to 0.5 % from 2 degrees of freedom on (Cornish-Fisher)."""
    z = 1.6448536
    terms = ((z**3 + z) / 4, (5 * z**5 + 16 * z**3 + 3 * z) / 96, (3 * z**7 + 19 * z**5 + 17 * z**3 - 15 * z) / 384)
    return z + sum(term / freedom**power for power, term in enumerate(terms, 1))
