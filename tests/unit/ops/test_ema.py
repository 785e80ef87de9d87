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
