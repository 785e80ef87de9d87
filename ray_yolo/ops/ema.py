"""The exponential moving average of a model's weights and statistics."""

from __future__ import annotations

import copy
import math
from typing import Generic, TypeVar

import torch
from torch import nn

from ray_yolo.ops import torch_internals

Model = TypeVar("Model", bound=nn.Module)


class Ema(Generic[Model]):
    """A copy of the model with averaged floating-point entries: e <- d e + (1 - d) m, d the `ema_decay` of the step.

    Every worker has its own; equal models give equal averages.
    """

    def __init__(self, model: Model, limit: float, ramp: float) -> None:
        self.model = copy.deepcopy(model).eval().requires_grad_(False)
        self.limit, self.ramp = limit, ramp
        self._pairs: tuple[list[torch.Tensor], list[torch.Tensor]] | None = None

    @torch.no_grad()
    def update(self, model: Model, step: int) -> None:
        """Update the average after the model's `step`-th optimiser step (counted from 1)."""
        if self._pairs is None:
            floating = [pair for pair in zip(self.model.state_dict().values(), model.state_dict().values(), strict=True)
                        if pair[0].dtype.is_floating_point]
            self._pairs = [average for average, _ in floating], [value for _, value in floating]
        torch_internals.lerp_(*self._pairs, 1 - ema_decay(step, self.limit, self.ramp))
        for copied, buffer in zip(self.model.buffers(), model.buffers(), strict=True):
            if not copied.dtype.is_floating_point:
                copied.copy_(buffer)


def ema_decay(step: int, limit: float, ramp: float) -> float:
    """Decay of the average at its n-th update: limit (1 - exp(-n / ramp))."""
    return limit * (1 - math.exp(-step / ramp))
