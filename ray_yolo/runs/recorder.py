"""The single writer of a run's event log, and the client that sends events to it.

Any worker on any node sends events, many times a second. `emit` does not wait, does not raise, and returns nothing.
With Ray, the writer is an actor on the driver's node; a log on a worker's node would be lost with that node. Without
Ray, the writer is a thread.
"""

from __future__ import annotations

import contextlib
import json
import logging
import math
import queue
import sys
import threading
import time
from collections import deque
from pathlib import Path
from typing import TYPE_CHECKING, TypeAlias, cast

from ray_yolo.core.events import CheckpointEvent, EpochEvent, Event, StepEvent
from ray_yolo.core.system import Process, own_process, undo_niceness
from ray_yolo.runs.event_log import EventLog, plain, read_events

if TYPE_CHECKING:
    from ray import ObjectRef
    from ray.actor import ActorHandle

_START_SECONDS = 120.0  # The actor's process may take so long to start on a busy machine.
_ASK_SECONDS = 5.0  # a worker asks this often whether the writer lives: all workers do
_MAX_PENDING_CALLS = 10_000  # a sender keeps at most this many while the writer hangs, and drops further events

_logger = logging.getLogger(__name__)


class Recorder:
    """The actor: writes the event logs of one run after another."""

    def __init__(self) -> None:
        undo_niceness()  # workers wait for it when they start and end
        self._logs: dict[str, EventLog | None] = {}  # logs by path; None: it is closed

    def open(self, path: str) -> Process:
        """Open a log. Returns this process."""
        self._logs[path] = EventLog(path)
        return own_process()

    def emit(self, path: str, event: Event) -> None:
        """Append one event. An event for a closed log is too late and is lost."""
        if path not in self._logs:  # this process replaces one that died
            self._logs[path] = EventLog(path)
        if log := self._logs[path]:
            log.append(event)

    def close(self, path: str) -> list[str]:
        """Close a log; another process may open it then. Returns the warnings that could not be written."""
        log = self._logs.get(path)
        self._logs[path] = None
        return log.close() if log else []

    def ready(self) -> bool:
        """True, once all events that the calling process sent before are written (or wait for the disk)."""
        return True


if TYPE_CHECKING:
    RecorderHandle: TypeAlias = ActorHandle[Recorder]


class LocalRecorder:
    """The writer of a run without Ray: a thread that appends the events that other threads put into a queue."""

    def __init__(self, path: str) -> None:
        self._log = EventLog(path)
        # SimpleQueue.put is reentrant: even a signal handler may emit.
        self._queue: queue.SimpleQueue[Event | threading.Event | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._run, name="ray_yolo recorder", daemon=True)
        self._thread.start()

    def emit(self, event: Event) -> None:
        """Queue one event."""
        self._queue.put(event)

    def flush(self, wait_seconds: float = 10.0) -> None:
        """Wait until all emitted events are written (or wait for the disk), for at most `wait_seconds`."""
        written = threading.Event()
        self._queue.put(written)
        written.wait(wait_seconds)

    def close(self, wait_seconds: float = 10.0) -> None:
        """Write all emitted events, within `wait_seconds`, and end the thread."""
        self._queue.put(None)
        self._thread.join(wait_seconds)

    def _run(self) -> None:
        while (item := self._queue.get()) is not None:
            if isinstance(item, threading.Event):
                item.set()
            else:
                self._log.append(item)
        self._log.close()


