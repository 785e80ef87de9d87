"""BatchNorm with statistics that the loop applies."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from ray_yolo.models.batch_norm import BatchNorm, Statistics


def make(channels: int = 5) -> BatchNorm:
    layer = BatchNorm(channels)
    with torch.no_grad():
        layer.weight.copy_(torch.linspace(0.5, 2, channels))
        layer.bias.copy_(torch.linspace(-1, 1, channels))
    return layer


def reference(channels: int = 5) -> nn.BatchNorm2d:
    layer = nn.BatchNorm2d(channels, eps=1e-3, momentum=0.03)
    layer.load_state_dict(make(channels).state_dict())
    return layer


def images(count: int = 4, seed: int = 0) -> Tensor:
    return torch.randn(count, 5, 6, 7, generator=torch.Generator().manual_seed(seed)) * 3 + 1


def test_recording_and_applying_equals_torchs_batch_norm_microbatch_by_microbatch() -> None:
    mine, theirs = make(), reference()
    statistics, total = Statistics(mine), torch.zeros(10)
    for seed in range(3):
        statistics.clear()
        assert torch.equal(mine(images(seed=seed)), theirs(images(seed=seed)))
        total += statistics.recorded(later=2 - seed)
    assert mine.running_mean.eq(0).all()  # nothing has changed yet
    statistics.apply(total, 3)
    for name, value in theirs.state_dict().items():
        assert torch.allclose(mine.state_dict()[name], value, rtol=1e-6), name


def test_a_microbatch_with_nan_leaves_no_trace_in_the_next_one() -> None:
    layer = make()
    statistics = Statistics(layer)
    layer(torch.full((2, 5, 3, 3), float("nan")))
    statistics.clear()
    layer(images())
    assert statistics.recorded(0).isfinite().all()


def test_without_clearing_the_nan_would_stay() -> None:
    """Negative control: 0 x NaN is NaN."""
    layer = make()
    statistics = Statistics(layer)
    layer(torch.full((2, 5, 3, 3), float("nan")))
    layer(images())
    assert not statistics.recorded(0).isfinite().all()


def test_scratch_is_no_part_of_the_state_and_eval_ignores_it() -> None:
    layer = make()
    Statistics(layer)
    assert set(layer.state_dict()) == set(reference().state_dict())
    assert torch.equal(layer.eval()(images()), reference().eval()(images()))
