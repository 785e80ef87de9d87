"""A step's gradient has the same bits for any sharing of its microbatches, and its exchange does not grow."""

from __future__ import annotations

from dataclasses import replace
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from ray_yolo.engine import gradients
from ray_yolo.engine.collectives import Collectives, ddp_options, form_node_groups
from ray_yolo.engine.gradients import GradientTree
from ray_yolo.ops.sharding import shard
from tests.support.workers import run_workers

pytestmark = pytest.mark.usefixtures("one_thread")

STEPS = 3  # DDP rebuilds its buckets after the first
ROW = 5


class Small(nn.Module):
    """Convolutions with channels-last weights, and a layer that fills a bucket alone."""

    def __init__(self) -> None:
        super().__init__()
        self.convolve = nn.Sequential(*(nn.Conv2d(3 if number == 0 else 8, 8, 3, padding=1) for number in range(4)))
        self.out = nn.Linear(8, 2000)

    def forward(self, x: Tensor) -> Tensor:
        return self.out(self.convolve(x).mean((2, 3)))


def data(count: int, step: int) -> Tensor:
    """Microbatches of very different magnitudes, so that rounding depends on the order of a sum."""
    generator = torch.Generator().manual_seed(step)
    scale = 10 ** torch.randn(count, 1, 1, 1, 1, generator=generator)
    return torch.randn(count, 2, 3, 6, 6, generator=generator) * scale


def build(collectives: Collectives) -> tuple[nn.Module, nn.Module]:
    torch.manual_seed(0)
    model = Small().to(memory_format=torch.channels_last)
    if collectives.num_workers == 1:
        return model, model
    return model, DistributedDataParallel(model, bucket_cap_mb=0.01, **ddp_options())


def summed(collectives: Collectives, count: int) -> Tensor:
    """Every step's gradient and row, (steps, numbers), by a worker's shard of the microbatches."""
    model, replica = build(collectives)
    tree = GradientTree(replica, collectives, ROW)
    sums = []
    for step in range(STEPS):
        inputs, own = data(count, step), shard(count, collectives.rank, collectives.num_workers)
        tree.start([len(shard(count, worker, collectives.num_workers)) for worker in range(collectives.num_workers)])
        for number in own:
            last = number == own[-1]
            with tree.microbatch(last=last):
                loss = replica(inputs[number]).square().sum()
                tree.attach_row(inputs[number].flatten()[:ROW])
                loss.backward()
        if not own:
            (replica(torch.ones(1, 3, 6, 6)).sum() * 0).backward()
        row = tree.finish()
        sums.append(torch.cat([*(p.grad.flatten() for p in model.parameters() if p.grad is not None), row]))
        model.zero_grad(set_to_none=True)
    return torch.stack(sums)


def summed_of_all(collectives: Collectives, counts: list[int]) -> list[Tensor]:
    return [summed(collectives, count) for count in counts]


def test_the_sum_is_that_of_all_microbatches() -> None:
    model, _ = build(Collectives())
    for step, total in enumerate(summed(Collectives(), 5)):
        inputs = data(5, step)
        model.zero_grad()
        torch.stack([model(batch).square().sum() for batch in inputs]).sum().backward()
        expected = torch.cat([p.grad.flatten() for p in model.parameters()])
        assert torch.allclose(total[:-ROW], expected, rtol=1e-4, atol=1e-4 * float(expected.abs().max()))
        assert torch.allclose(total[-ROW:], inputs.flatten(1)[:, :ROW].sum(0), rtol=1e-5)


@pytest.mark.parametrize("workers", [2, 3])
def test_the_bits_do_not_depend_on_the_number_of_workers(workers: int) -> None:
    counts = [1, 2, 5, 8]  # a worker without a microbatch, uneven shards, shards that are not aligned
    uninterrupted = summed_of_all(Collectives(), counts)
    for result in run_workers(workers, summed_of_all, counts):
        assert all(torch.equal(one, other) for one, other in zip(result, uninterrupted, strict=True))


def summed_on_machines(collectives: Collectives, machines: list[str], counts: list[int]) -> list[Tensor]:
    formed = form_node_groups(machines, collectives.rank, timedelta(seconds=30))
    assert formed is not None
    return summed_of_all(replace(collectives, node_groups=formed), counts)


