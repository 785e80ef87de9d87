"""Calls to the actor that assigns jobs and holds their coordinators, from drivers and from workers."""

from __future__ import annotations

import time
from collections.abc import Callable, Collection
from typing import Any, Literal, TypeAlias, cast

import ray
import ray.exceptions
from ray.actor import ActorHandle

from ray_yolo.core.events import Summary
from ray_yolo.core.structures import Orders, WorkerStatus
from ray_yolo.runtime.workers.coordinator import Heartbeat, HungWorker, Quorum, Registration
from ray_yolo.runtime.workers.job_queue import JobAssignment, JobQueue, PoolWorker

_ANSWER_SECONDS = 60.0
_STOP_SECONDS = 2.0  # the reply to an order to stop may take this long: the command has to end in time
_NEWS_SECONDS = 0.2  # a worker looks this often whether it has news itself, while its heartbeat waits for orders

QueueHandle: TypeAlias = "ActorHandle[JobQueue]"


def answer(reference: Any) -> Any:
    """The actor's reply, within a time limit."""
    return ray.get(reference, timeout=_ANSWER_SECONDS)


def stop_answer(reference: Any) -> bool:
    """The reply to an order to stop: whether workers have steps to save. True if there is no reply in time."""
    try:
        return bool(ray.get(reference, timeout=_STOP_SECONDS))
    except ray.exceptions.ActorDiedError:  # for good
        return False
    except ray.exceptions.RayError:  # it is being restarted, or busy: the driver repeats the order
        return True


class JobClient:
    """The coordinator of one job, which is an object of the queue's actor; see `Coordinator` for its methods.

    Args:
        wanted: number of workers of the job's first generation, if they register in time.
        seat: of a worker of the queue's pool: its id in the queue, its place, and its number in the job. The
            coordinator knows it by another id for each job.
    """

    def __init__(self, queue: QueueHandle, job: str, wanted: int, seat: tuple[str, PoolWorker, int] | None = None
                 ) -> None:
        self.queue, self.job, self.wanted, self._seat = queue, job, wanted, seat

    def of_worker(self, uid: str, worker: PoolWorker, assignment: JobAssignment) -> JobClient:
        """The same job's coordinator for a worker of the pool: its heartbeats reach the queue, too."""
        return JobClient(self.queue, self.job, self.wanted, (uid, worker, assignment.number))

    def _call(self, method: str, *arguments: Any) -> Any:
        return answer(self.queue.coordinator.remote(self.job, self.wanted, method, *arguments))

    def _order(self, method: str, *arguments: Any) -> Any:
        return answer(self.queue.order.remote(self.job, self.wanted, method, *arguments))

    # A worker's calls

    def register(self, uid: str, registration: Registration) -> None:
        """Request to join the next generation."""
        self._call("register", uid, registration)

    def quorum(self, uid: str) -> Quorum | Summary | Literal["left", "unknown"] | None:
        """The generation of a registered worker, if it has formed."""
        return cast("Quorum | Summary | Literal['left', 'unknown'] | None", self._call("quorum", uid))

    def heartbeat(self, uid: str, heartbeat: Heartbeat, current: tuple[Registration, Quorum] | None, known: Orders,
                  has_news: Callable[[], bool]) -> Orders | None:
        """Report a worker's phase. Returns its orders: at once if they are not the `known` ones, else as soon as they
        change, or after a second; None as soon as `has_news`, which the next heartbeat reports.

        Raises:
            ray.exceptions.RayError: if the queue does not answer. ActorDiedError: it has ended for good.
        """
        reference = self.queue.report.remote(known, self.job, self.wanted, uid, heartbeat, current, self._seat)
        until = time.monotonic() + _ANSWER_SECONDS
        while not ray.wait([reference], timeout=_NEWS_SECONDS)[0]:
            if has_news():
                return None
            if time.monotonic() > until:
                raise ray.exceptions.GetTimeoutError("the queue does not answer")
        return cast(Orders, ray.get(reference))

    def leave(self, uid: str) -> None:
        """A worker has left. Does not wait for a reply: the worker may be ending because nothing replies."""
        self.queue.coordinator.remote(self.job, self.wanted, "leave", uid)

    def may_regroup(self, limit: int) -> bool:
        """Whether another generation may form, after at most `limit` in a row that have failed by themselves."""
        return cast(bool, self._call("may_regroup", limit))

    def elect_saver(self, generation: int) -> bool:
        """Whether the caller is the first of its generation to call this."""
        return cast(bool, self._call("elect_saver", generation))

    def end(self, summary: Summary) -> None:
        """Training has ended."""
        self._call("end", summary)

    # A driver's calls

    def stop(self) -> bool:
        """Order the training to stop after the current step. Returns whether workers have steps to save."""
        return stop_answer(self.queue.order.remote(self.job, self.wanted, "stop"))

    def outcome(self) -> Summary | None:
        """How training has ended, if it has."""
        return cast("Summary | None", self._call("outcome"))

    def present(self) -> int:
        """The number of living workers."""
        return cast(int, self._call("present"))

    def mark_departed(self, workers: Collection[int]) -> list[int]:
        """Report workers whose processes have ended. Returns those of them that have failed."""
        return cast("list[int]", self._order("mark_departed", list(workers)))

    def drain_nodes(self, nodes: Collection[str]) -> dict[int, str]:
        """Make all workers on some nodes leave after the current step. Returns the node of each, by its number."""
        return cast("dict[int, str]", self._order("drain_nodes", nodes))

    def worker_statuses(self) -> tuple[WorkerStatus, ...]:
        """All workers, by number."""
        return cast("tuple[WorkerStatus, ...]", self._call("worker_statuses"))

    def describe_stall(self) -> str | None:
        """A warning about a stall, once for each step."""
        return cast("str | None", self._call("describe_stall"))

    def find_hung_worker(self) -> HungWorker | None:
        """The worker that exceeds its limit most, once all workers have dumped their stacks."""
        return cast("HungWorker | None", self._call("find_hung_worker"))

