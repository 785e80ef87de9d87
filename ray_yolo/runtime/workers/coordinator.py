"""Who trains together: the list of a training's workers, their generations, and who of them holds up the others.

A generation is a process group of its own. The next one forms when everybody of the last one who is alive has come to
ask for it, so between two steps; whoever else is waiting becomes a member, too. Who is silent is not alive: he may come
back, and is a newcomer then.

`Coordinator` runs as an actor beside the recorder. It is plain and knows neither Ray nor torch, which would take
seconds to
import. A heartbeat costs the same however many workers there are; what the driver asks for takes one pass over them.
"""

from __future__ import annotations

import math
import time
from collections import Counter, OrderedDict
from collections.abc import Callable, Collection, Mapping
from typing import Literal, NamedTuple

from ray_yolo.core.events import Summary
from ray_yolo.core.structures import Progress
from ray_yolo.core.system import Process, own_process

SILENCE_SECONDS = 3.0  # without a beat, of which there is one a second: not alive, for those who wait to go on
TOLD_SECONDS = 8.0  # without a step: it is told who is waited for
STACKS_SECONDS = 2.5  # from an accusation to its execution, in which all workers tell where they are
SETTLE_SECONDS = 60.0  # for workers that begin to come, when nobody trains
PEERS_NEEDED = ("exchanging", "validating", "joining")  # phases in which a worker may be inside a collective
_PEERS_ALONE = ("exchanging", "joining")  # those that last only as long as others let them
_LOOK_SECONDS = 0.1  # between two looks at the processes of this machine
_REMEMBERED = 1000  # workers that are not to come back


class Heartbeat(NamedTuple):
    """What a worker is doing."""

    phase: str
    step: int
    seconds: float  # since the phase began
    limit: float  # how long it may last while others wait
    heartbeat_limit: float = 30.0  # seconds without a heartbeat after which the worker is lost


class Registration(NamedTuple):
    """A worker that asks to train with others."""

    worker: int  # its number among Ray's
    process: Process
    address: tuple[str, int]  # where the others can meet it
    progress: Progress | None  # between which steps it stands; None: it has no state
    heartbeat: Heartbeat
    node: str = ""  # Ray's id of it
    timeout_seconds: float = 600.0  # after which a collective has failed


class Quorum(NamedTuple):
    """A generation, as one of its members is told."""

    number: int
    worker: int
    num_workers: int
    address: tuple[str, int]  # of worker 0
    source: int | None  # the worker that is furthest; None: nobody has a state
    behind: bool


class HeartbeatReply(NamedTuple):
    """What a beat is answered."""

    must_regroup: bool  # somebody waits to join, or is to leave
    stack_dump_requests: int  # so far; with each one everybody tells its stacks
    peer_lost: bool  # a collective of this generation cannot end any more: abort it
    all_draining: bool  # all members are to leave, and there is nobody who would take the state over
    unknown: bool = False  # the worker is not on this list, which may be a new one: see `Coordinator.introduce`


class HungWorker(NamedTuple):
    """A worker for which others wait in vain."""

    process: Process
    text: str


class WorkerStatus(NamedTuple):
    """A worker, for who looks on."""

    worker: int
    process: Process
    phase: str  # or `silent`
    step: int
    seconds: float  # in this phase
    waits: bool  # for others


class _State(NamedTuple):
    """As what a worker is counted."""

    member: bool  # of the present generation
    waits: bool  # for the next one
    leaves: bool  # before the next generation
    alive: bool  # was heard of lately


class _Worker(NamedTuple):
    """What is known of a worker that waits, or is a member."""

    arrival: Registration
    heartbeat: Heartbeat  # the newest
    heard: float  # when that came
    alive: bool = True
    since: float | None = None  # when it began to wait; None: it does not
    quorum: Quorum | None = None  # the present generation; None: it is no member
    leaves: bool = False

    @property
    def state(self) -> _State:
        return _State(self.quorum is not None, self.since is not None, self.leaves, self.alive)

    @property
    def name(self) -> str:
        process = self.arrival.process
        return f"worker {self.arrival.worker} on {process.node} (process {process.pid})"

    def idle(self, now: float) -> float:
        """Seconds that it has been in its phase, as far as it is known."""
        return now - self.heard + self.heartbeat.seconds


