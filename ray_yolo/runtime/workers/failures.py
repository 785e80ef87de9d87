"""Failure policies: whether failed workers are restarted, or the training ends with an error."""

from __future__ import annotations

import contextlib
import math
import re
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from concurrent.futures import Future
from pathlib import Path
from typing import TypeVar

import ray.exceptions

from ray_yolo.core.errors import (
    LoaderError,
    LostWorkersError,
    PeerDepartedError,
    RayYoloError,
    TrainingError,
    WorkerError,
)
from ray_yolo.core.events import CheckpointEvent, Emit, Event, StepEvent, WarningEvent, WorkerEvent
from ray_yolo.core.redact import redact
from ray_yolo.runs.event_log import EVENTS_FILE, read_events
from ray_yolo.runtime import cluster
from ray_yolo.runtime.graceful_stop import request_stop, run_in_background
from ray_yolo.runtime.workers.client import JobClient

# Errors that would recur: bad input, or a bug. torch raises NotImplementedError if a device lacks an operator, such as
# a CPU build of torchvision's nms on a GPU. It is a subclass of RuntimeError, as are torch's transient errors, so it is
# listed explicitly.
PERMANENT = (RayYoloError, FileNotFoundError, NotADirectoryError, IsADirectoryError, ImportError, ValueError, TypeError,
             LookupError, AttributeError, NameError, AssertionError, NotImplementedError)
_LONGEST = 400  # characters of a reason
TOGETHER_SECONDS = 5.0  # workers that fail within it are one failure: those of one node end one after the other

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
    """The policy of a training or a sweep. It counts failures on the driver: each count is limited by `max_failures`.

    Permanent errors end a training at once, others after `max_failures` of them without progress. Workers that fail
    within `TOGETHER_SECONDS` count as one failure.

    Args:
        run_dir: of the training, or the sweep.
        emit: takes events. The policy is pickled with it.
    """

    def __init__(self, run_dir: Path, max_failures: int, emit: Emit) -> None:
        self.run_dir, self.emit = run_dir, emit
        self.max_failures = max_failures
        self._of_trainings = RestartBudget(max_failures)
        self._of_idle_workers = RestartBudget(max_failures)
        self._failed_at = -math.inf  # time of the newest failure that was counted
        self._failed: frozenset[int] = frozenset()  # its workers

    def decide(self, failures: Mapping[int, Exception], *, others_continue: bool) -> None:
        """Return if workers that failed together may be restarted; otherwise raise the training's error."""
        events = read_events(self.run_dir / EVENTS_FILE)
        worker, error = cause_of(failures)
        reason = f"{describe_worker(worker, events)}: {error_line(error)}"
        if _is_permanent(error):
            raise (type(error) if isinstance(error, RayYoloError) else _kind_of(error))(reason)
        step = reached_step(events) if others_continue else saved_step(events)
        if not (_was_preempted(failures) or self._is_counted(failures) or self._of_trainings.allow(step)):
            kind = _kind_of(error)
            given_up = f"{reason}; given up after {self.max_failures} restarts without a new checkpoint"
            raise kind(given_up if self.max_failures else reason)
        self.notify(f"{reason}; " + ("it is replaced while the others continue" if others_continue else
                                     f"all workers restart from step {step}"))

    def _is_counted(self, workers: Collection[int]) -> bool:
        """Whether failed workers belong to the newest failure: a node's workers may be lost one after the other."""
        now = time.monotonic()
        is_together = now - self._failed_at < TOGETHER_SECONDS and self._failed.isdisjoint(workers)
        if is_together:
            self._failed |= set(workers)
        else:
            self._failed_at, self._failed = now, frozenset(workers)
        return is_together

    def decide_idle(self, failures: Mapping[int, Exception], progress: int) -> None:
        """Return if workers that trained nothing may be replaced; otherwise raise a LostWorkersError.

        Args:
            progress: a number that grows while workers start or train.
        """
        if _was_preempted(failures) or self._of_idle_workers.allow(progress):
            return
        worker, error = min(failures.items())
        raise LostWorkersError(f"worker {worker}: {error_line(error)}; given up after {self.max_failures} restarts in "
                               "which no worker started")

    def decide_controller(self, error: Exception) -> None:
        """Return if Ray Train's controller, which failed, may be restarted; otherwise raise a LostWorkersError."""
        if not self._of_trainings.allow(saved_step(read_events(self.run_dir / EVENTS_FILE))):
            raise LostWorkersError(f"Ray could not run the workers: {error}") from error
        self.notify(f"Ray's controller failed and is restarted: {error_line(error)}")

    def notify(self, text: str) -> None:
        """Emit a warning."""
        self.emit(WarningEvent(message=text))


def decide_departed(coordinator: JobClient, failures: Mapping[int, Exception], policy: FailurePolicy, *,
                    others_continue: bool | None = None) -> None:
    """Report a job's failed workers to its coordinator, and apply the policy to those that were not leaving.

    Args:
        others_continue: None: if other workers are present.
    """
    failed = list(failures)
    with contextlib.suppress(ray.exceptions.RayError):  # it is being restarted, and knows of no worker
        failed = coordinator.mark_departed(failed)
    if failed:
        continues = coordinator.present() > 0 if others_continue is None else others_continue
        policy.decide({worker: failures[worker] for worker in failed}, others_continue=continues)


def run_gracefully(work: Callable[[], T], stop: Callable[[], bool], run_dir: Path, notify: Callable[[str], None]) -> T:
    """Return or raise the outcome of `work`; on a signal its workers save the current step first (`request_stop`)."""
    def before_end(result: Future[T]) -> None:
        try:
            request_stop(stop, [run_dir], notify, result.done)
        finally:
            if not result.done():
                cluster.stop_workers(run_dir)  # otherwise they would continue without a recorder

    return run_in_background(work, before_end)


def cause_of(failures: Mapping[int, Exception]) -> tuple[int, Exception]:
    """(worker, error) of the failure that caused the others: permanent ones first, then Ray's, departed peers last."""
    def order(failure: tuple[int, Exception]) -> tuple[bool, bool, bool, int]:
        worker, error = failure
        return not _is_permanent(error), isinstance(error, PeerDepartedError), not _is_seen_by_ray(error), worker

    return min(failures.items(), key=order)


def _kind_of(error: Exception) -> type[RayYoloError]:
    """What ends a training after an error of a worker. Only a `WorkerError` can be the recipe's fault."""
    if _is_seen_by_ray(error) or isinstance(error, PeerDepartedError):
        return LostWorkersError
    return TrainingError if isinstance(error, (OSError, ImportError)) else WorkerError


def _is_seen_by_ray(error: Exception) -> bool:
    """Whether Ray reports the failure, such as a dead worker, and not the worker itself."""
    return type(error).__module__.startswith("ray.")


def _was_preempted(failures: Mapping[int, Exception]) -> bool:
    """Whether Ray knows of a preempted node among the causes."""
    causes = [getattr(error, "health_check_failure", error) for error in failures.values()]
    return any(getattr(cause, "preempted", False) for cause in causes)


def _is_permanent(error: Exception) -> bool:
    # A worker whose peer has departed is sound, and another process may have what a loader lacked.
    return isinstance(error, PERMANENT) and not isinstance(error, (PeerDepartedError, LoaderError))


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
