"""What the device computes of a step's update around the optimiser's own step: what is before it, and the averages."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor, nn

from ray_yolo.core.structures import Orders
from ray_yolo.engine.balance import SpeedReport
from ray_yolo.engine.learner import Learner
from ray_yolo.engine.worker_rows import Gathered, RowLayout, read_rows
from ray_yolo.models.batch_norm import Statistics


class Judged(NamedTuple):
    """What the device has decided about a step."""

    found_inf: Tensor  # () float32, 1: the step is skipped; torch's fused optimisers read it
    complete: Tensor  # () bool, of `Measured`
    numbers: Tensor  # those of `StepNumbers`, for the host


class StepNumbers(NamedTuple):
    """What the host reads of a step. `Update.judge` writes it in this order, `read_numbers` reads it."""

    norm: float  # The gradient has it before clipping.
    finite: bool  # Loss and gradient are.
    complete: bool  # No exchange was aborted; otherwise all values may be garbage.
    orders: Orders  # Any worker was ordered so.
    losses: tuple[float, ...]  # (terms,): each is the mean over the step's images.
    reports: tuple[SpeedReport, ...]  # Each worker has one.


def read_numbers(numbers: Sequence[float], terms: int) -> StepNumbers:
    """The content of `Judged.numbers` for a loss of so many terms."""
    norm, finite, complete, stop, save, regroup, *rest = numbers
    orders = Orders(stop=bool(stop), save=bool(save), regroup=bool(regroup))
    losses, reports = rest[:terms], zip(rest[terms::2], rest[terms + 1 :: 2], strict=True)
    return StepNumbers(norm, bool(finite), bool(complete), orders, tuple(losses),
                       tuple(SpeedReport(*report) for report in reports))


class Update:
    """Clips, decides and averages, each operation as a launch of its own.

    Args:
        statistics: of the learner's model.
    """

    def __init__(self, statistics: Statistics) -> None:
        self._statistics = statistics

    def judge(self, learner: Learner, gathered: Gathered, layout: RowLayout, num_images: int) -> Judged:
        """Read the workers' rows and clip the gradient. A step is skipped if it is incomplete, or its loss or gradient
        is not finite.

        An fp16 overflow with finite losses counts as finite until the scale is down to 1.
        """
        scaler, measured = learner.scaler, read_rows(gathered, layout)
        limit = learner.spec.recipe.optimizer.clip_norm
        weights = trained_weights(learner.optimizer)
        norm = gradient_norm([weight.grad for weight in weights if weight.grad is not None])
        nn.utils.clip_grads_with_norm_(weights, limit, norm, foreach=True)
        overflow = scaler.scale(torch.ones_like(norm)) >= 1 if scaler.is_enabled() else False
        finite = measured.complete & measured.losses.isfinite().all() & (norm.isfinite() | overflow)
        found_inf = 1 - (finite & norm.isfinite()).float()
        mean = measured.losses.sum(0) / num_images
        decided = torch.stack([norm, finite, measured.complete])
        numbers = torch.cat([decided, measured.orders, mean, measured.reports.flatten()])
        return Judged(found_inf, measured.complete, numbers)

    def average(self, learner: Learner, total: Tensor, count: int, number: int) -> None:
        """Update running statistics and moving average after the learner's `number`-th step, counted from 1.

        Args:
            total: the statistics of the step's `count` microbatches, the argument of `Statistics.apply`.
        """
        self._statistics.apply(total, count)
        learner.ema.update(learner.model, number)


def gradient_norm(gradients: Iterable[Tensor]) -> Tensor:
    """The Euclidean norm of all gradients, (): the same bits wherever they lie in memory.

    torch's kernel for GPUs may add the squares in another order where an address is no multiple of 16 bytes; the row
    "gradient norm" of `make gpu-test` tells. Views into one tensor, as recorded passes return, may have such addresses.
    """
    aligned = [gradient.clone() if gradient.data_ptr() % 16 else gradient for gradient in gradients]
    return nn.utils.get_total_norm(aligned, foreach=True)


def trained_weights(optimizer: torch.optim.Optimizer) -> list[nn.Parameter]:
    """All weights of an optimiser, in the order of its groups."""
    return [weight for group in optimizer.param_groups for weight in group["params"]]
