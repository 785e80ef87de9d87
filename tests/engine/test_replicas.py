"""What workers say to each other, played with real processes over gloo."""

from __future__ import annotations

import signal
import threading
import time

import pytest
import torch
from torch import Tensor

from ray_yolo.engine import replicas
from ray_yolo.engine.replicas import Replicas, cut_group, form_group, leave_group, offer_store, peers_needed
from ray_yolo.errors import PeerLostError
from tests.support.workers import run_workers


def gather_everything(replicas: Replicas) -> dict[str, Tensor]:
    rows = torch.full((replicas.worker, 2), float(replicas.worker))  # worker 0 has none
    x = torch.tensor([1.0 + replicas.worker], requires_grad=True)
    total = replicas.global_sum(x)
    (total.sum() * (replicas.worker + 1)).backward()
    return {
        "known": replicas.gather_rows(rows, list(range(replicas.num_workers))),
        "unknown": replicas.gather(rows),
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
def test_what_is_said_of_a_lost_peer_is_known(said: str) -> None:
    with pytest.raises(PeerLostError), peers_needed():
        raise RuntimeError(said)


def test_other_errors_are_not_a_lost_peer() -> None:
    with pytest.raises(RuntimeError, match="shape"), peers_needed():
        raise RuntimeError("shape mismatch")


def wait_in_vain(replicas: Replicas) -> dict[str, float]:
    """Worker 0 waits for the other one, who does not come and does not close his connections either."""
    store = offer_store("127.0.0.1")
    port = int(replicas.gather(torch.tensor([[float(store.port)]]))[0])
    leave_group()
    formed = form_group(store, ("127.0.0.1", port), replicas.worker, 2, 60.0, torch.device("cpu"))
    began = time.monotonic()
    if replicas.worker:
        time.sleep(8.0)
        return {}
    threading.Timer(1.0, cut_group).start()
    with pytest.raises(PeerLostError), peers_needed():
        formed.gather(torch.zeros(1, 1))
    return {"seconds": time.monotonic() - began}


def test_a_collective_that_waits_in_vain_is_ended_from_another_thread() -> None:
    assert 1.0 <= run_workers(2, wait_in_vain)[0]["seconds"] < 6.0


class Group:
    """Stands for one of NCCL's: how long it takes to abort is its matter."""

    def __init__(self, seconds: float) -> None:
        self._seconds, self.aborted = seconds, False

    def abort(self) -> None:
        time.sleep(self._seconds)
        self.aborted = True


@pytest.mark.parametrize(("seconds", "killed"), [(0.0, []), (5.0, [signal.SIGKILL])])
def test_nccl_is_aborted_within_a_limit_or_the_process_ends(
        monkeypatch: pytest.MonkeyPatch, seconds: float, killed: list[int]) -> None:
    ended: list[int] = []
    monkeypatch.setattr(replicas.os, "kill", lambda pid, number: ended.append(number))
    monkeypatch.setattr(replicas, "_ABORT_SECONDS", 0.2)
    group = Group(seconds)
    monkeypatch.setattr(replicas, "_group", replicas._Group(nccl=group))
    assert not Replicas(0, 2).is_cut
    cut_group()
    assert Replicas(0, 2).is_cut
    assert not Replicas().is_cut
    assert (ended, group.aborted) == (killed, not killed)


@pytest.mark.parametrize("dtype", [torch.float32, torch.int64])
def test_rows_that_have_not_come_are_not_numbers(monkeypatch: pytest.MonkeyPatch, dtype: torch.dtype) -> None:
    monkeypatch.setattr(replicas.dist, "all_gather_into_tensor", lambda found, mine: found[:1].copy_(mine))
    found = Replicas(0, 3).gather_rows(torch.ones(1, 2, dtype=dtype), [1, 1, 1])
    assert torch.equal(found[0], torch.ones(2, dtype=dtype))
    assert bool(found[1:].isnan().all()) is dtype.is_floating_point
    assert torch.equal(found[1:].isnan() | (found[1:] == 0), torch.ones(2, 2, dtype=torch.bool))
