"""What workers tell each other in the gather of a step: one row of numbers each, all of equal length.

| part | numbers | of |
|---|---|---|
| orders | 3 | the `Orders` that all workers carry out together: stop, save, regroup |
| report | 2 | `SpeedReport` |
| cut | 1 | whether the worker's process group was aborted before all gradients arrived |
| terms | microbatches x terms | the loss terms of its microbatches, each times its images; zeros if it has fewer |
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from ray_yolo.core.structures import Orders
from ray_yolo.engine.balance import SpeedReport

HEADER = [3, len(SpeedReport._fields), 1]
"""The lengths of orders, report and cut."""


class RowLayout(NamedTuple):
    """How the terms follow each other in the rows of a step."""

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
    orders: Tensor  # (3,) bool: whether any worker was ordered to stop, to save, to regroup


def write_row(orders: Orders, report: SpeedReport, cut: Tensor, terms: Sequence[Tensor], layout: RowLayout) -> Tensor:
    """A worker's row, on the device of `cut`.

    Args:
        cut: (), 1 or 0; the terms may then be garbage.
        terms: (terms,) of each of the worker's microbatches.
    """
    numbers = [float(value) for value in (orders.stop, orders.save, orders.regroup, *report)]
    # from pinned memory: a copy of other memory may wait for the device
    header = torch.tensor(numbers, pin_memory=cut.is_cuda).to(cut.device, non_blocking=True)
    parts = [header, cut[None], *terms]
    missing = max(layout.counts) - len(terms)
    if missing:  # a gather needs equal lengths
        parts.append(header.new_zeros(missing * layout.terms))
    return torch.cat(parts)


def read_rows(gathered: Gathered, layout: RowLayout) -> Measured:
    """What the rows contain."""
    orders, reports, cut, bodies = gathered.rows.split([*HEADER, gathered.rows.shape[1] - sum(HEADER)], dim=1)
    complete = gathered.of_this_step & ~cut.any()
    if layout.has_parts:
        losses = bodies.sum(0).view(-1, layout.terms)
    else:  # the workers' microbatches in order, without padding
        parts = []
        for body, count in zip(bodies, layout.counts, strict=True):
            parts.append(body[: count * layout.terms].view(count, layout.terms))
        losses = torch.cat(parts)
    return Measured(losses, reports, complete, orders.bool().any(0))
