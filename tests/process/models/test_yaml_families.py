"""Model files as Ultralytics writes them: heads without anchors, `scales`, the letter in the file's name."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from ray_yolo.config.model_facts import read_model_file
from ray_yolo.models.families import build_model, find_family
from tests.unit.models.test_yaml_families import TABLES, write


def shapes(model: torch.nn.Module) -> dict[str, torch.Size]:
    return {name: tensor.shape for name, tensor in model.state_dict().items()}


@pytest.mark.parametrize(
    "name", ["yolov8n", "yolov8m", "yolo11n", "yolo11m", "yolo12n", "yolo12l", "yolo26n", "yolo26m"])
def test_a_file_gives_the_built_in_model_of_the_letter_in_its_name(name: str, tmp_path: Path) -> None:
    table = read_model_file(write(tmp_path, f"my_{name}-2.yaml", TABLES[name[:-1]]))
    with torch.device("meta"):
        model, built_in = build_model(table, 3), build_model(name, 3)
    assert shapes(model) == shapes(built_in)
    assert model.head.strides == built_in.head.strides
    family = find_family(table)
    assert (family.decode, family.suppress) == (find_family(name).decode, find_family(name).suppress)
