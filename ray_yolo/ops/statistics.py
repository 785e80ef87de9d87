"""Statistics of small samples."""

from __future__ import annotations

import math

import numpy as np

NORMAL_95 = 1.6448536
"""The 95 % quantile of the normal distribution."""


def student(freedom: float, normal: float = NORMAL_95) -> float:
    """A quantile of Student's distribution from the `normal` one, by default the 95 % quantile.

    The Cornish-Fisher expansion in 1 / freedom. Its error is under 0.5 % from 3 degrees of freedom on, and 1.2 % at 2.

    Source: Abramowitz and Stegun 1972, 26.7.5.
    """
    z = normal
    terms = (
        (z**3 + z) / 4,
        (5 * z**5 + 16 * z**3 + 3 * z) / 96,
        (3 * z**7 + 19 * z**5 + 17 * z**3 - 15 * z) / 384,
    )
    return z + sum(term / freedom**power for power, term in enumerate(terms, 1))


_INTERVALS = 400  # Simpson's rule with so many has relative errors under 1e-3, as far as claims need quantiles.
_HALVINGS = 40


def student_tail(value: float, freedom: float) -> float:
    """P(T > value) of Student's distribution, for a value of 0 or more and any degrees of freedom from 1 on.

    With T = sqrt(freedom) tan(angle), the density of the angle is cos(angle)^(freedom - 1), up to its known norm.
    """
    angles = np.linspace(math.atan(value / math.sqrt(freedom)), math.pi / 2, _INTERVALS + 1)
    density = np.clip(np.cos(angles), 0.0, None) ** (freedom - 1)
    width = (angles[-1] - angles[0]) / _INTERVALS
    area = width / 3 * float(density[0] + density[-1] + 4 * density[1::2].sum() + 2 * density[2:-1:2].sum())
    norm = math.sqrt(math.pi) * math.exp(math.lgamma(freedom / 2) - math.lgamma((freedom + 1) / 2))
    return area / norm


def student_quantile(tail: float, freedom: float) -> float:
    """The value that Student's T exceeds with a probability `tail` of at most one half, by bisection of the angle."""
    low, high = 0.0, math.pi / 2
    for _ in range(_HALVINGS):
        middle = (low + high) / 2
        if student_tail(math.sqrt(freedom) * math.tan(middle), freedom) > tail:
            low = middle
        else:
            high = middle
    return math.sqrt(freedom) * math.tan(low)
