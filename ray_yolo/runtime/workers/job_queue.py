"""The job queue of a standing worker pool: trials submit jobs, idle workers acquire them.

Starting a worker takes ten seconds or more; a standing worker starts the next job at once. Each job has a coordinator
(`runtime/workers/coordinator.py`), which forms its generations. It is an object of the queue, which saves each trial a
process. The queue only assigns workers to jobs. Workers and trials poll the queue, so a lost one is detected by its
silence.

`JobQueue` runs as an actor on the driver's node. This module imports neither Ray nor torch, because that takes seconds.
Workers are indexed by what they do, so the cost of a call does not depend on their number. At most ten times a second
all of them are scanned.
"""

from __future__ import annotations

import asyncio
import contextlib
import math
import time
from collections import Counter
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from ray_yolo.core.errors import RayYoloError
from ray_yolo.core.events import Summary
from ray_yolo.core.structures import Orders
from ray_yolo.core.system import Process, undo_niceness
from ray_yolo.runtime.workers.coordinator import SILENCE_SECONDS as COORDINATOR_SILENCE_SECONDS
from ray_yolo.runtime.workers.coordinator import Coordinator, Heartbeat, Quorum, Registration

HEARTBEAT_SECONDS = 1.0  # a worker sends a heartbeat this often if its orders stay the same
SILENCE_SECONDS = 10.0  # an idle worker departs after this silence; heartbeats contain a busy one's limit
HUNG_SECONDS = 10.0
"""Beyond a busy worker's limit. Within it, the driver of its job finds that it hangs, and kills its process. If the
queue forgot it earlier, the driver would not know it, and the process would hold its bundle for ever."""
START_SECONDS = 90.0  # the first heartbeat may come this long after an assignment: the worker receives the job
REASON_SECONDS = 3.0  # the driver may report the reason this long after the end of a worker's process
ABSENCE_SECONDS = 20.0  # a job's trial that does not poll for this long counts as dead
IDLE_SECONDS = 3.0  # a worker without a job helps with a running one after this time
LEAST_WAIT, MOST_WAIT = 0.1, 2.0  # seconds until an idle worker asks again
CALLS_PER_SECOND = 1000  # all idle workers together make this many, within these bounds
_SCAN_SECONDS = 0.1  # all workers are scanned this often
_REMEMBERED = 100  # ended jobs, whose workers may still call their coordinators
ENDING_SECONDS = 15.0  # a job's last workers may finish this long after its summary


class PoolWorker(NamedTuple):
    """A worker of the pool and where it runs."""

    bundle: int  # the number of its bundle; see `WorkerPool`
    node: str  # Ray's id of it
    process: Process


class JobAssignment(NamedTuple):
    """A job that a worker acquired."""

    job: str
    number: int  # the worker has this number in the job
    config: Any


class NextTask(NamedTuple):
    """The queue's reply to an idle worker: what it shall do now."""

    orders: Orders = Orders()  # the worker is to leave the pool, or to stop because the queue is closed
    task: JobAssignment | None = None  # the worker is to train it
    ask_again: float = 0.0  # seconds, if there is no task yet


class Failure(NamedTuple):
    """The failure of a job on one worker."""

    number: int  # the worker had this number in the job
    error: Exception | None  # None: the worker has departed for an unknown reason


class JobStatus(NamedTuple):
    """What has happened to a job since the last poll."""

    summary: Summary | None
    failures: tuple[Failure, ...]
    stopped: bool = False  # it was ordered to stop, and no worker trains it


@dataclass
class _Job:
    folder: str
    wanted: int  # workers
    most: int  # workers that can help
    config: Any
    heard: float  # it was polled last at this time
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
    since: float  # it is idle since this time
    job: str | None = None
    number: int = 0  # the worker's number in that job
    step: int = 0  # the job has reached it
    limit: float = SILENCE_SECONDS  # seconds of silence after which it counts as departed
    leaving: bool = False  # it leaves its job


@dataclass
class _Team:
    """The workers that train one job."""

    workers: dict[str, _QueueWorker] = field(default_factory=dict)  # they are sorted by the time at which they came
    leaving: set[str] = field(default_factory=set)  # those that leave after the current step
    numbers: Counter[int] = field(default_factory=Counter)  # they are taken; twice if a replaced worker returns
    first_free: int = 0  # all smaller numbers are taken

    @property
    def staying(self) -> int:
        """How many of them stay."""
        return len(self.workers) - len(self.leaving)

    def free_number(self) -> int:
        """The smallest number that no worker has."""
        while self.first_free in self.numbers:
            self.first_free += 1
        return self.first_free

    def add(self, uid: str, worker: _QueueWorker) -> None:
        """Add a worker under its number."""
        self.workers[uid] = worker
        self.numbers[worker.number] += 1

    def remove(self, uid: str) -> None:
        """Remove a worker."""
        number = self.workers.pop(uid).number
        self.leaving.discard(uid)
        self.numbers[number] -= 1
        if not self.numbers[number]:
            del self.numbers[number]
            self.first_free = min(self.first_free, number)


