"""The exponential moving average of a model's weights and statistics."""

from __future__ import annotations

import copy
import math
from collections.abc import Sequence
from typing import Generic, NamedTuple, TypeVar

import torch
from torch import Tensor, nn

from ray_yolo.ops import torch_internals

AnyModule = TypeVar("AnyModule", bound=nn.Module)


class AveragedTensors(NamedTuple):
    """The tensors of an average and of its model, in pairs."""

    averages: list[Tensor]  # floating point: averaged
    values: list[Tensor]
    copies: list[Tensor]  # integers, as BatchNorm's counters: copied
    counters: list[Tensor]

    @classmethod
    def of(cls, average: nn.Module, model: nn.Module) -> AveragedTensors:
        """The pairs of two equal models."""
        tensors = cls([], [], [], [])
        for mine, theirs in zip(average.state_dict().values(), model.state_dict().values(), strict=True):
            if mine.dtype.is_floating_point:
                tensors.averages.append(mine)
                tensors.values.append(theirs)
            else:
                tensors.copies.append(mine)
                tensors.counters.append(theirs)
        return tensors


class Ema(Generic[AnyModule]):
    """A copy of the model with averaged floating-point entries: e <- d e + (1 - d) m, d the `ema_decay` of the step.

    Every worker has its own; equal models give equal averages.
    """

    def __init__(self, model: AnyModule, limit: float, ramp: float) -> None:
        self.model = copy.deepcopy(model).eval().requires_grad_(False)
        self.limit, self.ramp = limit, ramp
        self._tensors: AveragedTensors | None = None  # listed once: a state dict of a large model takes milliseconds

    def update(self, model: AnyModule, step: int) -> None:
        """Update the average after the model's `step`-th optimiser step (counted from 1)."""
        self.move(model, self.share(step))

    def share(self, step: int) -> float:
        """The share of the model in the average after its `step`-th optimiser step."""
        return 1 - ema_decay(step, self.limit, self.ramp)

    @torch.no_grad()
    def move(self, model: AnyModule, share: float | Sequence[Tensor]) -> None:
        """Move the average to a share of the model.

        Args:
            share: as tensors, one like each average; the bits are those of the number rounded to their type.
        """
        averages, values, copies, counters = self.pairs(model)
        torch_internals.lerp_(averages, values, share)
        if copies:  # the kernel refuses empty lists
            torch_internals.copy_(copies, counters)

    def pairs(self, model: AnyModule) -> AveragedTensors:
        """The tensors of the average and of the model, which is the same one in all calls."""
        if self._tensors is None:
            self._tensors = AveragedTensors.of(self.model, model)
        return self._tensors


def ema_decay(step: int, limit: float, ramp: float) -> float:
    """Decay of the average at its n-th update: limit (1 - exp(-n / ramp))."""
    return limit * (1 - math.exp(-step / ramp))
