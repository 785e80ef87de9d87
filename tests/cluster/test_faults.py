"""What breaks while a training goes on, and what it costs: `python -m pytest -m faults -s`; table: docs/faults.md.

What is printed: seconds until the others train without the lost worker, and until their next step; steps done again.
Nodes come first, while there is no other training.
"""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from ray.cluster_utils import Cluster
from ray.util.placement_group import placement_group, remove_placement_group

from ray_yolo.core.errors import LostWorkersError
from ray_yolo.core.events import CheckpointEvent, EpochEvent, StacksEvent, StartEvent, WarningEvent
from ray_yolo.runtime.workers import worker
from tests.support.faults import (
    UNINTERRUPTED_STEPS,
    Training,
    breakable_train_worker,
    breakable_worker,
    check,
    drain,
    left_over,
    ray_nodes,
    uninterrupted_run,
)
from tests.support.sweeps import assert_equal_rows, pool_sweep, wait_for_workers

pytestmark = [pytest.mark.faults, pytest.mark.ray, pytest.mark.timeout(900)]


@pytest.fixture(scope="module")
def uninterrupted(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return uninterrupted_run(tmp_path_factory.mktemp("calm"))


@pytest.fixture(scope="module")
def nodes() -> Iterator[Cluster]:
    """Room for two workers beside the driver, and for one on a node that can be taken away."""
    with ray_nodes(2) as found, pytest.MonkeyPatch.context() as patch:
        patch.setattr(worker, "pool_worker", breakable_worker)
        patch.setattr(worker, "train_worker", breakable_train_worker)
        yield found


def test_nodes_that_are_taken_away_lost_and_added(nodes: Cluster, uninterrupted: Path, tmp_path: Path) -> None:
    """A drained node's workers leave in order; neither that nor a lost node is a failure; the end does not wait."""
    node = nodes.add_node(num_cpus=1)
    training = Training(tmp_path, "2-3", max_failures=0)
    training.wait_for_workers(3)
    fault = drain(node.node_id)
    training.wait_for_workers(2, steps=1)
    print("drained", training.cost(fault))
    assert training.events_of(StartEvent)[-1].regrouped
    messages = [event.message for event in training.events_of(WarningEvent)]
    assert [message for message in messages if "will be taken away: its workers leave" in message]
    nodes.remove_node(node)
    node = nodes.add_node(num_cpus=1)
    training.wait_for_workers(3)
    training.stop()
    check(training, uninterrupted)
    nodes.remove_node(node)


def test_a_fixed_number_leaves_in_order_as_well(nodes: Cluster, uninterrupted: Path, tmp_path: Path) -> None:
    """A worker that gets SIGTERM is replaced; that of a drained node is, too, once another node is there."""
    node = nodes.add_node(num_cpus=1)
    training = Training(tmp_path, 3, max_failures=0)
    training.wait_for_workers(3)
    fault = training.hit(1, signal.SIGTERM)
    training.wait_for_workers(2, steps=1)
    print("SIGTERM, fixed number", training.cost(fault))
    assert training.cost(fault).lost == 0
    training.wait_for_workers(3)
    fault = drain(node.node_id)
    training.wait_for_workers(2, steps=1)
    print("drained, fixed number", training.cost(fault))
    assert training.cost(fault).lost == 0
    messages = [event.message for event in training.events_of(WarningEvent)]
    assert [message for message in messages if "will be taken away: its workers leave" in message]
    nodes.remove_node(node)
    node = nodes.add_node(num_cpus=1)
    training.wait_for_workers(3)
    training.stop()
    check(training, uninterrupted)
    nodes.remove_node(node)


def test_the_only_node_is_taken_away(nodes: Cluster, uninterrupted: Path, tmp_path: Path) -> None:
    """No worker could take the state over: this one trains on and saves inside an epoch, and the next one continues
    from there."""
    held = placement_group([{"CPU": 1}] * 2)  # all room elsewhere
    assert held.wait(60)
    node = nodes.add_node(num_cpus=1)
    training = Training(tmp_path, "1-2", max_failures=0)
    training.wait_for_workers(1, steps=1)
    drain(node.node_id)

    def saved() -> set[int]:
        ends = {event.step for event in training.events_of(EpochEvent)}
        return {event.step for event in training.events_of(CheckpointEvent)} - ends

    training.wait(lambda events: bool(saved()))
    nodes.remove_node(node)
    remove_placement_group(held)
    training.wait_for_workers(2, steps=1)
    assert max(saved()) <= training.events_of(StartEvent)[1].step
    training.stop()
    check(training, uninterrupted)


def head_seconds(nodes: Cluster) -> float:
    """What Ray's head has taken of the processor."""
    [server] = nodes.head_node.all_processes["gcs_server"]
    user, system = Path(f"/proc/{server.process.pid}/stat").read_text().rpartition(")")[2].split()[11:13]
    return (int(user) + int(system)) / os.sysconf("SC_CLK_TCK")


def test_two_of_a_fixed_number_are_lost_with_their_node(nodes: Cluster, uninterrupted: Path, tmp_path: Path) -> None:
    """The exchange leaves each node once while both nodes have two workers. Ray replaces one after the other."""
    node = nodes.add_node(num_cpus=2)
    training = Training(tmp_path, 4)
    training.wait_for_workers(4, steps=1)
    fault = time.time()
    nodes.remove_node(node, allow_graceful=False)
    training.wait_for_workers(2, steps=1)
    print("node with two workers lost, fixed number", training.cost(fault))
    assert training.cost(fault).lost == 0
    node = nodes.add_node(num_cpus=2)
    training.wait_for_workers(4, steps=1)
    training.stop()
    check(training, uninterrupted)
    nodes.remove_node(node)


def test_a_node_that_is_lost_for_good(nodes: Cluster, uninterrupted: Path, tmp_path: Path) -> None:
    """And another worker after that: the others continue, it is replaced, and the end does not wait for it."""
    node = nodes.add_node(num_cpus=1)
    training = Training(tmp_path, "2-3")
    training.wait_for_workers(3)
    fault = time.time()
    nodes.remove_node(node, allow_graceful=False)
    training.wait_for_workers(2, steps=1)
    print("node lost", training.cost(fault))
    time.sleep(2)  # Ray would try to place the lost worker without a pause
    before = head_seconds(nodes)
    time.sleep(4)
    assert head_seconds(nodes) - before < 1.0
    here = next(number for number, pid in training.pids().items() if Path(f"/proc/{pid}").exists())
    training.hit(here)
    training.wait_for_workers(1, steps=1)
    training.wait_for_workers(2, steps=1)
    training.stop()
    check(training, uninterrupted)
    assert left_over() == ""


def test_workers_that_die_before_their_first_step_end_the_training(nodes: Cluster, tmp_path: Path,
                                                                  monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(worker, "pool_worker", dies_at_once)
    Training(tmp_path, "1-2").join(LostWorkersError)
    assert left_over() == ""


def test_a_sweep_grows_and_shrinks_with_its_nodes(nodes: Cluster, tmp_path: Path) -> None:
    """Two slots, four, two, four, and two again without a word: the rows of the sweep that was left alone."""
    trials = tmp_path / "churned" / "runs" / "evolve" / "exp" / "trials"
    with ThreadPoolExecutor(1) as pool:
        uninterrupted = pool.submit(pool_sweep, tmp_path / "calm", trials=10, epochs=24).result()
        churned = pool.submit(pool_sweep, tmp_path / "churned", trials=10, epochs=24)
        wait_for_workers(trials, lambda present: present == 2)
        for drains in (True, False):
            node = nodes.add_node(num_cpus=2)
            wait_for_workers(trials, lambda present: present == 4)
            if drains:
                drain(node.node_id)
                wait_for_workers(trials, lambda present: present == 2)
            nodes.remove_node(node, allow_graceful=drains)
        assert not churned.done()
        assert_equal_rows(churned.result(), uninterrupted)
    assert left_over() == ""


@pytest.fixture(scope="module")
def trainings(nodes: Cluster) -> Iterator[list[Training]]:
    """The one that goes on through many faults, if there is one."""
    node = nodes.add_node(num_cpus=1)
    found: list[Training] = []
    yield found
    for training in found:
        training.stop()
    nodes.remove_node(node)
    assert left_over() == ""


@pytest.fixture
def training(uninterrupted: Path, trainings: list[Training], tmp_path: Path) -> Training:
    """It, unless it is ahead of the uninterrupted one, or has failed a test before."""
    if trainings and (trainings[0].error or trainings[0].step > UNINTERRUPTED_STEPS - 80):
        trainings.pop().stop()
    if not trainings:
        trainings.append(Training(tmp_path, "2-3"))
    return trainings[0]


@pytest.mark.parametrize("signum", [signal.SIGKILL, signal.SIGSEGV, signal.SIGSTOP])
def test_a_process_that_is_killed_crashes_or_is_frozen(
    training: Training, uninterrupted: Path, signum: signal.Signals
) -> None:
    training.wait_for_workers(3)
    fault = training.hit(1, signum)
    training.wait_for_workers(2, steps=1)
    training.wait_for_workers(3)
    print(signum.name, training.cost(fault))
    assert training.cost(fault).lost == 0
    check(training, uninterrupted)


@pytest.mark.parametrize("kind", ["hang", "hang in native code", "fail", "wrong"])
def test_a_worker_that_hangs_fails_or_computes_wrongly(training: Training, uninterrupted: Path, kind: str) -> None:
    training.wait_for_workers(3)
    fault = training.notify(0, kind)
    training.wait_for_workers(2, steps=1)
    training.wait_for_workers(3)
    print(kind, training.cost(fault))
    stacks = "\n".join(event.stacks for event in training.events_of(StacksEvent) if event.worker == 0)
    assert kind != "hang" or "breakable_worker" in stacks or "slowly" in stacks
    check(training, uninterrupted)


def test_two_that_are_killed_in_one_moment(training: Training, uninterrupted: Path) -> None:
    training.wait_for_workers(3)
    training.hit(0)
    fault = training.hit(2)
    training.wait_for_workers(1, steps=1)
    training.wait_for_workers(3)
    print("two killed", training.cost(fault))
    check(training, uninterrupted)


def test_all_that_are_killed_restart_from_the_checkpoint(training: Training, uninterrupted: Path) -> None:
    training.wait_for_workers(3)
    for number in range(3):
        fault = training.hit(number)
    training.wait(lambda events: any(isinstance(event, StartEvent) and event.time > fault for event in events))
    training.wait_for_workers(3)
    print("all killed", training.cost(fault))
    assert training.cost(fault).lost <= 3  # an epoch
    check(training, uninterrupted)


def test_a_worker_that_gets_sigterm_leaves_after_the_step(training: Training, uninterrupted: Path) -> None:
    training.wait_for_workers(3)
    fault = training.hit(2, signal.SIGTERM)
    training.wait_for_workers(2, steps=1)
    print("SIGTERM", training.cost(fault))
    assert training.cost(fault).lost == 0
    training.wait_for_workers(3)
    check(training, uninterrupted)


def dies_at_once(config: object, number: int) -> None:
    signal.raise_signal(signal.SIGKILL)
