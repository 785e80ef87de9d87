"""`val --worst`: which images are shown, with their losses."""

from __future__ import annotations

import csv
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from ray_yolo.core.structures import AnnotationIndex
from ray_yolo.ops.label_errors import DoubtfulLabel
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
    said = worst.write_worst(evaluation, index, 4, 64, tmp_path, {}, draw=True)
    assert said == ("worst: 1.png has the highest loss, nan (median of all images 1.5); no label is probably wrong "
                    "(worst.csv, worst_images*.jpg, worst_labels*.jpg)")
    rows = list(csv.DictReader((tmp_path / "worst.csv").read_text().splitlines()))
    assert [(row["file"], row["value"]) for row in rows] == [
        ("1.png", "nan"), ("2.png", "inf"), ("3.png", "-inf"), ("4.png", "2")]
    assert {image: str(total) for image, total in shown.items()} == {1: "nan", 2: "inf", 3: "-inf", 4: "2.0"}


def test_a_sentence_counts_the_doubtful_labels_by_kind(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    box = (0.0, 0.0, 9.0, 9.0)
    found = [DoubtfulLabel("wrong class", 0, box, 0, 1, 0.9), DoubtfulLabel("missing label", 1, box, None, 1, 0.8),
             DoubtfulLabel("wrong class", 1, box, 1, 0, 0.7)]
    monkeypatch.setattr(worst, "doubtful_labels", lambda *_: found)
    index = AnnotationIndex(("in/a.png", "in/b.png"), np.full((2, 2), 64, np.int32), np.zeros(3, np.int64),
                            np.zeros(0, np.int64), np.zeros((0, 4)), ("a", "b"))
    evaluation: Any = SimpleNamespace(image_losses=np.array([[0.5], [2.5]]), losses={"box": 0.0}, detections=None)
    assert worst.write_worst(evaluation, index, 5, 64, tmp_path, {}, draw=False) == (
        "worst: b.png has the highest loss, 2.5 (median of all images 1.5); 3 labels probably wrong "
        "(1 missing label, 2 wrong class) (worst.csv)")
