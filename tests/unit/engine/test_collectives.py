"""Collective operations of real processes over gloo."""

from __future__ import annotations

import math
import signal
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from ray_yolo.core.errors import PeerLostError
from ray_yolo.engine import collectives as module
from ray_yolo.engine.collectives import (
    Collectives,
    abort_process_group,
    collective_errors,
    form_process_group,
    leave_process_group,
    serve_rendezvous_store,
)
from tests.support.workers import run_workers


def gather_everything(collectives: Collectives) -> dict[str, Tensor]:
    rows = torch.full((collectives.worker, 2), float(collectives.worker))  # worker 0 has none
    x = torch.tensor([1.0 + collectives.worker], requires_grad=True)
    total = collectives.global_sum(x)
    (total.sum() * (collectives.worker + 1)).backward()
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


@pytest.mark.parametrize("said", [
    "[../third_party/gloo/gloo/transport/tcp/pair.cc:553] Connection closed by peer [10.0.0.2]:4711",
    "Application timeout caused pair closure",  # of a peer whose network is cut; tests/cluster/test_cluster_real.py
    "NCCL communicator was aborted on rank 0."])
def test_errors_of_a_lost_peer_are_recognised(said: str) -> None:
    with pytest.raises(PeerLostError), collective_errors():
        raise RuntimeError(said)


def test_other_errors_are_not_a_lost_peer() -> None:
    with pytest.raises(RuntimeError, match="shape"), collective_errors():
        raise RuntimeError("shape mismatch")


def wait_for_an_absent_peer(collectives: Collectives) -> dict[str, float]:
    """Worker 0 waits for the other one, which neither comes nor closes its connections."""
    store = serve_rendezvous_store("127.0.0.1")
    port = int(collectives.gather(torch.tensor([[float(store.port)]]))[0])
    leave_process_group()
    quorum = form_process_group(store, ("127.0.0.1", port), collectives.worker, 2, 60.0, torch.device("cpu"))
    began = time.monotonic()
    if collectives.worker:
        time.sleep(8.0)
        return {}
    threading.Timer(1.0, abort_process_group).start()
    with pytest.raises(PeerLostError), collective_errors():
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
    quorum = form_process_group(stores[0], ("127.0.0.1", ports[0]), collectives.worker, 2, 60.0, cpu)
    module._group.nccl = group
    threading.Timer(1.0, abort_process_group).start()
    began = time.monotonic()
    with pytest.raises(PeerLostError), collective_errors():
        dist.broadcast(torch.zeros(1), 1 - collectives.worker)
    seconds = time.monotonic() - began
    leave_process_group()
    quorum = form_process_group(stores[1], ("127.0.0.1", ports[1]), collectives.worker, 2, 60.0, cpu)
    return {"seconds": seconds, "aborted": group.aborted, "then": quorum.gather(torch.ones(1, 1))}


def test_workers_that_wait_for_each_other_abort_and_form_another_group() -> None:
    """With a stand-in for NCCL beside gloo."""
    for result in run_workers(2, wait_for_each_other):
        assert 0.9 <= result["seconds"] < 10.0
        assert result["aborted"]
        assert result["then"].tolist() == [[1], [1]]


def die_before_the_mesh(collectives: Collectives) -> dict[str, float]:
    """Worker 1 comes to the store, and exits."""
    module._MEETING_SECONDS = 3.0
    store = serve_rendezvous_store("127.0.0.1")
    port = int(collectives.gather(torch.tensor([[float(store.port)]]))[0])
    leave_process_group()
    cpu = torch.device("cpu")
    if collectives.worker:
        dist.TCPStore("127.0.0.1", port, is_master=False).add("come", 1)
        time.sleep(1.0)
        return {}
    began = time.monotonic()
    with pytest.raises(PeerLostError):
        form_process_group(store, ("127.0.0.1", port), 0, 2, 60.0, cpu)
    return {"seconds": time.monotonic() - began}


def test_a_death_between_meeting_and_mesh_costs_no_more_than_the_meeting() -> None:
    assert run_workers(2, die_before_the_mesh)[0]["seconds"] < 20.0


def slow_gather(collectives: Collectives) -> dict[str, Tensor]:
    module._MEETING_SECONDS = 2.0
    store = serve_rendezvous_store("127.0.0.1")
    port = int(collectives.gather(torch.tensor([[float(store.port)]]))[0])
    leave_process_group()
    quorum = form_process_group(store, ("127.0.0.1", port), collectives.worker, 2, 60.0, torch.device("cpu"))
    if collectives.worker:
        time.sleep(4.0)
    return {"rows": quorum.gather(torch.ones(1, 1))}


def test_a_collective_may_take_longer_than_the_meeting() -> None:
    assert [result["rows"].tolist() for result in run_workers(2, slow_gather)] == [[[1], [1]]] * 2


def listening(port: int) -> list[str]:
    """The addresses at which this machine listens on a port, in the kernel's hexadecimal form."""
    rows = [line.split() for name in ("tcp", "tcp6") for line in Path(f"/proc/net/{name}").read_text().splitlines()[1:]]
    return [row[1].partition(":")[0] for row in rows if row[3] == "0A" and int(row[1].partition(":")[2], 16) == port]


