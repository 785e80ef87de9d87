"""Calls to the actor that assigns jobs and holds their coordinators, from drivers and from workers."""

from __future__ import annotations

from collections.abc import Collection
from typing import Any, Literal, TypeAlias, cast

import ray
from ray.actor import ActorHandle

from ray_yolo.core.events import Summary
from ray_yolo.core.structures import WorkerStatus
from ray_yolo.runtime.workers.coordinator import Heartbeat, HeartbeatReply, HungWorker, Quorum, Registration
from ray_yolo.runtime.workers.job_queue import JobAssignment, JobQueue, PoolWorker

_ANSWER_SECONDS = 60.0

QueueHandle: TypeAlias = "ActorHandle[JobQueue]"


def answer(reference: Any) -> Any:
    """The actor's reply, within a time limit."""
    return ray.get(reference, timeout=_ANSWER_SECONDS)


class JobClient:
    """The coordinator of one job, which is an object of the queue's actor; see `Coordinator` for its methods.

    Args:
        wanted: number of workers of the job's first generation, if they register in time.
    """

    def __init__(self, queue: QueueHandle, job: str, wanted: int) -> None:
        self.queue, self.job, self.wanted = queue, job, wanted

    def _call(self, method: str, *arguments: Any) -> Any:
        return answer(self.queue.coordinator.remote(self.job, self.wanted, method, *arguments))

    # A worker's calls

    def register(self, uid: str, registration: Registration) -> None:
        """Request to join the next generation."""
        self._call("register", uid, registration)

    def quorum(self, uid: str) -> Quorum | Summary | Literal["left", "unknown"] | None:
        """The generation of a registered worker, if it has formed."""
        return cast("Quorum | Summary | Literal['left', 'unknown'] | None", self._call("quorum", uid))

    def introduce(self, uid: str, registration: Registration, quorum: Quorum) -> bool:
        """Report a worker's generation to a restarted coordinator."""
        return cast(bool, self._call("introduce", uid, registration, quorum))

    def heartbeat(self, uid: str, heartbeat: Heartbeat) -> HeartbeatReply:
        """Report a worker's phase."""
        return cast(HeartbeatReply, self._call("heartbeat", uid, heartbeat))

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

    def outcome(self) -> Summary | None:
        """How training has ended, if it has."""
        return cast("Summary | None", self._call("outcome"))

    def present(self) -> int:
        """The number of living workers."""
        return cast(int, self._call("present"))

    def mark_lost(self, workers: Collection[int]) -> list[int]:
        """Report workers whose processes have ended. Returns those of them that have failed."""
        return cast("list[int]", self._call("mark_lost", list(workers)))

    def drain_nodes(self, nodes: Collection[str]) -> dict[int, str]:
        """Make all workers on some nodes leave after the current step. Returns the node of each, by its number."""
        return cast("dict[int, str]", self._call("drain_nodes", nodes))

    def worker_statuses(self) -> tuple[WorkerStatus, ...]:
        """All workers, by number."""
        return cast("tuple[WorkerStatus, ...]", self._call("worker_statuses"))

    def describe_stall(self) -> str | None:
        """A warning about a stall, once for each step."""
        return cast("str | None", self._call("describe_stall"))

    def find_hung_worker(self) -> HungWorker | None:
        """The worker that exceeds its limit most, once all workers have dumped their stacks."""
        return cast("HungWorker | None", self._call("find_hung_worker"))


class PoolJobClient(JobClient):
    """The coordinator of the job that a worker of a pool trains. Its heartbeats go through the queue, to both.

    Args:
        uid: of the worker in the queue. The coordinator knows it by another one for each job.
    """

    def __init__(self, client: JobClient, uid: str, worker: PoolWorker, assignment: JobAssignment) -> None:
        super().__init__(client.queue, client.job, client.wanted)
        self._uid, self._worker, self._number = uid, worker, assignment.number

    def heartbeat(self, uid: str, heartbeat: Heartbeat) -> HeartbeatReply:
        """Report a worker's phase. The reply also says whether the queue wants it to leave the job."""
        reply = self.queue.heartbeat.remote(self._uid, self._worker, (self.job, self._number), self.wanted, uid,
                                            heartbeat)
        return cast(HeartbeatReply, answer(reply))
