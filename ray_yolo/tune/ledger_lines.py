"""What the lines of a sweep's ledger say: frozen, typed, each validated when it is read."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TypeVar

from pydantic import BaseModel

from ray_yolo.config.recipe import Recipe
from ray_yolo.tune.evolution import Genes, Space
from ray_yolo.tune.search import Search
from ray_yolo.tune.trials import Origin

VERSION = 1
Numbers = Mapping[str, float | None]


class Begun(BaseModel, frozen=True):
    """The first line, `sweep`: what is searched."""

    version: int = VERSION
    identity: dict[str, str]  # digests of what is not here whole: `data set`, `base recipe`
    space: Space
    search: Search
    recipe: Recipe  # resolved; the base of all trials


class Event(BaseModel, frozen=True):
    """A later line: what happened to a trial. What is added to one has a default, so that every older line is read."""

    trial: int


class Proposed(Event):
    """A new row, and what it follows from."""

    genes: Genes
    seen: tuple[int, ...]  # the trials that had finished before
    rungs: tuple[int, ...]  # theirs
    parents: tuple[int, ...]
    command: str


class Started(Event):
    """Its training begins, or begins again."""

    attempt: int


class Judged(Event):
    """The scheduler has compared it with others after so many epochs, and lets it go on."""

    epoch: int
    fitness: float


class Lost(Event):
    """It was interrupted by what its recipe can do nothing for: it is queued again."""

    reason: str


class Exploited(Event):
    """It goes on from another one's checkpoint with changed genes."""

    genes: Genes
    origin: Origin
    command: str


class Finished(Event):
    """It has come to its end, or was stopped by the scheduler; the numbers are of its last epoch."""

    fitness: float
    metrics: Numbers
    losses: Numbers
    epochs: int
    stopped: bool


class Failed(Event):
    """It has failed for good."""

    reason: str


TYPES: dict[str, type[Begun | Event]] = {"sweep": Begun, **{kind.__name__.lower(): kind for kind in (
    Proposed, Started, Judged, Lost, Exploited, Finished, Failed)}}
NAMES = {kind: name for name, kind in TYPES.items()}
Line = TypeVar("Line", Begun, Event)
