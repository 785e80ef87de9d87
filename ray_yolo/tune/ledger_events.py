"""The events of a sweep's ledger. None has a wall-clock time or the number of an attempt.

A sweep is a function of these events: two executions of a sweep write equal ones, in the same order.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Literal

from pydantic import BaseModel

from ray_yolo.tune.claim import Claim
from ray_yolo.tune.evolution import Genes

TrialNumbers = Mapping[str, float | None]
Why = Literal["new", "best", "default", "finish", "seed"]
"""Why a training is scheduled: a new trial; among the best of its rung; the default; to its end after exploration; on a
fresh seed."""


class LedgerEvent(BaseModel, frozen=True):
    """A line of the ledger."""


class ProposedEvent(LedgerEvent):
    """A new trial, proposed at a virtual time from the results counted by then."""

    trial: int
    genes: Genes
    how: str  # start, evolve, random, grid, gp
    parents: tuple[int, ...]
    at: float


class ScheduledEvent(LedgerEvent):
    """A slot trains a trial on a seed until it has a number of epochs."""

    trial: int
    seed: int
    until: int
    start: float
    end: float
    why: Why
    closing: bool = False  # not part of the exploration


class CountedEvent(LedgerEvent):
    """The result of a training counts from now on."""

    trial: int
    seed: int
    epochs: int
    fitness: float
    metrics: TrialNumbers = {}
    losses: TrialNumbers = {}
    weights: str = ""


class FailedEvent(LedgerEvent):
    """A training has failed and does not continue."""

    trial: int
    seed: int
    epochs: int
    reason: str


class ClosedEvent(LedgerEvent):
    """Exploration was closed: the best trials train to their ends, then they and the default train on fresh seeds."""

    at: float
    until: float  # virtual time by which a training must end to compete
    runs: int  # trainings on fresh seeds


class FinalistsEvent(LedgerEvent):
    """The trials that train on fresh seeds, best first, beside the default."""

    trials: tuple[int, ...]


class ChosenEvent(LedgerEvent):
    """The best of the finalists, which is compared with the default."""

    trial: int


class ClaimedEvent(LedgerEvent):
    """The end: the winner, which is the default (0) unless another trial is ahead of it, and the claim."""

    winner: int
    claim: Claim

    def __str__(self) -> str:
        if not self.winner:
            return f"{self.claim}; the default (trial 0) is kept"
        if self.claim.better:
            return f"trial {self.winner} is {self.claim}"
        reason = f"for its expected gain of {self.claim.gain:.2g}" if self.claim.runs else "because the default failed"
        return f"trial {self.winner} is {self.claim}; it is kept {reason}"


SCHEDULE_EVENTS: tuple[type[LedgerEvent], ...] = (
    ProposedEvent, ScheduledEvent, CountedEvent, FailedEvent, ClosedEvent, FinalistsEvent, ChosenEvent, ClaimedEvent)
"""The events of `tune/schedule.py`. The ledger writes their names without "Event", in lower case, as `type`."""
