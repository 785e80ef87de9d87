"""The published models: parameter counts, cost, strides, anchors, names of tensors."""

from __future__ import annotations

import re

import pytest
import torch

from ray_yolo.families import build_model
from ray_yolo.models.detector import Detector, count_parameters, fuse, gflops
from ray_yolo.models.zoo import YOLOV3, YOLOV5

MODELS = {**YOLOV5, **YOLOV3}

PARAMETERS = {  # with 80 and with 3 classes
    "yolov5nu": (2_654_816, 2_509_049), "yolov5su": (9_153_152, 9_123_353), "yolov5mu": (25_111_456, 25_066_873),
    "yolov5lu": (53_225_024, 53_165_657), "yolov5xu": (97_276_448, 97_202_297),
    "yolov8n": (3_157_200, 3_011_433), "yolov8s": (11_166_560, 11_136_761), "yolov8m": (25_902_640, 25_858_057),
    "yolov8l": (43_691_520, 43_632_153), "yolov8x": (68_229_648, 68_155_497)}


@pytest.mark.parametrize("name", PARAMETERS)
@pytest.mark.parametrize(("place", "num_classes"), [(0, 80), (1, 3)])
def test_parameter_counts_without_anchors_are_the_published_ones(name: str, place: int, num_classes: int,
                                                                 monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.nn.init, "kaiming_uniform_", lambda tensor, **_: tensor)  # most of the time
    assert count_parameters(build_model(name, num_classes)) == PARAMETERS[name][place]


def test_tensor_names_without_anchors_are_the_published_ones() -> None:
    norm = r"bn\.(weight|bias|running_mean|running_var|num_batches_tracked)"
    conv = rf"(conv\.weight|{norm})"
    head = rf"22\.(cv[23]\.[012]\.([01]\.{conv}|2\.(weight|bias))|dfl\.conv\.weight)"
    grammar = rf"model\.(\d+\.{conv}|\d+\.(cv[12]|m\.\d+\.cv[12])\.{conv}|{head})"
    state = build_model("yolov8n", 80).state_dict()
    assert [key for key in state if not re.fullmatch(grammar, key)] == []
    assert state["model.2.cv1.conv.weight"].shape == (32, 32, 1, 1)
    assert state["model.2.m.0.cv1.conv.weight"].shape == (16, 16, 3, 3)
    assert state["model.2.cv2.conv.weight"].shape == (32, 48, 1, 1)
    assert state["model.22.dfl.conv.weight"].flatten().tolist() == list(range(16))


def without_memory(name: str, num_classes: int = 80) -> Detector:
    """A model of shapes only: yolov5x takes 350 MB otherwise."""
    with torch.device("meta"):
        return MODELS[name].build(num_classes)


@pytest.mark.parametrize(
    ("name", "training", "fused", "published_gflops"),
    [
        ("yolov5n", 1_872_157, 1_867_405, 4.5),
        ("yolov5s", 7_235_389, 7_225_885, 16.5),
        ("yolov5m", 21_190_557, 21_172_173, 49.0),
        ("yolov5l", 46_563_709, 46_533_693, 109.1),
        ("yolov5x", 86_749_405, 86_705_005, 205.7),
        ("yolov3", 61_949_149, 61_922_845, 156.3),
        ("yolov3-spp", 62_998_749, 62_971_933, 157.1),
        ("yolov3-tiny", 8_852_366, 8_849_182, 13.2),
    ],
)
def test_size_and_cost_of_the_published_models(name: str, training: int, fused: int, published_gflops: float) -> None:
    model = without_memory(name)
    assert count_parameters(model) == training
    assert count_parameters(fuse(model)) == fused
    assert gflops(model) == pytest.approx(published_gflops, rel=0.015)


@pytest.mark.parametrize(("num_classes", "parameters"), [(1, 7_022_326), (20, 7_073_569)])
def test_fewer_classes_make_a_smaller_head(num_classes: int, parameters: int) -> None:
    assert count_parameters(without_memory("yolov5s", num_classes)) == parameters


@pytest.mark.parametrize("name", MODELS)
def test_strides_and_anchors_per_level(name: str) -> None:
    head = without_memory(name).head
    assert head.strides == ((16, 32) if name == "yolov3-tiny" else (8, 16, 32))
    assert head.anchors.shape == (len(head.strides), 3, 2)


def test_anchors_are_the_published_pixels_over_the_strides() -> None:
    head = YOLOV5["yolov5n"].build(80).head
    pixels = head.anchors * torch.tensor(head.strides)[:, None, None]
    assert pixels.tolist() == [[[10, 13], [16, 30], [33, 23]], [[30, 61], [62, 45], [59, 119]],
                               [[116, 90], [156, 198], [373, 326]]]


def test_tensor_names_are_the_published_ones() -> None:
    norm = r"bn\.(weight|bias|running_mean|running_var|num_batches_tracked)"
    conv = rf"(conv\.weight|{norm})"
    layers = {
        "yolov5n": rf"model\.(\d+\.{conv}|\d+\.(cv[123]|m\.\d+\.cv[12])\.{conv}|24\.(anchors|m\.[012]\.(weight|bias)))",
        "yolov3-spp": rf"model\.(\d+\.{conv}|\d+\.(\d\.)?cv[12]\.{conv}|28\.(anchors|m\.[012]\.(weight|bias)))",
    }
    for name, grammar in layers.items():
        state = without_memory(name).state_dict()
        assert [key for key in state if not re.fullmatch(grammar, key)] == []
    assert state["model.2.cv1.conv.weight"].shape == (32, 64, 1, 1)  # one bottleneck stands alone
    assert state["model.6.7.cv2.conv.weight"].shape == (256, 128, 3, 3)  # eight are a sequence
    assert state["model.12.cv2.conv.weight"].shape == (512, 2048, 1, 1)
    state = without_memory("yolov5n").state_dict()
    assert state["model.0.conv.weight"].shape == (16, 3, 6, 6)
    assert state["model.6.m.2.cv2.conv.weight"].shape == (64, 64, 3, 3)
    assert state["model.9.cv2.conv.weight"].shape == (256, 512, 1, 1)
    assert state["model.24.m.2.weight"].shape == (255, 256, 1, 1)
