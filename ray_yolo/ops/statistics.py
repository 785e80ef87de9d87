"""Statistics of small samples."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

NORMAL_95 = 1.6448536
"""The 95 % quantile of the normal distribution."""


def spearman(left: Sequence[float], right: Sequence[float]) -> float:
    """Rank correlation; equal values share their mean rank. 0 if all values on a side are equal."""
    first, second = _centred_ranks(left), _centred_ranks(right)
    norm = float(np.sqrt((first @ first) * (second @ second)))
    return float(first @ second) / norm if norm else 0.0


def _centred_ranks(values: Sequence[float]) -> np.ndarray:
    _, inverse, counts = np.unique(values, return_inverse=True, return_counts=True)
    last = np.cumsum(counts)  # rank of the last of equal values
    ranks = (last - (counts - 1) / 2)[inverse]
    return np.asarray(ranks - ranks.mean())


def student(freedom: float, normal: float = NORMAL_95) -> float:
    """A quantile of Student's distribution from the `normal` one, by default the 95 % quantile.

    The Cornish-Fisher expansion in 1 / freedom. Its error is under 0.5 % from 3 degrees of freedom on.

    Source: Abramowitz and Stegun 1972, 26.7.5.
    """
    z = normal
    terms = (
        (z**3 + z) / 4,
        (5 * z**5 + 16 * z**3 + 3 * z) / 96,
        (3 * z**7 + 19 * z**5 + 17 * z**3 - 15 * z) / 384,
    )
    return z + sum(term / freedom**power for power, term in enumerate(terms, 1))