@pytest.mark.parametrize("machines", ["aabb", "aabbcc"])
def test_the_bits_do_not_depend_on_machines(machines: str) -> None:
    counts = [1, 3, 8, 13]
    uninterrupted = summed_of_all(Collectives(), counts)
    for result in run_workers(len(machines), summed_on_machines, list(machines), counts):
        assert all(torch.equal(one, other) for one, other in zip(result, uninterrupted, strict=True))


def numbers_that_leave(collectives: Collectives, machines: list[str], by_machines: bool) -> float:
    """What this worker sends to other machines by all-to-all in a step, in units of the gradient's size."""
    formed = form_node_groups(machines, collectives.rank, timedelta(seconds=30))
    assert formed is not None
    send, left = dist.all_to_all_single, [0]

    def counting_send(received: Tensor, sent: Tensor, received_sizes: list[int], sent_sizes: list[int], **options: Any
                      ) -> Any:
        members = dist.get_process_group_ranks(options["group"] or dist.group.WORLD)
        left[0] += sum(size for size, member in zip(sent_sizes, members, strict=True)
                       if machines[member] != machines[collectives.rank])
        return send(received, sent, received_sizes, sent_sizes, **options)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(dist, "all_to_all_single", counting_send)
        gradient = summed(replace(collectives, node_groups=formed if by_machines else None), len(machines))
    return left[0] / STEPS / gradient[0].numel()


@pytest.mark.parametrize(("by_machines", "expected"), [(False, 1.0), (True, 0.5)])
def test_a_machine_sends_one_value_for_all_its_workers(by_machines: bool, expected: float) -> None:
    """Half of the gradient to the other machine: from each of two workers, or from both together."""
    sent = run_workers(4, numbers_that_leave, list("aabb"), by_machines)
    assert sent[0] + sent[1] == pytest.approx(expected, rel=0.05)


@pytest.mark.parametrize("machines", ["", "aaaa", "abcd", "aaab", "abab"])
def test_machines_that_do_not_suit_form_no_groups(machines: str) -> None:
    assert form_node_groups(list(machines), 0, timedelta(seconds=30)) is None


def summed_by_worker(collectives: Collectives, count: int) -> Tensor:
    """The same, but each worker sums its own microbatches before the workers' sums are added, as in a reduction."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(gradients, "parent", lambda left, right: left)  # fold any two nodes
        patch.setattr(gradients, "aligned_nodes", lambda part: [gradients.TreeNode(part.start, 1)] if part else [])
        patch.setattr(gradients, "fold_nodes", lambda subtrees, count: {
            gradients.TreeNode(0, 1): [sum(value[0] for value in subtrees.values())]})
        return summed(collectives, count)


def test_without_the_tree_the_bits_depend_on_the_number_of_workers() -> None:
    """Negative control."""
    uninterrupted = summed(Collectives(), 5)
    [first, _] = run_workers(2, summed_by_worker, 5)
    assert torch.allclose(first, uninterrupted, rtol=1e-3, atol=1e-4 * float(uninterrupted.abs().max()))
    assert not torch.equal(first, uninterrupted)


def bytes_sent(collectives: Collectives, counts: list[int]) -> list[float]:
    """Bytes that this worker sends in a step, in units of the gradient's size, by number of microbatches."""
    ratios = []
    for count in counts:
        sent = [0]
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(dist, "all_to_all_single", counting(dist.all_to_all_single, sent, collectives, 1))
            patch.setattr(dist, "all_gather_into_tensor", counting(dist.all_gather_into_tensor, sent, collectives, 0))
            gradient = summed(collectives, count)
        ratios.append(sent[0] / STEPS / gradient[0].numel())
    return ratios


def counting(function, sent: list[int], collectives: Collectives, argument: int):
    """The collective; it also counts the numbers that are sent to other workers."""
    def call(*args, **options):
        sent[0] += args[argument].numel() * (collectives.num_workers - 1) // collectives.num_workers
        return function(*args, **options)
    return call


@pytest.mark.parametrize("workers", [2, 4])
def test_bytes_sent_per_step_do_not_grow_with_workers_or_microbatches(
        workers: int) -> None:
    for aligned, more in run_workers(workers, bytes_sent, [workers, 4 * workers]):
        assert aligned == pytest.approx(2 * (workers - 1) / workers, rel=0.05)
        assert more == aligned
