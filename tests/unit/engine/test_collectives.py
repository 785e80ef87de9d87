"""Collective operations of real processes over gloo."""

from __future__ import annotations

import contextlib
import math
import signal
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from torch import Tensor

from ray_yolo.core.errors import PeerDepartedError
from ray_yolo.engine import collectives as module
from ray_yolo.engine.collectives import (
    Collectives,
    abort_process_group,
    collective_errors,
    leave_process_group,
    serve_rendezvous_store,
)


@pytest.mark.parametrize("said", [
    "[../third_party/gloo/gloo/transport/tcp/pair.cc:553] Connection closed by peer [10.0.0.2]:4711",
    "Application timeout caused pair closure",  # of a peer whose network is cut; tests/cluster/test_cluster_real.py
    "NCCL communicator was aborted on rank 0."])
def test_errors_of_a_departed_peer_are_recognised(said: str) -> None:
    with pytest.raises(PeerDepartedError), collective_errors():
        raise RuntimeError(said)


def test_other_errors_are_no_departed_peer() -> None:
    with pytest.raises(RuntimeError, match="shape"), collective_errors():
        raise RuntimeError("shape mismatch")


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
    monkeypatch.setattr(module, "_group", module._Group(nccl=(group,)))
    abort_process_group()
    assert (ended, group.aborted) == (killed, not killed)


def test_a_group_is_aborted_once_and_a_worker_leaves_it_after_that(monkeypatch: pytest.MonkeyPatch) -> None:
    """The heartbeats' thread aborts; the kernels' end wakes the main thread, which leaves the group."""
    calls: list[str] = []
    begun, freed = threading.Event(), threading.Event()

    def abort() -> None:
        calls.append("begun")
        begun.set()
        freed.wait(5)
        calls.append("ended")

    monkeypatch.setattr(module, "_group", module._Group(nccl=(SimpleNamespace(abort=abort),)))
    monkeypatch.setattr(module.dist, "is_initialized", lambda: True)
    monkeypatch.setattr(module.dist, "destroy_process_group", lambda: calls.append("destroyed"))
    heartbeats = threading.Thread(target=abort_process_group)
    heartbeats.start()
    assert begun.wait(5)
    main = threading.Thread(target=leave_process_group)
    main.start()
    time.sleep(0.1)
    freed.set()
    main.join()
    heartbeats.join()
    assert calls == ["begun", "ended", "destroyed"]


def test_an_abort_ends_the_group_that_it_was_called_for(monkeypatch: pytest.MonkeyPatch) -> None:
    """Not the next one, which the main thread forms as soon as the kernels have ended."""
    closed: list[str] = []

    def form_the_next() -> None:
        module._group = module._Group(connections=frozenset({"socket:[2]"}))

    monkeypatch.setattr(module, "_group", module._Group(frozenset({"socket:[1]"}),
                                                        (SimpleNamespace(abort=form_the_next),)))
    monkeypatch.setattr(module, "_sockets", lambda: {"socket:[1]": 1, "socket:[2]": 2})
    monkeypatch.setattr(module.os, "dup", lambda number: number)

    @contextlib.contextmanager
    def connection(fileno: int) -> Iterator[SimpleNamespace]:
        yield SimpleNamespace(getpeername=lambda: None, shutdown=lambda how: closed.append(f"socket:[{fileno}]"))

    monkeypatch.setattr(module.socket, "socket", connection)
    abort_process_group()
    assert closed == ["socket:[1]"]


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
