"""BatchNorm with statistics that the loop applies."""

from __future__ import annotations

import torch
from torch import Tensor

from ray_yolo.engine.collectives import Collectives
from ray_yolo.models.batch_norm import Statistics
from tests.support.workers import run_workers
from tests.unit.models.test_batch_norm import images, make, reference


def synchronised(collectives: Collectives, counts: list[int]) -> dict[str, Tensor]:
    """Output, gradients and statistics of this worker's part of 6 images."""
    layer = make()
    statistics = Statistics(layer, collectives.global_sum)
    first = sum(counts[: collectives.rank])
    part = images(6)[first : first + counts[collectives.rank]].requires_grad_()
    target = torch.arange(6.0)[first : first + counts[collectives.rank], None, None, None]
    output = layer(part)
    (output - target).square().sum().backward()
    return {"output": output.detach(), "input": part.grad, "weight": collectives.global_sum(layer.weight.grad),
            "bias": collectives.global_sum(layer.bias.grad), "statistics": statistics.recorded(0)}


def test_spread_over_workers_outputs_gradients_and_statistics_are_those_of_one() -> None:
    whole = images(6).requires_grad_()
    theirs = reference()
    output = theirs(whole)
    (output - torch.arange(6.0)[:, None, None, None]).square().sum().backward()
    fresh = make()
    recorder = Statistics(fresh)
    fresh(images(6))
    for counts in ([6], [4, 2, 0]):  # one worker without images
        results = run_workers(len(counts), synchronised, counts)
        assert torch.allclose(torch.cat([r["output"] for r in results]), output, atol=1e-5)
        assert torch.allclose(torch.cat([r["input"] for r in results]), whole.grad, atol=1e-4)
        for result in results:
            assert torch.allclose(result["weight"], theirs.weight.grad, rtol=1e-4)
            assert torch.allclose(result["bias"], theirs.bias.grad, rtol=1e-4)
            assert torch.allclose(result["statistics"], recorder.recorded(0), rtol=1e-5)
