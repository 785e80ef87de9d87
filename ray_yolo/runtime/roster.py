"""Who trains together: the list of a training's workers, their generations, and who of them holds up the others.

A generation is a process group of its own. The next one forms when everybody of the last one who is alive has come to
ask for it, so between two steps; whoever else is waiting becomes a member, too. Who is silent is not alive: he may come
back, and is a newcomer then.

`Roster` runs as an actor beside the recorder. It is plain and knows neither Ray nor torch, which would take seconds to
import.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Collection, Iterable
from typing import Literal, NamedTuple

from ray_yolo.events import Summary
from ray_yolo.ops.machine import Process
from ray_yolo.structures import Progress

SILENCE_SECONDS = 3.0  # without a beat, of which there is one a second: not alive, for those who wait to go on
TOLD_SECONDS = 8.0  # without a step: it is told who is waited for
STACKS_SECONDS = 2.5  # from an accusation to its execution, in which all workers tell where they are
SETTLE_SECONDS = 60.0  # for workers that begin to come, when nobody trains


class Beat(NamedTuple):
    """What a worker is doing."""

    phase: str
    step: int
    seconds: float  # since the phase began
    limit: float  # how long it may last while others wait


class Arrival(NamedTuple):
    """A worker that asks to train with others."""

    worker: int  # its number among Ray's
    process: Process
    address: tuple[str, int]  # where the others can meet it
    progress: Progress | None  # between which steps it stands; None: it has no state
    beat: Beat
    node: str = ""  # Ray's id of it


class Formed(NamedTuple):
    """A generation, as one of its members is told."""

    number: int
    worker: int
    num_workers: int
    address: tuple[str, int]  # of worker 0
    source: int | None  # the worker that is furthest; None: nobody has a state
    behind: bool


class Reply(NamedTuple):
    """What a beat is answered."""

    regroups: bool  # somebody waits to join, or is to leave
    accusations: int  # so far; with each one everybody tells its stacks
    in_vain: bool  # who waits in a collective waits for one that has ended, and may not have closed its connections
    nobody_stays: bool  # all members are to leave, and there is nobody who would take the state over


class Stalled(NamedTuple):
    """A worker for which others wait in vain."""

    process: Process
    text: str


class Seen(NamedTuple):
    """A worker, for who looks on."""

    worker: int
    process: Process
    phase: str
    step: int
    seconds: float  # in this phase
    waits: bool  # for others


class Roster:
    """The list. Every call returns at once.

    Args:
        wanted: how many workers begin together, if they come in time.
        clock: seconds.
    """

    def __init__(self, wanted: int, clock: Callable[[], float] = time.monotonic) -> None:
        self._wanted, self._clock = wanted, clock
        self._waiting: dict[str, Arrival] = {}
        self._since: dict[str, float] = {}  # when each began to wait
        self._members: dict[str, Arrival] = {}  # of the present generation, in the order of its workers
        self._parting: set[str] = set()  # are to leave before the next generation
        self._numbered: dict[int, str] = {}  # who came last under each number
        self._gone: set[str] = set()
        self._lost: set[str] = set()  # have ended, or are being ended, without having left
        self._beats: dict[str, tuple[float, Beat]] = {}  # the newest, and when it came
        self._number = self._rescued = 0
        self._accused, self._accused_at, self._accusations = "", 0.0, 0
        self._told: tuple[str, int] | None = None  # of whom, after which step, it was told that he is waited for
        self._ended: Summary | None = None

    def arrive(self, uid: str, arrival: Arrival) -> None:
        """A worker stands between two steps and asks for the next generation; one that was lost comes too late."""
        if uid not in self._lost:
            self._waiting[uid], self._since[uid] = arrival, self._clock()
            self._beats[uid] = (self._clock(), arrival.beat)
            self._numbered[arrival.worker] = uid

    def formed(self, uid: str) -> Formed | Summary | Literal["parted"] | None:
        """The generation that a worker that has arrived belongs to; how training ended if it has; `parted` if it goes
        on without this worker, which was told to leave or taken for lost; None: not yet.
        """
        if self._ended:
            return self._ended
        if uid in self._lost:
            return "parted"
        if self._waiting and self._is_ready():
            self._form()
        if uid in self._parting and uid in self._waiting.keys() - self._members.keys() and self._members:
            self._gone.add(uid)
            del self._waiting[uid]
        if uid in self._gone & self._parting:
            return "parted"
        if uid in self._waiting or uid not in self._members:
            return None
        arrivals = list(self._members.values())
        reached = [arrival.progress for arrival in arrivals]
        furthest = max((progress for progress in reached if progress), default=None)
        return Formed(self._number, list(self._members).index(uid), len(arrivals), arrivals[0].address,
                      None if furthest is None else reached.index(furthest), set(reached) != {furthest})

    def beat(self, uid: str, beat: Beat) -> Reply:
        """A worker tells what it does now."""
        self._beats[uid] = (self._clock(), beat)
        newcomers = any(self._is_alive(other) for other in self._waiting if other not in self._members)
        leavers = self._parting & self._members.keys() - self._gone
        return Reply(newcomers or bool(leavers and self._staying(self._members)), self._accusations,
                     uid in self._members and bool(self._lost & self._members.keys()),
                     uid in self._members and not self._staying(self._members))

    def part(self, uid: str) -> None:
        """Have a worker leave after the step in hand, in order; one stays until another has its state."""
        self._parting.add(uid)

    def part_from(self, nodes: Collection[str]) -> dict[int, str]:
        """The same for all workers on some nodes. Returns the node of each, by its number."""
        there = {uid: arrival for uid, arrival in {**self._members, **self._waiting}.items()
                 if arrival.node in nodes and uid not in self._gone}
        self._parting |= there.keys()
        return {arrival.worker: arrival.node for arrival in there.values()}

    def leave(self, uid: str) -> None:
        """A worker asks for no other generation."""
        self._gone.add(uid)
        self._waiting.pop(uid, None)

    def lose(self, workers: Collection[int]) -> list[int]:
        """The processes of workers, by their numbers, have ended, as their driver knows. Returns those for whom that is
        a failure: they were not to leave."""
        there = {**self._members, **self._waiting}
        for uid in [uid for uid, arrival in there.items() if arrival.worker in workers]:
            self._lost.add(uid)
            self.leave(uid)
        return [worker for worker in workers if self._numbered.get(worker) not in self._parting]

    def end(self, summary: Summary) -> None:
        """Training has ended."""
        self._ended = summary

    def outcome(self) -> Summary | None:
        """How training has ended, if it has."""
        return self._ended

    def present(self) -> int:
        """How many have come and not left."""
        return sum(self._is_alive(uid) for uid in self._waiting.keys() | self._members.keys())

    def seen(self) -> tuple[Seen, ...]:
        """The members and who waits to be one, in the order of their numbers."""
        there = {uid: arrival for uid, arrival in {**self._members, **self._waiting}.items() if uid not in self._gone}
        found = []
        for uid, arrival in there.items():
            beat = self._beats[uid][1]
            waits = uid in self._waiting or self._is_waiting(uid, beat)
            found.append(Seen(arrival.worker, arrival.process, beat.phase, beat.step, self._idle(uid), waits))
        return tuple(sorted(found))

    def held_up(self) -> str | None:
        """Said once of each step that does not come: for whom the others wait, and have waited for some seconds."""
        busy = {uid: beat for uid in self._members.keys() - self._gone - self._waiting.keys()
                if not self._is_waiting(uid, beat := self._beats[uid][1])}
        uid = max(busy, key=self._idle, default="")
        if self._ended or not uid or len(self._members) == 1 or self._told == (uid, busy[uid].step):
            return None
        if self._idle(uid) < max(TOLD_SECONDS, busy[uid].limit / 4) or not self._somebody_waits(uid):
            return None
        self._told = uid, busy[uid].step
        arrival = self._members[uid]
        return (f"nothing moves: {len(self._members) - len(busy)} of {len(self._members)} workers wait for worker "
                f"{arrival.worker} on {arrival.process.node} (process {arrival.process.pid}), {busy[uid].phase} for "
                f"{self._idle(uid):.0f} s after step {busy[uid].step}")

    def rescues(self) -> bool:
        """Whether the caller is the first of its generation to ask."""
        first, self._rescued = self._number > self._rescued, self._number
        return first

    def stalled(self) -> Stalled | None:
        """The member that others have waited for the longest beyond its limit, or the newcomer that has been silent for
        so long, once everybody has told its stacks.
        """
        there = {**self._members, **self._waiting}
        uid = max(there, key=self._lateness, default="")
        if self._ended or not uid or self._lateness(uid) <= 0 or not (
                uid in self._waiting or self._somebody_waits(uid)):
            self._accused = ""
            return None
        if uid != self._accused:
            self._accused, self._accused_at, self._accusations = uid, self._clock(), self._accusations + 1
        if self._clock() - self._accused_at < STACKS_SECONDS:
            return None
        self._lost.add(uid)
        self.leave(uid)
        arrival, (_, beat) = there[uid], self._beats[uid]
        process = arrival.process
        return Stalled(process, f"worker {arrival.worker} on {process.node} (process {process.pid}) has not moved for "
                                f"{self._idle(uid):.0f} s ({beat.phase}, after step {beat.step})")

    def _is_ready(self) -> bool:
        """Whether the next generation can form."""
        members = self._members.keys() - self._gone
        if any(uid not in self._waiting and self._is_alive(uid) for uid in members):
            return False
        if members & self._waiting.keys():
            return True
        since = [self._since[uid] for uid in self._waiting if self._is_alive(uid)]
        wanted = 1 if self._number else self._wanted  # who goes on from a checkpoint waits for nobody
        return len(since) >= wanted or self._clock() - min(since, default=math.inf) > SETTLE_SECONDS

    def _staying(self, uids: Iterable[str]) -> set[str]:
        """Those who live and are not to leave."""
        return {uid for uid in uids if uid not in self._parting and self._is_alive(uid)}

    def _form(self) -> None:
        alive = {uid: arrival for uid, arrival in self._waiting.items() if self._is_alive(uid)}
        staying = self._staying(alive)
        if any(alive[uid].progress for uid in staying) or not any(arrival.progress for arrival in alive.values()):
            self._gone |= self._parting & alive.keys() if staying else set()
            alive = {uid: arrival for uid, arrival in alive.items() if uid not in self._gone}
        self._members = dict(sorted(alive.items(), key=lambda item: (item[1].worker, item[0])))
        self._waiting = {uid: arrival for uid, arrival in self._waiting.items()  # who is silent may come back
                         if uid not in self._members.keys() | self._gone and not arrival.process.has_ended}
        self._number += 1

    def _is_alive(self, uid: str) -> bool:
        arrival = self._waiting.get(uid) or self._members[uid]
        heard = self._clock() - self._beats[uid][0] <= SILENCE_SECONDS
        return heard and uid not in self._gone and not arrival.process.has_ended

    def _idle(self, uid: str) -> float:
        """Seconds that a worker has been in its phase, as far as it is known."""
        heard, beat = self._beats[uid]
        return self._clock() - heard + beat.seconds

    def _lateness(self, uid: str) -> float:
        """Seconds beyond its limit that a worker has not moved; negative if it has, or waits itself and says so."""
        heard, beat = self._beats[uid]
        if uid in self._waiting:
            return self._clock() - heard - beat.limit
        if uid in self._gone or self._is_waiting(uid, beat):
            return -1.0
        left = max((self._since[other] for other in self._members.keys() & self._waiting.keys()), default=-math.inf)
        return min(self._idle(uid), self._clock() - left) - beat.limit  # who has left may be whom it waited for

    def _is_waiting(self, uid: str, beat: Beat) -> bool:
        """Whether a member waits for others, alive; or it is stuck in an exchange that is over for all of them."""
        furthest = max((self._beats[other][1].step for other in self._members), default=0)
        others = self._members.keys() - self._gone - {uid}
        return (beat.phase == "exchanging" and beat.step == furthest and not others <= self._waiting.keys()
                and self._clock() - self._beats[uid][0] <= SILENCE_SECONDS)

    def _somebody_waits(self, uid: str) -> bool:
        """Whether another member is alive and waits, or there is none: then it is the user who does."""
        others = [other for other in self._members if other != uid and self._is_alive(other)]
        exchanging = {other for other in others if self._beats[other][1].phase == "exchanging"}
        return not others or bool(exchanging or self._waiting.keys() & others)
