"""The job queue of a standing worker pool: trials submit jobs, idle workers acquire them.

Starting a worker takes ten seconds or more; a standing worker starts the next job at once. Each job has a coordinator
(`runtime/workers/coordinator.py`), which forms its generations. It is an object of the queue, which saves each trial a
process. The queue only assigns workers to jobs. Workers and trials poll the queue, so a lost one is detected by its
silence.

`JobQueue` runs as an actor on the driver's node. It imports neither Ray nor torch.
"""

from __future__ import annotations

import asyncio
import contextlib
import math
import time
from collections.abc import Callable, Collection
from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple

from ray_yolo.core.events import Summary
from ray_yolo.core.system import Process
from ray_yolo.runtime.workers.coordinator import SILENCE_SECONDS as COORDINATOR_SILENCE_SECONDS
from ray_yolo.runtime.workers.coordinator import Coordinator

SILENCE_SECONDS = 10.0  # without a message, until a worker is lost
ABSENCE_SECONDS = 20.0  # without a poll, until a job's trial counts as dead
IDLE_SECONDS = 3.0  # until a worker without a job helps with a running one
_SCAN_SECONDS = 0.1  # between two scans of all workers, for heartbeats
_REMEMBERED = 100  # ended jobs, whose workers may still call their coordinators
ENDING_SECONDS = 15.0  # from a job's summary, for its last workers to finish


class PoolWorker(NamedTuple):
    """A worker of the pool and where it runs."""

    number: int  # of its bundle; see `WorkerPool`
    node: str  # Ray's id of it
    process: Process


class JobAssignment(NamedTuple):
    """A job that a worker acquired."""

    job: str
    number: int  # among the job's workers
    config: Any


class Failure(NamedTuple):
    """The failure of a job on one worker."""

    number: int
    error: Exception | None  # None: the worker is lost


class JobStatus(NamedTuple):
    """What has happened to a job since the last poll."""

    summary: Summary | None
    failures: tuple[Failure, ...]


@dataclass
class _Job:
    folder: str
    wanted: int  # workers
    most: int  # workers that can help
    config: Any
    heard: float  # when it was polled last
    priority: float  # the least one is the most urgent
    summary: Summary | None = None
    ended: float = 0.0
    failures: list[Failure] = field(default_factory=list)
    judged: bool = True  # failures were reported, and it was polled again after that
    news: asyncio.Event = field(default_factory=asyncio.Event)


@dataclass
class _QueueWorker:
    identity: PoolWorker
    heard: float
    since: float  # since when it is idle
    job: str | None = None
    number: int = 0
    draining: bool = False  # has to leave its job


