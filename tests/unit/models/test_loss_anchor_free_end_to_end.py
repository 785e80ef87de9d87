"""The loss of two heads: its weights by progress, which head teaches what, distances by hand."""

from __future__ import annotations

import pytest
import torch

from ray_yolo.config.recipe import Recipe
from ray_yolo.models.families import build_model, find_family
from ray_yolo.models.loss_anchor_free import EndToEndLoss
from ray_yolo.ops.assign import AlignRule

TARGETS = torch.tensor([[0.0, 1, 8, 8, 40, 40], [1, 2, 20, 20, 50, 30]])


def build() -> tuple[torch.nn.Module, EndToEndLoss]:
    torch.manual_seed(0)
    model = build_model("yolo26n", 3)
    loss = find_family("yolo26n").build_loss(model.head, Recipe(model="yolo26n").loss, 3, 64)
    assert isinstance(loss, EndToEndLoss)
    return model, loss


@pytest.mark.parametrize(("epoch", "epochs", "many"), [(0, 10, 0.8), (9, 10, 0.1), (0, 1, 0.8), (3, 7, 0.45)])
def test_the_weight_of_the_one_to_many_head_falls_with_progress(epoch: int, epochs: int, many: float) -> None:
    _, loss = build()
    numerators, counts = torch.eye(3, 2) * 0 + torch.tensor([[1.0, 0.0]]), torch.ones(3, 2)
    terms = loss.terms(numerators, counts, epoch / max(epochs - 1, 1))
    torch.testing.assert_close(terms, many * torch.tensor([7.5, 0.5, 1.5]))
    terms = loss.terms(1 - numerators, counts, epoch / max(epochs - 1, 1))
    torch.testing.assert_close(terms, (1 - many) * torch.tensor([7.5, 0.5, 1.5]))


def test_the_one_to_one_head_teaches_itself_alone_and_both_reach_every_tensor() -> None:
    model, loss = build()
    numerators, _ = loss.measure(model(torch.rand(2, 3, 64, 64)), TARGETS, (64, 64))
    numerators[:, 1].sum().backward(retain_graph=True)
    taught = {name for name, parameter in model.named_parameters() if parameter.grad is not None
              and parameter.grad.abs().sum() > 0}
    assert taught
    assert all("one2one" in name for name in taught)
    numerators.sum().backward()
    assert all(parameter.grad is not None for parameter in model.parameters())


def test_both_heads_are_equal_at_the_start_and_the_light_one_gives_the_second_alone() -> None:
    model, _ = build()
    images = torch.rand(1, 3, 64, 96)
    both = model.eval()(images)
    assert len(both) == 6
    assert all(torch.equal(first, second) for first, second in zip(both[:3], both[3:], strict=True))
    model.head.lighten()
    assert all(torch.equal(one, other) for one, other in zip(model(images), both[3:], strict=True))


def test_distances_are_shares_of_the_network_input() -> None:
    _, loss = build()
    assert loss.rules == (AlignRule(floor=16.0), AlignRule(top=7, keep=1, floor=16.0))
    predicted = torch.tensor([[[1.0], [1.0], [2.0], [2.0]]])
    true, cells = torch.tensor([[2.0, 3.0, 2.0, 0.0]]), torch.tensor([[8.0]])
    # pixels apart: 8, 16, 0, 16, of 64 wide and 32 high
    found = loss._distance_loss(predicted, true, cells, (32, 64))
    assert found.tolist() == [pytest.approx((8 / 64 + 16 / 32 + 0 + 16 / 32) / 4)]
