"""What a notebook shows of a training and of a validation: numbers, and one picture as JPEG."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from ray_yolo.runtime.trainer import TrainResult
from ray_yolo.runtime.validator import ValResult
from tests.support.pictures import smooth_picture, write_image

METRICS = {"precision": 0.8, "recall": 0.75, "mAP50": 0.9, "mAP50-95": 0.7}


def trained(run: Path, **more: Any) -> TrainResult:
    return TrainResult(run, run / "weights/best.pt", run / "weights/last.pt", epochs=3, best_epoch=2, best_fitness=0.72,
                       metrics=METRICS, **more)


def test_a_training_has_metrics_epochs_paths_and_the_curves(tmp_path: Path) -> None:
    write_image(tmp_path / "results.png", smooth_picture(800, 1200))
    page = trained(tmp_path)._repr_html_()
    for text in ("training done", "<td>0.75</td>", "2 of 3", str(tmp_path / "weights/best.pt"), 'width="1000"'):
        assert text in page
    assert page.count("data:image/jpeg;base64,") == page.count("<img") == 1


def test_a_paused_training_without_pictures_has_its_numbers(tmp_path: Path) -> None:
    page = trained(tmp_path, paused=True)._repr_html_()
    assert "training paused" in page
    assert "<img" not in page


def test_a_validation_has_a_row_for_all_classes_and_for_each(tmp_path: Path) -> None:
    write_image(tmp_path / "val_batch0_pred.jpg", smooth_picture(60, 40))
    classes = [{"name": "<cat>", "labels": 3, **METRICS}, {"name": "dog", "labels": 4, **METRICS, "mAP50": None}]
    page = ValResult(tmp_path, METRICS, {}, classes, {}, {})._repr_html_()
    assert page.count("<tr>") == 4
    assert "<td>all</td><td class=\"number\">7</td>" in page
    assert "&lt;cat&gt;" in page
    assert page.count("data:image/jpeg;base64,") == 1
