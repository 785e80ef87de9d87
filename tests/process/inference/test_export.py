"""An exported file gives torch's numbers, says what it is, and does not exist where it would not.

Suppression in ONNX and TorchScript gives what `select` gives.
"""

from __future__ import annotations

import ast
import json
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime
import pytest
import torch

from ray_yolo.api import YOLO
from ray_yolo.inference.predictor import load_trained, to_network
from ray_yolo.models.families import build_model
from ray_yolo.ops.boxes import to_original
from ray_yolo.ops.nms import select
from tests.support.pictures import smooth_picture
from tests.unit.inference.test_export import ONE_OF_EACH, run, weights

__all__ = ["weights"]  # fixtures

METADATA = {"names": "{0: 'dark', 1: 'bright'}", "stride": "16", "imgsz": "[64, 64]", "batch": "1", "task": "detect",
            "nms": "False"}


def torch_predictions(weights: Path, images: torch.Tensor) -> torch.Tensor:
    """Predictions of the model as it was trained, not fused."""
    trained = load_trained(weights)
    with torch.no_grad():
        return torch.cat(trained.family.decode(trained.model.head, trained.model(images)), 2)


def onnx_predictions(path: Path, images: torch.Tensor) -> np.ndarray:
    session = onnxruntime.InferenceSession(path, providers=["CPUExecutionProvider"])
    return np.asarray(session.run(None, {"images": images.numpy()})[0])


def detections(weights: Path, images: torch.Tensor, confidence: float) -> np.ndarray:
    """Rows [image, x1, y1, x2, y2, score, class] of torch's model and our suppression."""
    said = torch_predictions(weights, images)
    actual = select(said[..., :4], said[..., 4:], confidence=confidence, iou=0.45, max_detections=1000,
                   multi_label=False)
    return np.concatenate([np.insert(rows.numpy(), 0, image, axis=1) for image, rows in enumerate(actual)])


def assert_same_rows(actual: np.ndarray, expected: np.ndarray) -> None:
    """The same rows; equal scores up to rounding may come in any order."""
    assert actual.shape == expected.shape
    difference = np.abs(actual[:, None] - expected[None]).max(2)
    assert difference.min(1).max() < 1e-3
    assert difference.min(0).max() < 1e-3


def noise(*shape: int) -> torch.Tensor:
    return torch.rand(shape, generator=torch.Generator().manual_seed(1))


def test_onnx_equals_torch_and_has_metadata(weights: Path, capfd: pytest.CaptureFixture[str]) -> None:
    result = run(weights)
    assert result.path == weights.with_suffix(".onnx")
    assert 0 < result.largest_difference < 1e-4
    images = noise(1, 3, 64, 64)
    expected = torch_predictions(weights, images).numpy()
    assert expected.shape == (1, 240, 6)
    assert np.abs(onnx_predictions(result.path, images) - expected).max() < 1e-3
    assert {entry.key: entry.value for entry in onnx.load(result.path).metadata_props} == METADATA == result.metadata
    assert ast.literal_eval(METADATA["names"]) == {0: "dark", 1: "bright"}
    assert str(result).startswith(f"{result.path}: the largest difference from torch is ")
    assert capfd.readouterr() == ("", "")


def test_dynamic_onnx_with_suppression_takes_any_shape_and_gives_detections(weights: Path) -> None:
    result = run(weights, dynamic=True, nms=True, confidence=0.3, opset=17)
    graph = onnx.load(result.path)
    assert {entry.version for entry in graph.opset_import if not entry.domain} == {17}
    assert {entry.key: entry.value for entry in graph.metadata_props} == METADATA | {"nms": "True"}
    for shape in ((1, 3, 64, 64), (3, 3, 96, 160)):
        images = noise(*shape)
        expected = detections(weights, images, confidence=0.3)
        assert len(expected) > 5
        assert_same_rows(onnx_predictions(result.path, images), expected)


