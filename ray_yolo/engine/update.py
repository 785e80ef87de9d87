"""What the device computes of a step's update around the optimiser's own step: what is before it, and the averages."""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

import torch
from torch import Tensor, nn

from ray_yolo.engine.balance import SpeedReport
from ray_yolo.engine.learner import Learner
from ray_yolo.models.batch_norm import Statistics

ORDERS = 3  # that all workers carry out together: stop, regroup, save
REPORT = len(SpeedReport._fields)


class RowLayout(NamedTuple):
    """What each worker's row contains: orders, report, whether it was cut, then the terms of its microbatches."""

    counts: tuple[int, ...]  # Each worker has so many microbatches.
    terms: int  # A loss has so many terms.
    has_parts: bool  # Every worker has a part of every microbatch, as under sync_bn.

    @property
    def microbatches(self) -> int:
        """Microbatches of the step."""
        return max(self.counts) if self.has_parts else sum(self.counts)


class Gathered(NamedTuple):
    """The rows of all workers for a step, equal on all of them."""

    rows: Tensor  # (workers, length), each of the step's `RowLayout`
    of_this_step: Tensor  # () bool: all of them are; otherwise an exchange was aborted, and any value may be garbage


class Measured(NamedTuple):
    """What the workers have measured in a step, equal on all of them."""

    losses: Tensor  # (microbatches, terms), each times its images
    reports: Tensor  # (workers, 2): each worker's `SpeedReport`
    complete: Tensor  # () bool: no exchange of any worker was aborted; otherwise all values may be garbage
    orders: Tensor  # (3,) bool: whether any worker was ordered to stop, to regroup, to save


def read_rows(gathered: Gathered, layout: RowLayout) -> Measured:
    """What the rows contain."""
    orders, reports, cut, bodies = gathered.rows.tensor_split([ORDERS, ORDERS + REPORT, ORDERS + REPORT + 1], dim=1)
    complete = gathered.of_this_step & ~cut.any()
    if layout.has_parts:
        losses = bodies.sum(0).view(-1, layout.terms)
    else:  # the workers' microbatches in order, without padding
        parts = []
        for body, count in zip(bodies, layout.counts, strict=True):
            parts.append(body[: count * layout.terms].view(count, layout.terms))
        losses = torch.cat(parts)
    return Measured(losses, reports, complete, orders.bool().any(0))


class Judged(NamedTuple):
    """What the device has decided about a step."""

    found_inf: Tensor  # () float32, 1: the step is skipped; torch's fused optimisers read it
    complete: Tensor  # () bool, of `Measured`
    numbers: Tensor  # mean losses, reports, norm, whether it is finite and complete, orders: the host reads them


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
        numbers = torch.cat([mean, measured.reports.flatten(), decided, measured.orders])
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