class JobQueue:
    """Assigns jobs to workers. No call but `wait_for_news` waits.

    Args:
        clock: returns the time in seconds.
        restarted: this queue replaces one that died; it first waits for messages of workers and jobs.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic, *, restarted: bool = False) -> None:
        self._clock = clock
        self._quiet_until = clock() + COORDINATOR_SILENCE_SECONDS if restarted else -math.inf
        self._jobs: dict[str, _Job] = {}  # in the order of submission
        self._folders: dict[str, str] = {}  # of these jobs and the newest ended ones
        self._coordinators: dict[str, Coordinator] = {}  # the same
        self._workers: dict[str, _QueueWorker] = {}
        self._draining: frozenset[str] = frozenset()  # nodes
        self._progress, self._scanned = 0, -math.inf
        self._closed: str | None = None

    def submit(self, job: str, folder: str, wanted: int, most: int, config: Any, priority: float = 0.0) -> None:
        """Add a job.

        Args:
            folder: of its run; two jobs in one folder never run at the same time.
            wanted: number of workers that it waits for.
            most: number of workers that it can use while others are idle.
            priority: workers are assigned to the job of the least priority first, among equal ones to the first.
        """
        self._jobs[job], self._folders[job] = _Job(folder, wanted, most, config, self._clock(), priority), folder
        self._scanned = -math.inf

    def coordinator(self, job: str, wanted: int, method: str, *arguments: Any) -> Any:
        """Call a method of a job's coordinator, whose first generation has `wanted` workers."""
        if job not in self._coordinators:
            self._coordinators[job] = Coordinator(wanted, self._clock, restarted=self._clock() < self._quiet_until)
        return getattr(self._coordinators[job], method)(*arguments)

    async def wait_for_news(self, job: str, seconds: float) -> JobStatus | str | None:
        """`poll`, at the next failure or end of a worker's part in the job, or after `seconds`."""
        if job in self._jobs and self._closed is None:
            with contextlib.suppress(asyncio.TimeoutError):
                await asyncio.wait_for(self._jobs[job].news.wait(), seconds)
        return self.poll(job)

    def poll(self, job: str) -> JobStatus | str | None:
        """The status of a job for its trial. Text: the queue is closed for this reason. None: the job is unknown.

        After a failure, no worker acquires the job until it was polled twice. By then the failure policy has decided.
        """
        self._scan()
        if self._closed is not None:
            return self._closed
        if job not in self._jobs:
            return None
        state, now = self._jobs[job], self._clock()
        state.news.clear()
        state.heard, state.judged = now, not state.failures
        failures, state.failures = tuple(state.failures), []
        over = state.summary and (now - state.ended > ENDING_SECONDS or not self._busy_at(job))
        return JobStatus(state.summary if over else None, failures)

    def cancel(self, job: str) -> None:
        """A job's trial no longer waits for it."""
        self._jobs.pop(job, None)
        for old in [name for name in self._folders if name not in self._jobs][:-_REMEMBERED]:
            del self._folders[old]
            self._coordinators.pop(old, None)

    def acquire(self, uid: str, worker: PoolWorker) -> JobAssignment | Literal["over", "leave"] | None:
        """Work for an idle worker. None: no work yet; `leave`: its node is draining; `over`: the queue is closed.
        """
        if self._closed is not None:
            return "over"
        if worker.node in self._draining:
            self._workers.pop(uid, None)
            return "leave"
        now = self._clock()
        idle = self._set_idle(uid, worker)
        self._scan()
        if now < self._quiet_until:
            return None
        job = self._needed() or (self._helped() if now - idle.since >= IDLE_SECONDS else None)
        if job is None:
            return None
        taken = {other.number for other in self._busy_at(job)}
        idle.number = next(number for number in range(len(taken) + 1) if number not in taken)
        idle.job = job
        self._progress, self._scanned = self._progress + 1, -math.inf
        return JobAssignment(job, idle.number, self._jobs[job].config)

    def heartbeat(self, uid: str, worker: PoolWorker, assignment: tuple[str, int], moved: bool, must_leave: bool
                  ) -> bool:
        """A worker trains at (job, number). Returns whether it has to leave after the current step.

        Args:
            moved: it has finished a step since the last heartbeat.
            must_leave: another worker takes its part.
        """
        state = self._workers.setdefault(uid, _QueueWorker(worker, 0.0, 0.0))
        state.heard, (state.job, state.number) = self._clock(), assignment
        state.draining |= must_leave
        self._progress += moved
        if self._clock() - self._scanned >= _SCAN_SECONDS:  # else each heartbeat would need a pass over all workers
            self._scan()
        return self._leaves(state)

    def ended(self, uid: str, worker: PoolWorker, assignment: tuple[str, int], result: Summary | Exception | None
              ) -> None:
        """A worker has finished its job, or (None) its part in it."""
        job, number = assignment
        self._set_idle(uid, worker)
        if job in self._jobs and isinstance(result, Summary):
            self._jobs[job].summary, self._jobs[job].ended = result, self._clock()
        elif job in self._jobs and isinstance(result, Exception):
            self._fail(job, Failure(number, result))
        if job in self._jobs:
            self._jobs[job].news.set()

    def drain_nodes(self, nodes: Collection[str]) -> dict[int, str]:
        """Make the workers on exactly these nodes leave after the current step. Returns the node of each, by the number
        of its bundle."""
        self._draining = frozenset(nodes)
        return {worker.identity.number: worker.identity.node for worker in self._workers.values()
                if worker.identity.node in nodes}

    def mark_lost(self, numbers: Collection[int]) -> None:
        """The driver reports bundles whose processes have ended."""
        for uid in [uid for uid, worker in self._workers.items() if worker.identity.number in numbers]:
            self._lose(uid)

    def progress(self) -> int:
        """A number that grows while workers start or train."""
        return self._progress

    def present(self) -> int:
        """The number of living workers."""
        self._scan()
        return len(self._workers)

    def close(self, reason: str) -> None:
        """Close the queue: there is no more work. Trials receive the reason."""
        self._closed = reason
        for job in self._jobs.values():
            job.news.set()

    def _set_idle(self, uid: str, worker: PoolWorker) -> _QueueWorker:
        now = self._clock()
        state = self._workers.setdefault(uid, _QueueWorker(worker, now, now))
        state.heard = now
        if state.job is not None:
            state.job, state.draining, state.since = None, False, now
        return state

    def _busy_at(self, job: str) -> list[_QueueWorker]:
        return [worker for worker in self._workers.values() if worker.job == job]

    def _stay_at(self, job: str) -> list[_QueueWorker]:
        return [worker for worker in self._busy_at(job) if not self._leaves(worker)]

    def _leaves(self, worker: _QueueWorker) -> bool:
        return worker.draining or worker.identity.node in self._draining

    def _open(self) -> dict[str, _Job]:
        """The jobs that workers may acquire."""
        now = self._clock()
        return {name: job for name, job in self._jobs.items()
                if job.summary is None and job.judged and not job.failures and now - job.heard <= ABSENCE_SECONDS}

    def _needed(self) -> str | None:
        """The most urgent job that waits for a worker, unless workers still train another job of its folder."""
        others = {worker.job for worker in self._workers.values()}
        busy = {self._folders[job]: job for job in others if job in self._folders}
        waiting = (name for name, job in self._open().items()
                   if len(self._stay_at(name)) < job.wanted and busy.get(job.folder, name) == name)
        return min(waiting, key=lambda name: self._jobs[name].priority, default=None)

    def _helped(self) -> str | None:
        """The most urgent running job that can use another worker; of equally urgent jobs, the one with the fewest."""
        counts = {name: len(self._busy_at(name)) for name in self._open()}
        can = [name for name, count in counts.items() if 0 < count < self._jobs[name].most]
        return min(can, key=lambda name: (self._jobs[name].priority, counts[name]), default=None)

    def _fail(self, job: str, failure: Failure) -> None:
        self._jobs[job].failures.append(failure)
        self._jobs[job].judged = False
        self._jobs[job].news.set()

    def _lose(self, uid: str) -> None:
        """Note a lost worker. If its node was draining, this is no failure of its job."""
        worker = self._workers.pop(uid)
        if worker.job in self._jobs and worker.identity.node not in self._draining:
            self._fail(worker.job, Failure(worker.number, None))

    def _scan(self) -> None:
        """Drop lost workers; if a job waits and no worker is idle, recall a helper from another job."""
        self._scanned = self._clock()
        for uid, worker in list(self._workers.items()):
            if worker.identity.process.has_ended or self._clock() - worker.heard > SILENCE_SECONDS:
                self._lose(uid)
        coming = any(worker.job is None or worker.draining for worker in self._workers.values())
        if not coming and self._needed():
            helpers = [worker for name, job in self._jobs.items() for worker in self._stay_at(name)[job.wanted:]]
            for worker in helpers[-1:]:
                worker.draining = True
