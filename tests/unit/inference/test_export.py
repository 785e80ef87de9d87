"""An exported file gives torch's numbers, says what it is, and does not exist where it would not.

Suppression in ONNX and TorchScript gives what `select` gives.
"""

from __future__ import annotations

import io
import json
import os
import sys
import warnings
from collections.abc import Callable
from itertools import product
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import onnxruntime
import pytest
import torch
from torch import Tensor

from ray_yolo.config.commands import ExportConfig, NmsConfig
from ray_yolo.core.errors import InputError, RayYoloError
from ray_yolo.inference import export as module
from ray_yolo.inference.export import ExportResult, Selection, export, onnx_selection, random_predictions
from ray_yolo.inference.exported import load_exported
from ray_yolo.models.families import FAMILIES, FAMILY_OF
from ray_yolo.ops.nms import select
from tests.support.weights import make_weights

SETTINGS = [NmsConfig(), NmsConfig(confidence=0.0), NmsConfig(confidence=0.6, iou=0.9), NmsConfig(max_detections=7),
            NmsConfig(agnostic_nms=True), NmsConfig(agnostic_nms=True, max_detections=1), NmsConfig(confidence=0.99)]

Suppress = Callable[[Tensor], np.ndarray]


@pytest.fixture
def weights(tmp_path: Path) -> Path:
    return make_weights(tmp_path)


def run(weights: Path, **settings: Any) -> ExportResult:
    return export(ExportConfig.model_validate({"weights": str(weights), **settings}))


# Each family, and both heads on YOLOv5's rows.
ONE_OF_EACH = ("yolov5n", "yolov3-tiny", "yolov8n", "yolov5nu", "yolo11n", "yolo12n", "yolo26n")


def test_the_exported_models_are_of_every_family() -> None:
    assert {id(FAMILY_OF[name]) for name in ONE_OF_EACH} == {id(family) for family in FAMILIES.values()}


def test_a_file_that_differs_from_torch_is_an_error_and_leaves_nothing(
        weights: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    trace = module._trace

    def wrong(model: torch.nn.Module, example: torch.Tensor) -> Any:
        return trace(torch.nn.Sequential(model, torch.nn.Hardtanh(0, 40)), example)

    monkeypatch.setattr(module, "_trace", wrong)
    before = sorted(weights.parent.iterdir())
    with pytest.raises(RayYoloError) as caught:
        run(weights, format="torchscript")
    assert caught.value.exit_code == 3
    assert sorted(weights.parent.iterdir()) == before


def test_a_failed_export_leaves_the_previous_file(weights: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    error = RayYoloError("differs")

    def fail(*arguments: Any) -> float:
        arguments[-1].write_text("half")
        raise error

    weights.with_suffix(".torchscript").write_text("good")
    before = sorted(weights.parent.iterdir())
    monkeypatch.setattr(module, "_write_torchscript", fail)
    with pytest.raises(RayYoloError) as caught:
        run(weights, format="torchscript")
    assert caught.value is error
    assert sorted(weights.parent.iterdir()) == before
    assert weights.with_suffix(".torchscript").read_text() == "good"


def test_a_wrong_suppression_is_an_error(weights: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "Selection", lambda settings, *, suppress: torch.nn.Flatten(0, 1))
    with pytest.raises(RayYoloError):
        run(weights, format="torchscript", nms=True)


def test_a_folder_that_cannot_be_written_is_refused(weights: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("os.access", lambda path, mode: False)
    for project in ("", "/proc/out"):
        with pytest.raises(InputError):
            run(weights, format="torchscript", project=project)


def test_a_file_is_written_into_the_project_folder(
        weights: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Weights on a share that cannot be written to."""
    access = os.access
    monkeypatch.setattr("os.access", lambda path, mode: Path(path) != weights.parent and access(path, mode))
    folder = tmp_path / "elsewhere" / "models"
    before = sorted(weights.parent.iterdir())
    assert run(weights, format="torchscript", project=str(folder)).path == folder / f"{weights.stem}.torchscript"
    assert sorted(weights.parent.iterdir()) == before


def test_a_folder_that_is_not_utf_8_takes_an_export(weights: Path, tmp_path: Path) -> None:
    folder = tmp_path / os.fsdecode(b"n\xff")
    file = run(weights, format="torchscript", project=str(folder)).path
    assert list(folder.iterdir()) == [file]
    stated = {"config.txt": ""}
    torch.jit.load(io.BytesIO(file.read_bytes()), _extra_files=stated)
    assert "names" in json.loads(stated["config.txt"])


def test_both_files_of_openvino_are_written_into_the_project_folder(
        weights: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With a converter that leaves two files, as OpenVINO's."""
    def save(model: object, file: Path, **options: Any) -> None:
        for path in (file, file.with_suffix(".bin")):
            path.write_text("saved")

    monkeypatch.setitem(module._REQUIRED, "openvino", ())
    monkeypatch.setitem(sys.modules, "openvino", mock.Mock(save_model=save))
    for name in ("_write_onnx", "_compare_predictions"):
        monkeypatch.setattr(module, name, lambda *arguments, **options: 0.0)
    monkeypatch.setattr(module, "load_exported", mock.Mock())
    folder, before = tmp_path / "elsewhere", sorted(weights.parent.iterdir())
    assert run(weights, format="openvino", project=str(folder)).path == folder / "best.xml"
    assert sorted(folder.iterdir()) == [folder / "best.bin", folder / "best.xml"]
    assert sorted(weights.parent.iterdir()) == before


def test_an_openvino_file_knows_all_that_its_export_states(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    stated = {"names": "{0: 'a', 1: 'b'}", "imgsz": "[64, 64]", "stride": "32", "nms": "False",
              "pixel_range": '{"integer": [0, 4095]}', "classes": "[1]"}
    model = mock.Mock(has_rt_info=lambda path: path[1] in stated, inputs=[mock.MagicMock()],
                      get_rt_info=lambda path: mock.Mock(astype=lambda kind: kind(stated[path[1]])))
    core = mock.Mock(read_model=lambda path: model)
    monkeypatch.setitem(sys.modules, "openvino", mock.Mock(Core=lambda: core))
    (tmp_path / "best.xml").touch()
    exported = load_exported(tmp_path / "best.xml")
    assert (exported.trained_classes, exported.names, exported.suppress) == ((1,), ("a", "b"), True)
    assert exported.pixel_range == {"integer": (0, 4095)}


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
