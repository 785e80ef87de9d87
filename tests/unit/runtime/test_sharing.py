"""Which worker of an elastic training leaves for another job, and when its place is requested again."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ray_yolo.runtime.sharing import (
    CALM_SECONDS,
    PATIENCE_SECONDS,
    Bundle,
    Group,
    GroupKind,
    Node,
    Places,
    Sharing,
    group_name,
    matches,
    named_group,
)
from tests.support.sharing_world import Job, Kind, World

CPU = {"CPU": 1.0}


def group(job: str, kind: GroupKind, number: int = 0, *, priority: int = 0, placed: bool = True, bundles: int = 1,
          needs: dict[str, float] = CPU, strategy: str = "PACK", node: str = "n",
          labels: dict[str, str] | None = None) -> Group:
    bundle = Bundle(needs, node if placed else "", labels or {})
    return Group(f"{job}-{kind}-{number}", job, (bundle,) * bundles, strategy, kind, priority, number)


def elastic(job: str, extras: int, *, priority: int = 0, waiting: int = 0) -> list[Group]:
    """A range of workers from 1: its minimum and some extras are placed, others wait."""
    return [group(job, "minimum", priority=priority),
            *(group(job, "extra", number, priority=priority) for number in range(1, extras + 1)),
            *(group(job, "extra", number, priority=priority, placed=False)
              for number in range(extras + 1, extras + 1 + waiting))]


def leaves(groups: list[Group], nodes: list[Node] | None = None) -> str | None:
    due = [group.id for group in groups if not group.is_placed]
    offer = Places(groups, nodes or [Node("n", {})], due).offer
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
    ([*elastic("a", 3), group("w", "foreign", placed=False, bundles=2, strategy="STRICT_PACK")],
     "a-extra-3"),  # on one node
    ([*elastic("a", 3), group("w", "foreign", placed=False, bundles=2, strategy="STRICT_SPREAD")], None),
    ([*elastic("a", 3), group("w", "foreign", placed=False, needs={"CPU": 2.0})], "a-extra-3"),  # two places
    ([*elastic("a", 3), group("w", "foreign", placed=False, needs={"CPU": 4.0})], None),
    ([*elastic("a", 3), group("w", "foreign", placed=False, needs={"CPU": 1.0, "memory": 1.0})], None),
    ([*elastic("a", 3), group("w", "foreign", placed=False, labels={"type": "A100"})], None),
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
    (1, 1.0, None),  # it fits, and Ray is about to place it
    (2, 1.0, "a-extra-3"), (4, 1.5, "a-extra-3"), (5, 1.0, None),
])
def test_free_resources_count(bundles: int, free: float, expected: str | None) -> None:
    groups = [*elastic("a", 3), group("w", "foreign", placed=False, bundles=bundles)]
    assert leaves(groups, [Node("n", {"CPU": free})]) == expected


def on(node: str, job: str, numbers: range, **settings: Any) -> list[Group]:
    return [group(job, "extra", number, node=node, **settings) for number in numbers]


def test_places_are_added_up_on_the_node_where_the_fewest_leave() -> None:
    groups = [*on("x", "a", range(1, 5)), *on("y", "b", range(1, 4)),
              group("w", "foreign", placed=False, needs={"CPU": 3.0})]
    assert leaves(groups, [Node("x", {}), Node("y", {})]) == "a-extra-4"  # as many on both; it has the most
    assert leaves(groups, [Node("x", {"CPU": 1.0}), Node("y", {})]) == "a-extra-4"
    assert leaves(groups, [Node("x", {"CPU": 1.0}), Node("y", {"CPU": 2.0})]) == "b-extra-3"
    lower = [*on("x", "a", range(1, 5), priority=-1), *groups[4:]]
    assert leaves(lower, [Node("x", {}), Node("y", {"CPU": 2.0})]) == "a-extra-4"  # the lowest priority first


def test_types_and_labels_of_nodes_count() -> None:
    a100, l4 = {"GPU": 1.0, "accelerator_type:A100": 0.001}, {"GPU": 1.0}
    groups = [*on("x", "a", range(1, 5), needs=l4), *on("y", "a", range(5, 9), needs=l4)]
    nodes = [Node("x", {"accelerator_type:A100": 1.0}, {"zone": "1"}), Node("y", {"accelerator_type:L4": 1.0})]
    assert leaves([*groups, group("w", "minimum", placed=False, needs=a100)], nodes) == "a-extra-4"
    assert leaves([*groups, group("w", "minimum", placed=False, needs=a100, bundles=5)], nodes) is None
    assert leaves([*groups, group("w", "minimum", placed=False, needs=l4, labels={"zone": "!1"})], nodes) == "a-extra-8"
    assert leaves([*groups, group("w", "minimum", placed=False, needs={"GPU": 1.0, "memory": 1e13})], nodes) is None


@pytest.mark.parametrize(("condition", "value", "expected"), [
    ("a", "a", True), ("a", "b", False), ("a", None, False), ("!a", "a", False), ("!a", None, True),
    ("in(a, b)", "b", True), ("in(a,b)", "c", False), ("!in(a,b)", "c", True), ("!in(a,b)", "a", False)])
def test_a_label_selector_is_that_of_ray(condition: str, value: str | None, expected: bool) -> None:
    assert matches({"key": condition}, {"key": value} if value else {}) is expected


def test_the_room_is_what_no_waiting_job_gets() -> None:
    nodes = [Node("x", {"CPU": 5.0}), Node("y", {"CPU": 1.5})]
    assert Places([], nodes, []).room(Bundle(CPU)) == 6
    waits = group("w", "foreign", placed=False, bundles=2)
    assert Places([waits], nodes, []).room(Bundle(CPU)) == 4
    large = group("w", "foreign", placed=False, needs={"CPU": 7.0})
    assert Places([large, *on("x", "a", range(1, 3))], nodes, [large.id]).room(Bundle(CPU)) == 1  # they are added up


def test_the_name_of_a_group_tells_its_kind_priority_and_number() -> None:
    bundles = (Bundle(CPU, "n"),)
    assert named_group("g", "j", group_name("extra", -3, 7), bundles, "PACK") == Group(
        "g", "j", bundles, "PACK", "extra", -3, 7)
    assert named_group("g", "j", "ray_yolo/extra/x", bundles, "PACK").kind == "foreign"
    assert group_name("extra", -3, 7) != group_name("extra", -3, 7)


def cpus(number: int, lag: float = 0.0, delay: float = 0.0) -> World:
    return World([Kind({"CPU": float(number)})], lag=lag, delay=delay)


def ranged(name: str, most: int, priority: int = 0) -> Job:
    return Job(name, Bundle(CPU), 1, most, priority)


def test_two_equal_ranges_share_a_cluster_and_the_one_that_stays_gets_all_back() -> None:
    world = cpus(4)
    world.start(ranged("a", 4))
    world.run(30)
    assert world.extras() == {"a": 3}
    world.start(ranged("b", 4))
    world.run(30)
    assert all(group.is_placed for group in world.groups if group.kind == "minimum")
    world.run(120)
    assert world.extras() == {"a": 1, "b": 1}
    moves = len(world.moves)
    world.run(600)
    assert len(world.moves) == moves  # they do not swap for ever
    world.end("b")
    world.run(2 * PATIENCE_SECONDS + 4)
    assert world.extras() == {"a": 3}


@pytest.mark.parametrize("lag", [0.0, 2.0])
def test_a_place_that_was_given_is_for_the_group_that_ray_is_about_to_place(lag: float) -> None:
    """The second range requested more workers before its minimum was placed. Ray tries a new group at once: they took
    the minimum's place, and another worker left for it, again and again."""
    world = cpus(4, lag, delay=5.0)
    world.start(ranged("a", 4))
    world.run(30)
    world.start(ranged("b", 4))
    world.run(300)
    assert world.extras() == {"a": 1, "b": 1}
    assert len(world.moves) == 2


