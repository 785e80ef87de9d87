"""What a sweep may claim about its winner: pairs of trainings of the winner and the default, each pair on one seed."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
from pydantic import BaseModel

NOISE, CORRELATION = 0.08, 0.0  # of one training, as a share of its fitness; between two recipes on one seed
PRIOR_FREEDOM = 3.0  # so many trainings is the noise that is known beforehand worth


class Claim(BaseModel, frozen=True):
    """Better than the default by `gain` +- `margin` (90 %) over `pairs` pairs, in units of fitness; or not better.

    `detectable` is the true gain that so many pairs would have shown in half of all sweeps.
    """

    better: bool
    gain: float = 0.0
    margin: float = 0.0
    pairs: int = 0
    detectable: float = 0.0

    def __str__(self) -> str:
        if self.better:
            return f"better than the default by {self.gain:.4g} +- {self.margin:.2g} over {self.pairs} pairs"
        if not self.pairs:
            return "not compared with the default: no pair of trainings finished"
        return f"not better than the default; {self.pairs} pairs could have shown {self.detectable:.2g}"


def judge(candidate: Sequence[float], default: Sequence[float], more: Sequence[float] = (), noise: float = 0.0
          ) -> Claim:
    """The claim from the fitness of the candidate and the default on the same fresh seeds, in the same order.

    Noise is a share of the fitness, the same for both: it is estimated from all trainings, and beforehand from the
    measured one and the exploration's `noise` (0: unknown). `more` are trainings of the default on other seeds.
    """
    pairs = len(candidate)
    if not pairs or min(*candidate, *default) <= 0:
        return Claim(better=False)
    ours, theirs, repeats = np.array(candidate), np.array(default), np.array([*default, *more])
    squares = sum(float(((runs / runs.mean() - 1) ** 2).sum()) for runs in (ours, repeats))
    freedom = PRIOR_FREEDOM + len(ours) - 1 + len(repeats) - 1
    prior = math.sqrt(NOISE * noise) if noise else NOISE
    noise = math.sqrt((PRIOR_FREEDOM * prior**2 + squares) / freedom)
    left, right = float(ours.mean()), float(theirs.mean())
    spread = noise * math.sqrt(left**2 + right**2 - 2 * CORRELATION * left * right)
    gain, margin = left - right, student(freedom) * spread / math.sqrt(pairs)
    return Claim(better=gain > margin, gain=gain, margin=margin, pairs=pairs, detectable=margin)


def student(freedom: float) -> float:
    """The 95 % quantile of Student's distribution, to 0.5 % from 2 degrees of freedom on (Cornish-Fisher)."""
    z = 1.6448536
    terms = ((z**3 + z) / 4, (5 * z**5 + 16 * z**3 + 3 * z) / 96, (3 * z**7 + 19 * z**5 + 17 * z**3 - 15 * z) / 384)
    return z + sum(term / freedom**power for power, term in enumerate(terms, 1))
