"""`val --worst`: which images are shown, with their losses."""

from __future__ import annotations

import csv
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from ray_yolo.core.structures import AnnotationIndex
from ray_yolo.runtime import worst


def test_what_is_not_finite_comes_first_and_is_shown_as_it_is(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    shown: dict[int, float] = {}

    def draw(images: list[int], totals: np.ndarray, *_: Any) -> None:
        shown.update({image: float(totals[image]) for image in images})

    monkeypatch.setattr(worst, "doubtful_labels", lambda *_: [])
    monkeypatch.setattr(worst, "draw_worst_images", draw)
    monkeypatch.setattr(worst, "draw_doubtful_labels", lambda *_: None)
    losses = np.array([[1.0], [np.nan], [np.inf], [-np.inf], [2.0]])
    index = AnnotationIndex(tuple(f"{number}.png" for number in range(5)), np.full((5, 2), 64, np.int32),
                            np.zeros(6, np.int64), np.zeros(0, np.int64), np.zeros((0, 4)), ("a",))
    evaluation: Any = SimpleNamespace(image_losses=losses, losses={"box": 0.0}, detections=None)
    worst.write_worst(evaluation, index, 4, 64, tmp_path, lambda *_: None, draw=True)
    rows = list(csv.DictReader((tmp_path / "worst.csv").read_text().splitlines()))
    assert [(row["file"], row["value"]) for row in rows] == [
        ("1.png", "nan"), ("2.png", "inf"), ("3.png", "-inf"), ("4.png", "2")]
    assert {image: str(total) for image, total in shown.items()} == {1: "nan", 2: "inf", 3: "-inf", 4: "2.0"}
