"""What workers say to each other, played with real processes over gloo."""

from __future__ import annotations

import threading
import time

import pytest
import torch
from torch import Tensor

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
        "any": torch.tensor([replicas.any(flag, torch.device("cpu")) for flag in (replicas.worker == 1, False)]),
    }


def test_gathers_keep_worker_order_and_sums_are_differentiable() -> None:
    for result in run_workers(3, gather_everything):
        expected = torch.tensor([[1.0, 1], [2, 2], [2, 2]])
        assert torch.equal(result["known"], expected)
        assert torch.equal(result["unknown"], expected)
        assert result["total"].item() == 6.0
        assert result["gradient"].item() == 6.0  # every worker's loss depends on every x: 1 + 2 + 3
        assert result["any"].tolist() == [True, False]


@pytest.mark.parametrize("said", [
    "[../third_party/gloo/gloo/transport/tcp/pair.cc:553] Connection closed by peer [10.0.0.2]:4711",
    "Application timeout caused pair closure"])  # of a peer whose network is cut; tests/cluster/test_cluster_real.py
def test_what_gloo_says_of_a_lost_peer_is_known(said: str) -> None:
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
    formed = form_group(store, ("127.0.0.1", port), replicas.worker, 2, timeout_seconds=60.0)
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
