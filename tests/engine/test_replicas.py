"""What workers say to each other, played with real processes over gloo."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from ray_yolo.engine.replicas import ReducedSum, Replicas, TreeSum
from ray_yolo.ops.sharing import share
from tests.support.workers import run_workers, wrap_model


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


def gradients(replicas: Replicas, num_microbatches: int, exact: bool) -> Tensor:
    """Gradient of sum_i (w . x_i)^2 over microbatches i, formed by a worker's share of them."""
    generator = torch.Generator().manual_seed(0)
    data = torch.randn(num_microbatches, 8, 50, generator=generator) * 10 ** torch.randn(
        num_microbatches, 1, 1, generator=generator)  # magnitudes differ, so that rounding depends on the order
    torch.manual_seed(0)
    model = nn.Linear(50, 3)
    replica = wrap_model(model, replicas)
    summing = TreeSum(list(model.parameters()), replicas) if exact else ReducedSum(replica)
    mine = share(num_microbatches, replicas.worker, replicas.num_workers)
    for number in mine:
        with summing.microbatch(last=number == mine[-1]):
            (model if exact else replica)(data[number]).square().sum().backward()
        summing.collect(number)
    summing.finish(num_microbatches)
    return torch.cat([p.grad.flatten() for p in model.parameters()])


@pytest.mark.parametrize("num_microbatches", [5, 8])
def test_tree_sum_has_the_same_bits_for_every_worker_count_and_the_reduced_sum_nearly(num_microbatches: int) -> None:
    calm = gradients(Replicas(), num_microbatches, exact=True)
    plain = gradients(Replicas(), num_microbatches, exact=False)
    assert torch.allclose(calm, plain, rtol=1e-5)
    for workers in (2, 3):
        for result in run_workers(workers, both_sums, num_microbatches):
            assert torch.equal(result["tree"], calm)
            assert torch.allclose(result["reduced"], calm, rtol=1e-5)


def both_sums(replicas: Replicas, num_microbatches: int) -> dict[str, Tensor]:
    return {"tree": gradients(replicas, num_microbatches, True),
            "reduced": gradients(replicas, num_microbatches, False)}


def test_summing_in_another_order_changes_the_bits() -> None:
    """Negative control: without the tree the sum depends on how it is cut."""
    parts = torch.randn(8, 1000, generator=torch.Generator().manual_seed(0))
    one_by_one = sum(parts[1:], parts[0])
    in_halves = sum(parts[1:4], parts[0]) + sum(parts[5:], parts[4])
    assert not torch.equal(one_by_one, in_halves)


def test_tree_sum_lets_a_worker_have_nothing() -> None:
    calm = gradients(Replicas(), 1, exact=True)
    for result in run_workers(2, tree_only, 1):
        assert torch.equal(result, calm)


def tree_only(replicas: Replicas, num_microbatches: int) -> Tensor:
    return gradients(replicas, num_microbatches, True)