class JobQueue:
    """Assigns jobs to workers. No call but `wait_for_news` waits.

    Args:
        clock: returns the time in seconds.
        restarted: this queue replaces one that died; it first waits for messages of workers and jobs.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic, *, restarted: bool = False) -> None:
        self._clock = clock
        self._quiet_until = clock() + COORDINATOR_SILENCE_SECONDS if restarted else -math.inf
        self._jobs: dict[str, _Job] = {}
        """The jobs whose trials wait for their end, in the order of submission."""
        self._folders: dict[str, str] = {}
        """The run folder of each of these jobs, and of the newest cancelled ones."""
        self._coordinators: dict[str, Coordinator] = {}
        """The coordinator of each of these jobs, and of those that were never submitted, as of a fixed number."""
        self._workers: dict[str, _QueueWorker] = {}
        self._idle: set[str] = set()
        """The workers without a job."""
        self._teams: dict[str, _Team] = {}
        """The other workers, by job."""
        self._ended: dict[int, tuple[_QueueWorker, float]] = {}
        """The workers whose processes have ended, by bundle, and when: the driver is about to report the reason."""
        self._leaving: set[str] = set()
        """The workers that leave their job, but not because of their node or bundle."""
        self._draining: frozenset[str] = frozenset()
        """The nodes whose workers leave."""
        self._given: frozenset[int] = frozenset()
        """The bundles that other programs of the cluster get."""
        self._progress, self._scanned = 0, -math.inf
        self._has_changed = True
        """Whether anything has changed since the next jobs were chosen."""
        self._next_needed: str | None = None
        """The job that the next idle worker gets."""
        self._next_helped: str | None = None
        """The job that an idle worker gets if it has been idle for long."""
        self._stops = False
        """Whether all jobs were ordered to stop."""
        self._ordered = asyncio.Event()
        """Set, and replaced, at each order that workers should get at once."""
        self._closed: RayYoloError | None = None
        """Why there is no more work."""

    def submit(self, job: str, folder: str, wanted: int, most: int, config: Any, priority: float = 0.0) -> None:
        """Add a job.

        Args:
            folder: of its run; two jobs in one folder never run at the same time.
            wanted: number of workers that it waits for.
            most: number of workers that it can use while others are idle.
            priority: workers are assigned to the job of the least priority first, among equal ones to the first.
        """
        self._jobs[job], self._folders[job] = _Job(folder, wanted, most, config, self._clock(), priority), folder
        self._has_changed = True

    def coordinator(self, job: str, wanted: int, method: str, *arguments: Any) -> Any:
        """Call a method of a job's coordinator, whose first generation has `wanted` workers."""
        return getattr(self._coordinator(job, wanted), method)(*arguments)

    def _coordinator(self, job: str, wanted: int) -> Coordinator:
        if job not in self._coordinators:
            made = Coordinator(wanted, self._clock, restarted=self._clock() < self._quiet_until)
            if self._stops:
                made.stop()
            self._coordinators[job] = made
        return self._coordinators[job]

    def order(self, job: str, wanted: int, method: str, *arguments: Any) -> Any:
        """As `coordinator`, for a method that changes workers' orders: heartbeats that wait are answered at once."""
        reply = self.coordinator(job, wanted, method, *arguments)
        self._announce()
        return reply

    def stop(self) -> bool:
        """Order all jobs to stop after their current step, and assign no more. Returns whether workers have steps to
        save."""
        self._stops = True
        for job in self._jobs.values():
            job.news.set()
        self._announce()
        have_steps = [coordinator.stop() for coordinator in self._coordinators.values()]
        return any(have_steps)

    async def wait_for_news(self, job: str, seconds: float) -> JobStatus | RayYoloError | None:
        """`poll`, at the next failure or end of a worker's part in the job, or after `seconds`."""
        if job in self._jobs and self._closed is None:
            with contextlib.suppress(asyncio.TimeoutError):
                await asyncio.wait_for(self._jobs[job].news.wait(), seconds)
        return self.poll(job)

    def poll(self, job: str) -> JobStatus | RayYoloError | None:
        """The status of a job for its trial. An error: the queue is closed for this reason. None: the job is unknown.

        After a failure, no worker acquires the job until it was polled twice. By then the failure policy has decided.
        """
        self._scan()
        if self._closed is not None:
            return self._closed
        if job not in self._jobs:
            return None
        state, now = self._jobs[job], self._clock()
        state.news.clear()
        failures, state.failures = tuple(state.failures), []
        was_open = state.judged and not failures and now - state.heard <= ABSENCE_SECONDS
        state.heard, state.judged = now, not failures
        self._has_changed |= not was_open
        over = state.summary and (now - state.ended > ENDING_SECONDS or job not in self._teams)
        return JobStatus(state.summary if over else None, failures, stopped=self._stops and job not in self._teams)

    def cancel(self, job: str) -> None:
        """A job's trial no longer waits for it."""
        self._jobs.pop(job, None)
        self._has_changed = True
        for old in [name for name in self._folders if name not in self._jobs][:-_REMEMBERED]:
            del self._folders[old]
            self._coordinators.pop(old, None)

    def next_task(self, uid: str, worker: PoolWorker) -> NextTask:
        """What an idle worker shall do. It leaves if its node is draining, or its bundle is given away."""
        if self._closed is not None:
            return NextTask(Orders(stop=True))
        if worker.node in self._draining or worker.bundle in self._given:
            self._remove(uid)
            return NextTask(Orders(leave=True))
        idle = self._set_idle(uid, worker)
        self._scan()
        job = self._choose(idle)
        if job is None:
            return NextTask(ask_again=min(max(LEAST_WAIT, len(self._idle) / CALLS_PER_SECOND), MOST_WAIT))
        # The worker counts as training from now on: its start-up takes seconds, and no second one must take its place.
        team = self._teams.get(job)
        idle.number = team.free_number() if team else 0
        idle.limit = START_SECONDS
        self._set_busy(uid, idle, job)
        self._progress += 1
        return NextTask(task=JobAssignment(job, idle.number, self._jobs[job].config))

    async def report(self, known: Orders, job: str, wanted: int, member: str, heartbeat: Heartbeat,
                     current: tuple[Registration, Quorum] | None, seat: tuple[str, PoolWorker, int] | None) -> Orders:
        """A worker's heartbeat. Returns its orders: at once if they are not the `known` ones, else as soon as they
        change by an order, or after `HEARTBEAT_SECONDS`.

        Args:
            wanted: see `coordinator`.
            member: the worker's id in the job's coordinator.
            current: see `Coordinator.heartbeat`.
            seat: of a worker of this pool: its id in the queue, its place, and its number in the job.
        """
        if seat:
            uid, worker, number = seat
            orders = self.heartbeat(uid, worker, (job, number), wanted, member, heartbeat, current)
        else:
            uid, orders = "", self._coordinator(job, wanted).heartbeat(member, heartbeat, current)
        until = self._clock() + HEARTBEAT_SECONDS
        while orders == known and (seconds := until - self._clock()) > 0:
            with contextlib.suppress(asyncio.TimeoutError):
                await asyncio.wait_for(self._ordered.wait(), seconds)
            orders = self._orders(uid, job, wanted, member, current)
        return orders

    def heartbeat(self, uid: str, worker: PoolWorker, assignment: tuple[str, int], wanted: int, member: str,
                  heartbeat: Heartbeat, current: tuple[Registration, Quorum] | None = None) -> Orders:
        """A worker of this pool trains at (job, number). Returns its orders at once; see `report`."""
        state = self._workers.get(uid) or _QueueWorker(worker, 0.0, 0.0)
        state.heard, state.limit = self._clock(), heartbeat.heartbeat_limit + HUNG_SECONDS
        job, number = assignment
        if (state.job, state.number) != assignment:  # this queue does not know it, as after a restart
            self._remove(uid)
            state.number = number
            self._workers[uid] = state
            self._set_busy(uid, state, job)
        if heartbeat.leaves and not state.leaving:
            self._let_leave(uid, state)  # another worker takes its part
        self._progress += heartbeat.step > state.step
        state.step = heartbeat.step
        self._scan()
        self._coordinator(job, wanted).heartbeat(member, heartbeat, current)
        return self._orders(uid, job, wanted, member, current)

    def _orders(self, uid: str, job: str, wanted: int, member: str, current: object) -> Orders:
        """The orders of a member of a job, which has the id `uid` in the queue if it is a worker of this pool."""
        worker = self._workers.get(uid)
        leaves = False
        if worker is not None and worker.job == job and self._leaves(worker):
            leaves = True
            self._coordinator(job, wanted).let_leave(member, at_once=worker.identity.bundle in self._given)
        orders: Orders = self._coordinator(job, wanted).orders(member, is_in_group=current is not None)
        is_cancelled = job in self._folders and job not in self._jobs  # no driver waits for its end
        return orders._replace(leave=orders.leave or leaves, stop=orders.stop or is_cancelled)

    def _announce(self) -> None:
        """Reply to the heartbeats that wait for orders."""
        self._ordered.set()
        self._ordered = asyncio.Event()

    def ended(self, uid: str, worker: PoolWorker, assignment: tuple[str, int], result: Summary | Exception | None
              ) -> None:
        """A worker has finished its job, or (None) its part in it."""
        name, number = assignment
        self._set_idle(uid, worker)
        job = self._jobs.get(name)
        if job is None:
            return
        if isinstance(result, Summary):
            job.summary, job.ended = result, self._clock()
        elif isinstance(result, Exception):
            job.failures.append(Failure(number, result))
            job.judged = False
        job.news.set()
        self._has_changed = True

    def drain_nodes(self, nodes: Collection[str]) -> dict[int, str]:
        """Make the workers on exactly these nodes leave after the current step. Returns the node of each, by the number
        of its bundle."""
        if nodes != self._draining:
            self._draining = frozenset(nodes)
            self._mark_leaving()
        return {worker.identity.bundle: worker.identity.node for worker in self._workers.values()
                if worker.identity.node in nodes}

    def give_bundles(self, bundles: Collection[int]) -> None:
        """Make the workers of exactly these bundles leave after the current step, for other programs of the cluster."""
        if bundles != self._given:
            self._given = frozenset(bundles)
            self._mark_leaving()

    def mark_departed(self, errors: Mapping[int, Exception]) -> list[int]:
        """The driver reports bundles whose processes have ended, and why. Returns those that trained no job; a job
        learns of the others."""
        without_job = []
        for uid in [uid for uid, worker in self._workers.items() if worker.identity.bundle in errors]:
            self._take_out(uid)
        for bundle, error in errors.items():
            if bundle in self._ended:
                worker, _ = self._ended.pop(bundle)
                self._fail(worker, error)
            else:
                without_job.append(bundle)
        return without_job

    def progress(self) -> int:
        """A number that grows while workers start or train."""
        return self._progress

    def present(self) -> int:
        """The number of living workers."""
        self._scan()
        return len(self._workers)

    def close(self, reason: RayYoloError) -> None:
        """Close the queue: there is no more work. Trials receive the reason."""
        self._closed = reason
        for job in self._jobs.values():
            job.news.set()

    # The indices of workers

    def _set_idle(self, uid: str, worker: PoolWorker) -> _QueueWorker:
        now = self._clock()
        state = self._workers.get(uid)
        if state is None or state.job is not None:
            self._remove(uid)
            state = _QueueWorker(worker, now, since=now)
            self._workers[uid] = state
            self._idle.add(uid)
        state.heard = now
        return state

    def _set_busy(self, uid: str, worker: _QueueWorker, job: str) -> None:
        """Add a worker with its number to a job's team."""
        worker.job = job
        self._idle.discard(uid)
        team = self._teams.setdefault(job, _Team())
        team.add(uid, worker)
        if self._leaves(worker):
            team.leaving.add(uid)
        self._has_changed = True

    def _let_leave(self, uid: str, worker: _QueueWorker) -> None:
        """Make a worker leave its job after the current step."""
        assert worker.job is not None, "it trains"
        worker.leaving = True
        self._leaving.add(uid)
        self._teams[worker.job].leaving.add(uid)
        self._has_changed = True
        self._announce()

    def _remove(self, uid: str) -> _QueueWorker | None:
        """Remove a worker from all indices; returns it if it was known."""
        worker = self._workers.pop(uid, None)
        if worker is None:
            return None
        self._idle.discard(uid)
        self._leaving.discard(uid)
        if worker.job is not None:
            self._has_changed = True
            team = self._teams[worker.job]
            team.remove(uid)
            if not team.workers:
                del self._teams[worker.job]
        return worker

    def _leaves(self, worker: _QueueWorker) -> bool:
        return worker.leaving or self._leaves_pool(worker)

    def _leaves_pool(self, worker: _QueueWorker) -> bool:
        """Whether a worker leaves for good: its end is no failure."""
        return worker.identity.node in self._draining or worker.identity.bundle in self._given

    def _mark_leaving(self) -> None:
        """Mark the workers that leave after a change of what is draining or given away."""
        self._has_changed = True
        self._announce()
        for team in self._teams.values():
            team.leaving = {uid for uid, worker in team.workers.items() if self._leaves(worker)}

    def _staying(self, job: str) -> int:
        """The number of workers that train a job and stay."""
        return self._teams[job].staying if job in self._teams else 0

    # Decisions

    def _choose(self, idle: _QueueWorker) -> str | None:
        """The job of an idle worker, if there is one for it."""
        now = self._clock()
        if now < self._quiet_until or self._stops:
            return None
        self._choose_next()
        if self._next_needed is None and now - idle.since >= IDLE_SECONDS:
            return self._next_helped
        return self._next_needed

    def _choose_next(self) -> None:
        """Choose the next jobs again, if anything has changed."""
        if self._has_changed:
            open_jobs = self._open()
            self._next_needed, self._next_helped = self._needed(open_jobs), self._helped(open_jobs)
            self._has_changed = False

    def _open(self) -> dict[str, _Job]:
        """The jobs that workers may acquire."""
        now = self._clock()
        return {name: job for name, job in self._jobs.items()
                if job.summary is None and job.judged and not job.failures and now - job.heard <= ABSENCE_SECONDS}

    def _needed(self, open_jobs: Mapping[str, _Job]) -> str | None:
        """The most urgent job that waits for a worker, unless workers still train another job of its folder."""
        trained = {self._folders[job]: job for job in self._teams if job in self._folders}
        waiting = [name for name, job in open_jobs.items()
                   if self._staying(name) < job.wanted and trained.get(job.folder, name) == name]
        return min(waiting, key=lambda name: open_jobs[name].priority, default=None)

    def _helped(self, open_jobs: Mapping[str, _Job]) -> str | None:
        """The most urgent running job that can use another worker; of equally urgent jobs, the one with the fewest."""
        counts = {name: len(self._teams[name].workers) for name in open_jobs if name in self._teams}
        can = [name for name, count in counts.items() if count < open_jobs[name].most]
        return min(can, key=lambda name: (open_jobs[name].priority, counts[name]), default=None)

    def _fail(self, worker: _QueueWorker, error: Exception | None) -> None:
        """Report a failure to a worker's job. If it was to leave the pool, its departure is none."""
        if worker.job not in self._jobs or self._leaves_pool(worker):
            return
        job = self._jobs[worker.job]
        job.failures.append(Failure(worker.number, error))
        job.judged = False
        job.news.set()
        self._has_changed = True

    def _take_out(self, uid: str) -> None:
        """Remove a worker whose process has ended. If it trained a job, the job gets the reason."""
        worker = self._remove(uid)
        if worker and worker.job is not None:
            self._ended[worker.identity.bundle] = worker, self._clock()

    def _scan(self) -> None:
        """Drop departed workers, at most ten times a second. After a change, let a helper leave if a job waits."""
        now = self._clock()
        if now - self._scanned >= _SCAN_SECONDS:
            self._scanned, self._has_changed = now, True  # jobs become absent by time alone
            self._drop_departed(now)
        if not self._idle and not self._leaving:
            self._choose_next()
            if self._next_needed:
                self._let_helper_leave()

    def _drop_departed(self, now: float) -> None:
        for uid, worker in list(self._workers.items()):
            if worker.identity.process.has_ended:
                self._take_out(uid)
            elif now - worker.heard > worker.limit:
                self._remove(uid)
                self._fail(worker, None)
        for bundle, (worker, ended) in list(self._ended.items()):
            if now - ended > REASON_SECONDS:
                del self._ended[bundle]
                self._fail(worker, None)

    def _let_helper_leave(self) -> None:
        """Let the last helper leave the newest job that has more workers than it waits for."""
        for name, job in reversed(self._jobs.items()):
            if self._staying(name) <= job.wanted:
                continue
            team = self._teams[name]
            uid = next(uid for uid in reversed(team.workers) if uid not in team.leaving)
            self._let_leave(uid, team.workers[uid])
            return


class JobQueueActor(JobQueue):
    """The queue as an actor. If its process dies, Ray starts it again; workers and drivers then report to it."""

    def __init__(self) -> None:
        import ray  # here: the process of an actor has imported it, and has not to import more before it replies

        undo_niceness()  # all workers wait for it
        super().__init__(restarted=bool(ray.get_runtime_context().was_current_actor_reconstructed))