def test_equal_ranges_share_nodes_that_join() -> None:
    """Both waited for more; the new node's places all went to the one whose groups still waited."""
    world = cpus(8)
    for name in "ab":
        world.start(ranged(name, 32))
        world.run(300)
    assert world.extras() == {"a": 3, "b": 3}
    world.join(world.nodes["n0"])
    world.run(300)
    assert world.extras() == {"a": 7, "b": 7}


def test_a_group_that_no_node_can_hold_takes_no_place() -> None:
    world = cpus(8)
    world.start(ranged("a", 8))
    world.run(30)
    world.start(Job("w", Bundle({"CPU": 1.0, "memory": 1e13}), 1, 1))
    world.run(600)
    world.start(ranged("b", 4))
    world.run(300)
    assert world.extras() == {"a": 3, "b": 3}
    world.end("b")
    world.run(2 * PATIENCE_SECONDS + 10)
    assert world.extras() == {"a": 7}  # though the other still waits


def test_a_higher_priority_gets_all_that_is_above_the_minimum_of_the_others() -> None:
    world = cpus(6)
    for name, priority in {"a": -1, "b": 0, "c": 1}.items():
        world.start(ranged(name, 4, priority))
        world.run(200)
    assert world.extras() == {"c": 3}
    world.end("c")
    world.run(300)
    assert world.extras() == {"b": 3, "a": 1}


