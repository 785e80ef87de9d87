"""An exported file gives torch's numbers, says what it is, and does not exist where it would not.

Suppression in ONNX and TorchScript gives what `select` gives.
"""

from __future__ import annotations

import ast
import importlib.util
import json
import warnings
from collections.abc import Callable
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime
import pytest
import torch
from torch import Tensor

from ray_yolo.api import YOLO
from ray_yolo.config.commands import ExportConfig, NmsConfig
from ray_yolo.core.errors import InputError, RayYoloError
from ray_yolo.inference import export as module
from ray_yolo.inference.export import ExportResult, Selection, export, onnx_selection, random_predictions
from ray_yolo.inference.predictor import load_trained, to_network
from ray_yolo.models.families import FAMILIES, FAMILY_OF, build_model
from ray_yolo.ops.boxes import to_original
from ray_yolo.ops.nms import select
from tests.support.pictures import smooth_picture
from tests.support.weights import make_weights

METADATA = {"names": "{0: 'dark', 1: 'bright'}", "stride": "16", "imgsz": "[64, 64]", "batch": "1", "task": "detect",
            "nms": "False"}

SETTINGS = [NmsConfig(), NmsConfig(confidence=0.0), NmsConfig(confidence=0.6, iou=0.9), NmsConfig(max_detections=7),
            NmsConfig(agnostic_nms=True), NmsConfig(agnostic_nms=True, max_detections=1), NmsConfig(confidence=0.99)]

Suppress = Callable[[Tensor], np.ndarray]


@pytest.fixture
def weights(tmp_path: Path) -> Path:
    return make_weights(tmp_path)


def run(weights: Path, **settings: Any) -> ExportResult:
    return export(ExportConfig.model_validate({"weights": str(weights), **settings}))


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


# Each family, and both heads on YOLOv5's rows.
ONE_OF_EACH = ("yolov5n", "yolov3-tiny", "yolov8n", "yolov5nu", "yolo11n", "yolo12n", "yolo26n")


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


def test_the_exported_models_are_of_every_family() -> None:
    assert {id(FAMILY_OF[name]) for name in ONE_OF_EACH} == {id(family) for family in FAMILIES.values()}


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


def test_a_file_that_differs_from_torch_is_an_error_and_leaves_nothing(
        weights: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    trace = module._trace

    def wrong(model: torch.nn.Module, example: torch.Tensor) -> Any:
        return trace(torch.nn.Sequential(model, torch.nn.Hardtanh(0, 40)), example)

    monkeypatch.setattr(module, "_trace", wrong)
    before = sorted(weights.parent.iterdir())
    with pytest.raises(RayYoloError, match=r"differs from torch by up to .* nothing was written") as caught:
        run(weights, format="torchscript")
    assert caught.value.exit_code == 3
    assert sorted(weights.parent.iterdir()) == before


def test_a_failed_export_leaves_the_previous_file(weights: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*arguments: Any) -> float:
        arguments[-1].write_text("half")
        raise RayYoloError("differs")

    weights.with_suffix(".torchscript").write_text("good")
    before = sorted(weights.parent.iterdir())
    monkeypatch.setattr(module, "_write_torchscript", fail)
    with pytest.raises(RayYoloError, match="differs"):
        run(weights, format="torchscript")
    assert sorted(weights.parent.iterdir()) == before
    assert weights.with_suffix(".torchscript").read_text() == "good"


def test_a_wrong_suppression_is_an_error(weights: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "Selection", lambda settings, *, suppress: torch.nn.Flatten(0, 1))
    with pytest.raises(RayYoloError, match="where torch gives"):
        run(weights, format="torchscript", nms=True)


@pytest.mark.parametrize("missing", ["onnx", "onnxruntime", "onnxscript"])
def test_a_missing_package_is_named_with_its_extra(missing: str, monkeypatch: pytest.MonkeyPatch) -> None:
    find = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name == missing else find(name))
    with pytest.raises(InputError) as caught:
        run(Path("nowhere.pt"))
    assert str(caught.value) == f"format: onnx needs {missing}; install with pip install ray_yolo[export]"


