"""The models without anchors: published parameter counts, names of tensors, and the meaning of what they give."""

from __future__ import annotations

import math
import re

import pytest
import torch

from ray_yolo.families import build_model
from ray_yolo.models.anchor_free import AnchorFree, decode
from ray_yolo.models.fusion import count_parameters

PARAMETERS = {  # with 80 and with 3 classes
    "yolov5nu": (2_654_816, 2_509_049), "yolov5su": (9_153_152, 9_123_353), "yolov5mu": (25_111_456, 25_066_873),
    "yolov5lu": (53_225_024, 53_165_657), "yolov5xu": (97_276_448, 97_202_297),
    "yolov8n": (3_157_200, 3_011_433), "yolov8s": (11_166_560, 11_136_761), "yolov8m": (25_902_640, 25_858_057),
    "yolov8l": (43_691_520, 43_632_153), "yolov8x": (68_229_648, 68_155_497)}


@pytest.mark.parametrize("name", PARAMETERS)
@pytest.mark.parametrize(("place", "num_classes"), [(0, 80), (1, 3)])
def test_parameter_counts_are_the_published_ones(name: str, place: int, num_classes: int,
                                                 monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.nn.init, "kaiming_uniform_", lambda tensor, **_: tensor)  # most of the time
    assert count_parameters(build_model(name, num_classes)) == PARAMETERS[name][place]


def test_tensor_names_are_the_published_ones() -> None:
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


def small_head(num_classes: int = 3) -> AnchorFree:
    """Two levels of 8 and 16 pixels per cell."""
    head = AnchorFree([8, 16], num_classes)
    head.calibrate((8, 16), None)
    return head


def test_a_side_is_the_expected_distance_from_the_middle_of_the_cell() -> None:
    levels = [torch.zeros(1, 64 + 3, 2, 3), torch.zeros(1, 64 + 3, 1, 2)]
    levels[0][0, :64] = -100.0
    for side, distance in enumerate((1, 0, 2, 15)):  # left, top, right, bottom
        levels[0][0, 16 * side + distance] = 100.0
    levels[0][0, 16 * 0 + 2] = 100.0  # left: half of 1, half of 2
    levels[0][0, 64:] = torch.tensor([0.0, math.log(3), -100.0])[:, None, None]
    boxes, scores = decode(small_head(), levels)
    assert boxes.shape == (1, 2 * 3 + 2, 4)
    x, y = 2.5 * 8, 1.5 * 8  # the last cell of the first level: column 2, row 1
    torch.testing.assert_close(boxes[0, 5], torch.tensor([x - 1.5 * 8, y, x + 2 * 8, y + 15 * 8]))
    torch.testing.assert_close(scores[0, 5], torch.tensor([0.5, 0.75, 0.0]))
    torch.testing.assert_close(boxes[0, 7], torch.tensor([24.0, 8, 24, 8]) + 7.5 * 16 * torch.tensor([-1.0, -1, 1, 1]))


def test_training_starts_from_five_objects_an_image() -> None:
    head = small_head(4)
    for number, stride in enumerate((8, 16)):
        bias = head.state_dict()[f"cv3.{number}.2.bias"]
        torch.testing.assert_close(bias.exp() * 4 * (640 / stride) ** 2, torch.full((4,), 5.0))
        assert head.state_dict()[f"cv2.{number}.2.bias"].eq(1).all()


def test_the_constants_of_the_head_are_not_trained() -> None:
    frozen = [name for name, parameter in small_head().named_parameters() if not parameter.requires_grad]
    assert frozen == ["dfl.conv.weight"]
