"""A cluster whose drivers share it, on a simulated clock."""

from __future__ import annotations

import math
import random
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import NamedTuple

from ray_yolo.runtime.sharing import Bundle, Group, GroupKind, Node, Sharing, matches

IDLE_SECONDS = 120.0  # a place that a job could use is free for so long at most


class Kind(NamedTuple):
    """A kind of nodes."""

    total: Mapping[str, float]
    labels: Mapping[str, str] = {}


@dataclass
class Job:
    """A program of the cluster with workers of its own, or groups of another program."""

    name: str
    place: Bundle
    least: int
    most: int  # as many as `least`: it is a fixed number, or a program of others
    priority: int = 0
    strategy: str = "PACK"
    apart: bool = False  # each of its bundles is a group, as that of a server's replica
    grows: bool = False  # by the places that the cluster would have for it alone, as a study
    driver: Sharing | None = None
    look_at: float = 0.0
    size: int = 0  # of its pool: places that it has, that wait, and that are given
    given: set[int] = field(default_factory=set)
    leaving: dict[int, float] = field(default_factory=dict)  # and when they have left
    idle_since: float | None = None


class World:
    """Nodes, groups and drivers.

    Args:
        lag: seconds until Ray reports what a removed group has held as free.
        delay: seconds at most until Ray tries again to place a group that waits. It tries a new group at once.
    """

    def __init__(self, kinds: list[Kind], seed: int = 0, lag: float = 0.0, delay: float = 0.0) -> None:
        self.now, self.lag, self.delay, self.random = 0.0, lag, delay, random.Random(seed)
        self.nodes = {f"n{number}": kind for number, kind in enumerate(kinds)}
        self.groups: list[Group] = []
        self.jobs: dict[str, Job] = {}
        self.taken: list[tuple[str, Mapping[str, float]]] = []  # by actors and tasks outside of groups
        self.moves: list[tuple[float, str, int]] = []
        self.removed: list[tuple[float, Bundle]] = []  # since `lag`
        self.requested = 0
        self.faults: list[str] = []
        self._changes = 0
        """How often nodes, groups or actors have changed. What is computed of them holds until the next time."""
        self._state, self._tried = (-1, 0), (-1, 0)
        """The state of what is below, and the newest one after which each waiting group is tried again."""
        self._tries: dict[str, float] = {}
        """When Ray tries to place each waiting group; infinite: not before something changes."""
        self._free: dict[str, Counter[str]] = {}
        self._reported: list[Node] = []
        self._idle: set[str] = set()

    # What happens

    def start(self, job: Job) -> None:
        self._changes += 1
        self.jobs[job.name] = job
        kind: GroupKind = "minimum" if job.grows or job.most > job.least else "foreign"
        parts = [1] * job.least if job.apart else [job.least]
        self.groups = [*self.groups, *(
            Group(f"{job.name}-{kind}-{number}", job.name, (job.place,) * part, job.strategy, kind, job.priority)
            for number, part in enumerate(parts))]
        if kind == "minimum":
            job.driver = Sharing(job.name, job.place, lambda: self.now)
            job.look_at, job.size = self.now + self.random.random(), job.least
            self.grow(job)

    def grow(self, job: Job) -> None:
        """Request places until there are so many as the job wants."""
        room = 0
        for kind in self.nodes.values() if job.grows else ():
            free = Counter(dict(kind.total))
            while matches(job.place.labels, kind.labels) and self.holds(free, job.place.needs):
                free.subtract(job.place.needs)
                room += 1
        size = max(job.size, job.most, room)
        for number in range(job.size, size):
            self.request(job, number)
        job.size = size

    def request(self, job: Job, number: int) -> None:
        self.requested += 1
        self._changes += 1
        self.groups = [*self.groups, Group(f"{job.name}-extra-{number}-{self.requested}", job.name, (job.place,),
                                           "PACK", "extra", job.priority, number)]

    def end(self, name: str) -> None:
        del self.jobs[name]
        self.remove(lambda group: group.job == name)

    def remove(self, ends: Callable[[Group], bool]) -> None:
        self._changes += 1
        for group in filter(ends, self.groups):
            self.removed += [(self.now, bundle) for bundle in group.bundles if bundle.node]
        self.groups = [group for group in self.groups if not ends(group)]

    def give(self, job: Job, number: int) -> None:
        job.given.add(number)
        self.remove(lambda group: group.job == job.name and group.kind == "extra" and group.number == number)

    def join(self, kind: Kind) -> None:
        """A node joins. Studies grow with the cluster."""
        self._changes += 1
        self.nodes[f"m{self.now:.0f}"] = kind
        for job in self.jobs.values():
            if job.driver:
                self.grow(job)

    def lose_node(self, name: str) -> None:
        """Its workers come back elsewhere."""
        self._changes += 1
        del self.nodes[name]
        self.taken = [(node, needs) for node, needs in self.taken if node != name]
        self.groups = [group._replace(bundles=tuple(bundle._replace(node="") if bundle.node == name else bundle
                                                    for bundle in group.bundles)) for group in self.groups]

    def take(self, node: str, needs: Mapping[str, float]) -> None:
        """An actor starts outside of groups."""
        self._changes += 1
        self.taken.append((node, needs))

    def end_actor(self) -> None:
        self._changes += 1
        self.taken.pop()

    # Ray

    def _update(self) -> None:
        """Compute what is free, what Ray reports as free, and which jobs have given a place that is idle now."""
        self.removed = [(at, bundle) for at, bundle in self.removed if self.now < at + self.lag]
        state = self._changes, len(self.removed)
        if state == self._state:
            return
        self._state = state
        self._free = {name: Counter(dict(kind.total)) for name, kind in self.nodes.items()}
        held = [(bundle.node, bundle.needs) for group in self.groups for bundle in group.bundles if bundle.node]
        for node, needs in [*held, *self.taken]:
            self._free[node].subtract(needs)
        reported = {name: Counter(free) for name, free in self._free.items()}
        for bundle in (bundle for _, bundle in self.removed if bundle.node in reported):
            reported[bundle.node].subtract(bundle.needs)
        self._reported = [Node(name, free, self.nodes[name].labels) for name, free in reported.items()]
        self._idle = {job.name for job in self.jobs.values() if job.given and any(
            matches(job.place.labels, kind.labels) and self.holds(self._free[name], job.place.needs)
            for name, kind in self.nodes.items())}

    def free(self) -> dict[str, Counter[str]]:
        """What is free on each node."""
        self._update()
        return {name: Counter(free) for name, free in self._free.items()}

    def table(self) -> list[Node]:
        self._update()
        return self._reported

    def place(self) -> None:
        """Ray places each waiting group that fits and is tried now."""
        free = {node.id: Counter(node.free) for node in self.table()}
        waiting = {group.id: number for number, group in enumerate(self.groups) if not group.is_placed}
        if self._tried != self._state:
            self._tried = self._state
            for name in self.random.sample(list(waiting), len(waiting)):
                is_new = name not in self._tries
                if is_new or self._tries[name] == math.inf:
                    self._tries[name] = self.now + (0 if is_new else self.random.uniform(0, self.delay))
        self._tries = {name: at for name, at in self._tries.items() if name in waiting}
        failed, placed = set[str](), list(self.groups)
        for name in sorted(waiting, key=self._tries.__getitem__):
            if self._tries[name] > self.now:
                break
            self._tries[name] = math.inf
            number = waiting[name]
            group = self.groups[number]
            same = f"{group.job} {group.kind}"
            if same in failed:
                continue
            found, before = list(group.bundles), {name: Counter(each) for name, each in free.items()}
            for index, bundle in enumerate(group.bundles):
                if not bundle.node:
                    fitting = [name for name, kind in self.nodes.items() if matches(bundle.labels, kind.labels)
                               and self.holds(free[name], bundle.needs)]
                    if group.strategy == "STRICT_SPREAD":
                        fitting = [name for name in fitting if name not in {each.node for each in found}]
                    elif group.strategy == "STRICT_PACK":  # its places are tried one by one: on this node all fit
                        rest = [each for each in found if not each.node]
                        fitting = [name for name in fitting if self.holds(free[name], self.sum(rest))]
                        fitting = [name for name in fitting if name in {each.node for each in found}] or fitting
                    if not fitting:
                        free = before
                        failed.add(same)
                        break
                    found[index] = bundle._replace(node=self.random.choice(fitting))
                    free[found[index].node].subtract(bundle.needs)
            else:
                placed[number] = group._replace(bundles=tuple(found))
                self._changes += 1
        self.groups = placed

    @staticmethod
    def sum(bundles: list[Bundle]) -> Counter[str]:
        total = Counter[str]()
        for bundle in bundles:
            total.update(bundle.needs)
        return total

    @staticmethod
    def holds(free: Mapping[str, float], needs: Mapping[str, float]) -> bool:
        return all(free.get(each, 0.0) >= amount - 1e-6 for each, amount in needs.items())

    # Drivers

    def look(self, job: Job) -> None:
        assert job.driver
        decision = job.driver.decide(self.groups, self.table(), job.leaving)
        job.look_at = self.now + decision.look_again
        if decision.withdraws:
            for group in [group for group in self.groups
                          if group.job == job.name and group.kind == "extra" and not group.is_placed]:
                self.give(job, group.number)
        if decision.give is not None:
            job.leaving[decision.give] = self.now + self.random.uniform(0.5, 5.0)
            self.moves.append((self.now, job.name, decision.give))
            if not any(self.could_hold(group) for group in self.waiting() if group.job == decision.to):
                self.faults.append(f"{self.now:.0f}: {job.name} gives to {decision.to}, which no node could hold")
        if decision.takes_back and not job.leaving:
            for number in sorted(job.given)[:decision.takes_back]:
                job.given.discard(number)
                job.driver.took_back(number)
                self.request(job, number)

    def step(self) -> None:
        """Go on to the next look or end of a worker."""
        drivers = [job for job in self.jobs.values() if job.driver]
        times = [at for job in drivers for at in (job.look_at, *job.leaving.values())]
        self.now = max(self.now + 0.2, min([*times, *self._tries.values(), self.now + 10.0]))
        for job in drivers:
            for number, at in list(job.leaving.items()):
                if at <= self.now:
                    del job.leaving[number]
                    self.give(job, number)
        self.place()
        for job in drivers:
            if job.look_at <= self.now:
                self.look(job)
        self.watch()

    def run(self, seconds: float) -> None:
        end = self.now + seconds
        while self.now < end:
            self.step()

    # What is seen

    def could_hold(self, group: Group, room: Mapping[str, Counter[str]] | None = None) -> bool:
        """Whether nodes have room for what a group waits for. Its bundles are equal.

        Args:
            room: on each node; by default what it has if all other groups and actors end.
        """
        if room is None:
            room = {name: Counter(dict(kind.total)) for name, kind in self.nodes.items()}
            for bundle in (bundle for bundle in group.bundles if bundle.node):
                room[bundle.node].subtract(bundle.needs)
        left = {name: Counter(free) for name, free in room.items()}
        lacking = [bundle for bundle in group.bundles if not bundle.node]
        if group.strategy == "STRICT_PACK":
            lacking = [lacking[0]._replace(needs=self.sum(lacking))]
        elif group.strategy == "STRICT_SPREAD":
            left = {name: free for name, free in left.items() if name not in {each.node for each in group.bundles}}
        for bundle in lacking:
            node = next((name for name, free in left.items() if self.holds(free, bundle.needs)
                         and matches(bundle.labels, self.nodes[name].labels)), None)
            if node is None:
                return False
            left[node].subtract(bundle.needs)
            if group.strategy == "STRICT_SPREAD":
                del left[node]
        return True

    def extras(self) -> Counter[str]:
        return Counter(group.job for group in self.groups if group.kind == "extra" and group.is_placed)

    def waiting(self) -> list[Group]:
        return [group for group in self.groups if not group.is_placed]

    def watch(self) -> None:
        """Note each job whose place was free for too long while it had given such a place. Places of workers that leave
        are added up for another job."""
        self._update()
        is_moving = any(job.leaving for job in self.jobs.values())
        is_moving |= bool(self.moves) and self.now - self.moves[-1][0] < 30.0
        for job in self.jobs.values():
            is_idle = job.name in self._idle and not is_moving
            job.idle_since = (self.now if job.idle_since is None else job.idle_since) if is_idle else None
            if job.idle_since is not None and self.now - job.idle_since > IDLE_SECONDS:
                self.faults.append(f"{self.now:.0f}: {job.name} could use an idle place since {job.idle_since:.0f}")
