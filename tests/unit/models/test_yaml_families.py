"""Model files as Ultralytics writes them: heads without anchors, `scales`, the letter in the file's name."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import yaml

from ray_yolo.config.model_facts import read_model_file
from ray_yolo.config.recipe import Recipe
from ray_yolo.models.families import build_model
from ray_yolo.models.yaml_rows import read_architecture

NECK = """
  - [-1, 1, nn.Upsample, [None, 2, "nearest"]]
  - [[-1, 6], 1, Concat, [1]]
  - [-1, {n}, {coarse}]
  - [-1, 1, nn.Upsample, [None, 2, "nearest"]]
  - [[-1, 4], 1, Concat, [1]]
  - [-1, {n}, {fine}]
  - [-1, 1, Conv, [256, 3, 2]]
  - [[-1, {p4}], 1, Concat, [1]]
  - [-1, {n}, {coarse}]
  - [-1, 1, Conv, [512, 3, 2]]
  - [[-1, {p5}], 1, Concat, [1]]
  - [-1, {last}]
  - [[{levels}], 1, Detect, [nc]]
"""
START = "backbone:\n  - [-1, 1, Conv, [64, 3, 2]]\n  - [-1, 1, Conv, [128, 3, 2]]\n"
START_11 = START + """\
  - [-1, 2, C3k2, [256, False, 0.25]]
  - [-1, 1, Conv, [256, 3, 2]]
  - [-1, 2, C3k2, [512, False, 0.25]]
  - [-1, 1, Conv, [512, 3, 2]]
"""
SCALES_11 = "scales: {n: [0.50, 0.25, 1024], s: [0.50, 0.50, 1024], m: [0.50, 1.00, 512], l: [1.00, 1.00, 512]}\n"
DEEP_11 = """\
  - [-1, 2, C3k2, [512, True]]
  - [-1, 1, Conv, [1024, 3, 2]]
  - [-1, 2, C3k2, [1024, True]]
"""
TABLES = {
    "yolov8": "nc: 80\nscales:\n  n: [0.33, 0.25, 1024]\n  m: [0.67, 0.75, 768]\n" + START + """\
  - [-1, 3, C2f, [128, True]]
  - [-1, 1, Conv, [256, 3, 2]]
  - [-1, 6, C2f, [256, True]]
  - [-1, 1, Conv, [512, 3, 2]]
  - [-1, 6, C2f, [512, True]]
  - [-1, 1, Conv, [1024, 3, 2]]
  - [-1, 3, C2f, [1024, True]]
  - [-1, 1, SPPF, [1024, 5]]
head:""" + NECK.format(n=3, coarse="C2f, [512]", fine="C2f, [256]", last="3, C2f, [1024]", p4=12, p5=9,
                       levels="15, 18, 21"),
    "yolo11": "nc: 80\n" + SCALES_11 + START_11 + DEEP_11 + """\
  - [-1, 1, SPPF, [1024, 5]]
  - [-1, 2, C2PSA, [1024]]
head:""" + NECK.format(n=2, coarse="C3k2, [512, False]", fine="C3k2, [256, False]", last="2, C3k2, [1024, True]", p4=13,
                       p5=10, levels="16, 19, 22"),
    "yolo12": "nc: 80\n" + SCALES_11 + START_11 + """\
  - [-1, 4, A2C2f, [512, True, 4]]
  - [-1, 1, Conv, [1024, 3, 2]]
  - [-1, 4, A2C2f, [1024, True, 1]]
head:""" + NECK.format(n=2, coarse="A2C2f, [512, False, -1]", fine="A2C2f, [256, False, -1]",
                       last="2, C3k2, [1024, True]", p4=11, p5=8, levels="14, 17, 20"),
    "yolo26": "nc: 80\nend2end: True\nreg_max: 1\n" + SCALES_11 + START_11 + DEEP_11 + """\
  - [-1, 1, SPPF, [1024, 5, 3, True]]
  - [-1, 2, C2PSA, [1024]]
head:""" + NECK.format(n=2, coarse="C3k2, [512, True]", fine="C3k2, [256, True]",
                       last="1, C3k2, [1024, True, 0.5, True]", p4=13, p5=10, levels="16, 19, 22"),
}


def write(folder: Path, name: str, text: str) -> str:
    path = folder / name
    path.write_text(text)
    return str(path)


@pytest.mark.parametrize("name", ["yolov8n", "yolo11n", "yolo12n", "yolo26n"])
def test_a_file_computes_what_the_built_in_model_does(name: str) -> None:
    images = torch.rand(1, 3, 64, 64)
    torch.manual_seed(1)
    ours = build_model(name, 3)  # in training: BatchNorm in evaluation lets a fresh model's activations fade
    torch.manual_seed(1)
    theirs = build_model(yaml.safe_load(TABLES[name[:-1]]), 3)
    with torch.no_grad():
        assert all(torch.equal(level, other) for level, other in zip(ours(images), theirs(images), strict=True))


def test_the_scale_is_the_letter_in_the_name_or_the_first(tmp_path: Path) -> None:
    scales = {"yolo11s.yaml": "s", "cards_yolo11m-big.yml": "m", "yolo11.yaml": "n", "yolo11z.yaml": "n",
              "models.yaml": "n"}
    for file, scale in scales.items():
        assert read_model_file(write(tmp_path, file, TABLES["yolo11"]))["scale"] == scale, file


def test_the_scale_key_comes_before_the_name(tmp_path: Path) -> None:
    table = read_model_file(write(tmp_path, "yolo11n.yaml", "scale: l\n" + TABLES["yolo11"]))
    architecture = read_architecture(table)
    assert (architecture.depth, architecture.width, architecture.most) == (1.0, 1.0, 512)


def test_loss_gains_follow_the_head_and_not_the_name(tmp_path: Path) -> None:
    for family in TABLES:
        (tmp_path / family).mkdir()
        path = write(tmp_path / family, "yolov5s.yaml", TABLES[family])
        assert Recipe(model=path).loss.box == 7.5, family
        assert Recipe(model=path, loss={"box": 3.0}).loss.box == 3.0, family


def test_loss_gains_of_a_file_with_anchors_are_the_defaults(tmp_path: Path) -> None:
    anchored = "anchors: 3\nbackbone: [[-1, 1, Conv, [8, 3, 2]]]\nhead: [[-1, 1, Detect, [nc, anchors]]]\n"
    assert Recipe(model=write(tmp_path, "yolov8n.yaml", anchored)).loss.box == 0.05
    assert Recipe(model=str(tmp_path / "no" / "yolov8n.yaml")).loss.box == 7.5  # a missing file means the name
    assert Recipe(model=write(tmp_path, "broken.yaml", "a: [")).loss.box == 0.05


@pytest.mark.parametrize("changes", [
    {"head": [[-1, 1, "A2C2f", [32, True, 4]], [-1, 1, "Detect", ["nc"]]], "scale": "n"},
    {"head": [[-1, 1, "C2PSA", [2]], [-1, 1, "Detect", ["nc"]]]},
])
def test_narrow_blocks_of_attention_have_a_head(changes: dict[str, Any]) -> None:
    """What is refused is in `tests.support.messages.models`."""
    assert build_model({**yaml.safe_load(TABLES["yolo11"]), **changes}, 2).num_classes == 2
