"""`YOLO` with trained weights: the commands' own calls, with their settings by name."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from ray_yolo import YOLO
from ray_yolo.config.commands import PredictConfig
from ray_yolo.core.errors import ConfigError, InputError
from ray_yolo.models.detector import Detector
from ray_yolo.runtime.predictor import predict
from tests.support.pictures import smooth_picture, write_image
from tests.support.videos import write_video
from tests.support.weights import make_weights

PICTURE = smooth_picture(48, 64)


@pytest.fixture(scope="module")
def weights(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_weights(tmp_path_factory.mktemp("weights"))


@pytest.fixture
def model(weights: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> YOLO:
    monkeypatch.chdir(tmp_path)
    write_image(Path("a.png"), PICTURE)
    return YOLO(weights)


def test_predict_gives_what_was_found_and_writes_nothing(model: YOLO) -> None:
    (result,) = model.predict("a.png", confidence=0.3)
    assert (result.path, result.names, result.orig_shape) == (str(Path("a.png").absolute()), model.names, (48, 64))
    assert np.array_equal(result.orig_img[..., ::-1], PICTURE)
    assert len(result)
    assert (result.boxes.conf > 0.3).all()
    assert result.speed.keys() == {"preprocess", "inference", "postprocess"}
    assert min(result.speed.values()) > 0
    assert os.listdir() == ["a.png"]


@pytest.mark.parametrize("thing", [
    PICTURE[..., ::-1].copy(), Image.fromarray(PICTURE), torch.from_numpy(PICTURE).permute(2, 0, 1)[None] / 255,
    Path("a.png"), ["a.png"]], ids=["array", "pil", "tensor", "path", "list"])
def test_whatever_a_picture_comes_as_the_same_is_found(model: YOLO, thing: object) -> None:
    (one,), (other,) = model("a.png"), model(thing)
    assert torch.equal(one.boxes.data, other.boxes.data)


def test_a_stream_is_looked_at_frame_by_frame(model: YOLO) -> None:
    write_video(Path("clip.avi"), [smooth_picture(48, 64, seed=seed) for seed in range(5)])
    found = model("clip.avi", stream=True)
    assert isinstance(found, Iterator)
    assert next(found).frame == 1
    assert [result.frame for result in found] == [2, 3, 4, 5]


def test_the_model_is_made_ready_once_and_settings_are_those_of_the_call(
        model: YOLO, monkeypatch: pytest.MonkeyPatch) -> None:
    everything = model("a.png")[0]
    monkeypatch.setattr("ray_yolo.api.build_predictor", None)
    assert len(model("a.png", max_det=2, device="cpu")[0]) == 2
    assert set(model("a.png", classes=1)[0].boxes.cls.tolist()) == {1}
    assert not torch.equal(model("a.png", imgsz=96)[0].boxes.data, everything.boxes.data)
    assert torch.equal(model("a.png")[0].boxes.data, everything.boxes.data)


def test_each_call_checks_the_image_size(model: YOLO, monkeypatch: pytest.MonkeyPatch) -> None:
    """Not only the first one, for which the model is made ready."""
    model("a.png")
    monkeypatch.setattr(Detector, "grid", 64)  # wider than the setting itself demands
    with pytest.raises(ConfigError, match="imgsz: 96 must be a multiple of 64"):
        model("a.png", imgsz=96)


def test_the_command_writes_the_same_files_as_the_call(model: YOLO, weights: Path) -> None:
    asked = {"save_txt": True, "save_conf": True, "save_csv": True, "save_json": True, "save_crop": True}
    write_image(Path("in/a.png"), PICTURE)
    model("in", save=True, name="call", **asked)
    predict(PredictConfig.model_validate({"weights": str(weights), "source": "in", **asked,
                                          "placement": {"name": "command"}}), quiet=True)
    call, command = ({path.relative_to(folder): path.read_bytes() for path in folder.rglob("*.*")}
                     for folder in (Path("runs/detect/call"), Path("runs/detect/command")))
    assert call == command
    assert {path.name for path in call} >= {"a.jpg", "a.txt", "a.1.jpg", "predictions.csv", "predictions.json"}


def test_pictures_that_cannot_be_read_are_reported(model: YOLO) -> None:
    Path("b.png").write_bytes(b"no picture")
    with pytest.raises(InputError, match=r"^source: b\.png is not an image"):
        model("b.png")
    good, bad = model(["a.png", "b.png"])
    assert (good.error, bad.error[:15], len(bad)) == ("", "is not an image", 0)
    with pytest.raises(InputError, match=r"^num_workers: .* python -m ray_yolo.predict"):
        model("a.png", num_workers=2)


def test_export_gives_a_checked_file(weights: Path) -> None:
    result = YOLO(str(weights)).export(format="torchscript", imgsz=96)
    assert result.path == weights.with_suffix(".torchscript")
    assert result.path.exists()
    assert result.metadata["imgsz"] == "[96, 96]"


def test_settings_of_the_commands_are_checked(weights: Path) -> None:
    with pytest.raises(InputError, match=r"^confidence=: got 2"):
        YOLO(str(weights)).predict("a.png", confidence=2)
    with pytest.raises(InputError, match="unknown setting 'opsets'; did you mean opset"):
        YOLO(str(weights)).export(opsets=3)


@pytest.mark.parametrize("call", ["val", "predict", "export"])
def test_a_model_without_weights_says_so(call: str) -> None:
    model = YOLO("yolov5n", nc=2)
    arguments = ["a.png"] if call == "predict" else []
    with pytest.raises(InputError, match=f"^{call}: this model has no weights yet"):
        getattr(model, call)(*arguments)
