"""A head with other classes gives the scores of those classes, and the same boxes."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from ray_yolo.config.sections import LossConfig
from ray_yolo.core.errors import ConfigError
from ray_yolo.models.detector import Detector, fuse
from ray_yolo.models.families import build_model, compare_weights, find_family, load_weights
from ray_yolo.models.heads import Head

MODELS = ("yolov5n", "yolov8n", "yolo11n", "yolo26n")
CHOSEN = (3, 0, 1)  # of four classes


def shaken(model: str) -> Detector:
    """A model of four classes whose outputs differ."""
    torch.manual_seed(0)
    detector = build_model(model, 4).eval()
    for layer in detector.head.class_layers().values():
        nn.init.normal_(layer.weight, std=0.1)
        assert layer.bias is not None
        nn.init.normal_(layer.bias)
    return detector


@torch.no_grad()
def predicted(detector: Detector, model: str) -> tuple[Tensor, Tensor]:
    images = torch.rand(1, 3, 64, 64, generator=torch.Generator().manual_seed(1))
    boxes, scores = find_family(model).decode(detector.head, detector(images))
    return boxes, scores


@pytest.mark.parametrize("model", MODELS)
def test_a_head_keeps_the_chosen_classes_in_their_order(model: str) -> None:
    detector = shaken(model)
    boxes, scores = predicted(detector, model)
    detector.head.select_classes(CHOSEN)
    chosen_boxes, chosen_scores = predicted(detector, model)
    torch.testing.assert_close(chosen_boxes, boxes)
    torch.testing.assert_close(chosen_scores, scores[..., list(CHOSEN)])
    assert detector.num_classes == 3
    torch.testing.assert_close(predicted(fuse(detector), model)[1], chosen_scores, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("model", MODELS)
def test_the_loss_of_a_chosen_head_has_its_classes(model: str) -> None:
    detector = shaken(model)
    detector.head.select_classes(CHOSEN)
    loss = find_family(model).build_loss(detector.head, LossConfig(), 3, 64)
    targets = torch.tensor([[0.0, 2, 8, 8, 40, 40]])
    levels = detector(torch.rand(1, 3, 64, 64))
    loss.terms(*loss.measure(levels, targets, (64, 64))).sum().backward()
    for layer in detector.head.class_layers().values():
        assert layer.weight.grad is not None


@pytest.mark.parametrize("model", MODELS)
def test_weights_are_loaded_by_class(model: str) -> None:
    source, target = shaken(model), build_model(model, 4).eval()
    order = (2, 3, 0, 1)
    load_weights(target, source.state_dict(), classes=order)
    torch.testing.assert_close(predicted(target, model)[1], predicted(source, model)[1][..., list(order)])


def test_a_file_of_other_classes_has_no_class_layers_for_a_model() -> None:
    source = build_model("yolov8n", 4).state_dict()
    assert compare_weights(build_model("yolov8n", 4), source).has_classes
    assert not compare_weights(build_model("yolov8n", 3), source).has_classes


def test_a_head_without_named_class_layers_refuses_to_change_them() -> None:
    with pytest.raises(ConfigError):
        Head(3).select_classes((1, 0, 2))
