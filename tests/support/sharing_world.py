"""A cluster whose drivers share it, on a simulated clock."""

from __future__ import annotations

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
    """A program of the cluster with workers of its own, or a group of another program."""

    name: str
    place: Bundle
    least: int
    most: int  # as many as `least`: it is a fixed number, or a program of others
    priority: int = 0
    strategy: str = "PACK"
    driver: Sharing | None = None
    look_at: float = 0.0
    given: set[int] = field(default_factory=set)
    leaving: dict[int, float] = field(default_factory=dict)  # and when they have left
    idle_since: float | None = None


class World:
    """Nodes, groups and drivers. Ray places what fits at once, and reports what has become free a while later."""

    def __init__(self, kinds: list[Kind], seed: int = 0, lag: float = 0.0) -> None:
        self.now, self.lag, self.random = 0.0, lag, random.Random(seed)
        self.nodes = {f"n{number}": kind for number, kind in enumerate(kinds)}
        self.groups: list[Group] = []
        self.jobs: dict[str, Job] = {}
        self.taken: list[tuple[str, dict[str, float]]] = []  # by actors and tasks outside of groups
        self.moves: list[tuple[float, str, int]] = []
        self.removed: list[tuple[float, Bundle]] = []
        self.requested = 0
        self.faults: list[str] = []

    # What happens

    def start(self, job: Job) -> None:
        self.jobs[job.name] = job
        bundles = (job.place,) * job.least
        kind: GroupKind = "foreign" if job.most == job.least else "minimum"
        self.groups.append(Group(f"{job.name}-{kind}", job.name, bundles, job.strategy, kind, job.priority))
        if job.most > job.least:
            job.driver = Sharing(job.name, job.place, lambda: self.now)
            job.look_at = self.now + self.random.random()
            for number in range(job.least, job.most):
                self.request(job, number)

    def request(self, job: Job, number: int) -> None:
        self.requested += 1
        self.groups.append(Group(f"{job.name}-extra-{number}-{self.requested}", job.name, (job.place,), "PACK", "extra",
                                 job.priority, number))

    def end(self, name: str) -> None:
        del self.jobs[name]
        self.remove(lambda group: group.job == name)

    def remove(self, ends: Callable[[Group], bool]) -> None:
        for group in filter(ends, self.groups):
            self.removed += [(self.now, bundle) for bundle in group.bundles if bundle.node]
        self.groups = [group for group in self.groups if not ends(group)]

    def give(self, job: Job, number: int) -> None:
        job.given.add(number)
        self.remove(lambda group: group.job == job.name and group.kind == "extra" and group.number == number)

    def lose_node(self, name: str) -> None:
        """Its workers come back elsewhere."""
        del self.nodes[name]
        self.taken = [(node, needs) for node, needs in self.taken if node != name]
        self.groups = [group._replace(bundles=tuple(bundle._replace(node="") if bundle.node == name else bundle
                                                    for bundle in group.bundles)) for group in self.groups]

    # Ray

    def free(self, *, reported: bool = False) -> dict[str, Counter[str]]:
        free = {name: Counter(dict(kind.total)) for name, kind in self.nodes.items()}
        held = [(bundle.node, bundle.needs) for group in self.groups for bundle in group.bundles]
        if reported:
            held += [(bundle.node, bundle.needs) for at, bundle in self.removed if self.now < at + self.lag]
        for node, needs in [*held, *self.taken]:
            if node in free:
                free[node].subtract(needs)
        return free

    def table(self) -> list[Node]:
        return [Node(name, free, self.nodes[name].labels) for name, free in self.free(reported=True).items()]

    def place(self) -> None:
        """Ray places each waiting group that fits, in any order."""
        waiting = [number for number, group in enumerate(self.groups) if not group.is_placed]
        free, failed = self.free(reported=True), set[str]()
        for number in self.random.sample(waiting, len(waiting)):
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
                self.groups[number] = group._replace(bundles=tuple(found))

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
        if decision.takes_back and not job.leaving:
            for number in sorted(job.given)[:decision.takes_back]:
                job.given.discard(number)
                job.driver.took_back(number)
                self.request(job, number)

    def step(self) -> None:
        """Go on to the next look or end of a worker."""
        drivers = [job for job in self.jobs.values() if job.driver]
        times = [at for job in drivers for at in (job.look_at, *job.leaving.values())]
        self.now = max(self.now + 0.2, min(times, default=self.now + 10.0))
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

    def extras(self) -> Counter[str]:
        return Counter(group.job for group in self.groups if group.kind == "extra" and group.is_placed)

    def waiting(self) -> list[Group]:
        return [group for group in self.groups if not group.is_placed]

    def watch(self) -> None:
        """Note each job whose place was free for too long while it had given such a place. Places of workers that leave
        are added up for another job."""
        free, is_moving = self.free(), any(job.leaving for job in self.jobs.values())
        is_moving |= bool(self.moves) and self.now - self.moves[-1][0] < 30.0
        for job in self.jobs.values():
            is_idle = bool(job.given) and not is_moving and any(
                matches(job.place.labels, kind.labels) and self.holds(free[name], job.place.needs)
                for name, kind in self.nodes.items())
            job.idle_since = (self.now if job.idle_since is None else job.idle_since) if is_idle else None
            if job.idle_since is not None and self.now - job.idle_since > IDLE_SECONDS:
                self.faults.append(f"{self.now:.0f}: {job.name} could use an idle place since {job.idle_since:.0f}")
