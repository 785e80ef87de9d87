"""Collective operations of real processes over gloo."""

from __future__ import annotations

import contextlib
import socket
import threading
import time
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from ray_yolo.core.errors import PeerDepartedError
from ray_yolo.engine import collectives as module
from ray_yolo.engine.collectives import (
    Collectives,
    abort_process_group,
    collective_errors,
    connect_gpus,
    form_process_group,
    leave_process_group,
    serve_rendezvous_store,
)
from tests.support.workers import run_workers
from tests.unit.engine.test_collectives import Group


def gather_everything(collectives: Collectives) -> dict[str, Tensor]:
    rows = torch.full((collectives.rank, 2), float(collectives.rank))  # worker 0 has none
    x = torch.tensor([1.0 + collectives.rank], requires_grad=True)
    total = collectives.global_sum(x)
    (total.sum() * (collectives.rank + 1)).backward()
    return {
        "known": collectives.gather_rows(rows, list(range(collectives.num_workers))),
        "unknown": collectives.gather(rows),
        "total": total.detach(),
        "gradient": x.grad,
    }


def test_gathers_keep_worker_order_and_sums_are_differentiable() -> None:
    for result in run_workers(3, gather_everything):
        expected = torch.tensor([[1.0, 1], [2, 2], [2, 2]])
        assert torch.equal(result["known"], expected)
        assert torch.equal(result["unknown"], expected)
        assert result["total"].item() == 6.0
        assert result["gradient"].item() == 6.0  # every worker's loss depends on every x: 1 + 2 + 3


def send_a_gpus_tensor(collectives: Collectives) -> Tensor:
    """What arrives of a tensor that worker 0 has on a GPU, of which the others have none of that number."""
    state = {"x": torch.tensor([1.0, 2.0])} if collectives.rank == 0 else None
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch.serialization, "location_tag", lambda storage: "cuda:3")
        return collectives.broadcast_state(state, source=0)["x"]


def test_a_state_arrives_on_the_host() -> None:
    for received in run_workers(2, send_a_gpus_tensor):
        assert torch.equal(received, torch.tensor([1.0, 2.0]))


def connect(collectives: Collectives) -> bool:
    world = dist.group.WORLD
    assert world is not None
    connect_gpus([world, dist.new_group([0, 1])], torch.device("cpu"))
    return True


def test_workers_connect_in_each_group() -> None:
    assert run_workers(2, connect) == [True, True]


def wait_for_an_absent_peer(collectives: Collectives) -> dict[str, float]:
    """Worker 0 waits for the other one, which neither comes nor closes its connections."""
    store = serve_rendezvous_store("127.0.0.1")
    port = int(collectives.gather(torch.tensor([[float(store.port)]]))[0])
    leave_process_group()
    quorum = form_process_group(store, ("127.0.0.1", port), collectives.rank, 2, 60.0, torch.device("cpu"))
    began = time.monotonic()
    if collectives.rank:
        time.sleep(8.0)
        return {}
    threading.Timer(1.0, abort_process_group).start()
    with pytest.raises(PeerDepartedError), collective_errors():
        quorum.gather(torch.zeros(1, 1))
    return {"seconds": time.monotonic() - began}


def test_another_thread_can_abort_a_collective_that_waits_for_an_absent_peer() -> None:
    assert 1.0 <= run_workers(2, wait_for_an_absent_peer)[0]["seconds"] < 6.0


def wait_for_each_other(collectives: Collectives) -> dict[str, Any]:
    """Both workers wait, as after a network failure between two GPUs, until each aborts its group."""
    stores = [serve_rendezvous_store("127.0.0.1") for _ in range(2)]
    ports = [int(collectives.gather(torch.tensor([[float(store.port)]]))[0]) for store in stores]
    leave_process_group()
    cpu, group = torch.device("cpu"), Group(0.0)
    quorum = form_process_group(stores[0], ("127.0.0.1", ports[0]), collectives.rank, 2, 60.0, cpu)
    module._group.nccl = (group,)
    threading.Timer(1.0, abort_process_group).start()
    began = time.monotonic()
    with pytest.raises(PeerDepartedError), collective_errors():
        dist.broadcast(torch.zeros(1), 1 - collectives.rank)
    seconds = time.monotonic() - began
    leave_process_group()
    quorum = form_process_group(stores[1], ("127.0.0.1", ports[1]), collectives.rank, 2, 60.0, cpu)
    return {"seconds": seconds, "aborted": group.aborted, "then": quorum.gather(torch.ones(1, 1))}


def test_workers_that_wait_for_each_other_abort_and_form_another_group() -> None:
    """With a stand-in for NCCL beside gloo."""
    for result in run_workers(2, wait_for_each_other):
        assert 0.9 <= result["seconds"] < 10.0
        assert result["aborted"]
        assert result["then"].tolist() == [[1], [1]]


