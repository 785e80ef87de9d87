"""The part of each image in a batch's loss."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from ray_yolo.config.sections import LossConfig
from ray_yolo.models.criterion import image_numerators
from ray_yolo.models.families import build_model, find_family


def targets() -> Tensor:
    """Labels of the images 0, 1 and 3 of four, in a mixed order; image 2 has none."""
    generator = torch.Generator().manual_seed(3)
    images = torch.tensor([3.0, 0, 1, 0, 3, 3])
    classes = torch.tensor([0.0, 1, 2, 2, 1, 0])
    low = torch.rand(6, 2, generator=generator) * 40
    high = low + 8 + torch.rand(6, 2, generator=generator) * 40
    return torch.cat([images[:, None], classes[:, None], low, high], 1)


@pytest.mark.parametrize(("name", "gamma"), [("yolov5n", 0.0), ("yolov5n", 1.5), ("yolov8n", 0.0), ("yolo26n", 0.0)])
def test_the_parts_of_the_images_add_up_to_the_loss_of_the_batch(name: str, gamma: float) -> None:
    torch.manual_seed(0)
    model, family = build_model(name, 3), find_family(name)
    loss = family.build_loss(model.head, LossConfig(fl_gamma=gamma), 3, 96)
    levels = model(torch.rand(4, 3, 96, 96))
    sums = loss.measure(levels, targets(), (96, 96))
    numerators = image_numerators(loss, levels, targets(), (96, 96))
    assert numerators.shape == (4, *sums.numerators.shape)
    torch.testing.assert_close(numerators.sum(0), sums.numerators.detach(), rtol=2e-5, atol=1e-6)
    parts = torch.stack([loss.terms(own, sums.counts, 0.3) for own in numerators])
    torch.testing.assert_close(parts.sum(0), loss.terms(*sums, 0.3).detach(), rtol=2e-5, atol=1e-6)
    assert len({round(float(part), 9) for part in parts.sum(1)}) == 4  # they differ


def test_a_batch_without_images_has_no_parts() -> None:
    model, family = build_model("yolov8n", 3), find_family("yolov8n")
    loss = family.build_loss(model.head, LossConfig(), 3, 64)
    assert image_numerators(loss, model(torch.rand(0, 3, 64, 64)), torch.zeros(0, 6), (64, 64)).shape == (0, 3, 1)
