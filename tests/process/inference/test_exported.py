"""Prediction with exported files: the detections of the weights, the limits of static files, and what is refused."""

from __future__ import annotations

import os
from pathlib import Path

import numpy as np
import pytest
import torch

from ray_yolo import YOLO
from ray_yolo.config.commands import ExportConfig, PredictConfig
from ray_yolo.core.errors import CheckpointError, ConfigError, InputError
from ray_yolo.inference.export import export
from ray_yolo.inference.exported import load_exported
from ray_yolo.runtime.predictor import predict
from tests.support.pictures import smooth_picture, write_image
from tests.support.weights import make_weights

PICTURE = smooth_picture(48, 64)
BGR = np.ascontiguousarray(PICTURE[..., ::-1])


@pytest.fixture(scope="module")
def weights(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_weights(tmp_path_factory.mktemp("weights"))


@pytest.fixture(scope="module")
def dynamic(weights: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    file = export(ExportConfig(weights=str(weights), format="onnx", imgsz=64, dynamic=True)).path
    return file.rename(tmp_path_factory.mktemp("dynamic") / "best.onnx")


@pytest.fixture(scope="module")
def static(weights: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    file = export(ExportConfig(weights=str(weights), format="onnx", imgsz=64, batch_size=2)).path
    return file.rename(tmp_path_factory.mktemp("static") / "best.onnx")


def test_a_dynamic_file_detects_as_its_weights(weights: Path, dynamic: Path) -> None:
    [expected] = YOLO(weights)(BGR, imgsz=64)
    [found] = YOLO(dynamic)(BGR)
    assert len(found) > 2
    assert torch.allclose(found.boxes.data, expected.boxes.data, atol=2e-2)
    assert found.names == expected.names
    assert repr(YOLO(dynamic)) == f"YOLO({dynamic}: {len(found.names)} classes, exported)"


def test_a_static_file_pads_to_squares_and_its_last_batch_with_blanks(weights: Path, static: Path) -> None:
    pictures = [BGR, BGR[::-1].copy(), BGR[:, ::-1].copy()]
    expected = YOLO(weights)(pictures, imgsz=64, square=True)
    for batch in (1, 2, 3):
        for one, other in zip(YOLO(static)(pictures, batch=batch), expected, strict=True):
            assert torch.allclose(one.boxes.data, other.boxes.data, atol=2e-2)
    with pytest.raises(ConfigError, match=r"^imgsz: best.onnx takes squares of 64 px only; leave --imgsz out"):
        YOLO(static)(BGR, imgsz=96)


def test_the_command_takes_an_exported_file(static: Path, tmp_path: Path) -> None:
    write_image(tmp_path / "in" / "a.png", PICTURE)
    result = predict(PredictConfig.model_validate({
        "weights": str(static), "source": str(tmp_path / "in"), "save_txt": True,
        "placement": {"project": str(tmp_path / "out"), "name": "x"}}), quiet=True)
    assert (result.folder / "labels" / "a.txt").read_text()
    assert len(result.predictions[0].detections) == len(YOLO(static)(BGR)[0])


def test_an_exported_file_only_predicts_in_fp32(dynamic: Path) -> None:
    model = YOLO(dynamic)
    for call in (model.train, model.val, model.export, model.info):
        with pytest.raises(InputError, match=r"is an exported file, which can only predict; open the .pt file"):
            call()
    with pytest.raises(ConfigError, match=r"^precision: best.onnx computes in fp32"):
        model(BGR, half=True)


def test_files_that_cannot_predict_here_are_refused(weights: Path, tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"no.onnx: no such file; python -m ray_yolo.export writes one"):
        load_exported(tmp_path / "no.onnx")
    (tmp_path / "broken.onnx").write_bytes(b"no network")
    with pytest.raises(CheckpointError, match=r"broken.onnx: cannot be opened \(.*\); export it again"):
        load_exported(tmp_path / "broken.onnx")
    suppressed = export(ExportConfig(weights=str(weights), imgsz=64, nms=True)).path
    with pytest.raises(CheckpointError, match=r"best.onnx: was exported with --nms, so its thresholds are fixed"):
        load_exported(suppressed)


def test_an_exported_file_in_a_folder_that_is_not_utf_8_detects(weights: Path, tmp_path: Path) -> None:
    folder = tmp_path / os.fsdecode(b"n\xff")
    file = export(ExportConfig(weights=str(weights), format="onnx", imgsz=64, project=str(folder))).path
    assert list(folder.iterdir()) == [file]
    [found] = YOLO(file)(BGR)
    assert len(found) > 2


def test_a_file_of_another_program_is_refused(dynamic: Path, tmp_path: Path) -> None:
    import onnx

    model = onnx.load(dynamic)
    del model.metadata_props[:]
    onnx.save(model, tmp_path / "other.onnx")
    with pytest.raises(CheckpointError, match=r"other.onnx: was not exported by ray_yolo"):
        YOLO(tmp_path / "other.onnx")


def test_openvino_detects_as_the_weights(weights: Path) -> None:
    pytest.importorskip("openvino")
    result = YOLO(weights).export(format="openvino", imgsz=64, dynamic=True)
    assert result.path == weights.with_suffix(".xml")
    assert weights.with_suffix(".bin").exists()
    [expected], [found] = YOLO(weights)(BGR, imgsz=64), YOLO(result.path)(BGR)
    assert len(found) > 2
    assert torch.allclose(found.boxes.data, expected.boxes.data, atol=2e-2)


def test_openvino_files_lie_in_the_project_folder_and_know_the_trained_classes(tmp_path: Path) -> None:
    pytest.importorskip("openvino")
    weights = make_weights(tmp_path, classes=(1,))
    file = export(ExportConfig(weights=str(weights), format="openvino", imgsz=64, project=str(tmp_path / "out"))).path
    assert sorted(path.name for path in file.parent.iterdir()) == ["best.bin", "best.xml"]
    assert not weights.with_suffix(".bin").exists()
    assert load_exported(file).trained_classes == (1,)


def test_openvino_has_no_suppression(weights: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: object())
    with pytest.raises(InputError, match=r"^nms: OpenVINO files have none"):
        YOLO(weights).export(format="openvino", nms=True)
