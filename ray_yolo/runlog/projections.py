"""What is made of a run's event log while it is written: files, console, MLflow, pictures, a user's functions.

Each projection has a guard of its own: what one raises is a warning in the log, and neither the others nor training nor
the exit code know of it. All are made from the log alone, so that each can be made again.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import ClassVar

from ray_yolo.events import Event
from ray_yolo.runlog.background import Background, reason_of
from ray_yolo.runlog.event_log import follow

Warn = Callable[[str], None]


class Projection:
    """One thing that is made of the events of a run.

    `event` is called for each event in order, `update` after every few of them, and again after it has failed: both in
    a thread of the projection's own. `finish` is called once, by the driver, when the log is complete and told, and
    the projections before this one are finished.
    """

    name: ClassVar[str]
    interval_seconds: ClassVar[float] = 2.0
    patience_seconds: float = 10.0
    """How long the last update may take, since `answered_at`."""
    is_last: bool = False
    """Whether the log is complete, so that the update that comes is the last one."""

    def event(self, event: Event) -> None:
        """Take note of an event, without waiting for anything."""

    def update(self) -> None:
        """Bring the sink up to date with what was noted."""

    def answered_at(self) -> float:
        """`time.monotonic` of the last part of an update that succeeded, where it has parts."""
        return 0.0

    def finish(self) -> None:
        """Complete the sink."""

    def abandon(self) -> None:
        """Instead of `finish`: the last update has not come to its end in time."""
        raise TimeoutError(f"not complete after {self.patience_seconds:g} s")


class Runner:
    """Feeds one projection from a log."""

    def __init__(self, projection: Projection, log: Path, warn: Warn) -> None:
        self._projection, self._warn = projection, warn
        self._events = follow(log)
        self._thread = Background(projection.name, self._round, interval_seconds=projection.interval_seconds, warn=warn)

    def finish(self) -> None:
        """Complete the sink, now that the log is. What goes wrong is a warning."""
        projection = self._projection
        projection.is_last = True
        try:
            done = self._thread.finish(projection.patience_seconds, projection.answered_at)
            (projection.finish if done else projection.abandon)()
        except Exception as error:  # whatever it is: training is over, and the others have their own work to end
            self._warn(f"{projection.name}: {reason_of(error)}")

    def _round(self) -> None:
        for event in next(self._events):
            self._projection.event(event)
        self._projection.update()


class Projections:
    """The projections of one run, fed side by side and ended one after the other, in their order."""

    def __init__(self, log: Path, projections: Sequence[Projection], warn: Warn) -> None:
        self._runners = [Runner(projection, log, warn) for projection in projections]

    def finish(self, flush: Callable[[], None] = lambda: None) -> None:
        """Complete everything. The log must be complete, but for warnings that this itself adds.

        Args:
            flush: called to have warnings written, so that those that follow tell them.
        """
        for runner in self._runners:
            runner.finish()
            flush()
