"""The moving average follows its definition."""

import copy
import math

import pytest
import torch
from torch import nn

from ray_yolo.ops.ema import Ema, ema_decay


def test_each_floating_entry_follows_the_definition_and_counters_are_copied() -> None:
    model = nn.Sequential(nn.Conv2d(2, 3, 1), nn.BatchNorm2d(3))
    ema = Ema(model, 0.9999, 2000)
    expected = copy.deepcopy(model.state_dict())
    for step in (1, 2, 3):
        model(torch.randn(4, 2, 5, 5))
        with torch.no_grad():
            model[0].weight.add_(1.0)
        ema.update(model, step)
        decay = ema_decay(step, 0.9999, 2000)
        for name, value in model.state_dict().items():
            blended = decay * expected[name] + (1 - decay) * value
            expected[name] = blended if value.is_floating_point() else value.clone()
    for name, value in ema.model.state_dict().items():
        assert torch.allclose(value, expected[name], atol=1e-6), name
    assert ema.model[1].num_batches_tracked == 3


@pytest.mark.parametrize("share", [1 - ema_decay(step, 0.9999, 2000) for step in (1, 1386, 1387, 20_000, 10**6)])
def test_a_share_in_tensors_gives_the_bits_of_the_number(share: float) -> None:
    """Also where the share is a half, from which on torch counts from the other end."""
    model = nn.Sequential(nn.Conv2d(5, 7, 3).to(memory_format=torch.channels_last), nn.BatchNorm2d(7))
    by_number, by_tensors = Ema(model, 0.9999, 2000), Ema(model, 0.9999, 2000)
    with torch.no_grad():
        model[0].weight.add_(torch.randn(7, 5, 3, 3))
    by_number.move(model, share)
    by_tensors.move(model, [torch.full_like(average, share) for average in by_tensors.pairs(model).averages])
    for one, other in zip(by_number.model.parameters(), by_tensors.model.parameters(), strict=True):
        assert torch.equal(one, other)


def test_the_average_is_in_eval_mode_without_gradients_and_leaves_the_model_alone() -> None:
    model = nn.Linear(2, 2)
    ema = Ema(model, 0.9999, 2000)
    assert not ema.model.training
    assert not any(parameter.requires_grad for parameter in ema.model.parameters())
    before = model.weight.clone()
    ema.update(model, 1)
    assert torch.equal(model.weight, before)


def test_moving_average_forgets_quickly_at_first() -> None:
    assert ema_decay(0, 0.9999, 2000) == 0.0
    assert ema_decay(2000, 0.9999, 2000) == pytest.approx(0.9999 * (1 - math.exp(-1)))
    assert ema_decay(10**6, 0.9999, 2000) == pytest.approx(0.9999)