def test_a_folder_that_cannot_be_written_is_refused(weights: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("os.access", lambda path, mode: False)
    with pytest.raises(InputError, match="cannot be written"):
        run(weights, format="torchscript")


def in_onnx(settings: NmsConfig, opset: int = 20, *, suppress: bool = True) -> Suppress:
    model = onnx_selection(settings, ir_version=10, opset=opset, suppress=suppress)
    session = onnxruntime.InferenceSession(model.SerializeToString(), providers=["CPUExecutionProvider"])
    return lambda predictions: np.asarray(session.run(None, {"predictions": predictions.numpy()})[0])


def in_torchscript(settings: NmsConfig, *, suppress: bool = True) -> Suppress:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch announces TorchScript's end
        traced = torch.jit.trace(
            Selection(settings, suppress=suppress), random_predictions(num_images=1), check_trace=False
        )
    return lambda predictions: traced(predictions).numpy()


def expected(predictions: Tensor, settings: NmsConfig, *, suppress: bool = True) -> np.ndarray:
    actual = select(predictions[..., :4], predictions[..., 4:], confidence=settings.confidence,
                   iou=settings.iou if suppress else None, max_detections=settings.max_detections, multi_label=False,
                   agnostic=settings.agnostic_nms)
    return np.concatenate([np.insert(rows.numpy(), 0, image, axis=1) for image, rows in enumerate(actual)])


def test_detections_are_those_of_select() -> None:
    images = (random_predictions(num_images=3), random_predictions(1, 40, 1), random_predictions(2, 500, 9))
    for build, settings in product((in_onnx, in_torchscript), SETTINGS):
        suppress = build(settings)
        for predictions in images:
            wanted, actual = expected(predictions, settings), suppress(predictions)
            assert actual.shape == wanted.shape, (build.__name__, settings)
            assert np.abs(actual - wanted).max(initial=0) < 1e-4, (build.__name__, settings)


def test_equal_scores_keep_the_order_of_select() -> None:
    predictions = random_predictions(2, 500, 9)
    predictions[..., 4:] = (predictions[..., 4:] * 8).round() / 8
    for suppress, build in product((True, False), (in_onnx, in_torchscript)):
        assert np.array_equal(build(NmsConfig(), suppress=suppress)(predictions),
                              expected(predictions, NmsConfig(), suppress=suppress)), (build.__name__, suppress)


def test_the_cases_need_suppression() -> None:
    predictions = random_predictions()
    sizes = [len(expected(predictions, settings)) for settings in SETTINGS]
    assert sizes[0] > sizes[4] > sizes[5] == 2
    assert sizes[1] > sizes[0] > sizes[3] == 14
    assert sizes[6] < 20


def test_detections_without_suppression_are_those_of_select() -> None:
    predictions = random_predictions()
    for build, settings in product((in_onnx, in_torchscript), SETTINGS):
        actual = build(settings, suppress=False)(predictions)
        wanted = expected(predictions, settings, suppress=False)
        assert actual == pytest.approx(wanted, abs=1e-5), (build.__name__, settings)


@pytest.mark.parametrize("build", [in_onnx, in_torchscript])
def test_rows_worked_by_hand(build: Callable[[NmsConfig], Suppress]) -> None:
    first = [[0, 0, 10, 10, 0.5, 0.1], [0, 0, 10, 9, 0.9, 0.1], [0, 0, 10, 10, 0.0, 0.8]]
    second = [[5, 5, 9, 9, 0.2, 0.2], [20, 0, 30, 10, 0.1, 0.75], [0, 0, 1, 1, 0.09, 0.09]]
    actual = build(NmsConfig())(torch.tensor([first, second]))
    assert actual == pytest.approx(np.array([
        [0, 0, 0, 10, 9, 0.9, 0],  # suppresses the first box of its class
        [0, 0, 0, 10, 10, 0.8, 1],
        [1, 20, 0, 30, 10, 0.75, 1]]))  # the others are below 0.25


@pytest.mark.parametrize("opset", [16, 17, 21])
def test_the_graph_is_valid_in_other_operator_sets(opset: int) -> None:
    predictions = random_predictions()
    assert np.array_equal(in_onnx(NmsConfig(), opset)(predictions), in_onnx(NmsConfig())(predictions))


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
