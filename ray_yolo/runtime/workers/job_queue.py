"""A standing crew: workers that train one job after another, and the list of jobs that they are leased to.

Starting a worker costs ten seconds and more; a worker that is there begins the next job within a moment. Who trains a
job together is said by the job's own roster (`runtime/workers/coordinator.py`), which is kept here to save each trial a
process; the
crew says which job a worker works at. Everybody asks again and again, so that whoever has died, or was taken for dead,
is known by what he says or does not.

`JobQueue` runs as an actor beside the driver. It is plain and knows neither Ray nor torch.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Collection
from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple

from ray_yolo.core.events import Summary
from ray_yolo.core.system import Process
from ray_yolo.runtime.workers.coordinator import SILENCE_SECONDS as ROSTER_SILENCE_SECONDS
from ray_yolo.runtime.workers.coordinator import Coordinator

SILENCE_SECONDS = 10.0  # without a word: a worker is lost
ABSENCE_SECONDS = 20.0  # without a question: whoever has offered a job has gone
IDLE_SECONDS = 3.0  # after which a worker for which no job waits helps with one that is under way
_LOOK_SECONDS = 0.1  # between two looks at all workers, for heartbeats
_REMEMBERED = 100  # jobs that are over, whose workers may still speak to their rosters
ENDING_SECONDS = 15.0  # from a job's summary, in which its last workers send what they still have to say


class PoolWorker(NamedTuple):
    """Where a worker of the crew works."""

    number: int  # of its place; see `WorkerPool`
    node: str  # Ray's id of it
    process: Process


class JobAssignment(NamedTuple):
    """What a worker is to work at."""

    job: str
    number: int  # among the job's workers
    config: Any


class Failure(NamedTuple):
    """How a job went wrong on a worker."""

    number: int
    error: Exception | None  # None: the worker is lost


class JobStatus(NamedTuple):
    """What has come of a job since it was last asked for."""

    summary: Summary | None
    failures: tuple[Failure, ...]


@dataclass
class _Job:
    folder: str
    wanted: int  # workers
    most: int  # workers that can help
    config: Any
    heard: float  # when it was last asked for
    summary: Summary | None = None
    ended: float = 0.0
    failures: list[Failure] = field(default_factory=list)
    judged: bool = True  # failures were told, and it was asked for again


@dataclass
class _Worker:
    place: PoolWorker
    heard: float
    since: float  # when it was last without a job
    job: str | None = None
    number: int = 0
    parts: bool = False  # is to leave its job


class JobQueue:
    """The list. Every call returns at once.

    Args:
        clock: seconds.
        restarted: there was such a list before, which is lost: its workers and members are heard of first.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic, *, restarted: bool = False) -> None:
        self._clock = clock
        self._quiet_until = clock() + ROSTER_SILENCE_SECONDS if restarted else -math.inf
        self._jobs: dict[str, _Job] = {}  # in the order in which they were offered
        self._folders: dict[str, str] = {}  # of these jobs and the newest that are over
        self._coordinators: dict[str, Coordinator] = {}  # the same
        self._workers: dict[str, _Worker] = {}
        self._draining: frozenset[str] = frozenset()  # nodes
        self._progress, self._looked = 0, -math.inf
        self._closed: str | None = None

    def submit(self, job: str, folder: str, wanted: int, most: int, config: Any) -> None:
        """A job waits for workers.

        Args:
            folder: of its run; two jobs on one are never worked at side by side.
            wanted: workers that it is to have.
            most: workers that it can have while others are idle.
        """
        self._jobs[job], self._folders[job] = _Job(folder, wanted, most, config, self._clock()), folder
        self._looked = -math.inf

    def coordinator(self, job: str, wanted: int, method: str, *given: Any) -> Any:
        """What a method of a job's roster, of workers of whom so many begin together, returns."""
        if job not in self._coordinators:
            self._coordinators[job] = Coordinator(wanted, self._clock, restarted=self._clock() < self._quiet_until)
        return getattr(self._coordinators[job], method)(*given)

    def poll(self, job: str) -> JobStatus | str | None:
        """What has come of a job, for whoever has offered it; why there is no crew any more; None: it is not known.

        A job that has failed is given to nobody before it was asked for twice.
        """
        self._look()
        if self._closed is not None:
            return self._closed
        if job not in self._jobs:
            return None
        offered, now = self._jobs[job], self._clock()
        offered.heard, offered.judged = now, not offered.failures
        failures, offered.failures = tuple(offered.failures), []
        over = offered.summary and (now - offered.ended > ENDING_SECONDS or not self._busy_at(job))
        return JobStatus(offered.summary if over else None, failures)

    def cancel(self, job: str) -> None:
        """Nobody waits for a job any more."""
        self._jobs.pop(job, None)
        for old in [name for name in self._folders if name not in self._jobs][:-_REMEMBERED]:
            del self._folders[old]
            self._coordinators.pop(old, None)

    def acquire(self, uid: str, place: PoolWorker) -> JobAssignment | Literal["over", "leave"] | None:
        """An idle worker asks for work; None: there is none yet; `leave`: there will be some elsewhere."""
        if self._closed is not None:
            return "over"
        if place.node in self._draining:
            self._workers.pop(uid, None)
            return "leave"
        now = self._clock()
        worker = self._rest(uid, place)
        self._look()
        if now < self._quiet_until:
            return None
        job = self._needed() or (self._helped() if now - worker.since >= IDLE_SECONDS else None)
        if job is None:
            return None
        taken = {other.number for other in self._busy_at(job)}
        worker.number = next(number for number in range(len(taken) + 1) if number not in taken)
        worker.job = job
        self._progress, self._looked = self._progress + 1, -math.inf
        return JobAssignment(job, worker.number, self._jobs[job].config)

    def heartbeat(self, uid: str, place: PoolWorker, lease: tuple[str, int], moved: bool) -> bool:
        """A worker is at work at (job, number). Returns whether it is to leave after the step in hand.

        Args:
            moved: it has finished a step since it was last heard of.
        """
        worker = self._workers.setdefault(uid, _Worker(place, 0.0, 0.0))
        worker.heard, (worker.job, worker.number) = self._clock(), lease
        self._progress += moved
        if self._clock() - self._looked >= _LOOK_SECONDS:  # or each heartbeat would cost a pass over all workers
            self._look()
        return self._leaves(worker)

    def ended(self, uid: str, place: PoolWorker, lease: tuple[str, int], outcome: Summary | Exception | None) -> None:
        """A worker has come to the end of its job, or (None) of its part in it."""
        job, number = lease
        self._rest(uid, place)
        if job in self._jobs and isinstance(outcome, Summary):
            self._jobs[job].summary, self._jobs[job].ended = outcome, self._clock()
        elif job in self._jobs and isinstance(outcome, Exception):
            self._fail(job, Failure(number, outcome))

    def drain(self, uid: str) -> None:
        """Have a worker leave its job after the step in hand; another one takes its part."""
        if uid in self._workers:
            self._workers[uid].parts = True

    def drain_nodes(self, nodes: Collection[str]) -> dict[int, str]:
        """Have the workers on these nodes, and on no others, leave after the step in hand. Returns the node of each, by
        the number of its place."""
        self._draining = frozenset(nodes)
        return {worker.place.number: worker.place.node for worker in self._workers.values()
                if worker.place.node in nodes}

    def mark_lost(self, places: Collection[int]) -> None:
        """The processes in these places have ended, as their driver knows."""
        for uid in [uid for uid, worker in self._workers.items() if worker.place.number in places]:
            self._lose(uid)

    def progress(self) -> int:
        """A number that grows as long as workers come up, or anybody gets on."""
        return self._progress

    def present(self) -> int:
        """How many workers live."""
        self._look()
        return len(self._workers)

    def close(self, reason: str) -> None:
        """There is no more work, and nobody who would do it."""
        self._closed = reason

    def _rest(self, uid: str, place: PoolWorker) -> _Worker:
        """The worker, who has no job."""
        now = self._clock()
        worker = self._workers.setdefault(uid, _Worker(place, now, now))
        worker.heard = now
        if worker.job is not None:
            worker.job, worker.parts, worker.since = None, False, now
        return worker

    def _busy_at(self, job: str) -> list[_Worker]:
        return [worker for worker in self._workers.values() if worker.job == job]

    def _stay_at(self, job: str) -> list[_Worker]:
        return [worker for worker in self._busy_at(job) if not self._leaves(worker)]

    def _leaves(self, worker: _Worker) -> bool:
        return worker.parts or worker.place.node in self._draining

    def _open(self) -> dict[str, _Job]:
        """The jobs that may be given to a worker."""
        now = self._clock()
        return {name: job for name, job in self._jobs.items()
                if job.summary is None and job.judged and not job.failures and now - job.heard <= ABSENCE_SECONDS}

    def _needed(self) -> str | None:
        """The job that waits the longest for a worker; on its folder nobody may work at another one any more."""
        others = {worker.job for worker in self._workers.values()}
        busy = {self._folders[job]: job for job in others if job in self._folders}
        return next((name for name, job in self._open().items()
                     if len(self._stay_at(name)) < job.wanted and busy.get(job.folder, name) == name), None)

    def _helped(self) -> str | None:
        """The job under way with the fewest workers that could have another one."""
        counts = {name: len(self._busy_at(name)) for name in self._open()}
        can = [name for name, count in counts.items() if 0 < count < self._jobs[name].most]
        return min(can, key=counts.__getitem__, default=None)

    def _fail(self, job: str, failure: Failure) -> None:
        self._jobs[job].failures.append(failure)
        self._jobs[job].judged = False

    def _lose(self, uid: str) -> None:
        """That a node takes its workers along when it goes is no failure of the job."""
        worker = self._workers.pop(uid)
        if worker.job in self._jobs and worker.place.node not in self._draining:
            self._fail(worker.job, Failure(worker.number, None))

    def _look(self) -> None:
        """Who has gone; and where a job waits and nobody is idle, have a helper come back."""
        self._looked = self._clock()
        for uid, worker in list(self._workers.items()):
            if worker.place.process.has_ended or self._clock() - worker.heard > SILENCE_SECONDS:
                self._lose(uid)
        coming = any(worker.job is None or worker.parts for worker in self._workers.values())
        if not coming and self._needed():
            helpers = [worker for name, job in self._jobs.items() for worker in self._stay_at(name)[job.wanted:]]
            for worker in helpers[-1:]:
                worker.parts = True
