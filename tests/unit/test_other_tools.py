"""The page about other tools: its code gives each tool what it documents."""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from ray_yolo.inference.results import Boxes, Results

PAGE = (Path(__file__).parents[2] / "docs" / "other_tools.md").read_text()
_, SUPERVISION, FIFTYONE, LABEL_STUDIO = re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL)
ROWS = torch.tensor([[10.0, 20, 30, 60, 0.75, 1], [0, 0, 100, 50, 0.5, 0]])


@pytest.fixture
def known() -> dict[str, Any]:
    """The names before each block."""
    results = Results(np.zeros((200, 100, 3), np.uint8), "in/a.jpg", {0: "cat", 1: "dog"}, Boxes(ROWS, (200, 100)))
    return {"results": [results]}


def test_supervision_draws_the_boxes(known: dict[str, Any]) -> None:
    exec(SUPERVISION, known)
    assert known["detections"].xyxy.tolist() == ROWS[:, :4].tolist()
    assert known["annotated"].any()


def test_fiftyone_gets_corner_and_size_in_shares(known: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    """Stand-ins for its classes, which take what they have by name."""
    stored: list[Any] = []
    monkeypatch.setitem(sys.modules, "fiftyone", SimpleNamespace(
        Detection=SimpleNamespace, Detections=SimpleNamespace, Sample=SimpleNamespace,
        Dataset=lambda name: SimpleNamespace(add_samples=stored.extend)))
    exec(FIFTYONE, known)
    [sample] = stored
    first = sample.predictions.detections[0]
    assert (sample.filepath, first.label, first.confidence) == ("in/a.jpg", "dog", 0.75)
    assert first.bounding_box == pytest.approx([0.1, 0.1, 0.2, 0.2])


def test_label_studio_gets_percents(known: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    exec(LABEL_STUDIO, known)
    [task] = json.loads(Path("tasks.json").read_text())
    assert task["data"]["image"] == "/data/local-files/?d=images/val/a.jpg"
    region = task["predictions"][0]["result"][0]
    assert (region["original_width"], region["original_height"], region["score"]) == (100, 200, 0.75)
    value = region["value"]
    assert [value[side] for side in ("x", "y", "width", "height")] == pytest.approx([10, 10, 20, 20])
    assert value["rectanglelabels"] == ["dog"]
