"""Membership of one training: its workers, their generations, and the worker that others wait for.

A generation is a process group. The next generation forms between two steps, when all living members of the current one
have registered for it. Waiting newcomers become members too. A worker without heartbeats counts as dead; if it returns,
it joins as a new worker.

Each worker has one place, and one view of all workers answers all questions. The view in the replies to heartbeats is
at most 0.1 s old, so their cost does not depend on the number of workers.

`Coordinator` is an object of the queue's actor. It imports neither Ray nor torch, because these imports take seconds.
"""

from __future__ import annotations

import math
import time
from collections import OrderedDict
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from operator import attrgetter
from typing import Literal, NamedTuple

from ray_yolo.core.events import Summary
from ray_yolo.core.structures import Orders, Progress, WorkerStatus
from ray_yolo.core.system import Process

SILENCE_SECONDS = 3.0  # a worker that is silent for this long counts as dead; it sends one heartbeat a second
STALL_REPORT_SECONDS = 8.0  # a stall is reported after this time without a step
ABSENCE_SECONDS = 60.0  # the departure of the last worker is reported this long after it; to start others takes less
STACKS_SECONDS = 2.5  # a hung worker is killed this long after it was found: meanwhile all workers dump their stacks
SETTLE_SECONDS = 60.0  # the first generation waits this long for more workers
PEERS_NEEDED = ("exchanging", "validating", "joining")  # phases in which a worker may be inside a collective
_PEERS_ONLY = ("exchanging", "joining")  # phases whose duration depends on peers alone
_NOTHING_TO_SAVE = ("starting", "joining")  # phases of a worker that has not trained yet
_SCAN_SECONDS = 0.1  # the age of a view of all workers, from which replies to heartbeats are made
_REMEMBERED = 1000  # departed workers


class Heartbeat(NamedTuple):
    """What a worker is doing."""

    phase: str
    step: int
    seconds: float  # the phase began this long ago
    limit: float  # how long it may last while others wait
    heartbeat_limit: float = 30.0  # seconds without a heartbeat after which the worker counts as departed
    leaves: bool = False  # the worker leaves after the current step


class Registration(NamedTuple):
    """A worker that requests to join the next generation."""

    worker: int  # its number in the job
    process: Process
    address: tuple[str, int]  # peers reach the worker there
    progress: Progress | None  # its training state is at it; None: it has none
    heartbeat: Heartbeat
    node: str = ""  # Ray's id of it
    timeout_seconds: float = 600.0  # a collective that takes longer has failed
    is_saved: bool = False  # its state is on storage


class Quorum(NamedTuple):
    """A generation, from the point of view of one member."""

    number: int
    rank: int
    size: int  # So many workers train in the generation.
    address: tuple[str, int]  # rank 0 listens there
    source: int | None  # the rank with the furthest state; None: no worker has a state
    behind: bool
    members: tuple[int, ...] = ()  # their numbers in the job; for rank 0 alone, which records them
    nodes: tuple[str, ...] = ()  # Rank by rank the node it runs on, if there are several ranks.


class HungWorker(NamedTuple):
    """A worker that makes no progress while others wait for it."""

    process: Process
    text: str


@dataclass
class Member:
    """A worker that has registered."""

    registration: Registration
    heartbeat: Heartbeat
    """The newest one."""

    heard: float
    """When the newest heartbeat came."""

    place: Literal["newcomer", "training", "ready"] = "newcomer"
    """Where it stands: it waits for a first generation (newcomer), is in the current one (training), or has left its
    step of the current one and waits for the next (ready)."""

    leaving: bool = False
    """Whether it will not be in the next generation, if others can continue without it."""

    at_once: bool = False
    """Whether it will not be in the next generation even if it is the last, once its state is on storage: another
    program gets its place. It is then `leaving`, too."""

    quorum: Quorum | None = None
    """The newest generation that it was in."""

    @property
    def name(self) -> str:
        """For messages."""
        process = self.registration.process
        return f"worker {self.registration.worker} on {process.node} (process {process.pid})"


