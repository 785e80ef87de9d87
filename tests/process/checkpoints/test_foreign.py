"""Released files yield their tensors and names; no other content of them is run."""

from __future__ import annotations

from pathlib import Path

import pytest

from ray_yolo.checkpoints.foreign import read_weights
from ray_yolo.inference.predictor import load_trained
from ray_yolo.models.detector import Detector
from ray_yolo.models.families import build_model
from tests.support.released import ULTRALYTICS, write_released
from tests.unit.checkpoints.test_foreign import assert_equal, detector, rounded

__all__ = ["detector"]  # fixtures


@pytest.mark.parametrize("names", [["a", "b", "c"], {0: "a", 1: "b", 2: "c"}, {2: "c", 0: "a", 1: "b"}],
                         ids=["list", "dict", "dict in another order"])
def test_a_released_file_gives_its_tensors_in_fp32_and_its_names(
        detector: Detector, tmp_path: Path, names: object) -> None:
    weights = read_weights(write_released(tmp_path / "yolov5n.pt", detector, names))
    assert_equal(weights.tensors, rounded(detector))
    assert (weights.names, weights.meta) == (("a", "b", "c"), None)


@pytest.mark.parametrize("name", ["yolov5nu", "yolov8n"])
def test_ultralytics_files_without_anchors_are_models_too(tmp_path: Path, name: str) -> None:
    detector = build_model(name, 2)
    trained = load_trained(write_released(tmp_path / "x.pt", detector, {0: "a", 1: "b"}, ULTRALYTICS))
    assert (trained.recipe.model, trained.names) == (name, ("a", "b"))
    assert_equal(trained.model.state_dict(), rounded(detector))
