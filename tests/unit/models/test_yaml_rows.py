from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import yaml

from ray_yolo.core.errors import ConfigError
from ray_yolo.models.blocks import Bottleneck
from ray_yolo.models.yaml_rows import read_architecture
from ray_yolo.models.zoo import TINY as TINY_ROWS
from ray_yolo.models.zoo import YOLOV3, YOLOV5
from tests.support.messages.models import small

YOLOV5S = """
nc: 80
depth_multiple: 0.33
width_multiple: 0.50
anchors:
  - [10,13, 16,30, 33,23]
  - [30,61, 62,45, 59,119]
  - [116,90, 156,198, 373,326]
backbone:
  [[-1, 1, Conv, [64, 6, 2, 2]], [-1, 1, Conv, [128, 3, 2]], [-1, 3, C3, [128]], [-1, 1, Conv, [256, 3, 2]],
   [-1, 6, C3, [256]], [-1, 1, Conv, [512, 3, 2]], [-1, 9, C3, [512]], [-1, 1, Conv, [1024, 3, 2]],
   [-1, 3, C3, [1024]], [-1, 1, SPPF, [1024, 5]]]
head:
  [[-1, 1, Conv, [512, 1, 1]], [-1, 1, nn.Upsample, [None, 2, 'nearest']], [[-1, 6], 1, Concat, [1]],
   [-1, 3, C3, [512, False]],
   [-1, 1, Conv, [256, 1, 1]], [-1, 1, nn.Upsample, [None, 2, 'nearest']], [[-1, 4], 1, Concat, [1]],
   [-1, 3, C3, [256, False]],
   [-1, 1, Conv, [256, 3, 2]], [[-1, 14], 1, Concat, [1]], [-1, 3, C3, [512, False]],
   [-1, 1, Conv, [512, 3, 2]], [[-1, 10], 1, Concat, [1]], [-1, 3, C3, [1024, False]],
   [[17, 20, 23], 1, Detect, [nc, anchors]]]
"""

TINY = """
nc: 80
depth_multiple: 1.0
width_multiple: 1.0
anchors: [[10,14, 23,27, 37,58], [81,82, 135,169, 344,319]]
backbone:
  [[-1, 1, Conv, [16, 3, 1]], [-1, 1, nn.MaxPool2d, [2, 2, 0]], [-1, 1, Conv, [32, 3, 1]],
   [-1, 1, nn.MaxPool2d, [2, 2, 0]], [-1, 1, Conv, [64, 3, 1]], [-1, 1, nn.MaxPool2d, [2, 2, 0]],
   [-1, 1, Conv, [128, 3, 1]], [-1, 1, nn.MaxPool2d, [2, 2, 0]], [-1, 1, Conv, [256, 3, 1]],
   [-1, 1, nn.MaxPool2d, [2, 2, 0]], [-1, 1, Conv, [512, 3, 1]], [-1, 1, nn.ZeroPad2d, [[0, 1, 0, 1]]],
   [-1, 1, nn.MaxPool2d, [2, 1, 0]]]
head:
  [[-1, 1, Conv, [1024, 3, 1]], [-1, 1, Conv, [256, 1, 1]], [-1, 1, Conv, [512, 3, 1]],
   [-2, 1, Conv, [128, 1, 1]], [-1, 1, nn.Upsample, [None, 2, 'nearest']], [[-1, 8], 1, Concat, [1]],
   [-1, 1, Conv, [256, 3, 1]], [[19, 15], 1, Detect, [nc, anchors]]]
"""


def shapes(model: torch.nn.Module) -> dict[str, torch.Size]:
    return {name: tensor.shape for name, tensor in model.state_dict().items()}


@pytest.mark.parametrize(
    ("text", "built_in"), [(YOLOV5S, YOLOV5["yolov5s"]), (TINY, YOLOV3["yolov3-tiny"])]
)
def test_a_yaml_model_equals_the_built_in_one(text: str, built_in: Any) -> None:
    read = read_architecture(yaml.safe_load(text))
    images = torch.rand(1, 3, 64, 64)
    torch.manual_seed(1)
    ours = built_in.build(4).eval()
    torch.manual_seed(1)
    theirs = read.build(4).eval()
    assert shapes(ours) == shapes(theirs)
    with torch.no_grad():
        for level, other in zip(ours(images), theirs(images), strict=True):
            assert torch.equal(level, other)
    assert torch.equal(ours.head.anchors, theirs.head.anchors)


def test_rows_equal_the_built_in_rows() -> None:
    assert read_architecture(yaml.safe_load(TINY)).rows[:11] == TINY_ROWS[:11]
    assert read_architecture(yaml.safe_load(YOLOV5S)).rows[:9] == YOLOV5["yolov5s"].rows[:9]


def test_spp_bottlenecks_and_depthwise_convolutions_can_be_written() -> None:
    backbone = [[-1, 1, "Conv", [8, 3, 2]], [-1, 2, "Bottleneck", [8, False]], [-1, 1, "SPP", [8, [3, 5]]],
                [-1, 1, "DWConv", [16, 3, 2]]]
    model = read_architecture(small(backbone=backbone, head=[[-1, 1, "Detect", ["nc", "anchors"]]])).build(2)
    assert shapes(model)["model.2.cv2.conv.weight"] == (8, 12, 1, 1)
    assert shapes(model)["model.3.conv.weight"] == (16, 1, 3, 3)
    assert not any(block.adds for block in model.modules() if isinstance(block, Bottleneck))
    assert model.head.strides == (4,)


def test_anchors_may_be_a_number_to_be_fitted() -> None:
    model = read_architecture(small(anchors=2)).build(3)
    assert model.head.anchors.shape == (1, 2, 2)


def test_the_data_set_decides_the_number_of_classes() -> None:
    assert read_architecture(small(nc=7)).build(3).num_classes == 3


@pytest.mark.parametrize(
    "place", ["source", "number", "module", "argument", "nested", "anchors", "nc", "depth_multiple", "activation"]
)
def test_strings_are_looked_up_and_never_evaluated(place: str, tmp_path: Path) -> None:
    harm = f"open({str(tmp_path / 'harmed')!r}, 'w')"
    row = {"source": -1, "number": 1, "module": "Conv", "argument": 8, "nested": 3, place: harm}
    backbone = [[row["source"], row["number"], row["module"], [row["argument"], [row["nested"]]]]]
    top = {place: harm} if place not in {"source", "number", "module", "argument", "nested"} else {"backbone": backbone}
    with pytest.raises(ConfigError):
        read_architecture(small(**top))
    assert list(tmp_path.iterdir()) == []
