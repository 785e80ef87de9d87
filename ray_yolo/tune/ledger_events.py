"""The lines of a study's ledger. None has a wall-clock time or the number of an attempt.

A study is a sweep or a comparison. It is a function of its lines: two executions write equal ones, in the same order.
The first line says what is asked (`tune.study`). The others are these:

| type | in a sweep | in a comparison |
|---|---|---|
| proposed, scheduled, closed, finalists, chosen | a decision | |
| counted, failed | the result of a training | the same |
| claimed | the end | the same; another one follows if it is continued |
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Literal

from pydantic import BaseModel

from ray_yolo.tune.claim import Claim, PairsClaim
from ray_yolo.tune.evolution import Genes

TrialNumbers = Mapping[str, float | None]
Why = Literal["new", "best", "default", "finish", "seed"]
"""Why a training is scheduled: a new trial; among the best of its rung; the default; to its end after exploration; on a
fresh seed."""


class LedgerEvent(BaseModel, frozen=True):
    """A line of the ledger."""

    def __str__(self) -> str:
        return f"{type(self).__name__} {self.model_dump_json()}"


class ProposedEvent(LedgerEvent):
    """A new trial, proposed at a virtual time from the results counted by then."""

    trial: int
    genes: Genes
    how: str  # start, evolve, random, grid, gp
    parents: tuple[int, ...]
    at: float
    level: int = 0  # number of the rung to which it trains first


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
    classes: TrialNumbers = {}  # a comparison has each class's mAP50-95 of the epoch of `fitness`, the best one


class FailedEvent(LedgerEvent):
    """A training has failed and does not continue."""

    trial: int
    seed: int
    epochs: int
    reason: str
    diverged: bool = False  # its loss stayed not finite; in ledgers up to version 5 it is not known


class ClosedEvent(LedgerEvent):
    """Exploration was closed: the best trials train to their ends, then they and the default train on fresh seeds."""

    at: float
    until: float  # virtual time by which a training must end to compete
    runs: int  # trainings on fresh seeds
    too_slow: tuple[int, ...] = ()  # trials whose trainings on fresh seeds could not end in time


class FinalistsEvent(LedgerEvent):
    """The trials that train on fresh seeds, best first, beside the default."""

    trials: tuple[int, ...]


class ChosenEvent(LedgerEvent):
    """The best of the finalists, which is compared with the default."""

    trial: int


class ClaimedEvent(LedgerEvent):
    """The end: the claim, and the winner of a sweep, which is the default (0) unless another trial is expected
    to be better."""

    winner: int = 0
    claim: Claim | PairsClaim

    def __str__(self) -> str:
        if isinstance(self.claim, PairsClaim):
            return str(self.claim)
        if not self.winner:
            return f"{self.claim}; the default (trial 0) is kept"
        if self.claim.better:
            return f"trial {self.winner} is {self.claim}"
        expected = self.claim.expected or self.claim.gain  # earlier ledgers have no other expectation
        reason = f"for its expected gain of {expected:.2g}" if self.claim.runs else "because the default failed"
        return f"trial {self.winner} is {self.claim}; it is kept {reason}"


EVENTS: tuple[type[LedgerEvent], ...] = (
    ProposedEvent, ScheduledEvent, CountedEvent, FailedEvent, ClosedEvent, FinalistsEvent, ChosenEvent, ClaimedEvent)
"""All lines but the first. The ledger writes their names without "Event", in lower case, as `type`."""
