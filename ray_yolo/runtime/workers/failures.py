"""Failure policies: whether failed workers are restarted, or the training ends with an error."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from pathlib import Path
from typing import TypeVar

from ray_yolo.core.errors import LostWorkersError, PeerLostError, RayYoloError, TrainingError
from ray_yolo.core.events import CheckpointEvent, Emit, Event, StepEvent, WarningEvent, WorkerEvent
from ray_yolo.core.redact import redact
from ray_yolo.runs.event_log import EVENTS_FILE, read_events
from ray_yolo.runtime import cluster
from ray_yolo.runtime.graceful_stop import request_stop, run_in_background

# Errors that would recur: bad input, or a bug. torch raises NotImplementedError if a device lacks an operator, such as
# a CPU build of torchvision's nms on a GPU. It is a subclass of RuntimeError, as are torch's transient errors, so it is
# listed explicitly.
PERMANENT = (RayYoloError, FileNotFoundError, NotADirectoryError, IsADirectoryError, ImportError, ValueError, TypeError,
             LookupError, AttributeError, NameError, AssertionError, NotImplementedError)
_LOST_PEER = re.compile(r"gloo|nccl|connection|socket|peer|timed? ?out|process group", re.IGNORECASE)
_LONGEST = 400  # characters of a reason

T = TypeVar("T")


class RestartBudget:
    """Counts consecutive failures; the counter resets after progress.

    Args:
        limit: consecutive failures allowed without progress; -1: any number.
    """

    def __init__(self, limit: int) -> None:
        self.limit = limit
        self._failures, self._progress = 0, -1

    def allow(self, progress: int) -> bool:
        """Whether one more failure is allowed; `progress` is a number that grows, such as the last saved step."""
        self._failures = 1 if progress > self._progress else self._failures + 1
        self._progress = max(progress, self._progress)
        return self.limit < 0 or self._failures <= self.limit


class FailurePolicy:
    """The policy of one training: permanent errors end it at once, others after `max_failures` without progress.

    Args:
        emit: takes events. The policy is pickled with it.
    """

    def __init__(self, run_dir: Path, max_failures: int, emit: Emit) -> None:
        self.run_dir, self.restarts, self.emit = run_dir, RestartBudget(max_failures), emit

    def decide(self, failures: Mapping[int, Exception], *, others_continue: bool) -> None:
        """Return if workers that failed together may be restarted; otherwise raise the training's error."""
        events = read_events(self.run_dir / EVENTS_FILE)
        worker, error = cause_of(failures)
        reason = f"{describe_worker(worker, events)}: {error_line(error)}"
        if _is_permanent(error):
            raise type(error)(reason) if isinstance(error, RayYoloError) else TrainingError(reason)
        step = reached_step(events) if others_continue else saved_step(events)
        preempted = any(getattr(getattr(each, "health_check_failure", each), "preempted", False)
                        for each in failures.values())
        if not (preempted or self.restarts.allow(step)):
            # Ray has seen the worker die, or the worker has lost another one: the recipe is not at fault
            lost = type(error).__module__.startswith("ray.") or isinstance(error, PeerLostError)
            kind, limit = LostWorkersError if lost else TrainingError, self.restarts.limit
            raise kind(f"{reason}; given up after {limit} restarts without a new checkpoint" if limit else reason)
        self.notify(f"{reason}; " + ("it is replaced while the others continue" if others_continue else
                                     f"all workers restart from step {step}"))

    def notify(self, text: str) -> None:
        """Emit a warning."""
        self.emit(WarningEvent(message=text))


class PoolFailurePolicy:
    """The policy of a standing pool: lost workers are replaced as long as others start or make progress.

    The `FailurePolicy` of a job decides what a failure means for the job.

    Args:
        progress: a number that grows while workers start or train.
        notify: takes warnings.
    """

    def __init__(self, max_failures: int, progress: Callable[[], int], notify: Callable[[str], None]) -> None:
        self._restarts, self._progress, self.notify = RestartBudget(max_failures), progress, notify

    def decide(self, failures: Mapping[int, Exception], *, others_continue: bool) -> None:
        """Return if the workers may be replaced; otherwise raise a LostWorkersError."""
        if not self._restarts.allow(self._progress()):
            worker, error = min(failures.items())
            raise LostWorkersError(f"{describe_worker(worker, [])}: {error_line(error)}; given up after "
                                   f"{self._restarts.limit} restarts in which no worker started")


def run_gracefully(work: Callable[[], T], run_dir: Path, notify: Callable[[str], None]) -> T:
    """Return or raise the outcome of `work`; on a signal its workers save the current step first (`request_stop`)."""
    def before_end(result: Future[T]) -> None:
        try:
            request_stop([run_dir], notify, result.done)
        finally:
            if not result.done():
                cluster.stop_workers(run_dir)  # otherwise they would continue without a recorder

    return run_in_background(work, before_end)


def cause_of(failures: Mapping[int, Exception]) -> tuple[int, Exception]:
    """(worker, error) of the failure that caused the others: permanent errors first, lost connections last."""
    def rank(failure: tuple[int, Exception]) -> tuple[int, int]:
        worker, error = failure
        lost = isinstance(error, PeerLostError) or (
            isinstance(error, RuntimeError) and _LOST_PEER.search(str(error)) is not None)
        return (0 if _is_permanent(error) else 1 + lost, worker)

    return min(failures.items(), key=rank)


def _is_permanent(error: Exception) -> bool:
    return isinstance(error, PERMANENT) and not isinstance(error, PeerLostError)  # that worker is sound


def describe_worker(worker: int, events: Sequence[Event]) -> str:
    """A worker by its number and the node on which it started last."""
    nodes = [event.node for event in events if isinstance(event, WorkerEvent) and event.worker == worker]
    return f"worker {worker} on {nodes[-1]}" if nodes else f"worker {worker}"


def error_line(error: BaseException) -> str:
    """The last line of an error, in which Ray and loader processes put the reason."""
    name, lines = type(error).__name__, str(error).strip().splitlines() or [""]
    text = redact(re.sub(rf"^[\w.]*\b{name}: ", "", lines[-1]))[:_LONGEST]
    return text if isinstance(error, RayYoloError) else f"{name}: {text}"


def reached_step(events: Sequence[Event]) -> int:
    """The newest step in a log, saved or not."""
    return max((event.step for event in events if isinstance(event, (StepEvent, CheckpointEvent))), default=0)


def saved_step(events: Sequence[Event]) -> int:
    """The step of the newest checkpoint in a log; 0 before the first."""
    return max((event.step for event in events if isinstance(event, CheckpointEvent)), default=0)
