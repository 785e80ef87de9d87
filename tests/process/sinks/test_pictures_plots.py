"""Pictures of a data set and of what was detected in it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from ray_yolo.sinks import pictures
from ray_yolo.sinks.pictures import Failed, draw_detections, draw_training
from tests.support.jobs import make_spec

TABLE = np.array([[0, 1, 1, 20, 20, 0.9, 0, *[1] * 10]], np.float32)
WRITTEN = {"train_batch0.jpg", "train_batch1.jpg", "train_batch2.jpg", "val_batch0_pred.jpg", "val_batch1_pred.jpg",
           "PR_curve.png", "F1_curve.png", "P_curve.png", "R_curve.png", "confusion_matrix.png",
           "confusion_matrix_normalized.png"}


@pytest.mark.parametrize(("broken", "names", "lost"), [
    ("plot_pictures", ["train_batch0.jpg", "train_batch1.jpg", "train_batch2.jpg"], "train_batch"),
    ("plot_truth_and_detections", ["val_batch0_pred.jpg", "val_batch1_pred.jpg"], "val_batch"),
    ("plot_all_curves", ["curves"], "_curve"), ("plot_confusion", ["confusion matrices"], "confusion_")])
def test_pictures_that_cannot_be_drawn_are_named_and_the_others_are_drawn(
        tmp_path: Path, monkeypatch: pytest.MonkeyPatch, broken: str, names: list[str], lost: str) -> None:
    def refuse(*_: Any, **__: Any) -> None:
        raise ValueError("no ink")

    spec, failed, folder = make_spec(tmp_path), Failed(), tmp_path / "drawn"
    monkeypatch.setattr(pictures, broken, refuse)
    draw_training(folder, spec, failed)
    draw_detections(TABLE, spec.val, 64, folder, failed)
    assert failed == dict.fromkeys(names, "ValueError: no ink")
    assert {path.name for path in folder.iterdir()} == {name for name in WRITTEN if lost not in name}
