"""Rates as pure functions of progress: learning rates, momentum, accumulation.

Nothing here remembers anything, so a resumed training asks for step n and gets what the calm one got.
Source: the YOLOv5 recipe.
"""

from __future__ import annotations

import math
from typing import NamedTuple


class Rates(NamedTuple):
    """What the optimiser is set to for one step; learning rates of (biases, decayed weights, norm weights)."""

    lr: tuple[float, float, float]
    momentum: float


def decay_factor(epoch: int, epochs: int, final: float, *, cosine: bool) -> float:
    """Learning rate of an epoch relative to lr0: from 1 at epoch 0 towards `final` at epoch `epochs`.

    Linear: (1 - e/E)(1 - final) + final. Cosine: 1 + (final - 1)(1 - cos(pi e/E)) / 2.
    """
    share = epoch / epochs
    if cosine:
        return 1 + (final - 1) * (1 - math.cos(math.pi * share)) / 2
    return (1 - share) * (1 - final) + final


def interpolate(x: float, length: float, start: float, end: float) -> float:
    """Straight line from `start` at 0 to `end` at `length`, constant outside; `end` if the length is 0."""
    if x >= length:
        return end
    return start + (end - start) * max(x, 0.0) / length


def warm_rates(batch: int, warmup: int, lr: float, bias_lr: float, momentum: float, warmup_momentum: float) -> Rates:
    """Rates at a batch index (over all epochs): `lr` and `momentum`, approached during the first `warmup` batches.

    Weights start at 0, biases at `bias_lr`, momentum at `warmup_momentum`.
    """
    rising = interpolate(batch, warmup, 0.0, lr)
    return Rates((interpolate(batch, warmup, bias_lr, lr), rising, rising),
                 interpolate(batch, warmup, warmup_momentum, momentum))


def accumulation(batch: int, warmup: int, batch_size: int, nominal_batch: int) -> int:
    """Batches that an optimiser step collects at a batch index: 1 at the start, nominal / batch_size after warm-up."""
    return max(1, round(interpolate(batch, warmup, 1.0, nominal_batch / batch_size)))
