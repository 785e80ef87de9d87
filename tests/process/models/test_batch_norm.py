"""BatchNorm of microbatches that are spread over workers, by plain operations and by the kernels that GPUs have."""

from __future__ import annotations

import copy
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from torch import Tensor

from ray_yolo.engine.collectives import Collectives
from ray_yolo.models.batch_norm import Statistics, spread_norm
from ray_yolo.models.families import build_model
from tests.benchmarks.launch_counter import Counter
from tests.support.norm_kernels import kernels_on_cpu
from tests.support.workers import run_workers
from tests.unit.models.test_batch_norm import images, make, reference

BOTH_WAYS = pytest.mark.parametrize("by_kernels", [False, True])


def synchronised(collectives: Collectives, counts: list[int], by_kernels: bool) -> dict[str, Tensor]:
    """Output, gradients and statistics of this worker's part of 6 images."""
    layer = make()
    statistics = Statistics(layer, spread_norm(collectives, by_kernels=by_kernels))
    first = sum(counts[: collectives.rank])
    part = images(6)[first : first + counts[collectives.rank]].requires_grad_()
    target = torch.arange(6.0)[first : first + counts[collectives.rank], None, None, None]
    with kernels_on_cpu() if by_kernels else nullcontext():
        output = layer(part)
        (output - target).square().sum().backward()
    return {"output": output.detach(), "input": part.grad, "weight": collectives.global_sum(layer.weight.grad),
            "bias": collectives.global_sum(layer.bias.grad), "statistics": statistics.recorded(0)}


@BOTH_WAYS
def test_spread_over_workers_outputs_gradients_and_statistics_are_those_of_one(by_kernels: bool) -> None:
    whole = images(6).requires_grad_()
    theirs = reference()
    output = theirs(whole)
    (output - torch.arange(6.0)[:, None, None, None]).square().sum().backward()
    fresh = make()
    recorder = Statistics(fresh)
    fresh(images(6))
    for counts in ([6], [4, 2, 0]):  # one worker without images
        results = run_workers(len(counts), synchronised, counts, by_kernels)
        assert torch.allclose(torch.cat([r["output"] for r in results]), output, atol=1e-5)
        assert torch.allclose(torch.cat([r["input"] for r in results]), whole.grad, atol=1e-4)
        for result in results:
            assert torch.allclose(result["weight"], theirs.weight.grad, rtol=1e-4)
            assert torch.allclose(result["bias"], theirs.bias.grad, rtol=1e-4)
            assert torch.allclose(result["statistics"], recorder.recorded(0), rtol=1e-5)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_kernels_give_half_precision_back_and_sum_in_fp32(dtype: torch.dtype) -> None:
    """Both ways round the same numbers once."""
    results = []
    for by_kernels in (False, True):
        layer = make()
        Statistics(layer, spread_norm(Collectives(), by_kernels=by_kernels))
        part = images(6).to(dtype).requires_grad_()
        with kernels_on_cpu():
            output = layer(part)
            output.float().square().sum().backward()
        results.append((output, part.grad, layer.weight.grad, layer.bias.grad))
    for plain, kernel in zip(*results, strict=True):
        assert plain.dtype == kernel.dtype
        assert torch.allclose(plain.float(), kernel.float(), rtol=2 * torch.finfo(dtype).eps, atol=1e-3)


@pytest.mark.parametrize("frozen", ["input", "weights"])
def test_kernels_leave_out_gradients_of_frozen_parts(frozen: str) -> None:
    layer = make()
    Statistics(layer, spread_norm(Collectives(), by_kernels=True))
    part = images(6).requires_grad_(frozen != "input")
    layer.requires_grad_(frozen != "weights")
    with kernels_on_cpu():
        layer(part).square().sum().backward()
    assert (part.grad is None) == (frozen == "input")
    assert (layer.weight.grad is None) == (frozen == "weights")


class CountedExchange(Collectives):
    """One worker whose exchanges are counted."""

    def __init__(self) -> None:
        self.calls: list[str] = []

    def global_sum(self, x: Tensor) -> Tensor:
        return _Counted.apply(x, self.calls)

    def stack(self, x: Tensor) -> Tensor:
        self.calls.append("stack")
        return x[None]


class _Counted(torch.autograd.Function):
    """The sum over one worker, in both directions."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, calls: list[str]) -> Tensor:
        ctx.calls = calls
        calls.append("sum")
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        ctx.calls.append("sum")
        return gradient, None


def test_kernels_halve_the_exchanges_and_take_a_third_of_the_traffic() -> None:
    """Those of yolov5n's 57 layers in a forward and a backward pass, without what is between them."""
    found = {}
    for by_kernels in (False, True):
        model = build_model("yolov5n", 3).to(memory_format=torch.channels_last).train()
        exchange = CountedExchange()
        statistics = Statistics(model, spread_norm(exchange, by_kernels=by_kernels))
        total = Counter()
        for layer in statistics.layers:
            part = torch.randn(2, layer.num_features, 32, 32).to(memory_format=torch.channels_last).requires_grad_()
            gradient = torch.ones_like(part)
            with kernels_on_cpu(), total:
                torch.autograd.grad(layer(part), [part, layer.weight, layer.bias], gradient)
        found[by_kernels] = len(exchange.calls), total.count, total.bytes
    (exchanges, launches, read_and_written), with_kernels = found[False], found[True]
    assert (exchanges, with_kernels[0]) == (4 * 57, 2 * 57)
    assert with_kernels[1] < 0.3 * launches
    assert with_kernels[2] < 0.36 * read_and_written


def test_a_copy_of_the_model_shares_the_exchange() -> None:
    """The moving average copies the model. Process groups, which some exchanges have, cannot be copied."""
    class Uncopied(Collectives):
        def __deepcopy__(self, memo: dict) -> Collectives:
            raise TypeError("cannot pickle 'ProcessGroup' object")

    layer = make()
    Statistics(layer, spread_norm(Uncopied()))
    copy.deepcopy(layer)
