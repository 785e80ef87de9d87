"""Sinks: the consumers of a run's event log in the driver's process (console, callbacks, Ray's metrics, log upload).

Each sink runs in its own thread, because a user's function or a slow terminal may block one of them. An exception in a
sink becomes a warning, in the log or (callbacks) on stderr; it affects neither the other sinks nor training nor the
exit code. The files and deliveries that are made from the log are no sinks but records, which a process of its own
makes (`records`).
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import ClassVar, Protocol

from ray_yolo.core.deadline import seconds_left
from ray_yolo.core.events import EpochEvent, Event, StepEvent
from ray_yolo.core.redact import reason_of
from ray_yolo.runs.event_log import follow
from ray_yolo.sinks.retry import Retry, Warn

Tell = Callable[[str], None]
"""Receives lines for the end of a command."""


class Record(Protocol):
    """One record of a run."""

    name: str
    uses_time: bool
    """Whether an update may take CPU seconds, which training pays for."""

    def update(self, events: Sequence[Event], ended: bool) -> None:
        """Make the record agree with the log.

        Args:
            ended: whether the log is complete, and files that training writes are final.

        Raises:
            RayYoloError: if the user must change something first; not tried again before new events.
            Exception: for any other reason; tried again.
        """


def ignore(text: str) -> None:
    """A `Tell` or `Warn` without a user."""


class History:
    """The events of a log that a consumer needs, in memory.

    Epochs are without the results of each class, and of consecutive steps only the first and the last are kept: 300
    epochs of 1,203 classes would need 425 MB.
    """

    def __init__(self, *types: type[Event]) -> None:
        self.events: list[Event] = []
        self._types = types

    def add(self, event: Event) -> bool:
        """Add an event. Returns whether there is more than a new step."""
        if not isinstance(event, self._types):
            return False
        is_step = isinstance(event, StepEvent)
        last_two = self.events[-2:]
        if is_step and len(last_two) == 2 and all(isinstance(each, StepEvent) for each in last_two):
            self.events.pop()
        self.events.append(without_classes(event))
        return not is_step


class Sink:
    """One consumer of the events of a run.

    The sink's own thread calls `event` for each event in order, then `update`. The driver calls `finish` once, after
    the last update or its time limit.
    """

    name: ClassVar[str]
    interval_seconds: ClassVar[float] = 2.0
    limit_seconds: float = 10.0
    """For the last update."""

    def event(self, event: Event) -> None:
        """Queue an event. It must neither wait nor fail: the events of a batch are given once."""

    def update(self, last: bool = False) -> None:
        """Process the events. With `last` they are the whole log."""

    def finish(self) -> None:
        """Complete the sink, in the driver's thread."""


class SinkThread:
    """Feeds one sink from a log, in a daemon thread. `Retry` has the rule for failures; where only the user can change
    something, the thread ends."""

    def __init__(self, sink: Sink, log: Path, warn: Warn) -> None:
        self._sink, self._events = sink, follow(log)
        self._retry = Retry(sink.name, warn, first_pause=2 * sink.interval_seconds)
        self._stopping = threading.Event()
        self._thread = threading.Thread(target=self._run, name=f"ray_yolo {sink.name}", daemon=True)
        self._thread.start()

    def finish(self) -> None:
        """Complete the sink after the log is complete. Errors become warnings."""
        sink = self._sink
        self._stopping.set()
        self._thread.join(seconds_left(sink.limit_seconds))
        if self._thread.is_alive():
            self._retry.warn_once(f"not complete after {sink.limit_seconds:g} s")
        try:
            sink.finish()
        except Exception as error:  # of any kind: training is over, and the other sinks must still finish
            self._retry.warn_once(reason_of(error))

    def _run(self) -> None:
        pause, last = self._sink.interval_seconds, False
        while not (last or self._retry.needs_user):
            last = self._stopping.wait(pause)  # known before the log is read, so the log is complete then
            self._retry.attempt(partial(self._feed, last), is_last=last)
            pause = max(self._sink.interval_seconds, self._retry.due - time.monotonic())

    def _feed(self, last: bool) -> None:
        for event in next(self._events):
            self._sink.event(event)
        self._sink.update(last)


class Sinks:
    """The sinks of one run: fed in parallel, finished one by one in their order."""

    def __init__(self, log: Path, sinks: Sequence[Sink], warn: Warn) -> None:
        self._threads = [SinkThread(sink, log, warn) for sink in sinks]

    def finish(self, flush: Callable[[], None] = lambda: None) -> None:
        """Complete every sink. The log must be complete, except for warnings that finishing itself adds.

        Args:
            flush: writes those warnings, so that the sinks that follow receive them.
        """
        for thread in self._threads:
            thread.finish()
            flush()


def without_classes(event: Event) -> Event:
    """The event; an epoch event loses its per-class results."""
    return event.model_copy(update={"per_class": ()}) if isinstance(event, EpochEvent) else event
