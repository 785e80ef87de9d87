"""What is made of a run's event log while it is written: files, console, MLflow, pictures, a user's functions.

Each projection has a thread and a guard of its own: what one raises is a warning in the log, and neither the others nor
training nor the exit code know of it. All are made from the log alone, so that each can be made again.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import ClassVar

from ray_yolo.core.errors import RayYoloError
from ray_yolo.core.events import EndEvent, EpochEvent, Event, StartEvent, StepEvent
from ray_yolo.core.redact import reason_of, redact
from ray_yolo.runs.event_log import follow

Warn = Callable[[str], None]

_LONGEST_PAUSE_SECONDS = 60.0


class Sink:
    """One thing that is made of the events of a run.

    `event` is called for each event in order, `update` after every few of them, and again after it has failed: both in
    a thread of the projection's own. `finish` is called once, by the driver, when the log is complete and told, and
    the projections before this one are finished.
    """

    name: ClassVar[str]
    interval_seconds: ClassVar[float] = 2.0
    needs: ClassVar[tuple[type[Event], ...]] = ()
    """Kinds of the events that make `history`."""
    patience_seconds: float = 10.0
    """How long the last update may take, since `answered_at`."""

    def __init__(self) -> None:
        self.history: list[Event] = []
        """What it `needs` of the log so far: epochs without the numbers of each class, which would fill the driver's
        memory; of steps in a row the first and the last."""
        self.is_stale = False
        """Whether it has grown by more than steps; whoever brings his sink up to date with it takes this back."""
        self.trains = False
        """Whether a step was told, or what comes after one. What takes seconds to import would delay the first."""

    @property
    def has_ended_well(self) -> bool:
        """Whether training has come to its end, by what was told."""
        last = next((event for event in reversed(self.history) if isinstance(event, (StartEvent, EndEvent))), None)
        return isinstance(last, EndEvent) and last.status == "done"

    def event(self, event: Event) -> None:
        """Take note of an event, without waiting for anything."""
        self.trains = self.trains or isinstance(event, (StepEvent, EpochEvent, EndEvent))
        if not isinstance(event, self.needs):
            return
        in_a_row = [isinstance(other, StepEvent) for other in (*self.history[-2:], event)]
        if in_a_row == [True] * 3:
            self.history.pop()
        self.is_stale |= not in_a_row[-1]
        self.history.append(without_classes(event))

    def update(self, last: bool = False) -> None:
        """Bring the sink up to date with what was noted; the `last` time that was the whole log."""

    def answered_at(self) -> float:
        """`time.monotonic` of the last part of an update that succeeded, where it has parts."""
        return 0.0

    def finish(self) -> None:
        """Complete the sink."""

    def abandon(self) -> str:
        """Instead of `finish`: the last update has not succeeded in time. What to warn of if nothing was warned of."""
        return f"{self.name}: not complete after {self.patience_seconds:g} s"


class SinkRunner:
    """Feeds one projection from a log, in a daemon thread.

    An update that fails costs one warning and is tried again, at first soon, then once a minute. After an error of ours
    (`RayYoloError`), which says what the user has to do first, it is not tried again.
    """

    def __init__(self, projection: Sink, log: Path, warn: Warn) -> None:
        self._projection, self._events, self._warn = projection, follow(log), warn
        self._warned = False
        self._finishing, self._abandoned, self._done = threading.Event(), threading.Event(), threading.Event()
        threading.Thread(target=self._run, name=f"ray_yolo {projection.name}", daemon=True).start()

    def finish(self) -> None:
        """Complete the sink, now that the log is. What goes wrong is a warning."""
        projection, told = self._projection, ""
        complete = self._await_last_update()
        try:
            if complete:
                projection.finish()
            else:
                told = projection.abandon()
        except Exception as error:  # whatever it is: training is over, and the others have their own work to end
            told = f"{projection.name}: {reason_of(error)}"
        if told and (complete or not self._warned):
            self._warn(told)

    def _await_last_update(self) -> bool:
        """Whether it succeeds before patience runs out; if not, the thread ends when it can."""
        asked = time.monotonic()
        self._finishing.set()
        while not self._done.wait(0.02):
            silent = time.monotonic() - max(asked, self._projection.answered_at())
            if self._abandoned.is_set() or silent > self._projection.patience_seconds:
                self._abandoned.set()
                return False
        return True

    def _run(self) -> None:
        projection = self._projection
        pause = projection.interval_seconds
        while not self._abandoned.is_set():
            last = self._finishing.wait(pause)  # known before the log is read: what is in it then is everything
            try:
                for event in next(self._events):
                    projection.event(event)
                projection.update(last)
            except RayYoloError as error:
                self._warned = True
                self._warn(f"{projection.name}: {redact(str(error))}. Training goes on without.")
                self._abandoned.set()
            except Exception as error:  # whatever a foreign library raises, the thread has to live on
                if not self._warned:
                    self._warned = True
                    self._warn(f"{projection.name}: {reason_of(error)}. Training goes on; this is tried again.")
                pause = min(2 * pause, _LONGEST_PAUSE_SECONDS)
                self._abandoned.wait(projection.interval_seconds if last else 0)
            else:
                pause = projection.interval_seconds
                if last:
                    self._done.set()
                    return


class Sinks:
    """The projections of one run, fed side by side and ended one after the other, in their order."""

    def __init__(self, log: Path, projections: Sequence[Sink], warn: Warn) -> None:
        self._runners = [SinkRunner(projection, log, warn) for projection in projections]

    def finish(self, flush: Callable[[], None] = lambda: None) -> None:
        """Complete everything. The log must be complete, but for warnings that this itself adds.

        Args:
            flush: called to have warnings written, so that those that follow tell them.
        """
        for runner in self._runners:
            runner.finish()
            flush()


def without_classes(event: Event) -> Event:
    """The event, if it is an epoch's without the numbers of each class."""
    return event.model_copy(update={"per_class": ()}) if isinstance(event, EpochEvent) else event