def test_a_worker_that_has_come_back_stays_for_a_minute() -> None:
    world = cpus(4)
    world.start(ranged("a", 4))
    world.run(30)
    world.start(ranged("b", 1))
    world.run(30)
    assert world.extras() == {"a": 2}
    world.end("b")
    world.run(CALM_SECONDS + 2)
    assert world.extras() == {"a": 3}
    before, _, number = world.moves[-1]
    world.start(ranged("c", 1))
    world.run(CALM_SECONDS + 2 * PATIENCE_SECONDS)
    again, _, moved = world.moves[-1]
    assert moved == number
    assert again - before >= CALM_SECONDS


@pytest.mark.parametrize("lag", [0.0, 2.0, 4.0])
def test_no_more_leave_than_are_missing_while_what_they_free_is_not_reported_yet(lag: float) -> None:
    """A sweep of four gave three places to a training of two: the second had left, and did not count as free yet."""
    world = cpus(4, lag)
    world.start(ranged("a", 4))
    world.run(30)
    world.start(Job("fixed", Bundle(CPU), 2, 2))
    world.run(PATIENCE_SECONDS + 40)
    assert all(group.is_placed for group in world.groups)
    assert world.extras() == {"a": 1}


@pytest.mark.parametrize("lag", [0.0, 4.0])
def test_another_one_leaves_if_a_third_program_has_taken_what_was_freed(lag: float) -> None:
    world = cpus(4, lag)
    world.start(ranged("a", 4))
    world.run(30)
    world.start(Job("fixed", Bundle(CPU), 2, 2))
    while not world.jobs["a"].given:
        world.step()
    world.take("n0", CPU)  # a task took the CPU without waiting
    world.run(PATIENCE_SECONDS + 30)
    assert all(group.is_placed for group in world.groups)
    assert world.extras() == {}


def test_what_was_freed_and_taken_between_two_looks_is_not_free() -> None:
    """Two CPUs of an ended group counted as free, though another group had got them: a worker left for nothing."""
    now = [0.0]
    sharing, nodes = Sharing("a", Bundle(CPU), lambda: now[0]), [Node("n", {"CPU": 0.0})]
    rest = [*elastic("a", 1), group("w", "foreign", placed=False, needs={"CPU": 3.0})]
    for now[0] in (0.0, 10.0):
        sharing.decide([*rest, group("o", "foreign", bundles=2)], nodes)
    now[0] = 20.0
    assert sharing.decide([*rest, group("p", "foreign", bundles=2)], nodes).give is None
    now[0] = 21.0
    assert sharing.decide(rest, nodes).give == 1


@given(size=st.integers(2, 8), lag=st.integers(0, 4),
       jobs=st.lists(st.tuples(st.integers(-2, 2), st.integers(1, 6)), min_size=2, max_size=4),
       starts=st.lists(st.integers(0, 100), min_size=4, max_size=4), ends=st.sets(st.integers(0, 3), max_size=2))
def test_no_minimum_leaves_no_worker_moves_twice_a_minute_and_the_jobs_come_to_rest(
        size: int, lag: int, jobs: list[tuple[int, int]], starts: list[int], ends: set[int]) -> None:
    world = cpus(size, lag)
    for number, (priority, most) in enumerate(jobs):
        world.start(ranged(str(number), most, priority))
        world.run(starts[number])
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
        if waits.kind != "extra" and not waits.is_placed:
            assert not [extra for extra in world.groups if extra.kind == "extra" and extra.is_placed
                        and extra.priority <= waits.priority and extra.job != waits.job]
