"""Group membership from the view of a session: one fixed group, or generations that change between steps.

The number of workers does not affect the weights, so workers may join and leave between any two steps.
"""

from __future__ import annotations

import math
import statistics
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Literal, NamedTuple

from ray_yolo.checkpoints.writer import WRITE_SECONDS
from ray_yolo.core.events import Summary
from ray_yolo.core.structures import Orders, Progress
from ray_yolo.engine.collectives import Collectives

Phase = Literal["starting", "loading", "computing", "exchanging", "validating", "saving", "joining"]

LEAST_LIMIT = 30.0  # seconds without progress that are always allowed, however fast the steps are
_SLOW: tuple[Phase, ...] = ("starting", "validating")  # phases that may take ten times as long


@dataclass
class Activity:
    """What a worker is doing. Its training updates it, and its heartbeat thread reports it.

    Args:
        stall_seconds: how long a phase may last while others wait; 0: ten times the median step, at least
            `LEAST_LIMIT`.
    """

    stall_seconds: float = 0.0
    phase: Phase = "starting"
    step: int = 0
    since: float = field(default_factory=time.monotonic)
    recent: deque[float] = field(default_factory=lambda: deque(maxlen=50))  # seconds of the newest steps
    work: deque[float] = field(default_factory=lambda: deque(maxlen=20))  # own seconds per microbatch of those

    def enter(self, phase: Phase) -> None:
        """Record the start of a phase."""
        self.phase, self.since = phase, time.monotonic()

    def finished(self, step: int, seconds: float) -> None:
        """Record the end of a step."""
        self.step = step
        self.recent.append(seconds)

    @property
    def heartbeat_limit(self) -> float:
        """Seconds without a heartbeat after which this worker counts as departed, in any phase."""
        return self.stall_seconds or max(LEAST_LIMIT, 10 * statistics.median(self.recent or [0.0]))

    @property
    def limit(self) -> float:
        """Seconds that the current phase may last while others wait for this worker.

        A save may take as long as the saver allows, independently of the duration of steps.
        """
        if self.phase == "saving":
            return WRITE_SECONDS + self.heartbeat_limit
        return self.heartbeat_limit * (10 if self.phase in _SLOW or not self.recent else 1)


@contextmanager
def warns_without_progress(activity: Activity, warn: Callable[[str], None], seconds: float = 1.0) -> Iterator[None]:
    """Context in which a phase without progress is a warning, once each time: for a worker that no other waits for.

    seconds: between two looks at the activity.
    """
    ended = threading.Event()

    def watch() -> None:
        warned = -math.inf
        while not ended.wait(seconds):
            since = activity.since
            idle = time.monotonic() - since
            is_measured = activity.phase != "starting"  # decoding all images for the cache may take hours
            if is_measured and idle > activity.limit and since != warned:
                warned = since
                remedy = "check the storage of the images, or use --workers 0" if activity.phase == "loading" else (
                    "check the device and the storage")
                warn(f"no progress for {idle:.0f} s while {activity.phase}, after step {activity.step}; if it does not "
                     f"continue, {remedy}, and run the same command again")

    watcher = threading.Thread(target=watch, name="ray_yolo progress", daemon=True)
    watcher.start()
    try:
        yield
    finally:
        ended.set()
        watcher.join()


class Generation(NamedTuple):
    """A group of workers that train together until a worker departs, waits to join, or has to leave."""

    collectives: Collectives
    source: int | None  # the rank with the most advanced state; None: no worker has a state
    behind: bool  # some worker has another state than the source
    members: tuple[int, ...] = ()  # the numbers of the workers; only rank 0 knows them


class Rendezvous:
    """How a session joins the group of workers. This class has a single generation, which the caller has formed.

    The generations of `runtime.workers.rendezvous.RendezvousClient` follow one another. Only `join` may wait.
    """

    lasting = True
    """Whether there is only one generation, which does not survive the loss of a worker."""

    orders = Orders()
    """The newest orders of this worker. The session reads them once in each step."""

    def __init__(self, collectives: Collectives) -> None:
        self._collectives = collectives

    def join(self, progress: Progress | None, *, is_saved: bool = False) -> Generation | Summary | None:
        """Join the next generation, with the `progress` of this worker's state (None: it has no state), and whether
        that is on storage.

        Returns the summary if training has ended meanwhile, or None if this worker leaves and training continues.
        """
        return Generation(self._collectives, None, False, tuple(range(self._collectives.num_workers)))

    def stop(self) -> None:
        """Order this worker to stop. A signal handler may call this."""
        self.orders = self.orders._replace(stop=True)

    def may_regroup(self) -> bool:
        """Whether the workers may form another generation after a peer has departed, or could not be reached."""
        return not self.lasting

    def elect_saver(self) -> bool:
        """Whether this worker saves the last completed step after the loss of a peer."""
        return False

    def finish(self, summary: Summary) -> None:
        """Announce the end of training to workers that join later."""
