"""Learning rates, momentum and accumulation as pure functions of progress, equal in resumed and uninterrupted runs.

Source: the YOLOv5 recipe.
"""

from __future__ import annotations

import math
from typing import NamedTuple


class Rates(NamedTuple):
    """Settings of the optimiser for one step; learning rates of (biases, decayed weights, norm weights).

    Those of the backbone are `backbone_lr` times as high.
    """

    lr: tuple[float, float, float]
    momentum: float


def decay_factor(epoch: int, epochs: int, final: float, *, cosine: bool) -> float:
    """Learning rate of an epoch relative to lr0, from 1 at epoch 0 to `final` at epoch `epochs`.

    Linear: (1 - e/E)(1 - final) + final. Cosine: 1 + (final - 1)(1 - cos(pi e/E)) / 2.
    """
    share = epoch / epochs
    if cosine:
        return 1 + (final - 1) * (1 - math.cos(math.pi * share)) / 2
    return (1 - share) * (1 - final) + final


def interpolate(x: float, length: float, start: float, end: float) -> float:
    """Linear from `start` at 0 to `end` at `length`, constant outside; `end` if the length is 0."""
    if x >= length:
        return end
    return start + (end - start) * max(x, 0.0) / length


def warm_rates(batch: int, warmup: int, lr: float, bias_lr: float, momentum: float, warmup_momentum: float) -> Rates:
    """Rates at a batch index (over all epochs): `lr` and `momentum`, reached linearly over the first `warmup` batches.

    At batch 0 the rate of weights is 0, that of biases `bias_lr`, and momentum is `warmup_momentum`.
    """
    weights = interpolate(batch, warmup, 0.0, lr)
    return Rates((interpolate(batch, warmup, bias_lr, lr), weights, weights),
                 interpolate(batch, warmup, warmup_momentum, momentum))


def accumulation(batch: int, warmup: int, batch_size: int, nominal_batch: int) -> int:
    """Batches per optimiser step at a batch index: 1 at the start, nominal_batch / batch_size after warm-up."""
    return max(1, round(interpolate(batch, warmup, 1.0, nominal_batch / batch_size)))