def test_a_store_listens_at_the_workers_own_address_alone() -> None:
    assert listening(serve_rendezvous_store("127.0.0.1").port) == ["0100007F"]


@pytest.mark.parametrize(("set_before", "address", "expected"), [
    ({}, "127.0.0.1", {"GLOO_SOCKET_IFNAME": "lo", "NCCL_SOCKET_IFNAME": "lo"}), ({}, "203.0.113.9", {}),
    ({"GLOO_SOCKET_IFNAME": "eth7", "NCCL_SOCKET_IFNAME": "ib0"}, "127.0.0.1",
     {"GLOO_SOCKET_IFNAME": "eth7", "NCCL_SOCKET_IFNAME": "ib0"})])
def test_the_interface_is_that_of_the_address_unless_the_user_chose_one(
        monkeypatch: pytest.MonkeyPatch, set_before: dict[str, str], address: str, expected: dict[str, str]) -> None:
    environment = dict(set_before)
    monkeypatch.setattr(module.os, "environ", environment)
    module.use_interface(address)
    assert environment == expected


class Group:
    """A stand-in for an NCCL process group, which takes `seconds` to abort."""

    def __init__(self, seconds: float) -> None:
        self._seconds, self.aborted = seconds, False

    def abort(self) -> None:
        time.sleep(self._seconds)
        self.aborted = True


@pytest.mark.parametrize(("seconds", "killed"), [(0.0, []), (5.0, [signal.SIGKILL])])
def test_nccl_is_aborted_within_a_limit_or_the_process_ends(
        monkeypatch: pytest.MonkeyPatch, seconds: float, killed: list[int]) -> None:
    ended: list[int] = []
    monkeypatch.setattr(module.os, "kill", lambda pid, number: ended.append(number))
    monkeypatch.setattr(module, "_ABORT_SECONDS", 0.2)
    group = Group(seconds)
    monkeypatch.setattr(module, "_group", module._Group(nccl=group))
    abort_process_group()
    assert (ended, group.aborted) == (killed, not killed)


VALUES = torch.tensor([[0.5, 0.0, -0.0, math.nan, math.inf, 1e-45], [1.0, 2.0, 3.0, 4.0, 5.0, 6.0], [0.0] * 6])


def sent(worker: int, step: int, values: Tensor, patch: pytest.MonkeyPatch) -> Tensor:
    """The rows that a worker passes to NCCL for a step."""
    rows: list[Tensor] = []
    patch.setattr(module.dist, "all_gather_into_tensor", lambda received, own: rows.append(own.clone()))
    Collectives(worker, 3).gather_step(values, step)
    return rows[0]


# The received row of worker 1, from the row that it sends for this step and the row of the previous step
LEFT: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "the row": lambda new, old: new,
    "zeros": lambda new, old: torch.zeros_like(new),
    "a number": lambda new, old: torch.full_like(new, 0x40E00000),  # the bits of 7.0
    "garbage": lambda new, old: torch.arange(new.numel(), dtype=torch.int32).view(new.shape) * 1234567,
    "the row before": lambda new, old: old,
    "one number of the row before": lambda new, old: torch.cat([new[:, :3], old[:, 3:4], new[:, 4:]], 1),
    "values without seals": lambda new, old: torch.stack([new[0], old[1]]),
    "seals without values": lambda new, old: torch.stack([old[0], new[1]])}


@pytest.mark.parametrize("equal", [False, True])
@pytest.mark.parametrize("left", LEFT)
def test_only_rows_of_the_step_are_complete(monkeypatch: pytest.MonkeyPatch, left: str, equal: bool) -> None:
    """For any values that an aborted gather leaves, also if the previous step had the same numbers."""
    before = VALUES if equal else VALUES * 0.75 + 1
    old, new = ([sent(worker, step, values[worker], monkeypatch) for worker in range(3)]
                for step, values in ((6, before), (7, VALUES)))
    rows = torch.cat([new[0], LEFT[left](new[1], old[1]), new[2]])
    monkeypatch.setattr(module.dist, "all_gather_into_tensor", lambda received, mine: received.copy_(rows))
    received, complete = Collectives(0, 3).gather_step(VALUES[0], 7)
    same = left == "the row" or (equal and left == "seals without values")  # which then equals the row
    assert bool(complete) is same
    if complete:
        assert torch.equal(received.view(torch.int32), VALUES.view(torch.int32))
    received, complete = Collectives().gather_step(VALUES[0], 7)  # alone
    assert bool(complete)
    assert torch.equal(received.view(torch.int32), VALUES[:1].view(torch.int32))


def test_operations_after_an_abort_see_it(monkeypatch: pytest.MonkeyPatch) -> None:
    cpu = torch.device("cpu")
    monkeypatch.setattr(module, "_group", module._Group(cut=torch.zeros(())))
    before = Collectives(0, 2).was_cut(cpu)
    abort_process_group()
    assert (before, Collectives(0, 2).was_cut(cpu), Collectives().was_cut(cpu)) == (0, 1, 0)
    monkeypatch.setattr(module, "_group", module._Group())  # formed by Ray
    abort_process_group()
    assert Collectives(0, 2).was_cut(cpu) == 0
