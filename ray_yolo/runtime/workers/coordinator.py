"""Membership of one training: its workers, their generations, and the worker that others wait for.

A generation is a process group. The next generation forms between two steps, when all living members of the current one
have registered for it. Waiting newcomers become members too. A worker without heartbeats counts as dead; if it returns,
it joins as a new worker.

`Coordinator` runs as an actor next to the recorder. It imports neither Ray nor torch, because these imports take
seconds. The cost of a heartbeat does not depend on the number of workers. At most ten times a second all of them are
scanned, and the driver's queries take one pass over them.
"""

from __future__ import annotations

import math
import time
from collections import Counter, OrderedDict
from collections.abc import Callable, Collection, Mapping
from enum import Flag, auto
from operator import attrgetter
from typing import Literal, NamedTuple

from ray_yolo.core.events import Summary
from ray_yolo.core.structures import Progress, WorkerStatus
from ray_yolo.core.system import Process

SILENCE_SECONDS = 3.0  # without a heartbeat until a worker counts as dead; it sends one a second
STALL_REPORT_SECONDS = 8.0  # without a step, until a stall is reported
ABSENCE_SECONDS = 60.0  # after the last worker was lost, until that is reported; to start others takes less
STACKS_SECONDS = 2.5  # from finding a hung worker to killing it, in which all workers dump their stacks
SETTLE_SECONDS = 60.0  # to wait for more workers when the first generation forms
PEERS_NEEDED = ("exchanging", "validating", "joining")  # phases in which a worker may be inside a collective
_PEERS_ONLY = ("exchanging", "joining")  # phases whose duration depends on peers alone
_SCAN_SECONDS = 0.1  # between two scans of all workers for silent and ended ones
_REMEMBERED = 1000  # departed workers


class Heartbeat(NamedTuple):
    """What a worker is doing."""

    phase: str
    step: int
    seconds: float  # since the phase began
    limit: float  # how long it may last while others wait
    heartbeat_limit: float = 30.0  # seconds without a heartbeat after which the worker is lost
    must_leave: bool = False  # after the current step


class Registration(NamedTuple):
    """A worker that requests to join the next generation."""

    worker: int  # its number among Ray's
    process: Process
    address: tuple[str, int]  # at which peers reach it
    progress: Progress | None  # of its training state; None: it has none
    heartbeat: Heartbeat
    node: str = ""  # Ray's id of it
    timeout_seconds: float = 600.0  # after which a collective has failed


class Quorum(NamedTuple):
    """A generation, from the point of view of one member."""

    number: int
    worker: int
    num_workers: int
    address: tuple[str, int]  # of worker 0
    source: int | None  # the worker with the furthest state; None: no worker has a state
    behind: bool
    members: tuple[int, ...] = ()  # their numbers among Ray's; for worker 0 alone, which records them
    nodes: tuple[str, ...] = ()  # of the workers, if there are several


class HeartbeatReply(NamedTuple):
    """The reply to a heartbeat."""

    must_regroup: bool  # a worker waits to join, or has to leave
    stack_dump_requests: int  # so far; at each new one every worker dumps its stacks
    peer_lost: bool  # this generation's collectives cannot finish: abort them
    all_draining: bool  # all members have to leave, and no other worker could take over the state
    must_leave: bool = False  # the queue of a pool wants the worker to leave this job after the current step
    unknown: bool = False  # the worker is not registered, as after a restart: see `Coordinator.introduce`


class HungWorker(NamedTuple):
    """A worker that makes no progress while others wait for it."""

    process: Process
    text: str


class WorkerState(Flag):
    """What the coordinator knows of a worker; several may hold at once."""

    WAITING = auto()  # for the next generation
    MEMBER = auto()  # of the current generation
    DRAINING = auto()  # leaves before the next generation
    SILENT = auto()  # has sent no heartbeat lately, so it counts as dead
    LEFT = auto()  # has left, or was lost: it is not registered any more


WAITING, MEMBER, DRAINING, SILENT, LEFT = WorkerState
NOTHING = WorkerState(0)