class _View(NamedTuple):
    """All workers at one moment."""

    now: float
    left_at: float  # when a member has left the generation
    inside: Mapping[str, _Worker]  # the members that have not
    size: int  # of the generation; of these members
    alive: int
    waiting: int  # may wait for another
    surely_waiting: int
    furthest: int  # step
    broken: bool  # the generation's collectives cannot end

    @staticmethod
    def may_wait(worker: _Worker) -> bool:
        """Whether a member, as far as it is known, may wait for others."""
        return worker.alive and (worker.since is not None or worker.heartbeat.phase in PEERS_NEEDED)

    @staticmethod
    def surely_waits(worker: _Worker) -> bool:
        """The same where no work of its own can be the reason."""
        return worker.alive and (worker.since is not None or worker.heartbeat.phase == "exchanging")

    def silence(self, worker: _Worker) -> float:
        """Seconds without a heartbeat."""
        return self.now - worker.heard

    def waited(self, worker: _Worker) -> float:
        """Seconds in which a member has not moved, and nobody has left: that may be whom it waited for."""
        return min(worker.idle(self.now), self.now - self.left_at)

    def is_blocked(self, worker: _Worker) -> bool:
        """Whether a member is in an exchange that only others can end."""
        return (self.surely_waits(worker) and worker.since is None and worker.heartbeat.step == self.furthest
                and len(self.inside) > 1 and not self.broken)

    def is_needed(self, worker: _Worker) -> bool:
        """Whether another member waits for this one, or there is none that lives: then it is the user who does."""
        if not worker.alive:
            return self.waiting > 0
        return self.surely_waiting > self.surely_waits(worker) or self.alive == 1

    def lateness(self, worker: _Worker) -> float:
        """Seconds beyond a limit: of a worker that is silent, or a member for which others wait."""
        silent = self.silence(worker) - worker.heartbeat.heartbeat_limit
        if not worker.quorum or worker.since is not None or self.is_blocked(worker) or not (
                self.broken or self.is_needed(worker)):
            return silent
        return max(silent, self.waited(worker) - worker.heartbeat.limit)

    def is_deadlock(self) -> bool:
        """Whether all who are left have waited for others beyond what is allowed: less where one has left."""
        def limit(worker: _Worker) -> float:
            return worker.heartbeat.limit if self.left_at > -math.inf else worker.arrival.timeout_seconds

        return bool(self.inside) and not self.broken and all(
            worker.alive and worker.heartbeat.phase in _PEERS_ALONE and self.waited(worker) > limit(worker)
            for worker in self.inside.values())