class RecorderClient:
    """Sends a process's events to the actor. It has the methods of `LocalRecorder`.

    Args:
        path: of the log.
        ends: whether the actor ends with this log.
    """

    def __init__(self, actor: ActorHandle[Recorder], path: str, *, ends: bool) -> None:
        self.actor, self._path, self._ends, self._warned = actor, path, ends, False
        self.writer: Process | None = None  # the actor's process, once it has opened the log
        self._rows: deque[Event] = deque(maxlen=_MAX_PENDING_CALLS)  # the actor may not have written them
        self._sign_of_life: ObjectRef[bool] | None = None
        """The reply that `is_gone` awaits."""
        self._asked = -math.inf
        """When `is_gone` has asked for it."""

    def emit(self, event: Event) -> None:
        """Send one event."""
        if isinstance(event, (StepEvent, EpochEvent, CheckpointEvent)):
            self._rows.append(event)
        try:
            self.actor.emit.remote(self._path, event)
        except Exception as error:  # Ray shut down, queue full, value that cannot be sent
            if not self._warned:
                _logger.warning("an event could not be sent to the log, and later ones may be lost too: %s", error)
            self._warned = True

    def is_gone(self) -> bool:
        """Whether the writer has ended for good, by its reply to the last question. Does not wait for a reply."""
        import ray

        if self._sign_of_life is None and time.monotonic() - self._asked > _ASK_SECONDS:
            self._asked, self._sign_of_life = time.monotonic(), self.actor.ready.remote()
        if self._sign_of_life is None:
            return False
        if not ray.wait([self._sign_of_life], timeout=0)[0]:
            return False
        reply, self._sign_of_life = self._sign_of_life, None
        try:
            ray.get(reply)
        except ray.exceptions.ActorDiedError:
            return True
        except ray.exceptions.RayError:  # it is being restarted
            pass
        return False

    def wait(self, wait_seconds: float) -> None:
        """Wait until the writer replies. Without a writer there is no driver either, and training is pointless.

        Raises:
            ray.exceptions.RayError: if the writer has ended, or does not reply within `wait_seconds`.
        """
        import ray

        ray.get(self.actor.ready.remote(), timeout=wait_seconds)

    def flush(self, wait_seconds: float = 10.0) -> None:
        """Wait until all events of this process have arrived. Every worker calls this before it returns: events that
        arrive after the writer's end are lost.

        If the writer has ended first, with Ray's head or the driver, this process appends the rows that the log lacks:
        the checkpoint has their steps.
        """
        import ray

        sent = len(self._rows)
        try:
            self.wait(wait_seconds)
        except ray.exceptions.RayError as error:
            if isinstance(error, ray.exceptions.ActorDiedError) or (self.writer and self.writer.has_ended):
                self._append_rows()
            return
        for _ in range(sent):
            self._rows.popleft()

    def _append_rows(self) -> None:
        """Append the rows of this process that the log lacks. Only the recording worker has any."""
        rows = list(self._rows)
        self._rows.clear()
        if not rows or not Path(self._path).exists():  # It is on another machine, without shared storage.
            return
        written = set(map(_content, read_events(self._path)))
        with contextlib.suppress(OSError):
            log = EventLog(self._path)
            for event in rows:
                if _content(event) not in written:
                    log.append(event)
            log.close()

    def close(self, wait_seconds: float = 10.0) -> None:
        """Write all events of this process, and close the log. Warnings that the log cannot take go to stderr."""
        import ray

        with contextlib.suppress(ray.exceptions.RayError):
            self.wait(wait_seconds)
            for lost in ray.get(self.actor.close.remote(self._path), timeout=wait_seconds):
                print(f"WARNING: {lost}", file=sys.stderr)
        with contextlib.suppress(ray.exceptions.RayError):
            if self._ends:
                ray.kill(self.actor, no_restart=True)


def _content(event: Event) -> str:
    """The content of an event in the log, by which a row is found there: without number and time."""
    return json.dumps([event.type, plain(event.fields)])


def open_log(path: str, actor: ActorHandle[Recorder] | None = None) -> RecorderClient:
    """Make an actor write the log at an absolute path; by default a new actor, which ends with the log.

    Raises:
        ray.exceptions.RayError: if the log cannot be opened.
    """
    import ray

    recorder = RecorderClient(actor or start_recorder(), path, ends=actor is None)
    recorder.writer = ray.get(recorder.actor.open.remote(path), timeout=_START_SECONDS)
    return recorder


def start_recorder() -> ActorHandle[Recorder]:
    """Start a writer of logs on this node, without reserving a CPU. It ends with this process.

    If its process dies, Ray restarts it and repeats the calls without a reply. An event may then be in the log twice;
    readers take one row for each epoch.
    """
    import ray
    from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

    here = NodeAffinitySchedulingStrategy(ray.get_runtime_context().get_node_id(), soft=False)
    actor = ray.remote(Recorder).options(
        num_cpus=0, max_restarts=-1, max_task_retries=-1, max_pending_calls=_MAX_PENDING_CALLS,
        scheduling_strategy=here)
    return cast("ActorHandle[Recorder]", actor.remote())
