"""Results: equal numbers in every form, plots, crops, and compatibility with tools for Ultralytics' results."""

from __future__ import annotations

import numpy as np
import pytest
from supervision import Detections

from ray_yolo import api
from ray_yolo.config.model_facts import MODELS
from ray_yolo.config.recipe import Recipe
from ray_yolo.inference.predictor import Trained
from ray_yolo.models.families import build_model, find_family
from tests.unit.inference.test_results import PICTURE, results

__all__ = ["results"]  # fixtures


@pytest.mark.parametrize("name", ["yolov5n", "yolov5n6", "yolov3-tiny", "yolov8n", "yolo11n", "yolo12n", "yolo26n"])
def test_supervision_reads_the_predictions_of_each_family(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    trained = Trained(build_model(name, 2).eval(), find_family(name), ("cat", "dog"),
                      Recipe(model=name, imgsz=2 * MODELS[name].grid))
    monkeypatch.setattr(api, "open_weights", lambda _: trained)
    [results] = api.YOLO("best.pt").predict(PICTURE, conf=1e-6, max_det=9)
    read = Detections.from_ultralytics(results)
    assert len(read) == len(results) > 2
    assert np.array_equal(read.xyxy, results.boxes.xyxy)
    assert np.array_equal(read.confidence, results.boxes.conf)
    assert read["class_name"].tolist() == [("cat", "dog")[number] for number in read.class_id]
