"""The norm that a step is clipped by, on gradients at any place in memory."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from ray_yolo.engine.gradients import views_like
from ray_yolo.engine.update import gradient_norm


@pytest.mark.parametrize("start", range(4))
def test_the_norm_does_not_depend_on_where_the_gradients_lie(start: int, monkeypatch: pytest.MonkeyPatch) -> None:
    own = [torch.randn(shape) for shape in ((3,), (4, 5), (255,), (8, 3, 3, 3))]
    flat = torch.cat([torch.zeros(start), *(gradient.flatten() for gradient in own)])
    views = views_like(flat[start:], own)
    kernel, read = nn.utils.get_total_norm, []

    def reading(gradients: list[Tensor], **named: bool) -> Tensor:
        read.extend(gradients)
        return kernel(gradients, **named)

    monkeypatch.setattr(nn.utils, "get_total_norm", reading)
    assert gradient_norm(views) == kernel(own, foreach=True)
    assert [gradient.data_ptr() % 16 for gradient in read] == [0] * len(own)  # where a GPU may read by fours
    assert all(map(torch.equal, read, own))