class _Worker(NamedTuple):
    """A worker that has registered."""

    registration: Registration
    heartbeat: Heartbeat  # the newest
    heard: float  # when the newest heartbeat came
    state: WorkerState
    quorum: Quorum | None = None  # of the newest generation that it was a member of

    def is_in(self, states: WorkerState, *, but_not: WorkerState = NOTHING) -> bool:
        """Whether it is in all of some states, and in none of others."""
        return _holds(self.state, states, but_not)

    @property
    def name(self) -> str:
        process = self.registration.process
        return f"worker {self.registration.worker} on {process.node} (process {process.pid})"

    def idle(self, now: float) -> float:
        """Seconds in its current phase, by the newest heartbeat."""
        return now - self.heard + self.heartbeat.seconds


def _holds(state: WorkerState, states: WorkerState, but_not: WorkerState) -> bool:
    return state & (states | but_not) == states


class _View(NamedTuple):
    """All workers at one moment."""

    now: float
    left_at: float  # when a member last left the generation
    inside: Mapping[str, _Worker]  # the members that have not left
    size: int  # of the generation; of these members
    alive: int
    waiting: int  # members that may wait for another
    surely_waiting: int
    furthest: int  # step
    broken: bool  # the generation's collectives cannot finish

    @staticmethod
    def may_wait(worker: _Worker) -> bool:
        """Whether a member may wait for others, by its phase."""
        is_in_exchange = worker.heartbeat.phase in PEERS_NEEDED
        return SILENT not in worker.state and (WAITING in worker.state or is_in_exchange)

    @staticmethod
    def surely_waits(worker: _Worker) -> bool:
        """Whether a member waits for others without doing any work."""
        is_exchanging = worker.heartbeat.phase == "exchanging"
        return SILENT not in worker.state and (WAITING in worker.state or is_exchanging)

    def silence(self, worker: _Worker) -> float:
        """Seconds without a heartbeat."""
        return self.now - worker.heard

    def waited(self, worker: _Worker) -> float:
        """Seconds without progress since the last departure: before that, a member may have waited for that worker."""
        return min(worker.idle(self.now), self.now - self.left_at)

    def is_blocked(self, worker: _Worker) -> bool:
        """Whether a member is in an exchange that only its peers can finish."""
        is_last = worker.heartbeat.step == self.furthest
        return (self.surely_waits(worker) and WAITING not in worker.state and is_last and len(self.inside) > 1
                and not self.broken)

    def is_needed(self, worker: _Worker) -> bool:
        """Whether another member waits for this one; the last living member always counts as needed."""
        if SILENT in worker.state:
            return self.waiting > 0
        return self.surely_waiting > self.surely_waits(worker) or self.alive == 1

    def lateness(self, worker: _Worker) -> float:
        """Seconds by which a silent worker, or a member that others wait for, exceeds its limit."""
        silent = self.silence(worker) - worker.heartbeat.heartbeat_limit
        if not worker.is_in(MEMBER, but_not=WAITING) or self.is_blocked(worker):
            return silent
        if not self.broken and not self.is_needed(worker):
            return silent
        return max(silent, self.waited(worker) - worker.heartbeat.limit)

    def is_deadlock(self) -> bool:
        """Whether all remaining members wait for one another beyond the limit, which is shorter after a departure."""
        def limit(worker: _Worker) -> float:
            return worker.heartbeat.limit if self.left_at > -math.inf else worker.registration.timeout_seconds

        return bool(self.inside) and not self.broken and all(
            SILENT not in worker.state and worker.heartbeat.phase in _PEERS_ONLY and self.waited(worker) > limit(worker)
            for worker in self.inside.values())


