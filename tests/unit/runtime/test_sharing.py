"""Which worker of an elastic training leaves for another job, and when its place is requested again."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ray_yolo.runtime.sharing import (
    CALM_SECONDS,
    PATIENCE_SECONDS,
    Group,
    GroupKind,
    Sharing,
    choose_offer,
    group_name,
    read_groups,
)

CPU = {"CPU": 1.0}
FULL: list[dict[str, float]] = [{}]


def group(job: str, kind: GroupKind, number: int = 0, *, priority: int = 0, placed: bool = True, bundles: int = 1,
          needs: dict[str, float] = CPU, strict: bool = False) -> Group:
    return Group(f"{job}-{kind}-{number}", job, placed, (needs,) * bundles, strict, kind, priority, number)


def elastic(job: str, extras: int, *, priority: int = 0, waiting: int = 0) -> list[Group]:
    """A range of workers from 1: its minimum and some extras are placed, others wait."""
    return [group(job, "minimum", priority=priority),
            *(group(job, "extra", number, priority=priority) for number in range(1, extras + 1)),
            *(group(job, "extra", number, priority=priority, placed=False)
              for number in range(extras + 1, extras + 1 + waiting))]


def leaves(groups: list[Group], free: list[dict[str, float]] = FULL) -> str | None:
    offer = choose_offer(groups, [group.id for group in groups if not group.is_placed], free)
    return offer.leaves.id if offer else None


WAITS = group("w", "minimum", placed=False)


@pytest.mark.parametrize(("groups", "expected"), [
    ([*elastic("a", 3), WAITS], "a-extra-3"),  # the youngest
    ([*elastic("a", 0), WAITS], None),  # a minimum stays
    ([*elastic("a", 2), *elastic("b", 3), WAITS], "b-extra-3"),  # the job with the most extras
    ([*elastic("b", 2), *elastic("a", 2), WAITS], "a-extra-2"),  # then the first by its id
    ([*elastic("a", 3), *elastic("b", 1, priority=-1), WAITS], "b-extra-1"),  # the lowest priority first
    ([*elastic("a", 3, priority=1), WAITS], None),
    ([*elastic("a", 3, priority=1), group("w", "minimum", placed=False, priority=1)], "a-extra-3"),
    ([*elastic("a", 3), group("w", "foreign", placed=False)], "a-extra-3"),
    ([*elastic("a", 3), group("w", "foreign", placed=False, bundles=3)], "a-extra-3"),
    ([*elastic("a", 3), group("w", "foreign", placed=False, bundles=4)], None),  # all together would not do
    ([*elastic("a", 3), group("w", "foreign", placed=False, bundles=2, strict=True)], None),
    ([*elastic("a", 3), group("w", "foreign", placed=False, needs={"CPU": 2.0})], None),
    ([*elastic("a", 3), group("w", "foreign", placed=False, needs={"GPU": 1.0})], None),
    ([*elastic("a", 3), *elastic("b", 0, waiting=3)], "a-extra-3"),  # equal priorities are levelled out
    ([*elastic("a", 2), *elastic("b", 1, waiting=2)], None),
    ([*elastic("a", 2), *elastic("b", 1, waiting=2, priority=1)], "a-extra-2"),
    ([*elastic("a", 1, waiting=2, priority=1), *elastic("b", 2, waiting=1)], "b-extra-2"),
    ([*elastic("a", 1, waiting=2), *elastic("b", 1, waiting=2)], None),
])
def test_who_leaves_for_a_waiting_group(groups: list[Group], expected: str | None) -> None:
    assert leaves(groups) == expected
    assert leaves(groups[::-1]) == expected  # whatever the order of the table


@pytest.mark.parametrize(("bundles", "free", "expected"), [
    (1, [{"CPU": 1.0}], None),  # it fits, and Ray is about to place it
    (2, [{"CPU": 1.0}], "a-extra-3"), (4, [{"CPU": 0.5}, {"CPU": 1.0}], "a-extra-3"), (5, [{"CPU": 1.0}], None),
])
def test_free_resources_count(bundles: int, free: list[dict[str, float]], expected: str | None) -> None:
    groups = [*elastic("a", 3), group("w", "foreign", placed=False, bundles=bundles)]
    assert leaves(groups, free) == expected


@pytest.mark.parametrize(("bundles", "free", "expected"), [
    (({}, {"CPU": 1.0}), [{}], "a-extra-3"),  # the first one reserves nothing
    (({"CPU": 1.0}, {"CPU": 2.0}), [{"CPU": 1.0}], None),  # no extra holds the second one
    (({"CPU": 0.5}, {"CPU": 1.0}), [{"CPU": 0.5}], "a-extra-3"),
    (({"CPU": 0.5}, {"CPU": 1.0}), [{"CPU": 1.0}, {"CPU": 1.0}], None),
    (({"CPU": 1.0}, {"GPU": 1.0}), [{}], None),
])
def test_bundles_of_another_program_may_differ(bundles: tuple[dict[str, float], ...], free: list[dict[str, float]],
                                               expected: str | None) -> None:
    table = {"w": {"placement_group_id": "w", "name": "", "state": "PENDING", "strategy": "PACK",
                   "bundles": dict(enumerate(bundles))}}
    assert leaves([*elastic("a", 3), *read_groups(table, lambda _: "w")], free) == expected


def test_a_group_is_read_from_the_table_of_ray() -> None:
    def row(state: str, bundles: dict[int, dict[str, float]], name: str = "", strategy: str = "PACK") -> dict[str, Any]:
        return {"placement_group_id": f"id-{state}-{len(name)}", "name": name, "state": state, "bundles": bundles,
                "strategy": strategy}

    name = group_name("extra", -3, 7)
    table = {"1": row("CREATED", {0: {"CPU": 2.0, "memory": 5.0}}, name), "2": row("REMOVED", {0: {"CPU": 1.0}}),
             "3": row("PENDING", {0: {"memory": 1.0}}), "4": row("PENDING", {0: {"GPU": 1.0}, 1: {"GPU": 1.0}}, "x",
                                                              "STRICT_PACK")}
    assert read_groups(table, lambda group: group[:2]) == [
        Group(f"id-CREATED-{len(name)}", "id", True, ({"CPU": 2.0},), False, "extra", -3, 7),
        Group("id-PENDING-1", "id", False, ({"GPU": 1.0}, {"GPU": 1.0}), True)]
    assert group_name("extra", -3, 7) != name


class World:
    """Some drivers on one cluster of CPUs. Time is simulated.

    Args:
        jobs: the priority and the largest number of workers of each.
        lag: the looks until Ray reports and gives out what a removed group has held.
    """

    def __init__(self, cpus: int, jobs: dict[str, tuple[int, int]], lag: int = 0) -> None:
        self.now, self.cpus = 0.0, cpus
        self.free_history = [0] * (lag + 1)
        self.groups: list[Group] = []
        self.most = {job: most for job, (_, most) in jobs.items()}
        self.priority = {job: priority for job, (priority, _) in jobs.items()}
        self.drivers: dict[str, Sharing] = {}
        self.given: dict[str, set[int]] = {}
        self.moves: list[tuple[float, str, int]] = []

    def start(self, job: str) -> None:
        self.drivers[job], self.given[job] = Sharing(job, lambda: self.now), set()
        self.groups.append(group(job, "minimum", priority=self.priority[job], placed=False))
        self.groups += [self.extra(job, number) for number in range(1, self.most[job])]

    def end(self, job: str) -> None:
        del self.drivers[job]
        self.groups = [group for group in self.groups if group.job != job]

    def extra(self, job: str, number: int) -> Group:
        return group(job, "extra", number, priority=self.priority[job], placed=False)

    def place(self) -> None:
        """Place the waiting groups that fit into what Ray reports as free."""
        reported = min(self.free_history[0], self.cpus - self.held())
        for place, waiting in enumerate(self.groups):
            if not waiting.is_placed and len(waiting.bundles) <= reported:
                self.groups[place] = waiting._replace(is_placed=True)
                reported -= len(waiting.bundles)

    def held(self) -> int:
        return sum(len(group.bundles) for group in self.groups if group.is_placed)

    def extras(self) -> Counter[str]:
        return Counter(group.job for group in self.groups if group.kind == "extra" and group.is_placed)

    def remove(self, job: str, number: int) -> None:
        self.given[job].add(number)
        self.groups = [group for group in self.groups
                       if not (group.job == job and group.kind == "extra" and group.number == number)]

    def step(self, seconds: float = 2.0) -> None:
        self.now += seconds
        self.free_history = [*self.free_history[1:], self.cpus - self.held()]
        self.place()
        for job, driver in self.drivers.items():
            reported = min(self.free_history[0], self.cpus - self.held())
            decision = driver.decide(self.groups, [{"CPU": float(reported)}], ())
            if decision.withdraws:
                for waiting in [group for group in self.groups
                                if group.job == job and group.kind == "extra" and not group.is_placed]:
                    self.remove(job, waiting.number)
            if decision.give is not None:
                self.remove(job, decision.give)
                self.moves.append((self.now, job, decision.give))
            if decision.takes_back:
                for number in self.given[job]:
                    driver.took_back(number)
                    self.moves.append((self.now, job, number))
                    self.groups.append(self.extra(job, number))
                self.given[job] = set()

    def run(self, seconds: float) -> None:
        end = self.now + seconds
        while self.now < end:
            self.step()


def test_two_equal_ranges_share_a_cluster_and_the_one_that_stays_gets_all_back() -> None:
    world = World(4, {"a": (0, 4), "b": (0, 4)})
    world.start("a")
    world.run(30)
    assert world.extras() == {"a": 3}
    world.start("b")
    world.run(PATIENCE_SECONDS + 4)
    assert all(group.is_placed for group in world.groups if group.kind == "minimum")
    world.run(60)
    assert world.extras() == {"a": 1, "b": 1}
    moves = len(world.moves)
    world.run(600)
    assert len(world.moves) == moves  # they do not swap for ever
    world.end("b")
    world.run(CALM_SECONDS + 4)
    assert world.extras() == {"a": 3}


def test_a_higher_priority_gets_all_that_is_above_the_minimum_of_the_others() -> None:
    world = World(6, {"a": (-1, 4), "b": (0, 4), "c": (1, 4)})
    for job in "abc":
        world.start(job)
        world.run(200)
    assert world.extras() == {"c": 3}
    world.end("c")
    world.run(300)
    assert world.extras() == {"b": 3, "a": 1}


def test_a_worker_that_has_come_back_stays_for_a_minute() -> None:
    world = World(4, {"a": (0, 4), "b": (0, 1), "c": (0, 1)})
    world.start("a")
    world.start("b")
    world.run(PATIENCE_SECONDS + 2)
    assert world.extras() == {"a": 2}
    world.end("b")
    world.run(CALM_SECONDS + 2)
    assert world.extras() == {"a": 3}
    back, _, _ = world.moves[-1]
    world.start("c")
    world.run(CALM_SECONDS + PATIENCE_SECONDS)
    again, _, number = world.moves[-1]
    assert (number, again - back) == (3, CALM_SECONDS)


@pytest.mark.parametrize("lag", [0, 1, 2])
def test_no_more_leave_than_are_missing_while_what_they_free_is_not_reported_yet(lag: int) -> None:
    """A sweep of four gave three places to a training of two: the second had left, and did not count as free yet."""
    world = World(4, {"a": (0, 4)}, lag)
    world.start("a")
    world.run(30)
    world.groups.append(group("fixed", "foreign", placed=False, bundles=2))
    world.run(PATIENCE_SECONDS + 20)
    assert all(group.is_placed for group in world.groups)
    assert world.extras() == {"a": 1}


@pytest.mark.parametrize("lag", [0, 2])
def test_another_one_leaves_if_a_third_program_has_taken_what_was_freed(lag: int) -> None:
    world = World(4, {"a": (0, 4)}, lag)
    world.start("a")
    world.run(30)
    world.groups.append(group("fixed", "foreign", placed=False, bundles=2))
    while not world.moves:
        world.step()
    world.groups.append(group("task", "foreign"))  # it took the CPU without waiting
    world.run(PATIENCE_SECONDS + 20)
    assert all(group.is_placed for group in world.groups)
    assert world.extras() == {}


@given(cpus=st.integers(2, 8), lag=st.integers(0, 2),
       jobs=st.lists(st.tuples(st.integers(-2, 2), st.integers(1, 6)), min_size=2, max_size=4),
       starts=st.lists(st.integers(0, 100), min_size=4, max_size=4), ends=st.sets(st.integers(0, 3), max_size=2))
def test_no_minimum_leaves_no_worker_moves_twice_a_minute_and_the_jobs_come_to_rest(
        cpus: int, lag: int, jobs: list[tuple[int, int]], starts: list[int], ends: set[int]) -> None:
    world = World(cpus, {str(number): job for number, job in enumerate(jobs)}, lag)
    for number in range(len(jobs)):
        world.start(str(number))
        world.run(starts[number])
        assert world.held() <= cpus
    for number in ends & set(range(len(jobs))):
        world.end(str(number))
        world.run(30)
    world.run(900)
    rest = len(world.moves)
    world.run(600)
    assert len(world.moves) == rest
    last: dict[tuple[str, int], float] = {}
    for at, job, number in world.moves:
        assert at - last.get((job, number), -CALM_SECONDS) >= CALM_SECONDS
        last[job, number] = at
    for waits in world.groups:
        if waits.kind == "minimum" and not waits.is_placed:
            assert not [extra for extra in world.groups if extra.kind == "extra" and extra.is_placed
                        and extra.priority <= waits.priority]
