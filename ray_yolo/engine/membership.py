"""Who trains together, as the session sees it: a group that is given once, or generations that change between steps.

Worker count does not change the weights, so workers may come and go whenever all stand between the same two steps.
"""

from __future__ import annotations

import statistics
import time
from collections import deque
from dataclasses import dataclass, field
from typing import Literal, NamedTuple, Protocol

from ray_yolo.checkpoints.writer import WRITE_SECONDS
from ray_yolo.core.events import Summary
from ray_yolo.core.structures import Progress
from ray_yolo.engine.collectives import Collectives

Phase = Literal["starting", "loading", "computing", "exchanging", "validating", "saving", "joining"]

LEAST_LIMIT = 30.0  # seconds without progress that are put up with, however fast the steps are
_SLOW: tuple[Phase, ...] = ("starting", "validating")  # may take ten times as long


@dataclass
class Activity:
    """What a worker is doing: written by its training, read by the thread that tells others.

    Args:
        stall_seconds: how long a phase may last while others wait; 0: ten times the median step, at least
            `LEAST_LIMIT`.
    """

    stall_seconds: float = 0.0
    phase: Phase = "starting"
    step: int = 0
    since: float = field(default_factory=time.monotonic)
    recent: deque[float] = field(default_factory=lambda: deque(maxlen=50))  # seconds of the last steps

    def enter(self, phase: Phase) -> None:
        """Another phase has begun."""
        self.phase, self.since = phase, time.monotonic()

    def finished(self, step: int, seconds: float) -> None:
        """A step has been finished."""
        self.step = step
        self.recent.append(seconds)

    @property
    def heartbeat_limit(self) -> float:
        """Seconds without a heartbeat after which this worker is lost, whatever its phase."""
        return self.stall_seconds or max(LEAST_LIMIT, 10 * statistics.median(self.recent or [0.0]))

    @property
    def limit(self) -> float:
        """Seconds that the present phase may last while others wait for this worker.

        A save may take as long as the saver lets it, whatever the steps take.
        """
        if self.phase == "saving":
            return WRITE_SECONDS + self.heartbeat_limit
        return self.heartbeat_limit * (10 if self.phase in _SLOW or not self.recent else 1)


class Generation(NamedTuple):
    """Those who train together until one is lost or one is waiting."""

    collectives: Collectives
    source: int | None  # the worker whose state counts; None: nobody has any
    behind: bool  # somebody has another state than the source


class Rendezvous(Protocol):
    """How a session finds the others."""

    lasting: bool
    """Whether there is no other generation: who is lost is lost for good."""

    def join(self, progress: Progress | None) -> Generation | Summary | None:
        """Become a member of the next generation, or be told how a training that has ended meanwhile did; None: it goes
        on without this worker, which was told to leave.

        Args:
            progress: where this worker is between two steps; None: it has no state yet.
        """

    def must_regroup(self) -> bool:
        """Whether the generation shall end: somebody waits to join, or is to leave. Does not wait for the answer."""

    def all_draining(self) -> bool:
        """Whether all members are to leave, so that what is not saved by then is lost. Does not wait for the answer."""

    def elect_saver(self) -> bool:
        """Whether this worker is the one that saves the last finished step because a peer was lost."""

    def finish(self, summary: Summary) -> None:
        """Tell those who come later that training has ended."""


class FixedRendezvous:
    """The one generation of a group that somebody else has made."""

    lasting = True

    def __init__(self, collectives: Collectives) -> None:
        self._collectives = collectives

    def join(self, progress: Progress | None) -> Generation | Summary | None:
        """The group as it is."""
        return Generation(self._collectives, None, False)

    def must_regroup(self) -> bool:
        """Never."""
        return False

    def all_draining(self) -> bool:
        """Never: nobody is told to leave."""
        return False

    def elect_saver(self) -> bool:
        """Never: the group is torn down, and goes on from its last checkpoint."""
        return False

    def finish(self, summary: Summary) -> None:
        """Nobody comes later."""
