"""The coordinator alone, on the test's clock: generations, stalls and hung workers."""

from __future__ import annotations

import os
import subprocess
import sys
import time

import pytest

from ray_yolo.core.structures import Progress
from ray_yolo.core.system import own_process, process_of
from ray_yolo.runtime.workers import coordinator as module
from ray_yolo.runtime.workers.coordinator import Coordinator, Heartbeat, Quorum, Registration
from tests.unit.runtime.workers.test_coordinator import ELSEWHERE, EXCHANGING, JOINING, Desk


def test_a_process_of_this_node_that_has_ended_is_not_waited_for() -> None:
    desk = with_one_that_has_ended()
    desk.coordinator.register("a", Registration(0, own_process(), ("a", 1), Progress(0, 4, 1), JOINING))
    assert desk.members("a") == [0]
    assert desk.coordinator.quorum("a").size == 1


def test_a_process_that_has_ended_is_no_worker_that_hangs() -> None:
    """It is neither reported as a stall, nor killed, nor listed; its peers are informed that it is lost."""
    desk = with_one_that_has_ended()
    exchanging = Heartbeat("exchanging", 0, 1.0, 30.0)
    said = []
    for _ in range(60):
        desk.now += 1.0
        assert desk.coordinator.heartbeat("a", exchanging).abort
        said += [desk.coordinator.describe_stall(), desk.coordinator.find_hung_worker()]
        assert [each.worker for each in desk.coordinator.worker_statuses()] == [0]
    assert set(said) == {None}


def with_one_that_has_ended() -> Desk:
    """Two workers of this machine, b of which has ended since, in a phase that others wait for."""
    process, desk = subprocess.Popen(["sleep", "60"]), Desk(2)
    for number, pid in enumerate((os.getpid(), process.pid)):
        arrival = Registration(number, process_of(pid), ("ab"[number], 1), None, JOINING)
        desk.coordinator.register("ab"[number], arrival)
    assert desk.members("ab") == [0, 1]
    desk.heartbeat("b", Heartbeat("loading", 0, 1.0, 30.0))
    process.kill()
    process.wait()
    desk.now += 0.2
    return desk


def test_the_coordinator_needs_neither_torch_nor_ray() -> None:
    code = f"import sys, {module.__name__}; print(sorted({{'torch', 'ray'}} & sys.modules.keys()))"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout == "[]\n"


def test_what_is_known_does_not_grow_with_workers_that_have_come_and_gone() -> None:
    desk, sizes = Desk(1), []
    for number in range(10_000):
        uid, kind = f"worker-{number}", number % 5
        desk.coordinator.register(uid, Registration(number % 7, ELSEWHERE, (uid, 1), None, JOINING, uid))
        desk.coordinator.quorum(uid)
        desk.coordinator.heartbeat(uid, EXCHANGING)
        desk.coordinator.drain_nodes({uid if kind == 0 else f"never-{number}"})
        if kind in (1, 2):
            desk.coordinator.leave(uid)
        elif kind == 3:
            desk.coordinator.mark_departed([number % 7])
        desk.now += 0.5
        desk.coordinator.describe_stall()
        desk.coordinator.find_hung_worker()
        if number in (4_999, 9_999):
            sizes.append(sum(len(value) for value in vars(desk.coordinator).values() if hasattr(value, "__len__")))
    assert sizes[0] == pytest.approx(sizes[1], abs=50)


def seconds_of_a_generation(num_workers: int) -> float:
    """CPU seconds for each of many workers that form a group, send heartbeats, and regroup without two."""
    now, coordinator = 0.0, Coordinator(num_workers, lambda: now)
    names, began = [f"worker-{number}" for number in range(num_workers)], time.process_time()
    for generation in range(2):
        for number, name in enumerate(names):
            progress = Progress(0, 4, generation) if generation else None
            coordinator.register(name, Registration(number, ELSEWHERE, (name, 1), progress, JOINING, name))
            coordinator.quorum(name)
        for name in names:
            found = coordinator.quorum(name)
            assert isinstance(found, Quorum)
            assert found.size == len(names)
        for _ in range(5):
            now += 1.0
            for name in names:
                coordinator.heartbeat(name, EXCHANGING)
            assert (coordinator.describe_stall(), coordinator.find_hung_worker(), coordinator.present()) == (
                None,
                None,
                len(names),
            )
            assert len(coordinator.worker_statuses()) == len(names)
        coordinator.drain_nodes({names[1]})
        coordinator.mark_departed([num_workers // 2])
        del names[num_workers // 2]
        coordinator.leave(names.pop(1))
    return (time.process_time() - began) / num_workers


def test_a_heartbeat_costs_no_more_among_ten_thousand_workers() -> None:
    """Ten times as much if each looked at all workers."""
    few, many = (min(seconds_of_a_generation(number) for _ in range(repeats))
                 for number, repeats in ((1_000, 3), (10_000, 1)))
    assert many < 4 * few
