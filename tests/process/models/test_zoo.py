"""The published models: parameter counts, cost, strides, anchors, names of tensors."""

from __future__ import annotations

from itertools import product

import pytest
import torch

from ray_yolo.models.detector import count_parameters, fuse, gflops
from ray_yolo.models.families import build_model
from tests.unit.models.test_zoo import MODELS, PARAMETERS, without_memory

TENSORS = {
    "yolov5n6": 459, "yolov5s6": 459, "yolov5m6": 627, "yolov5l6": 795, "yolov5x6": 963,
    "yolov5n6u": 563, "yolov5s6u": 563, "yolov5m6u": 731, "yolov5l6u": 899, "yolov5x6u": 1067,
    "yolo11n": 499, "yolo11s": 499, "yolo11m": 649, "yolo11l": 1015, "yolo11x": 1015,
    "yolo26n": 708, "yolo26s": 708, "yolo26m": 768, "yolo26l": 1092, "yolo26x": 1092,
    "yolo12n": 691}


def test_parameters_and_tensors_are_as_many_as_published(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.nn.init, "kaiming_uniform_", lambda tensor, **_: tensor)  # most of the time
    monkeypatch.setattr(torch.nn.init, "trunc_normal_", lambda tensor, **_: tensor)
    for name, (place, num_classes) in product(PARAMETERS, ((0, 80), (1, 3))):
        with torch.device("meta"):
            model = build_model(name, num_classes)
        assert count_parameters(model) == PARAMETERS[name][place], (name, num_classes)
        assert len(model.state_dict()) == TENSORS.get(name, len(model.state_dict())), (name, num_classes)


def test_a_fused_model_has_the_published_parameters() -> None:
    published = {"yolo11n": 2_616_248, "yolo11m": 20_091_712, "yolo26n": 2_408_932, "yolo26m": 20_411_132}
    for name, fused in published.items():
        with torch.device("meta"):
            assert count_parameters(fuse(build_model(name, 80))) == fused, name


def test_the_cost_is_the_published_one() -> None:
    for name, cost in {"yolo11n": 6.54, "yolo26n": 5.48, "yolov5n6": 4.56}.items():
        with torch.device("meta"):
            assert gflops(build_model(name, 80)) == pytest.approx(cost, rel=0.015), name


SIZES = {  # parameters in training and fused, GFLOPs
    "yolov5n": (1_872_157, 1_867_405, 4.5), "yolov5s": (7_235_389, 7_225_885, 16.5),
    "yolov5m": (21_190_557, 21_172_173, 49.0), "yolov5l": (46_563_709, 46_533_693, 109.1),
    "yolov5x": (86_749_405, 86_705_005, 205.7), "yolov3": (61_949_149, 61_922_845, 156.3),
    "yolov3-spp": (62_998_749, 62_971_933, 157.1), "yolov3-tiny": (8_852_366, 8_849_182, 13.2)}


def test_size_and_cost_of_the_published_models() -> None:
    for name, (training, fused, published_gflops) in SIZES.items():
        model = without_memory(name)
        assert count_parameters(model) == training, name
        assert count_parameters(fuse(model)) == fused, name
        assert gflops(model) == pytest.approx(published_gflops, rel=0.015), name


def test_strides_and_anchors_per_level() -> None:
    for name in MODELS:
        head = without_memory(name).head
        strides = (16, 32) if name == "yolov3-tiny" else (8, 16, 32, 64) if name.endswith("6") else (8, 16, 32)
        assert head.strides == strides, name
        assert head.anchors.shape == (len(head.strides), 3, 2), name
