"""What workers say to each other, played with real processes over gloo."""

from __future__ import annotations

import sys

import torch
from torch import Tensor, nn

from ray_yolo.engine.replicas import Replicas, wrapped
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


def train_once(replicas: Replicas) -> dict[str, Tensor]:
    model = wrapped(nn.Linear(2, 1, bias=False))
    model(torch.full((1, 2), float(replicas.worker))).sum().backward()
    return {"gradient": model.module.weight.grad, "compiler": torch.tensor("torch._dynamo" in sys.modules)}


def test_a_wrapped_model_trains_without_importing_the_compiler() -> None:
    for result in run_workers(2, train_once):
        assert result["gradient"].tolist() == [[0.5, 0.5]]  # the mean of 0 and 1
        assert not result["compiler"]