@pytest.mark.parametrize("nms", [False, True])
def test_torchscript_gives_torchs_numbers_for_any_shape(weights: Path, nms: bool) -> None:
    result = run(weights, format="torchscript", nms=nms)
    extra = {"config.txt": ""}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch announces TorchScript's end
        loaded = torch.jit.load(result.path, _extra_files=extra)
    assert json.loads(extra["config.txt"]) == METADATA | {"nms": str(nms)}
    for shape in ((1, 3, 64, 64), (3, 3, 96, 160)):
        images = noise(*shape)
        actual = loaded(images).numpy()
        if nms:
            assert_same_rows(actual, detections(weights, images, confidence=0.25))
        else:
            assert np.abs(actual - torch_predictions(weights, images).numpy()).max() < 1e-3


@pytest.fixture(scope="module", params=ONE_OF_EACH)
def known(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Weights of a known model, without a recipe."""
    torch.manual_seed(0)
    path = tmp_path_factory.mktemp("known") / f"{request.param}.pt"
    torch.save(build_model(request.param, 2).state_dict(), path)
    return path


def assert_exports(known: Path, *shapes: tuple[int, ...], **settings: Any) -> None:
    """The exported model gives the predictions of the one that was trained, for images of these shapes."""
    path = run(known, **{"imgsz": 64, **settings}).path
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch announces TorchScript's end
        loaded = torch.jit.load(path) if path.suffix == ".torchscript" else None
    for shape in shapes:
        images = noise(*shape)
        actual = onnx_predictions(path, images) if loaded is None else loaded(images).numpy()
        difference = np.abs(actual - torch_predictions(known, images).numpy())
        assert difference[..., :4].max() < 1e-2, f"{settings}: boxes, {shape}"
        assert difference[..., 4:].max() < 1e-5, f"{settings}: scores, {shape}"


def test_every_family_becomes_torchscript_of_any_shape(known: Path) -> None:
    assert_exports(known, (1, 3, 64, 64), (3, 3, 96, 160), format="torchscript")


def test_a_file_without_suppression_does_not_claim_it(tmp_path: Path) -> None:
    torch.save(build_model("yolo26n", 2).state_dict(), tmp_path / "x.pt")
    result = run(tmp_path / "x.pt", imgsz=64, format="torchscript", nms=True)
    assert "nms" not in result.metadata
    assert result.metadata["detections"] == "True"
    assert "suppress" not in result.takes


@pytest.mark.slow
def test_every_family_becomes_onnx_of_a_fixed_and_of_any_shape(known: Path) -> None:
    assert_exports(known, (2, 3, 64, 64), format="onnx", batch_size=2)
    assert_exports(known, (1, 3, 64, 64), (3, 3, 96, 160), format="onnx", dynamic=True)


@pytest.mark.slow
def test_a_model_of_four_levels_becomes_onnx_of_a_fixed_and_of_any_shape(tmp_path: Path) -> None:
    torch.save(build_model("yolov5n6", 2).state_dict(), tmp_path / "x.pt")
    assert_exports(tmp_path / "x.pt", (1, 3, 128, 128), imgsz=128, format="onnx")
    assert_exports(tmp_path / "x.pt", (1, 3, 128, 128), (2, 3, 128, 192), imgsz=128, format="onnx", dynamic=True)


def test_a_fixed_onnx_equals_predict_with_squares(weights: Path) -> None:
    """And without `rect=False` predict finds something else: it pads to rectangles."""
    result = run(weights, nms=True, confidence=0.1)
    assert "squares of 64 px" in str(result)
    picture = smooth_picture(30, 60, seed=5)
    pixels, ratio, pad = to_network(picture, 64, 32, rect=False)
    assert (pixels.shape, pad) == ((64, 64, 3), (16, 0))
    assert (pixels[0] == 114).all()
    rows = onnx_predictions(result.path, torch.from_numpy(pixels.transpose(2, 0, 1)[None] / np.float32(255)))
    boxes = to_original(rows[:, 1:5], ratio, pad, picture.shape[:2])
    actual, other = (YOLO(weights).predict(picture[..., ::-1], confidence=0.1, rect=rect)[0] for rect in (False, True))
    assert len(actual) > 3
    assert_same_rows(np.column_stack([boxes, rows[:, 5:]]), np.asarray(actual.boxes.data))
    assert (len(other), np.asarray(other.boxes.data).tolist()) != (len(actual), np.asarray(actual.boxes.data).tolist())
    assert "multiples of 32 px" in str(run(weights, dynamic=True))