class Coordinator:
    """The list. Every call returns at once.

    Args:
        wanted: how many workers begin together, if they come in time.
        clock: seconds.
        restarted: there was such a list before, which is lost: its members introduce themselves first.
    """

    def __init__(self, wanted: int, clock: Callable[[], float] = time.monotonic, *, restarted: bool = False) -> None:
        self._wanted, self._clock = wanted, clock
        self._workers: dict[str, _Worker] = {}
        self._states: Counter[_State] = Counter()  # of these
        self._living: OrderedDict[str, None] = OrderedDict()  # the living ones, the longest unheard of first
        self._local: set[str] = set()  # those whose end can be seen from here
        self._dismissed: OrderedDict[str, bool] = OrderedDict()  # have left or are lost: whether they were to leave
        self._numbered: dict[int, str] = {}  # the newest worker of each number
        self._parting: OrderedDict[str, bool] = OrderedDict()  # are to leave, and have not come yet
        self._here, self._looked = own_process()[:2], -math.inf
        self._quiet_until = clock() + SILENCE_SECONDS if restarted else -math.inf
        self._first_came = 0.0  # of those who wait
        self._number = self._rescued = 0
        self._generation: tuple[int, tuple[str, int]] | None = None  # its number and the address of its first worker
        self._left_at, self._left = -math.inf, dict[int, str]()  # when members left it last, and who they are
        self._broken = False  # its collectives cannot end any more
        self._accused, self._accused_at, self._accusations = "", 0.0, 0
        self._told: tuple[str, int] | None = None  # of whom, after which step, it was told that he is waited for
        self._ended: Summary | None = None

    def register(self, uid: str, arrival: Registration) -> None:
        """A worker stands between two steps and asks for the next generation; one that was lost comes too late."""
        now = self._look()
        if uid in self._dismissed:
            return
        before = self._workers.get(uid)
        if not any(state.waits and number for state, number in self._states.items()):
            self._first_came = now
        if before and before.quorum:
            self._left_at, self._left[before.arrival.worker] = now, before.name
        quorum, leaves = (before.quorum, before.leaves) if before else (None, self._parting.pop(uid, False))
        self._record(uid, _Worker(arrival, arrival.heartbeat, now, since=now, quorum=quorum, leaves=leaves))

    def quorum(self, uid: str) -> Quorum | Summary | Literal["parted", "unknown"] | None:
        """The generation that a worker that has arrived belongs to; how training ended if it has; `parted` if it goes
        on without this worker, which was told to leave or taken for lost; `unknown` if it has to arrive again; None:
        not yet.
        """
        if self._ended:
            return self._ended
        now = self._look()
        if uid in self._workers and self._is_ready(now):
            self._form()
        if (worker := self._workers.get(uid)) is None:
            return "parted" if uid in self._dismissed else "unknown"
        if worker.leaves and not worker.quorum and self._has_members():
            self.leave(uid)
            return "parted"
        return worker.quorum if worker.since is None else None

    def introduce(self, uid: str, arrival: Registration, quorum: Quorum) -> bool:
        """A member of a generation that this list does not know it by, as after a restart, tells of itself.

        Returns:
            Whether that is the present generation; if not, others train without this worker, and it has to arrive.
        """
        now = self._look()
        if uid in self._workers:
            return True
        if quorum.number > self._number and uid not in self._dismissed:
            self._end_generation()
            self._number, self._generation = quorum.number, (quorum.number, quorum.address)
        if uid in self._dismissed or self._generation != (quorum.number, quorum.address):
            return False
        self._record(uid, _Worker(arrival, arrival.heartbeat, now, quorum=quorum, leaves=self._parting.pop(uid, False)))
        return True

    def heartbeat(self, uid: str, heartbeat: Heartbeat) -> HeartbeatReply:
        """A worker tells what it does now."""
        now = self._look()
        worker = self._workers.get(uid)
        if worker is None:
            lost = uid in self._dismissed
            return HeartbeatReply(False, self._accusations, lost, all_draining=False, unknown=not lost)
        self._record(uid, worker._replace(heartbeat=heartbeat, heard=now, alive=True))
        there = [state for state, number in self._states.items() if number]
        newcomers = any(state.waits and state.alive and not state.member for state in there)
        leavers = any(state.member and state.leaves for state in there)
        stayers = any(state.member and state.alive and not state.leaves for state in there)
        member = worker.quorum is not None
        return HeartbeatReply(newcomers or (leavers and stayers), self._accusations, member and self._broken,
                     member and not stayers)

    def drain(self, uid: str) -> None:
        """Have a worker leave after the step in hand, in order; one stays until another has its state."""
        if worker := self._workers.get(uid):
            self._put(uid, worker._replace(leaves=True))
        elif uid not in self._dismissed:
            _remember(self._parting, uid, True)

    def drain_nodes(self, nodes: Collection[str]) -> dict[int, str]:
        """The same for all workers on some nodes. Returns the node of each, by its number."""
        there = {uid: worker.arrival for uid, worker in self._workers.items() if worker.arrival.node in nodes}
        for uid in there:
            self.drain(uid)
        return {arrival.worker: arrival.node for arrival in there.values()}

    def leave(self, uid: str) -> None:
        """A worker asks for no other generation."""
        worker = self._drop(uid)
        if worker and worker.quorum:
            self._left_at, self._left[worker.arrival.worker] = self._clock(), worker.name
        _remember(self._dismissed, uid, worker.leaves if worker else self._dismissed.get(uid, False))

    def mark_lost(self, workers: Collection[int]) -> list[int]:
        """The processes of workers, by their numbers, have ended, as their driver knows. Returns those for whom that is
        a failure: they were not to leave."""
        self._broken |= any(number in self._left for number in workers)  # left in an error, which nobody was told of
        failed = [number for number in workers if not self._was_to_leave(self._numbered.get(number, ""))]
        for uid in [uid for uid, worker in self._workers.items() if worker.arrival.worker in workers]:
            self._lose(uid)
        return failed

    def end(self, summary: Summary) -> None:
        """Training has ended."""
        self._ended = summary

    def outcome(self) -> Summary | None:
        """How training has ended, if it has."""
        return self._ended

    def present(self) -> int:
        """How many have come and not left."""
        self._look()
        return len(self._living)

    def worker_statuses(self) -> tuple[WorkerStatus, ...]:
        """The members and who waits to be one, in the order of their numbers, without those who have ended."""
        view, found = self._view(), []
        for worker in self._workers.values():
            arrival, heartbeat = worker.arrival, worker.heartbeat
            phase, seconds = (
                (heartbeat.phase, worker.idle(view.now)) if worker.alive else ("silent", view.silence(worker))
            )
            waits = worker.alive and (worker.since is not None or view.is_blocked(worker))
            found.append(WorkerStatus(arrival.worker, arrival.process, phase, heartbeat.step, seconds, waits))
        return tuple(sorted(found))

    def describe_stall(self) -> str | None:
        """Said once of each step that does not come: for whom the others wait, and have waited for some seconds; or
        that they have waited for one another beyond the limit, and form a new group.
        """
        view = self._view()
        if self._ended or view.size < 2:
            return None
        if view.is_deadlock():
            return self._abort_exchange(view)
        busy = {uid: worker for uid, worker in view.inside.items() if not view.is_blocked(worker)}
        uid = max(busy, key=lambda uid: (not busy[uid].alive, busy[uid].idle(view.now)), default="")
        if not uid or self._told == (uid, busy[uid].heartbeat.step):
            return None
        slow, heartbeat = busy[uid], busy[uid].heartbeat
        reasons = [("without a heartbeat", view.silence(slow), heartbeat.heartbeat_limit)]
        if slow.alive or heartbeat.phase not in PEERS_NEEDED:  # else it may have been waiting when it fell silent
            reasons.insert(0, (heartbeat.phase, slow.idle(view.now), heartbeat.limit))
        due = [reason for reason in reasons if reason[1] >= max(TOLD_SECONDS, reason[2] / 4)]
        if not due or not view.is_needed(slow):
            return None
        doing, seconds, _ = due[0]
        self._told, waiting = (uid, heartbeat.step), view.waiting - view.may_wait(slow)
        return (f"nothing moves: {waiting} of {view.size} workers wait for {slow.name}, {doing} for {seconds:.0f} s "
                f"after step {heartbeat.step}")

    def elect_saver(self) -> bool:
        """Whether the caller is the first of its generation to ask."""
        first, self._rescued = self._number > self._rescued, self._number
        return first

    def find_hung_worker(self) -> HungWorker | None:
        """The worker that was not heard of, or for which others have waited, the longest beyond its limit, once
        everybody has told its stacks.
        """
        view = self._view()
        now, late = view.now, {uid: view.lateness(worker) for uid, worker in self._workers.items()}
        uid = max(late, key=late.__getitem__, default="")
        if self._ended or not uid or late[uid] <= 0:
            self._accused = ""
            return None
        if uid != self._accused:
            self._accused, self._accused_at, self._accusations = uid, now, self._accusations + 1
        if now - self._accused_at < STACKS_SECONDS:
            return None
        worker = self._workers[uid]
        self._lose(uid)
        return HungWorker(worker.arrival.process, f"{worker.name} has not moved for {worker.idle(now):.0f} s "
                                               f"({worker.heartbeat.phase}, after step {worker.heartbeat.step})")

    def _look(self) -> float:
        """The time, once it is noticed who has fallen silent, or ended on this machine."""
        now = self._clock()
        while self._living and now - self._workers[uid := next(iter(self._living))].heard > SILENCE_SECONDS:
            del self._living[uid]
            self._put(uid, self._workers[uid]._replace(alive=False))
        if now - self._looked >= _LOOK_SECONDS:
            self._looked = now
            for uid in [uid for uid in self._local if self._workers[uid].arrival.process.has_ended]:
                self._lose(uid)
        return now

    def _record(self, uid: str, worker: _Worker) -> None:
        """Keep what a living worker has said."""
        self._put(uid, worker)
        self._numbered[worker.arrival.worker] = uid
        self._living[uid] = None
        self._living.move_to_end(uid)
        if worker.arrival.process[:2] == self._here:
            self._local.add(uid)

    def _put(self, uid: str, worker: _Worker) -> None:
        if before := self._workers.get(uid):
            self._states[before.state] -= 1
        self._workers[uid] = worker
        self._states[worker.state] += 1

    def _drop(self, uid: str) -> _Worker | None:
        if worker := self._workers.pop(uid, None):
            self._states[worker.state] -= 1
            self._living.pop(uid, None)
            self._local.discard(uid)
        return worker

    def _lose(self, uid: str) -> None:
        """A worker has ended, or is being ended, without having left."""
        if self._workers[uid].quorum:
            self._broken = True
        self.leave(uid)

    def _was_to_leave(self, uid: str) -> bool:
        worker = self._workers.get(uid)
        return worker.leaves if worker else self._dismissed.get(uid, False)

    def _has_members(self) -> bool:
        return any(state.member and number for state, number in self._states.items())

    def _is_ready(self, now: float) -> bool:
        """Whether the next generation can form."""
        there = {state: number for state, number in self._states.items() if number}
        waiting = sum(number for state, number in there.items() if state.waits and state.alive)
        if now < self._quiet_until or not waiting or any(state[:2] == (True, False) and state.alive for state in there):
            return False
        wanted = 1 if self._number else self._wanted  # who goes on from a checkpoint waits for nobody
        return (any(state.member and state.waits for state in there) or waiting >= wanted
                or now - self._first_came > SETTLE_SECONDS)

    def _form(self) -> None:
        chosen = {uid: worker for uid, worker in self._workers.items() if worker.since is not None and worker.alive}
        staying = [worker for worker in chosen.values() if not worker.leaves]
        if staying and (any(worker.arrival.progress for worker in staying)
                        or not any(worker.arrival.progress for worker in chosen.values())):
            for uid in [uid for uid, worker in chosen.items() if worker.leaves]:
                del chosen[uid]
                self.leave(uid)
        self._end_generation()
        arrivals = sorted((worker.arrival.worker, uid, worker.arrival) for uid, worker in chosen.items())
        reached = [arrival.progress for _, _, arrival in arrivals]
        furthest = max((progress for progress in reached if progress), default=None)
        source, behind = None if furthest is None else reached.index(furthest), set(reached) != {furthest}
        self._number += 1
        self._generation = self._number, arrivals[0][2].address
        for number, (_, uid, arrival) in enumerate(arrivals):
            quorum = Quorum(self._number, number, len(arrivals), arrivals[0][2].address, source, behind)
            self._put(uid, self._workers[uid]._replace(since=None, quorum=quorum, arrival=arrival))

    def _end_generation(self) -> None:
        """Its members are newcomers, if they wait, or unknown."""
        for uid, worker in list(self._workers.items()):
            if worker.since is None:
                self._drop(uid)
            elif worker.quorum:
                self._put(uid, worker._replace(quorum=None))
        self._left_at, self._left, self._broken = -math.inf, {}, False

    def _view(self) -> _View:
        now = self._look()
        members = [worker for worker in self._workers.values() if worker.quorum]
        inside = {uid: worker for uid, worker in self._workers.items() if worker.quorum and worker.since is None}
        return _View(now, self._left_at, inside, len(members), sum(worker.alive for worker in members),
                     sum(map(_View.may_wait, members)), sum(map(_View.surely_waits, members)),
                     max((worker.heartbeat.step for worker in members), default=0), self._broken)

    def _abort_exchange(self, view: _View) -> str:
        """Have those who wait for one another abort that, and regroup. Returns what is known of why."""
        self._broken, self._left_at = True, view.now
        waited, heartbeat = min((view.waited(worker), worker.heartbeat) for worker in view.inside.values())
        peers = ", ".join(sorted(self._left.values()))
        whom = f"{peers}, which left," if peers else "one another"
        return (
            f"{len(view.inside)} of {view.size} workers have waited for {whom} for {waited:.0f} s ({heartbeat.phase}, "
            f"after step {heartbeat.step}): what they exchange is aborted, and they form a new group"
        )


def _remember(memory: OrderedDict[str, bool], uid: str, value: bool) -> None:
    """Keep the newest of them."""
    memory[uid] = value
    if len(memory) > _REMEMBERED:
        memory.popitem(last=False)
