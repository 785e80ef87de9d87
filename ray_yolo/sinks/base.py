"""Sinks: the consumers of a run's event log while it is written (files, console, MLflow, pictures, callbacks).

Each sink runs in its own thread. An exception in a sink becomes a warning in the log; it affects neither the other
sinks nor training nor the exit code. A sink reads only the log, so its output can be rebuilt.
"""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import ClassVar

from ray_yolo.core.deadline import seconds_left
from ray_yolo.core.errors import RayYoloError
from ray_yolo.core.events import EndEvent, EpochEvent, Event, StepEvent
from ray_yolo.core.redact import reason_of, redact
from ray_yolo.runs.event_log import follow

Warn = Callable[[str], None]

_LONGEST_PAUSE_SECONDS = 60.0
_PROMPT_SECONDS = 3.5  # for all sinks that can be completed elsewhere


class Sink:
    """One consumer of the events of a run.

    The sink's own thread calls `event` for each event in order, then `update`. It calls `update` again after a failure.
    The driver calls `finish` once, when the log is complete and read, and the sinks before this one are finished.
    """

    name: ClassVar[str]
    interval_seconds: ClassVar[float] = 2.0
    needs: ClassVar[tuple[type[Event], ...]] = ()
    """Types of the events that `history` keeps."""
    patience_seconds: float = 10.0
    """Time limit of the last update, since `answered_at`."""
    prompt_seconds: float = math.inf
    """Total time limit of the last update where a user waits at a prompt; 0: there is none. The rest is completed
    elsewhere."""

    def __init__(self) -> None:
        self.history: list[Event] = []
        """The events so far that it `needs`. To save memory, epochs are without the results of each class, and only the
        first and the last of consecutive steps are kept."""
        self.is_stale = False
        """Whether `history` has grown by more than steps; a sink that is up to date resets it."""
        self.is_training = False
        """Whether a first step was reported. Before it, slow imports would delay training."""

    def event(self, event: Event) -> None:
        """Record an event, without waiting for anything."""
        self.is_training = self.is_training or isinstance(event, (StepEvent, EpochEvent, EndEvent))
        if not isinstance(event, self.needs):
            return
        are_steps = [isinstance(other, StepEvent) for other in (*self.history[-2:], event)]
        if are_steps == [True] * 3:
            self.history.pop()
        self.is_stale |= not are_steps[-1]
        self.history.append(without_classes(event))

    def update(self, last: bool = False) -> None:
        """Process the recorded events. With `last` they are the whole log."""

    def answered_at(self) -> float:
        """`time.monotonic` of the last partial success of a running update, if it has parts."""
        return 0.0

    def finish(self) -> None:
        """Complete the sink."""

    def abandon(self) -> str:
        """Called instead of `finish` after a timeout. Returns a warning, which is logged if there was none yet."""
        return f"{self.name}: not complete after {self.patience_seconds:g} s"


class SinkRunner:
    """Feeds one sink from a log, in a daemon thread.

    If an update fails, one warning is logged, and the update is retried, soon at first, then once a minute. An error of
    this package (`RayYoloError`) states what the user must change, so it is not retried.

    Args:
        interactive: whether a user waits at a prompt. `prompt_seconds` then limits the last update.
    """

    def __init__(self, sink: Sink, log: Path, warn: Warn, *, interactive: bool = False) -> None:
        self._sink, self._events, self._warn = sink, follow(log), warn
        self._interactive = interactive
        self._warned = False
        self._finishing, self._abandoned, self._done = threading.Event(), threading.Event(), threading.Event()
        threading.Thread(target=self._run, name=f"ray_yolo {sink.name}", daemon=True).start()

    def finish(self, deadline: float = math.inf) -> bool:
        """Complete the sink after the log is complete. Errors become warnings. Returns whether it was in time.

        Args:
            deadline: by `time.monotonic`, if the sink can be completed elsewhere.
        """
        message = ""
        limit = self._sink.prompt_seconds if self._interactive else math.inf
        limit = seconds_left(limit)
        complete = self._await_last_update(min(deadline, time.monotonic() + limit) if limit < math.inf else math.inf)
        try:
            if complete:
                self._sink.finish()
            else:
                message = self._sink.abandon()
        except Exception as error:  # of any kind: training is over, and the other sinks must still finish
            message = f"{self._sink.name}: {reason_of(error)}"
        if message and (complete or not self._warned):
            self._warn(message)
        return complete

    def _await_last_update(self, deadline: float) -> bool:
        """Whether the last update succeeds in time; if not, the thread ends later."""
        start = time.monotonic()
        if start < deadline:
            self._finishing.set()
        while not (self._done.wait(0.02) or self._abandoned.is_set()):
            now = time.monotonic()
            if now >= deadline or now - max(start, self._sink.answered_at()) > self._sink.patience_seconds:
                self._abandoned.set()
        return self._done.is_set()

    def _run(self) -> None:
        sink = self._sink
        pause = sink.interval_seconds
        while not self._abandoned.is_set():
            last = self._finishing.wait(pause)  # known before the log is read, so the log is complete then
            try:
                for event in next(self._events):
                    sink.event(event)
                sink.update(last)
            except RayYoloError as error:
                self._warned = True
                self._warn(f"{sink.name}: {redact(str(error))}. Training continues without.")
                self._abandoned.set()
            except Exception as error:  # of any library: the thread must survive
                if not self._warned:
                    self._warned = True
                    self._warn(f"{sink.name}: {reason_of(error)}. Training continues; this is tried again.")
                pause = min(2 * pause, _LONGEST_PAUSE_SECONDS)
                self._abandoned.wait(sink.interval_seconds if last else 0)
            else:
                pause = sink.interval_seconds
                if last:
                    self._done.set()
                    return


class Sinks:
    """The sinks of one run: fed in parallel, finished one by one in their order."""

    def __init__(self, log: Path, sinks: Sequence[Sink], warn: Warn, *, interactive: bool = False) -> None:
        self._runners = [SinkRunner(sink, log, warn, interactive=interactive) for sink in sinks]

    def finish(self, flush: Callable[[], None] = lambda: None) -> bool:
        """Complete every sink. The log must be complete, except for warnings that finishing itself adds. Returns
        whether all were in time.

        Args:
            flush: writes those warnings, so that the sinks that follow receive them.
        """
        deadline, in_time = time.monotonic() + seconds_left(_PROMPT_SECONDS), True
        for runner in self._runners:
            in_time &= runner.finish(deadline)
            flush()
        return in_time


def without_classes(event: Event) -> Event:
    """The event; an epoch event loses its per-class results."""
    return event.model_copy(update={"per_class": ()}) if isinstance(event, EpochEvent) else event