class View:
    """All workers at one moment, from one pass over them.

    Args:
        left_at: when a member last left the generation.
        broken: the generation's collectives cannot finish.
    """

    def __init__(self, members: Mapping[str, Member], now: float, left_at: float, *, broken: bool) -> None:
        self.now, self.left_at, self.broken = now, left_at, broken
        self.group = [member for member in members.values() if member.place != "newcomer"]
        self.inside = {uid: member for uid, member in members.items() if member.place == "training"}
        self.alive = {uid: member for uid, member in members.items() if not self.is_silent(member)}
        self.waiting = [member for member in self.alive.values() if member.place != "training"]
        staying = any(not member.leaving and not self.is_silent(member) for member in self.group)
        has_newcomer = any(member.place == "newcomer" for member in self.waiting)
        self.all_leave = not staying
        leaver = any(member.at_once or (staying and member.leaving) for member in self.group)
        self.must_regroup = has_newcomer or leaver
        self.furthest = max((member.heartbeat.step for member in self.group), default=0)
        self.num_alive = sum(not self.is_silent(member) for member in self.group)  # members of the generation, as below
        self.num_waiting = sum(map(self.may_wait, self.group))
        self.num_surely_waiting = sum(map(self.surely_waits, self.group))

    def is_silent(self, worker: Member) -> bool:
        """Whether it has sent no heartbeat lately, so that it counts as dead."""
        return self.now - worker.heard > SILENCE_SECONDS

    def idle(self, worker: Member) -> float:
        """Seconds in its current phase, by the newest heartbeat."""
        return self.now - worker.heard + worker.heartbeat.seconds

    def waited(self, worker: Member) -> float:
        """Seconds without progress since the last departure: before that, a member may have waited for that worker."""
        return min(self.idle(worker), self.now - self.left_at)

    def may_wait(self, worker: Member) -> bool:
        """Whether a member may wait for others, by its phase."""
        return not self.is_silent(worker) and (worker.place == "ready" or worker.heartbeat.phase in PEERS_NEEDED)

    def surely_waits(self, worker: Member) -> bool:
        """Whether a member waits for others without doing any work."""
        return not self.is_silent(worker) and (worker.place == "ready" or worker.heartbeat.phase == "exchanging")

    def is_blocked(self, worker: Member) -> bool:
        """Whether a member is in an exchange that only its peers can finish."""
        is_last = worker.heartbeat.step == self.furthest
        return (self.surely_waits(worker) and worker.place != "ready" and is_last and len(self.inside) > 1
                and not self.broken)

    def is_needed(self, worker: Member) -> bool:
        """Whether another member waits for this one; the last living member always counts as needed."""
        if self.is_silent(worker):
            return self.num_waiting > 0
        return self.num_surely_waiting > self.surely_waits(worker) or self.num_alive == 1

    def lateness(self, worker: Member) -> float:
        """Seconds by which a silent worker, or a member that others wait for, exceeds its limit."""
        silent = self.now - worker.heard - worker.heartbeat.heartbeat_limit
        if worker.place != "training" or self.is_blocked(worker):
            return silent
        if not self.broken and not self.is_needed(worker):
            return silent
        return max(silent, self.waited(worker) - worker.heartbeat.limit)

    def is_deadlock(self) -> bool:
        """Whether all remaining members wait for one another beyond the limit, which is shorter after a departure."""
        def limit(worker: Member) -> float:
            return worker.heartbeat.limit if self.left_at > -math.inf else worker.registration.timeout_seconds

        return bool(self.inside) and not self.broken and all(
            not self.is_silent(worker) and worker.heartbeat.phase in _PEERS_ONLY and self.waited(worker) > limit(worker)
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
        self._members: dict[str, Member] = {}
        """All workers that have registered and not departed, by id."""
        self._departed: OrderedDict[str, bool] = OrderedDict()
        """The newest workers that have departed, and whether they were leaving."""
        self._newest: dict[int, str] = {}
        """The id of the newest worker of each number."""
        self._seen: View | None = None
        """The newest view; None: a worker has come, gone or changed its place since."""
        self._witness = ""
        """A member that trained when a worker last asked whether the next generation has formed."""
        self._quiet_until = clock() + SILENCE_SECONDS if restarted else -math.inf
        """Until then no generation forms, because members have to introduce themselves."""
        self._first_waiting_at = 0.0
        """When the first worker registered. If no generation has formed for long after that, it forms of fewer."""
        self._number = self._saver_elected = 0
        """Numbers of the newest generation, and of the newest one that has elected a saver."""
        self._generation: tuple[int, tuple[str, int]] | None = None
        """Number and address of the current generation: two coordinators may form two of one number."""
        self._left_at, self._left = -math.inf, dict[int, str]()
        """When a member last left the generation, and the names of those that have, by number."""
        self._broken = False
        """Whether the generation's collectives cannot finish."""
        self._formed_at: Progress | None = None
        """The progress with which the generation began."""
        self._departures = 0
        """How many members have departed from the generation."""
        self._failed_alone = 0
        """How many generations in a row ended without a step, although no member had departed."""
        self._hung, self._hung_at, self._dumps = "", 0.0, 0
        """The worker that hangs, since when, and how often all were asked to dump their stacks."""
        self._reported_stall: tuple[str, int] | None = None
        """The worker whose stall was reported, and the step before it."""
        self._reported_absence = 0
        """Number of the generation whose workers have all departed, which was reported."""
        self._stops = False
        """Whether the training was ordered to stop."""
        self._ended: Summary | None = None

    def register(self, uid: str, registration: Registration) -> None:
        """A worker between two steps requests to join the next generation; a departed worker is ignored."""
        if uid in self._departed:
            return
        now = self._clock()
        self._newest[registration.worker] = uid
        member = self._members.get(uid)
        if member is None:
            self._first_waiting_at = self._first_waiting_at if self._members else now
            heartbeat = registration.heartbeat
            self._members[uid] = Member(registration, heartbeat, now, leaving=heartbeat.leaves)
            self._seen = None
            return
        if member.place != "newcomer":
            member.place = "ready"
            self._left_at, self._left[registration.worker] = now, member.name
        member.registration, member.heartbeat, member.heard = registration, registration.heartbeat, now
        member.leaving |= registration.heartbeat.leaves

    def quorum(self, uid: str) -> Quorum | Summary | Literal["left", "unknown"] | None:
        """The reply to a registered worker.

        | reply | meaning |
        |---|---|
        | `Quorum` | the generation that the worker belongs to |
        | `Summary` | training has ended |
        | `left` | the others continue without this worker: it was leaving, or counted as departed |
        | `unknown` | the worker has to register again |
        | None | not known yet |
        """
        if self._ended:
            return self._ended
        if uid in self._members and not self._waits_surely() and self._is_ready(view := self._look()):
            self._form(view)
        if (worker := self._members.get(uid)) is None:
            return "left" if uid in self._departed else "unknown"
        if worker.leaving and worker.place == "newcomer":
            view = self._look()
            is_new = worker.registration.progress is None
            is_stayed_for = is_new and any(not member.leaving for member in view.waiting)
            # Others train, or will train, without it; or nothing is lost without it
            if view.group or is_stayed_for or (is_new and worker.at_once):
                self.leave(uid)
                return "left"
        return worker.quorum if worker.place == "training" else None

    def heartbeat(self, uid: str, heartbeat: Heartbeat, current: tuple[Registration, Quorum] | None = None) -> Orders:
        """A worker reports its phase. Returns its orders.

        Args:
            current: the generation in which the worker trains, and its request for it. A coordinator that has no
                record of the worker, as after a restart, takes it in by that.
        """
        member = self._members.get(uid)
        if member is None and current and uid not in self._departed:
            member = self._introduce(uid, *current)
        if member:
            if self._clock() - member.heard > SILENCE_SECONDS or heartbeat.leaves > member.leaving:
                self._seen = None
            member.heartbeat, member.heard = heartbeat, self._clock()
            member.leaving |= heartbeat.leaves
        return self.orders(uid, is_in_group=current is not None)

    def _introduce(self, uid: str, registration: Registration, quorum: Quorum) -> Member | None:
        """Take in a member that this coordinator has no record of; None if its generation is not the current one."""
        own = quorum.number, quorum.address
        if quorum.number > self._number:  # the first member after a restart
            self._end_generation()
            self._number, self._generation = quorum.number, own
        if self._generation != own:
            return None
        self._newest[registration.worker] = uid
        member = Member(registration, registration.heartbeat, self._clock(), "training", quorum=quorum)
        self._members[uid] = member
        self._seen = None
        return member

    def orders(self, uid: str, *, is_in_group: bool = False) -> Orders:
        """The orders of a worker. One that is in a group, and no member, has departed, or its generation has ended
        without it: it joins as a new worker.
        """
        view = self._view()
        member = self._members.get(uid)
        if member is None:
            is_over = is_in_group or uid in self._departed
            return Orders(stop=self._stops, abort=is_over, regroup=is_over, dumps=self._dumps)
        in_group = member.place != "newcomer"
        return Orders(self._stops, in_group and view.all_leave, view.must_regroup, member.leaving,
                      in_group and self._broken, self._dumps)

    def stop(self) -> bool:
        """Order the training to stop after the current step. Returns whether workers have steps to save."""
        self._stops = True
        if self._clock() < self._quiet_until:  # members have not introduced themselves yet
            return True
        return not self._ended and any(
            member.registration.progress is not None
            or (member.place == "training" and member.heartbeat.phase not in _NOTHING_TO_SAVE)
            for member in self._view().alive.values())

    def let_leave(self, uid: str, *, at_once: bool = False) -> None:
        """Make a worker leave after the current step. The last one stays until another worker has its state; if it
        leaves `at_once`, until its state is on storage.
        """
        member = self._members.get(uid)
        if member and (at_once > member.at_once or not member.leaving):
            member.leaving, member.at_once, self._seen = True, member.at_once or at_once, None

    def drain_nodes(self, nodes: Collection[str]) -> dict[int, str]:
        """Make all workers on some nodes leave. Returns the node of each, by its number."""
        leaving = {}
        for uid, member in self._members.items():
            if member.registration.node in nodes:
                self.let_leave(uid)
                leaving[member.registration.worker] = member.registration.node
        return leaving

    def leave(self, uid: str) -> None:
        """A worker has left and will not register again."""
        member = self._members.pop(uid, None)
        if member and member.place != "newcomer":
            self._left_at, self._left[member.registration.worker] = self._clock(), member.name
            self._departures += 1
        self._departed[uid] = member.leaving if member else self._departed.get(uid, False)
        if len(self._departed) > _REMEMBERED:
            self._departed.popitem(last=False)
        self._seen = None

    def mark_departed(self, workers: Collection[int]) -> list[int]:
        """The driver reports the numbers of workers whose processes have ended. Returns the failed ones: those that
        were not leaving."""
        if any(number in self._left for number in workers):  # left with an error, unknown to peers
            self._broken = True
        failed = [number for number in workers if not self._was_leaving(number)]
        for uid in [uid for uid, member in self._members.items() if member.registration.worker in workers]:
            self._depart(uid)
        return failed

    def _was_leaving(self, number: int) -> bool:
        """Whether the newest worker of a number is, or was, about to leave."""
        uid = self._newest.get(number, "")
        return self._members[uid].leaving if uid in self._members else self._departed.get(uid, False)

    def end(self, summary: Summary) -> None:
        """Training has ended."""
        self._ended = summary

    def outcome(self) -> Summary | None:
        """How training has ended, if it has."""
        return self._ended

    def present(self) -> int:
        """The number of living workers."""
        return len(self._look().alive)

    def worker_statuses(self) -> tuple[WorkerStatus, ...]:
        """Members and waiting workers, by number, without those that have ended."""
        view, statuses = self._look(), list[WorkerStatus]()
        for worker in self._members.values():
            heartbeat, registration = worker.heartbeat, worker.registration
            is_silent = view.is_silent(worker)
            statuses.append(WorkerStatus(
                worker=registration.worker, node=registration.process.node, pid=registration.process.pid,
                phase="silent" if is_silent else heartbeat.phase, step=heartbeat.step,
                seconds=view.now - worker.heard if is_silent else view.idle(worker),
                waits=not is_silent and (worker.place != "training" or view.is_blocked(worker))))
        return tuple(sorted(statuses, key=attrgetter("worker", "node", "pid")))

    def describe_stall(self) -> str | None:
        """A warning about a stall, once for each step. It names the hung worker, or states that all workers wait for
        one another and regroup, which this call starts, or that none is left.
        """
        view = self._look()
        if self._ended:
            return None
        if self._broken and not view.alive:
            return self._describe_absence(view.now)
        if len(view.group) < 2:
            return None
        if view.is_deadlock():
            return self._abort_exchange(view)
        busy = {uid: worker for uid, worker in view.inside.items() if not view.is_blocked(worker)}
        if not busy:
            return None

        def slowness(uid: str) -> tuple[bool, float]:
            return view.is_silent(busy[uid]), view.idle(busy[uid])  # a silent one before all others

        slowest = max(busy, key=slowness)
        slow = busy[slowest]
        heartbeat = slow.heartbeat
        stall = (slowest, heartbeat.step)
        if self._reported_stall == stall or not view.is_needed(slow):
            return None
        reasons: list[tuple[str, float, float]] = []  # what it does, for how long, and how long it may
        # A silent worker may have waited for others when its heartbeats stopped.
        if not view.is_silent(slow) or heartbeat.phase not in PEERS_NEEDED:
            reasons.append((heartbeat.phase, view.idle(slow), heartbeat.limit))
        reasons.append(("without a heartbeat", view.now - slow.heard, heartbeat.heartbeat_limit))
        for doing, seconds, limit in reasons:
            if seconds < max(STALL_REPORT_SECONDS, limit / 4):
                continue
            self._reported_stall = stall
            waiting = view.num_waiting - view.may_wait(slow)  # it does not wait for itself
            return (f"training stalls: {waiting} of {len(view.group)} workers wait for {slow.name}, {doing} for "
                    f"{seconds:.0f} s after step {heartbeat.step}")
        return None

    def _describe_absence(self, now: float) -> str | None:
        """A warning, once, if the members of a generation have all departed and no worker has started since: Ray waits
        for room for them without a word."""
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
        view = self._look()
        late = {uid: view.lateness(worker) for uid, worker in self._members.items()}
        uid = max(late, key=late.__getitem__, default="")
        if self._ended or not uid or late[uid] <= 0:
            self._hung = ""
            return None
        if uid != self._hung:
            self._hung, self._hung_at, self._dumps = uid, view.now, self._dumps + 1
        if view.now - self._hung_at < STACKS_SECONDS:
            return None
        worker = self._members[uid]
        self._depart(uid)
        return HungWorker(worker.registration.process,
                          f"{worker.name} has not moved for {view.idle(worker):.0f} s ({worker.heartbeat.phase}, after "
                          f"step {worker.heartbeat.step})")

    def _view(self) -> View:
        """All workers as they were at most `_SCAN_SECONDS` ago: the cost of a heartbeat does not grow with them."""
        if self._seen is None or self._clock() - self._seen.now >= _SCAN_SECONDS:
            return self._look()
        return self._seen

    def _look(self) -> View:
        """All workers now. Those whose processes on this machine have ended depart."""
        for uid, member in list(self._members.items()):
            if member.registration.process.has_ended:
                self._depart(uid)
        self._seen = View(self._members, self._clock(), self._left_at, broken=self._broken)
        return self._seen

    def _depart(self, uid: str) -> None:
        """A worker has ended, or is being killed, without having left. The exchange of a member cannot finish."""
        if self._members[uid].place != "newcomer":
            self._broken = True
        self.leave(uid)

    def _waits_surely(self) -> bool:
        """Whether the next generation cannot form yet, by what is known without a pass over all workers: too few have
        registered, or a member that was seen to train still does. All workers ask, again and again.
        """
        now = self._clock()
        if now < self._quiet_until:
            return True
        if not self._number and len(self._members) < self._wanted:
            return now - self._first_waiting_at <= SETTLE_SECONDS
        witness = self._members.get(self._witness)
        return (witness is not None and witness.place == "training" and not witness.registration.process.has_ended
                and now - witness.heard <= SILENCE_SECONDS)

    def _is_ready(self, view: View) -> bool:
        """Whether the next generation can form. Leaving workers count only if no other worker waits."""
        training = [uid for uid, member in view.alive.items() if member.place == "training"]
        if training:
            self._witness = training[-1]  # workers register in about the order in which they did before
            return False
        if not view.waiting:
            return False
        staying = sum(not member.leaving for member in view.waiting)
        wanted = 1 if self._number else self._wanted  # a restart from a checkpoint waits for no further workers
        if len(view.group) > len(view.inside) or (staying or len(view.waiting)) >= wanted:
            return True
        return view.now - self._first_waiting_at > SETTLE_SECONDS

    def _form(self, view: View) -> None:
        """Form a generation of the living workers that wait; of none, if all of them leave at once and may."""
        waiting = {uid: member for uid, member in view.alive.items() if member.place != "training"}
        chosen = _remaining(waiting)
        for uid in waiting.keys() - chosen.keys():
            self.leave(uid)
        if not chosen:
            self._end_generation()
            return

        ranked = _rank(chosen)
        registrations = [chosen[uid].registration for uid in ranked]
        reached = [registration.progress for registration in registrations]
        known = [progress for progress in reached if progress]
        furthest = max(known) if known else None
        source = None if furthest is None else reached.index(furthest)  # the others copy its weights
        is_anyone_behind = any(progress != furthest for progress in reached)
        has_failed_alone = self._number > 0 and not self._departures and furthest == self._formed_at
        self._failed_alone = self._failed_alone + 1 if has_failed_alone else 0
        self._end_generation()
        self._formed_at = furthest

        nodes = tuple(registration.node for registration in registrations)
        if len(set(nodes)) == 1:
            nodes = ()
        self._number += 1
        address = registrations[0].address
        self._generation = self._number, address
        for rank, uid in enumerate(ranked):
            members = tuple(each.worker for each in registrations) if rank == 0 else ()
            member = self._members[uid]
            member.place = "training"
            member.quorum = Quorum(self._number, rank, len(ranked), address, source, is_anyone_behind, members, nodes)
        self._seen = None

    def _end_generation(self) -> None:
        """Members that wait become newcomers; the others become unknown."""
        self._members = {uid: member for uid, member in self._members.items() if member.place != "training"}
        for member in self._members.values():
            member.place = "newcomer"
        self._left_at, self._left, self._broken, self._departures = -math.inf, {}, False, 0
        self._seen = None

    def _abort_exchange(self, view: View) -> str:
        """Make members that wait for one another abort the exchange and regroup. Returns the reason."""
        self._broken, self._left_at, self._seen = True, view.now, None
        waited, heartbeat = min((view.waited(worker), worker.heartbeat) for worker in view.inside.values())
        peers = ", ".join(sorted(self._left.values()))
        whom = f"{peers}, which left," if peers else "one another"
        return (f"{len(view.inside)} of {len(view.group)} workers have waited for {whom} for {waited:.0f} s "
                f"({heartbeat.phase}, after step {heartbeat.step}): they abort the exchange and form a new group")


def _remaining(waiting: Mapping[str, Member]) -> Mapping[str, Member]:
    """Those of some waiting workers that are in the next generation: as few of those that leave as the weights need.

    They need one worker that has them, or, if all leave at once, storage.
    """
    known = [member.registration for member in waiting.values() if member.registration.progress]
    for leaves in (attrgetter("leaving"), attrgetter("at_once")):
        rest = {uid: member for uid, member in waiting.items() if not leaves(member)}
        if rest and (not known or any(member.registration.progress for member in rest.values())):
            return rest
    furthest = max((each.progress or Progress(), each.is_saved) for each in known) if known else (None, True)
    return {} if furthest[1] and all(member.at_once for member in waiting.values()) else waiting


def _rank(workers: Mapping[str, Member]) -> list[str]:
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