def exchange_on_two_machines(collectives: Collectives) -> dict[str, Any]:
    """The groups of two machines exchange. Then worker 3 stays away, and the one beside it waits until it aborts."""
    store = serve_rendezvous_store("127.0.0.1")
    ports = collectives.gather(torch.tensor([[float(store.port)]]))
    leave_process_group()
    formed = form_process_group(store, ("127.0.0.1", int(ports[0])), collectives.rank, 4, 60.0, torch.device("cpu"),
                                ["a", "a", "b", "b"])
    groups = formed.node_groups
    assert groups is not None
    sums = {}
    for name, group in (("inside", groups.inside), ("across", groups.across)):
        total = torch.tensor([10.0 ** formed.rank])
        dist.all_reduce(total, group=group)
        sums[name] = total
    if formed.rank == 3:
        time.sleep(5.0)
        return sums
    if formed.rank == 2:
        began = time.monotonic()
        threading.Timer(1.0, abort_process_group).start()
        with pytest.raises(PeerDepartedError), collective_errors():
            dist.all_reduce(torch.zeros(1), group=groups.inside)
        assert time.monotonic() - began < 4.0
    return sums


def test_groups_of_machines_exchange_and_can_be_aborted() -> None:
    results = run_workers(4, exchange_on_two_machines)
    assert [result["inside"].item() for result in results] == [11, 11, 1100, 1100]
    assert [result["across"].item() for result in results] == [101, 1010, 101, 1010]


@contextlib.contextmanager
def deaf_server() -> Iterator[tuple[str, int]]:
    """An address where connections are neither accepted nor refused, as that of a host without power."""
    with contextlib.ExitStack() as sockets:
        server = sockets.enter_context(socket.create_server(("127.0.0.1", 0), backlog=0))
        for _ in range(4):  # they fill the queue of the server
            client = sockets.enter_context(socket.socket())
            client.setblocking(False)
            client.connect_ex(server.getsockname())
        yield server.getsockname()


def meet(worker: int, store: dist.TCPStore, address: tuple[str, int]) -> float:
    """Worker `worker` of two meets in a store where the other one never comes. Returns seconds until it gives up."""
    began = time.monotonic()
    with pytest.raises(PeerDepartedError):
        form_process_group(store, address, worker, 2, 60.0, torch.device("cpu"))
    return time.monotonic() - began


@pytest.mark.parametrize("worker", [0, 1])
def test_an_abort_ends_the_meeting(worker: int) -> None:
    stores = [serve_rendezvous_store("127.0.0.1") for _ in range(2)]
    timer = threading.Timer(1.0, abort_process_group)
    timer.start()
    assert 0.9 < meet(worker, stores[worker], ("127.0.0.1", stores[0].port)) < 5.0


def test_an_abort_ends_the_attempts_to_connect() -> None:
    own = serve_rendezvous_store("127.0.0.1")
    with deaf_server() as address:
        threading.Timer(1.0, abort_process_group).start()
        assert 0.9 < meet(1, own, address) < 5.0


def test_a_closed_store_is_a_departed_peer() -> None:
    own = serve_rendezvous_store("127.0.0.1")
    with socket.create_server(("127.0.0.1", 0)) as closed:
        address = closed.getsockname()
    assert meet(1, own, address) < 1.0


def die_before_the_mesh(collectives: Collectives) -> dict[str, float]:
    """Worker 1 comes to the store, and exits."""
    module._MEETING_SECONDS = 3.0
    store = serve_rendezvous_store("127.0.0.1")
    port = int(collectives.gather(torch.tensor([[float(store.port)]]))[0])
    leave_process_group()
    cpu = torch.device("cpu")
    if collectives.rank:
        dist.TCPStore("127.0.0.1", port, is_master=False).add("come", 1)
        time.sleep(1.0)
        return {}
    began = time.monotonic()
    with pytest.raises(PeerDepartedError):
        form_process_group(store, ("127.0.0.1", port), 0, 2, 60.0, cpu)
    return {"seconds": time.monotonic() - began}


def test_a_death_between_meeting_and_mesh_costs_no_more_than_the_meeting() -> None:
    assert run_workers(2, die_before_the_mesh)[0]["seconds"] < 20.0


def slow_gather(collectives: Collectives) -> dict[str, Tensor]:
    module._MEETING_SECONDS = 2.0
    store = serve_rendezvous_store("127.0.0.1")
    port = int(collectives.gather(torch.tensor([[float(store.port)]]))[0])
    leave_process_group()
    quorum = form_process_group(store, ("127.0.0.1", port), collectives.rank, 2, 60.0, torch.device("cpu"))
    if collectives.rank:
        time.sleep(4.0)
    return {"rows": quorum.gather(torch.ones(1, 1))}


def test_a_collective_may_take_longer_than_the_meeting() -> None:
    assert [result["rows"].tolist() for result in run_workers(2, slow_gather)] == [[[1], [1]]] * 2
