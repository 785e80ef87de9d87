"""What becomes of a training whose workers have failed: Ray starts them again, unless that would not help."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from pathlib import Path
from typing import TypeVar

from ray.actor import ActorHandle

from ray_yolo.core.errors import LostWorkersError, PeerLostError, RayYoloError, TrainingError
from ray_yolo.core.events import CheckpointEvent, Event, StepEvent, WarningEvent, WorkerEvent
from ray_yolo.core.redact import redact
from ray_yolo.runs.event_log import EVENTS_FILE, read_events
from ray_yolo.runs.recorder import Recorder, emitter
from ray_yolo.runtime import cluster
from ray_yolo.runtime.graceful_stop import request_stop, run_in_background

# They would come again: input that is not as it has to be, or a defect of the program. torch raises the last of them
# where a device lacks an operator, such as torchvision's nms, built for CPUs, on a GPU. It is a RuntimeError, as are
# those of its errors that may pass, so it has to be named.
PERMANENT = (RayYoloError, FileNotFoundError, NotADirectoryError, IsADirectoryError, ImportError, ValueError, TypeError,
             LookupError, AttributeError, NameError, AssertionError, NotImplementedError)
_LOST_PEER = re.compile(r"gloo|nccl|connection|socket|peer|timed? ?out|process group", re.IGNORECASE)
_LONGEST = 400  # characters of a reason

T = TypeVar("T")


class RestartBudget:
    """How many failures are left: those before the newest checkpoint count no more, training has got on since.

    Args:
        limit: failures in a row without a new checkpoint that are put up with; -1: any number.
    """

    def __init__(self, limit: int) -> None:
        self.limit = limit
        self._failures, self._step = 0, -1

    def allow(self, step: int) -> bool:
        """Whether one more failure, while the newest checkpoint is of `step`, is to be put up with."""
        self._failures = 1 if step > self._step else self._failures + 1
        self._step = max(step, self._step)
        return self.limit < 0 or self._failures <= self.limit


class FailurePolicy:
    """Is asked about workers that have failed, before they are started again.

    It raises where that shall not be: after a failure that would come again, and when `max_failures` are used up.
    """

    def __init__(self, run_dir: Path, max_failures: int, recorder: ActorHandle[Recorder] | None) -> None:
        self.restarts = RestartBudget(max_failures)
        self._run_dir, self._recorder = run_dir, recorder

    def decide(self, failures: Mapping[int, Exception], *, others_go_on: bool) -> None:
        """Put up with workers that have failed together, or raise."""
        events = read_events(self._run_dir / EVENTS_FILE)
        worker, error = cause_of(failures)
        told = f"{place_of(worker, events)}: {summary(error)}"
        if _is_permanent(error):
            raise type(error)(told) if isinstance(error, RayYoloError) else TrainingError(told)
        step = reached_step(events) if others_go_on else saved_step(events)
        taken = any(getattr(getattr(each, "health_check_failure", each), "preempted", False)  # by who lends the node
                    for each in failures.values())
        if not (taken or self.restarts.allow(step)):
            # said by Ray of a worker, not by the worker; or of another worker
            lost = type(error).__module__.startswith("ray.") or isinstance(error, PeerLostError)
            kind, limit = LostWorkersError if lost else TrainingError, self.restarts.limit
            raise kind(f"{told}; given up after {limit} restarts without a new checkpoint" if limit else told)
        self.notify(f"{told}; " + ("it is replaced, and the others go on" if others_go_on else
                                 f"all workers are started again, from step {step}"))

    def notify(self, text: str) -> None:
        """Give a warning to the log, if there is one."""
        if self._recorder is not None:
            emitter(self._recorder)(WarningEvent(message=text))


def in_order(work: Callable[[], T], folder: Path, notify: Callable[[str], None]) -> T:
    """What `work` returns, whose workers a signal ends in order where it can; see `ask_to_stop`."""
    def before_end(outcome: Future[T]) -> None:
        try:
            request_stop([folder], notify, outcome.done)
        finally:
            if not outcome.done():
                cluster.stop_workers(folder)  # or they would train on, and nobody would record it

    return run_in_background(work, before_end)


def cause_of(failures: Mapping[int, Exception]) -> tuple[int, Exception]:
    """(worker, error): of those that failed together the one that the others failed for."""
    def rank(failure: tuple[int, Exception]) -> tuple[int, int]:
        worker, error = failure
        lost = isinstance(error, PeerLostError) or (
            isinstance(error, RuntimeError) and _LOST_PEER.search(str(error)) is not None)
        return (0 if _is_permanent(error) else 1 + lost, worker)

    return min(failures.items(), key=rank)


def _is_permanent(error: Exception) -> bool:
    return isinstance(error, PERMANENT) and not isinstance(error, PeerLostError)  # that worker is sound


def place_of(worker: int, events: Sequence[Event]) -> str:
    """A worker by its number and the node where it has begun last."""
    nodes = [event.node for event in events if isinstance(event, WorkerEvent) and event.worker == worker]
    return f"worker {worker} on {nodes[-1]}" if nodes else f"worker {worker}"


def summary(error: BaseException) -> str:
    """What an error says, on one line: Ray and loader processes put the point into the last of theirs."""
    name, lines = type(error).__name__, str(error).strip().splitlines() or [""]
    text = redact(re.sub(rf"^[\w.]*\b{name}: ", "", lines[-1]))[:_LONGEST]
    return text if isinstance(error, RayYoloError) else f"{name}: {text}"


def reached_step(events: Sequence[Event]) -> int:
    """The newest step that a log tells of, saved or not."""
    return max((event.step for event in events if isinstance(event, (StepEvent, CheckpointEvent))), default=0)


def saved_step(events: Sequence[Event]) -> int:
    """The step of the newest checkpoint that a log knows of; 0 before the first."""
    return max((event.step for event in events if isinstance(event, CheckpointEvent)), default=0)