class Coordinator:
    """Tracks the members of one training. No call blocks.

    Args:
        wanted: number of workers for the first generation, if they register in time.
        clock: returns the time in seconds.
        restarted: this coordinator replaces one that died; members introduce themselves first.
    """

    def __init__(self, wanted: int, clock: Callable[[], float] = time.monotonic, *, restarted: bool = False) -> None:
        self._wanted, self._clock = wanted, clock
        self._workers: dict[str, _Worker] = {}
        self._states: Counter[WorkerState] = Counter()  # of these; without those of no worker
        self._departed: OrderedDict[str, WorkerState] = OrderedDict()  # the newest that have LEFT
        self._numbered: dict[int, str] = {}  # the newest worker of each number
        self._scanned = -math.inf
        self._quiet_until = clock() + SILENCE_SECONDS if restarted else -math.inf
        self._first_waiting_at = 0.0  # when the first of the waiting workers registered
        self._number = self._saver_elected = 0
        self._generation: tuple[int, tuple[str, int]] | None = None  # its number and the address of its first worker
        self._left_at, self._left = -math.inf, dict[int, str]()  # the last departure, and the members that have left
        self._broken = False  # the generation's collectives cannot finish
        self._formed_at: Progress | None = None  # the progress with which the generation began
        self._departures = 0  # members that have departed from the generation
        self._failed_alone = 0  # generations in a row that ended without a step, although no member had departed
        self._hung, self._hung_at, self._stack_dump_requests = "", 0.0, 0
        self._reported_stall: tuple[str, int] | None = None  # the worker, and the step before the stall
        self._reported_absence = 0  # number of the generation whose workers were all lost
        self._ended: Summary | None = None

    def register(self, uid: str, registration: Registration) -> None:
        """A worker between two steps requests to join the next generation; a departed worker is ignored."""
        now = self._refresh()
        if uid in self._departed:
            return
        before = self._workers.get(uid)
        if not self._any(WAITING):
            self._first_waiting_at = now
        state, quorum = WAITING, None
        if before:
            state |= before.state & (MEMBER | DRAINING)
            quorum = before.quorum
            if MEMBER in state:
                self._left_at, self._left[registration.worker] = now, before.name
        if registration.heartbeat.must_leave:
            state |= DRAINING
        self._numbered[registration.worker] = uid
        self._put(uid, _Worker(registration, registration.heartbeat, now, state, quorum))

    def quorum(self, uid: str) -> Quorum | Summary | Literal["left", "unknown"] | None:
        """The reply to a registered worker.

        | reply | meaning |
        |---|---|
        | `Quorum` | the generation that the worker belongs to |
        | `Summary` | training has ended |
        | `left` | the others continue without this worker: it was draining, or counted as lost |
        | `unknown` | the worker has to register again |
        | None | not known yet |
        """
        if self._ended:
            return self._ended
        now = self._refresh()
        if uid in self._workers and self._is_ready(now):
            self._form()
        if (worker := self._workers.get(uid)) is None:
            return "left" if uid in self._departed else "unknown"
        if worker.is_in(DRAINING, but_not=MEMBER) and self._can_do_without(worker):
            self.leave(uid)
            return "left"
        return None if WAITING in worker.state else worker.quorum

    def introduce(self, uid: str, registration: Registration, quorum: Quorum) -> bool:
        """A member reports its generation to a coordinator that has no record of it, as after a restart.

        Returns:
            Whether that generation is the current one, or the worker is known meanwhile. If not, it has to register.
        """
        now = self._refresh()
        if uid in self._workers:
            return True
        if uid in self._departed:
            return False
        own = quorum.number, quorum.address
        if quorum.number > self._number:  # the first member after a restart
            self._end_generation()
            self._number, self._generation = quorum.number, own
        if self._generation != own:
            return False
        self._numbered[registration.worker] = uid
        state = MEMBER | DRAINING if registration.heartbeat.must_leave else MEMBER
        self._put(uid, _Worker(registration, registration.heartbeat, now, state, quorum))
        return True

    def heartbeat(self, uid: str, heartbeat: Heartbeat) -> HeartbeatReply:
        """A worker reports its phase."""
        now = self._refresh()
        worker = self._workers.get(uid)
        if worker is None:
            lost = uid in self._departed
            return HeartbeatReply(False, self._stack_dump_requests, lost, all_draining=False, unknown=not lost)
        state = worker.state & ~SILENT
        if heartbeat.must_leave:
            state |= DRAINING
        self._put(uid, worker._replace(heartbeat=heartbeat, heard=now, state=state))
        newcomers = self._any(WAITING, but_not=SILENT | MEMBER)
        draining = self._any(MEMBER | DRAINING)
        staying = self._any(MEMBER, but_not=SILENT | DRAINING)
        member = MEMBER in state
        return HeartbeatReply(newcomers or (draining and staying), self._stack_dump_requests, member and self._broken,
                              member and not staying)

    def drain_nodes(self, nodes: Collection[str]) -> dict[int, str]:
        """Make all workers on some nodes leave after the current step; the last one stays until another worker has its
        state. Returns the node of each, by its number.
        """
        workers = {uid: worker for uid, worker in self._workers.items() if worker.registration.node in nodes}
        for uid, worker in workers.items():
            self._put(uid, worker._replace(state=worker.state | DRAINING))
        return {worker.registration.worker: worker.registration.node for worker in workers.values()}

    def leave(self, uid: str) -> None:
        """A worker has left and will not register again."""
        worker = self._drop(uid)
        if worker and MEMBER in worker.state:
            self._left_at, self._left[worker.registration.worker] = self._clock(), worker.name
            self._departures += 1
        state = worker.state if worker else self._departed.get(uid, NOTHING)
        self._departed[uid] = LEFT | (state & DRAINING)
        if len(self._departed) > _REMEMBERED:
            self._departed.popitem(last=False)

    def mark_lost(self, workers: Collection[int]) -> list[int]:
        """The driver reports the numbers of workers whose processes have ended. Returns the failed ones: those that
        were not draining."""
        if any(number in self._left for number in workers):  # left with an error, unknown to peers
            self._broken = True
        failed = [number for number in workers if not self._drains(number)]
        lost = [uid for uid, worker in self._workers.items() if worker.registration.worker in workers]
        for uid in lost:
            self._lose(uid)
        return failed

    def _drains(self, number: int) -> bool:
        """Whether the newest worker of a number is, or was, about to leave."""
        uid = self._numbered.get(number, "")
        if uid in self._workers:
            return DRAINING in self._workers[uid].state
        return DRAINING in self._departed.get(uid, NOTHING)

    def end(self, summary: Summary) -> None:
        """Training has ended."""
        self._ended = summary

    def outcome(self) -> Summary | None:
        """How training has ended, if it has."""
        return self._ended

    def present(self) -> int:
        """The number of living workers."""
        self._refresh()
        return self._count(NOTHING, but_not=SILENT)

    def worker_statuses(self) -> tuple[WorkerStatus, ...]:
        """Members and waiting workers, by number, without those that have ended."""
        view, statuses = self._view(), list[WorkerStatus]()
        for worker in self._workers.values():
            heartbeat, registration = worker.heartbeat, worker.registration
            phase, seconds = heartbeat.phase, worker.idle(view.now)
            if SILENT in worker.state:
                phase, seconds = "silent", view.silence(worker)
            waits = SILENT not in worker.state and (WAITING in worker.state or view.is_blocked(worker))
            statuses.append(WorkerStatus(
                worker=registration.worker, node=registration.process.node, pid=registration.process.pid, phase=phase,
                step=heartbeat.step, seconds=seconds, waits=waits))
        return tuple(sorted(statuses, key=attrgetter("worker", "node", "pid")))

    def describe_stall(self) -> str | None:
        """A warning about a stall, once for each step. It names the hung worker, or states that all workers wait for
        one another and regroup, which this call starts, or that none is left.
        """
        view = self._view()
        if self._ended:
            return None
        if self._broken and not self.present():
            return self._describe_absence(view.now)
        if view.size < 2:
            return None
        if view.is_deadlock():
            return self._abort_exchange(view)
        busy = {uid: worker for uid, worker in view.inside.items() if not view.is_blocked(worker)}
        if not busy:
            return None

        def slowness(uid: str) -> tuple[bool, float]:
            return SILENT in busy[uid].state, busy[uid].idle(view.now)  # a silent one before all others

        slowest = max(busy, key=slowness)
        slow = busy[slowest]
        heartbeat = slow.heartbeat
        stall = (slowest, heartbeat.step)
        if self._reported_stall == stall or not view.is_needed(slow):
            return None
        reasons: list[tuple[str, float, float]] = []  # what it does, for how long, and how long it may
        # A silent worker may have waited for others when its heartbeats stopped.
        if SILENT not in slow.state or heartbeat.phase not in PEERS_NEEDED:
            reasons.append((heartbeat.phase, slow.idle(view.now), heartbeat.limit))
        reasons.append(("without a heartbeat", view.silence(slow), heartbeat.heartbeat_limit))
        for doing, seconds, limit in reasons:
            if seconds < max(STALL_REPORT_SECONDS, limit / 4):
                continue
            self._reported_stall = stall
            waiting = view.waiting
            if view.may_wait(slow):
                waiting -= 1  # it does not wait for itself
            return (f"training stalls: {waiting} of {view.size} workers wait for {slow.name}, {doing} for "
                    f"{seconds:.0f} s after step {heartbeat.step}")
        return None

    def _describe_absence(self, now: float) -> str | None:
        """A warning, once, if the members of a generation were lost and no worker has started since: Ray waits for room
        for them without a word."""
        if self._reported_absence == self._number or now - self._left_at < ABSENCE_SECONDS:
            return None
        self._reported_absence = self._number
        return (f"all workers are lost, and none has started for {ABSENCE_SECONDS:.0f} s: Ray waits until the cluster "
                "has room for them (see `ray status`); to continue on fewer, stop this command, and run it again with "
                "--resume and a smaller --num-workers")

    def may_regroup(self, limit: int) -> bool:
        """Whether another generation may form, after at most `limit` (-1: any number) in a row that have failed by
        themselves: no step was finished, and no member had departed. Such workers cannot reach each other. If a member
        departs, the failure policy of the driver counts it.
        """
        return limit < 0 or self._failed_alone <= limit

    def elect_saver(self, generation: int) -> bool:
        """Whether the caller is the first of its generation to call this; it saves the last finished step.

        The number of the generation is the caller's, because a restarted coordinator may not know it yet.
        """
        is_first = generation > self._saver_elected
        self._saver_elected = max(generation, self._saver_elected)
        return is_first

    def find_hung_worker(self) -> HungWorker | None:
        """The worker that exceeds its limit most, once all workers have dumped their stacks."""
        view = self._view()
        now, late = view.now, {uid: view.lateness(worker) for uid, worker in self._workers.items()}
        uid = max(late, key=late.__getitem__, default="")
        if self._ended or not uid or late[uid] <= 0:
            self._hung = ""
            return None
        if uid != self._hung:
            self._hung, self._hung_at, self._stack_dump_requests = uid, now, self._stack_dump_requests + 1
        if now - self._hung_at < STACKS_SECONDS:
            return None
        worker = self._workers[uid]
        self._lose(uid)
        return HungWorker(worker.registration.process, f"{worker.name} has not moved for {worker.idle(now):.0f} s "
                                               f"({worker.heartbeat.phase}, after step {worker.heartbeat.step})")

    def _refresh(self) -> float:
        """The time. Marks workers as dead that are silent, or whose processes on this machine have ended."""
        now = self._clock()
        if now - self._scanned >= _SCAN_SECONDS:
            self._scanned = now
            for uid, worker in list(self._workers.items()):
                if worker.registration.process.has_ended:
                    self._lose(uid)
                elif SILENT not in worker.state and now - worker.heard > SILENCE_SECONDS:
                    self._put(uid, worker._replace(state=worker.state | SILENT))
        return now

    def _count(self, states: WorkerState, *, but_not: WorkerState = NOTHING) -> int:
        """The number of workers that are in all of some states, and in none of others."""
        return sum(number for state, number in self._states.items() if _holds(state, states, but_not))

    def _any(self, states: WorkerState, *, but_not: WorkerState = NOTHING) -> bool:
        """Whether there is such a worker."""
        return any(_holds(state, states, but_not) for state in self._states)

    def _put(self, uid: str, worker: _Worker) -> None:
        before = self._workers.get(uid)
        self._workers[uid] = worker
        if before and before.state is worker.state:
            return
        if before:
            self._uncount(before.state)
        self._states[worker.state] += 1

    def _drop(self, uid: str) -> _Worker | None:
        worker = self._workers.pop(uid, None)
        if worker:
            self._uncount(worker.state)
        return worker

    def _uncount(self, state: WorkerState) -> None:
        self._states[state] -= 1
        if not self._states[state]:
            del self._states[state]

    def _lose(self, uid: str) -> None:
        """A worker has ended, or is being killed, without having left."""
        if MEMBER in self._workers[uid].state:
            self._broken = True
        self.leave(uid)

    def _can_do_without(self, newcomer: _Worker) -> bool:
        """Whether other workers train, or will train, without a newcomer."""
        staying = self._any(WAITING, but_not=SILENT | DRAINING)
        return self._any(MEMBER) or (staying and newcomer.registration.progress is None)

    def _is_ready(self, now: float) -> bool:
        """Whether the next generation can form. Draining workers count only if no other worker waits."""
        waiting = self._count(WAITING, but_not=SILENT)
        staying = self._count(WAITING, but_not=SILENT | DRAINING)
        if now < self._quiet_until or not waiting or self._any(MEMBER, but_not=SILENT | WAITING):
            return False
        wanted = 1 if self._number else self._wanted  # a restart from a checkpoint waits for no further workers
        if self._any(MEMBER | WAITING) or (staying or waiting) >= wanted:
            return True
        return now - self._first_waiting_at > SETTLE_SECONDS

    def _form(self) -> None:
        chosen = {uid: worker for uid, worker in self._workers.items() if worker.is_in(WAITING, but_not=SILENT)}
        if self._can_do_without_draining(chosen.values()):
            for uid, worker in list(chosen.items()):
                if DRAINING in worker.state:
                    del chosen[uid]
                    self.leave(uid)
        self._end_generation()

        ranked = _rank(chosen)
        registrations = [chosen[uid].registration for uid in ranked]
        reached = [registration.progress for registration in registrations]
        known = [progress for progress in reached if progress]
        furthest = max(known) if known else None
        source = None if furthest is None else reached.index(furthest)  # the others copy its weights
        is_anyone_behind = any(progress != furthest for progress in reached)
        has_failed_alone = self._number > 0 and not self._departures and furthest == self._formed_at
        self._failed_alone = self._failed_alone + 1 if has_failed_alone else 0
        self._formed_at, self._departures = furthest, 0

        nodes = tuple(registration.node for registration in registrations)
        if len(set(nodes)) == 1:
            nodes = ()
        self._number += 1
        address = registrations[0].address
        self._generation = self._number, address
        for number, uid in enumerate(ranked):
            members = tuple(each.worker for each in registrations) if number == 0 else ()
            quorum = Quorum(self._number, number, len(ranked), address, source, is_anyone_behind, members, nodes)
            worker = self._workers[uid]
            state = (worker.state & ~WAITING) | MEMBER
            self._put(uid, worker._replace(state=state, quorum=quorum, registration=registrations[number]))

    @staticmethod
    def _can_do_without_draining(chosen: Collection[_Worker]) -> bool:
        """Whether workers that are about to leave need not join: others stay, and no weights would be lost."""
        staying = [worker for worker in chosen if DRAINING not in worker.state]
        has_weights = any(worker.registration.progress for worker in chosen)
        keeps_weights = any(worker.registration.progress for worker in staying)
        return bool(staying) and (keeps_weights or not has_weights)

    def _end_generation(self) -> None:
        """Members that wait become newcomers; the others become unknown."""
        for uid, worker in list(self._workers.items()):
            if WAITING not in worker.state:
                self._drop(uid)
            else:
                self._put(uid, worker._replace(state=worker.state & ~MEMBER))
        self._left_at, self._left, self._broken = -math.inf, {}, False

    def _view(self) -> _View:
        now = self._refresh()
        members = [worker for worker in self._workers.values() if MEMBER in worker.state]
        inside = {uid: worker for uid, worker in self._workers.items() if worker.is_in(MEMBER, but_not=WAITING)}
        alive = sum(SILENT not in worker.state for worker in members)
        return _View(now, self._left_at, inside, len(members), alive,
                     sum(map(_View.may_wait, members)), sum(map(_View.surely_waits, members)),
                     max((worker.heartbeat.step for worker in members), default=0), self._broken)

    def _abort_exchange(self, view: _View) -> str:
        """Make members that wait for one another abort the exchange and regroup. Returns the reason."""
        self._broken, self._left_at = True, view.now
        waited, heartbeat = min((view.waited(worker), worker.heartbeat) for worker in view.inside.values())
        peers = ", ".join(sorted(self._left.values()))
        whom = f"{peers}, which left," if peers else "one another"
        return (f"{len(view.inside)} of {view.size} workers have waited for {whom} for {waited:.0f} s "
                f"({heartbeat.phase}, after step {heartbeat.step}): they abort the exchange and form a new group")


def _rank(workers: Mapping[str, _Worker]) -> list[str]:
    """Ids in the order of their ranks: by number, but all workers of a node directly after its lowest one.

    Then an exchange can leave each node once (`engine/collectives.NodeGroups`).
    """
    lowest: dict[str, int] = {}  # number of each node's workers
    for worker in workers.values():
        node, number = worker.registration.node, worker.registration.worker
        lowest[node] = min(number, lowest.get(node, number))

    def place(uid: str) -> tuple[int, str, int, str]:
        registration = workers[uid].registration
        return lowest[registration.node], registration.node, registration.worker, uid

    return sorted(workers, key=place)
