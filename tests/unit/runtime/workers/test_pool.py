"""The worker pool: bundles, launches, and replacements."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import ray.exceptions

from ray_yolo.config.placement import Placement
from ray_yolo.core.events import PlacementEvent
from ray_yolo.runtime import cluster, ray_internals, sharing
from ray_yolo.runtime.sharing import CALM_SECONDS, PATIENCE_SECONDS
from ray_yolo.runtime.workers import pool
from ray_yolo.runtime.workers.pool import WorkerPool

LOST = ray.exceptions.WorkerCrashedError()


def work(config: dict[str, Any], number: int) -> Any:
    """What each worker does is its number's."""
    if number == 1:
        signal.raise_signal(signal.SIGKILL)
    if number == 2:
        raise ValueError("odd")
    return config["answer"], os.environ["OMP_NUM_THREADS"]


class Desk:
    """A supervisor whose pool, coordinator, nodes and failure policy are the test's."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.launched: list[int] = []
        self.decided: list[tuple[dict[int, Exception], int]] = []
        self.outcome: tuple[dict[int, Any], dict[int, Exception]] = ({}, {})
        self.gone: list[int] = []
        self.draining: set[str] = set()
        self.on_nodes: dict[int, str] = {}
        self.present, self.missing, self.replaced = 2, "", 0
        self.relaunch: list[int] = []
        self.training: set[int] = set()  # a job
        self.groups: list[sharing.Group] = []  # of the cluster
        self.free = 0.0  # CPUs
        self.given: list[int] = []
        self.waiting: list[int] = []
        self.not_assigned: list[set[int]] = []
        self.said: list[str] = []
        desk = self

        queue: Any = SimpleNamespace(  # answers at once
            present=SimpleNamespace(remote=lambda: desk.present),
            progress=SimpleNamespace(remote=lambda: 7),
            mark_departed=SimpleNamespace(remote=self.mark_departed),
            drain_nodes=SimpleNamespace(remote=lambda nodes: {
                number: node for number, node in desk.on_nodes.items() if node in nodes}))

        class FailurePolicy:
            """Records the decisions that it is asked for."""

            def notify(self, text: str) -> None:
                desk.said.append(text)

            def decide_idle(self, failures: dict[int, Exception], progress: int) -> None:
                desk.decided.append((failures, progress))

        queue.give_bundles = SimpleNamespace(remote=self.not_assigned.append)
        monkeypatch.setattr(pool, "answer", lambda found: found)
        monkeypatch.setattr(cluster, "own_job", lambda: "own")
        monkeypatch.setattr(cluster, "is_shared", lambda: bool(self.groups))
        monkeypatch.setattr(cluster, "placement_groups", lambda: self.groups)
        monkeypatch.setattr(cluster, "nodes_with_places", lambda: [sharing.Node("n", {"CPU": self.free})])
        monkeypatch.setattr(cluster, "describe_job", lambda job: f"program {job}")
        monkeypatch.setattr(sharing, "SOON_SECONDS", 0.0)
        monkeypatch.setattr(sharing, "LATE_SECONDS", 0.0)
        monkeypatch.setattr(cluster, "draining_nodes", lambda: set(self.draining))
        monkeypatch.setattr(cluster, "leave_notice", str)
        monkeypatch.setattr(cluster, "missing_resources", lambda placement, workers, gpus: self.missing)
        room: Any = self
        policy: Any = FailurePolicy()
        placement = Placement(num_workers=3, wait_for_resources=0.2)
        self.supervisor = pool.Supervisor(room, queue, placement, 0.0, policy)

    def mark_departed(self, errors: dict[int, Exception]) -> list[int]:
        """Returns the workers that trained no job."""
        self.gone.extend(errors)
        return [number for number in errors if number not in self.training]

    def ended(self, seconds: float) -> tuple[dict[int, Any], dict[int, Exception]]:
        """Once, what the test has put there."""
        found, self.outcome = self.outcome, ({}, {})
        return found

    def __len__(self) -> int:
        return 2

    def launch(self, number: int) -> None:
        """A worker is launched in a bundle."""
        self.launched.append(number)

    def waiting_extras(self) -> list[int]:
        """Those that no worker has yet."""
        return self.waiting

    def give(self, number: int) -> None:
        """A bundle is removed."""
        self.given.append(number)

    def take_back(self, number: int) -> None:
        """A bundle is requested again."""
        self.given = [other for other in self.given if other != number]
        self.launched.append(number)

    def replace_lost_groups(self) -> list[int]:
        """Groups of lost nodes are replaced."""
        self.replaced += 1
        return self.relaunch


@pytest.fixture
def desk(monkeypatch: pytest.MonkeyPatch) -> Iterator[Desk]:
    return Desk(monkeypatch)


def test_a_lost_worker_is_decided_about_and_replaced(desk: Desk) -> None:
    desk.outcome = ({}, {0: LOST, 2: LOST})
    assert desk.supervisor.poll() is False
    assert desk.decided == [({0: LOST, 2: LOST}, 7)]  # in one moment: one failure
    assert desk.launched == desk.gone == [0, 2]
    desk.training, desk.outcome = {1}, ({}, {1: LOST, 2: LOST})
    desk.supervisor.poll()
    assert desk.launched[2:] == [1, 2]
    assert desk.decided[1:] == [({2: LOST}, 7)]  # the job's driver decides about the other one


def extra(job: str, number: int, *, is_placed: bool = True) -> sharing.Group:
    bundle = sharing.Bundle({"CPU": 1.0}, "n" if is_placed else "")
    return sharing.Group(f"{job}{number}", job, (bundle,), "PACK", "extra", 0, number)


WAITS = sharing.Group("w", "other", (sharing.Bundle({"CPU": 1.0}),))


def test_a_worker_leaves_for_a_waiting_program_and_its_place_is_requested_again_later(
        desk: Desk, monkeypatch: pytest.MonkeyPatch) -> None:
    now = [0.0]
    monkeypatch.setattr(desk.supervisor._sharing, "_clock", lambda: now[0])
    placed = [extra("own", 1), extra("own", 2)]
    desk.groups, desk.waiting = [*placed, WAITS], [3]
    desk.supervisor.poll()
    assert desk.not_assigned == []
    now[0] = PATIENCE_SECONDS
    desk.supervisor.poll()
    assert desk.not_assigned[-1] == {2}
    assert "place 2 is given to program other" in desk.said[-1]
    assert desk.given == [3]  # no worker runs in it; it would take what is given
    desk.waiting = []
    desk.supervisor.poll()
    assert desk.given == [3]  # the worker still finishes its step
    desk.outcome = ({}, {2: LOST})  # it dies instead
    desk.supervisor.poll()
    assert desk.given == [3, 2]
    assert desk.decided == []
    assert desk.launched == []
    desk.groups = [extra("own", 1)]
    now[0] += CALM_SECONDS - 1.0
    desk.supervisor.poll()
    assert desk.given == [3, 2]
    now[0] += 1.0
    desk.supervisor.poll()
    assert desk.launched == [3, 2]
    assert desk.not_assigned[-1] == set()
    assert desk.said[-1] == "requested again: 2 worker places that other programs got"


def test_a_failed_look_at_the_tables_of_ray_is_skipped(desk: Desk, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail() -> list[sharing.Node]:
        raise OSError("RPC error: Deadline Exceeded")

    desk.groups = [extra("own", 1)]
    monkeypatch.setattr(cluster, "nodes_with_places", fail)
    assert desk.supervisor.poll() is False
    assert (desk.said, desk.given, desk.launched) == ([], [], [])


def test_as_many_places_are_requested_again_as_there_is_room_for(desk: Desk, monkeypatch: pytest.MonkeyPatch) -> None:
    """Though a group that no node can hold still waits, and another one that gets its places."""
    now = [0.0]
    monkeypatch.setattr(desk.supervisor._sharing, "_clock", lambda: now[0])
    large = sharing.Group("l", "other", (sharing.Bundle({"CPU": 1.0, "memory": 1e13}),))
    desk.groups, desk.given = [extra("own", 1), WAITS, large], [2, 3]
    desk.supervisor._sharing._calm_since = 0.0  # a place was given just now
    desk.free = 2.0
    for now[0] in (0.0, PATIENCE_SECONDS):
        desk.supervisor.poll()
    assert (desk.launched, desk.given) == ([2], [3])
    assert desk.not_assigned[-1] == {3}


def test_a_place_whose_worker_has_left_a_draining_node_is_given_at_once(
        desk: Desk, monkeypatch: pytest.MonkeyPatch) -> None:
    now = [0.0]
    monkeypatch.setattr(desk.supervisor._sharing, "_clock", lambda: now[0])
    desk.draining, desk.on_nodes, desk.outcome = {"left"}, {2: "left"}, ({}, {})
    desk.supervisor.poll()
    desk.outcome = ({2: None}, {})
    desk.groups = [extra("own", 1), extra("own", 2), WAITS]
    desk.supervisor.poll()
    now[0] = PATIENCE_SECONDS
    desk.supervisor.poll()
    assert desk.given == [2]
    desk.draining = set()
    desk.supervisor.poll()
    assert desk.launched == []  # the place is another one's now


def test_workers_of_a_node_that_is_taken_away_are_no_failures_and_come_back_elsewhere(desk: Desk) -> None:
    desk.draining, desk.on_nodes = {"left"}, {1: "left"}
    desk.supervisor.poll()
    desk.outcome = ({}, {1: LOST, 2: LOST})
    desk.supervisor.poll()
    assert desk.decided == [({2: LOST}, 7)]
    assert desk.launched == [2]
    desk.draining, desk.on_nodes = set(), {}
    desk.supervisor.poll()
    assert desk.launched == [2, 1]
    desk.outcome = ({0: None}, {})  # it was drained
    desk.supervisor.poll()
    assert desk.launched == [2, 1, 0]
    assert len(desk.decided) == 1


def test_a_worker_that_found_the_queue_closed_is_the_end(desk: Desk) -> None:
    desk.outcome = ({0: False, 1: True}, {2: LOST})
    assert desk.supervisor.poll() is True
    assert not desk.decided


def test_while_workers_are_missing_groups_of_lost_nodes_are_replaced_and_launched(desk: Desk) -> None:
    desk.supervisor.poll()
    assert desk.replaced == 0
    desk.present, desk.relaunch = 1, [1]
    desk.supervisor.poll()
    assert (desk.replaced, desk.launched, desk.gone, desk.decided) == (1, [1], [1], [])
    desk.present, desk.relaunch, desk.outcome = 2, [], ({}, {0: LOST})
    desk.supervisor.poll()  # before it is filled again
    assert (desk.replaced, desk.launched) == (2, [1, 0])


class Group:
    """A placement group of so many bundles, as `WorkerPool` knows them."""

    def __init__(self, bundles: list[dict[str, float]], name: str) -> None:
        self.bundle_count, self.state, self.nodes = len(bundles), "CREATED", ["left"] * len(bundles)
        self.id = SimpleNamespace(hex=lambda: name)


def test_a_group_that_has_lost_all_its_nodes_is_replaced_by_one_for_each_bundle(
        monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[Group] = []
    names: list[str] = []
    freed: list[str] = []
    events: list[PlacementEvent] = []

    def ask(bundles: list[dict[str, float]], strategy: str = "PACK", *, name: str) -> Group:
        names.append(name.rpartition("/")[0])
        made.append(Group(bundles, f"g{len(made)}"))
        return made[-1]

    def table(group: Group) -> dict[str, Any]:
        return {"state": group.state, "bundles_to_node_id": dict(enumerate(group.nodes))}

    monkeypatch.setattr(pool, "placement_group", ask)
    monkeypatch.setattr(ray_internals, "placement_group_table", table)
    monkeypatch.setattr(pool, "remove_placement_group", lambda group: freed.append(group.id.hex()))
    monkeypatch.setattr(ray, "put", lambda value: value)
    given = Placement(num_workers=(2, 3), cpus_per_worker=1.0, workers=0, priority=-3)
    found = WorkerPool(work, {}, given, 0.0, events.append)
    found._running = {"running": 0, "waiting": 1, "elsewhere": 2}
    assert found.replace_lost_groups() == []
    made[0].state, made[0].nodes = "RESCHEDULING", ["", "left"]  # place 1 has a worker
    assert found.replace_lost_groups() == []
    made[0].nodes = ["", ""]
    assert found.replace_lost_groups() == [0, 1]
    assert (freed, found._running) == (["g0"], {"elsewhere": 2})
    assert [(event.group, event.instead_of) for event in events] == [("g0", ""), ("g1", ""), ("g2", "g0"), ("g3", "g0")]
    assert [group for group, _ in found._bundles] == [made[2], made[3], made[1]]
    assert found.replace_lost_groups() == []
    # what the drivers of other jobs read
    assert names == ["ray_yolo/minimum/-3/0", "ray_yolo/extra/-3/2", "ray_yolo/minimum/-3/0", "ray_yolo/minimum/-3/1"]


def test_a_bundle_above_the_minimum_is_given_away_and_requested_again(monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[Group] = []
    freed: list[str] = []

    def ask(bundles: list[dict[str, float]], strategy: str = "PACK", *, name: str) -> Group:
        made.append(Group(bundles, f"g{len(made)}"))
        return made[-1]

    monkeypatch.setattr(pool, "placement_group", ask)
    monkeypatch.setattr(pool, "is_waiting", lambda group: group.state == "PENDING")
    monkeypatch.setattr(pool, "remove_placement_group", lambda group: freed.append(group.id.hex()))
    monkeypatch.setattr(ray, "put", lambda value: value)
    found = WorkerPool(work, {}, Placement(num_workers=(1, 4), cpus_per_worker=1.0, workers=0), 0.0)
    made[0].state = made[3].state = "PENDING"
    assert found.waiting_extras() == [3]  # the minimum is no extra
    found._running = {"task": 2, "other": 0}
    found.give(2)
    found.give(2)  # once more does nothing
    assert (found.given, freed, found._running) == ([2], ["g2"], {"other": 0})
    assert found.waiting_extras() == [3]
    launched: list[int] = []
    monkeypatch.setattr(found, "launch", launched.append)
    found.take_back(2)
    assert (found.given, launched) == ([], [2])
    assert found._bundles[2] == (made[4], 0)
    assert list(found.grow(5)) == [4]
