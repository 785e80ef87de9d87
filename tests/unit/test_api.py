"""`YOLO` with trained weights: the commands' own calls, with their settings by name."""

from __future__ import annotations

import inspect
import os
import re
import shutil
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from ray_yolo import YOLO
from ray_yolo.config.commands import PredictConfig
from ray_yolo.core.errors import ConfigError, InputError, ResourcesError
from ray_yolo.models.detector import Detector
from ray_yolo.runtime.predictor import predict
from ray_yolo.tune import comparer
from ray_yolo.tune.compare_settings import CompareConfig
from ray_yolo.tune.sides import Recipes
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
    with pytest.raises(ConfigError):
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
    with pytest.raises(InputError):
        model("b.png")
    good, bad = model(["a.png", "b.png"])
    assert (good.error, bad.error[:15], len(bad)) == ("", "is not an image", 0)


def test_export_gives_a_checked_file(weights: Path) -> None:
    result = YOLO(str(weights)).export(format="torchscript", imgsz=96)
    assert result.path == weights.with_suffix(".torchscript")
    assert result.path.exists()
    assert result.metadata["imgsz"] == "[96, 96]"


def test_settings_of_the_commands_are_checked(weights: Path) -> None:
    with pytest.raises(InputError):
        YOLO(str(weights)).predict("a.png", confidence=2)
    with pytest.raises(InputError):
        YOLO(str(weights)).export(opsets=3)


@pytest.mark.parametrize("call", ["val", "predict", "export"])
def test_a_model_without_weights_is_refused(call: str) -> None:
    model = YOLO("yolov5n", nc=2)
    arguments = ["a.png"] if call == "predict" else []
    with pytest.raises(InputError):
        getattr(model, call)(*arguments)


def test_a_model_says_what_it_is(weights: Path) -> None:
    fresh = repr(YOLO("yolov5n", nc=2))
    assert re.fullmatch(r"YOLO\(yolov5n: 2 classes, [\d,]{9} parameters, no weights yet\)", fresh)
    assert repr(YOLO(weights)).endswith(f"parameters, weights {weights})")


def test_the_folder_of_a_run_means_its_best_weights(weights: Path, tmp_path: Path) -> None:
    run = tmp_path / "exp"
    (run / "weights").mkdir(parents=True)
    with pytest.raises(InputError):
        YOLO(run)
    shutil.copy(weights, run / "weights" / "last.pt")
    assert str(run / "weights" / "last.pt") in repr(YOLO(run))
    shutil.copy(weights, run / "weights" / "best.pt")
    model = YOLO(run)
    assert str(run / "weights" / "best.pt") in repr(model)
    assert len(model(PICTURE[..., ::-1])[0]) == len(YOLO(weights)(PICTURE[..., ::-1])[0])


def test_a_model_file_that_is_not_there_means_the_model_of_its_name() -> None:
    model = YOLO("yolov8n.yaml", nc=3)
    assert repr(model).startswith("YOLO(yolov8n: 3 classes")
    with pytest.raises(InputError):
        YOLO("yolov99n.yaml")


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
@pytest.mark.parametrize("device", [0, "cuda", "cuda:1", "xla", "mps", "hpu"])
def test_a_device_that_is_not_there_is_refused(model: YOLO, device: str | int) -> None:
    with pytest.raises(ResourcesError):
        model("a.png", device=device)


@pytest.mark.parametrize("settings", [{"weights": "other.pt"}, {"nosave": False}, {"num_workers": 2}])
def test_prediction_refuses_what_it_would_ignore(model: YOLO, settings: dict[str, object]) -> None:
    with pytest.raises(InputError):
        model.predict("a.png", **settings)


def test_the_help_of_each_call_lists_its_settings() -> None:
    for call, setting in ((YOLO.train, "epochs"), (YOLO.val, "coco"), (YOLO.predict, "vid_stride"),
                          (YOLO.__call__, "save"), (YOLO.export, "opset"), (YOLO.tune, "trials")):
        assert setting in inspect.signature(call).parameters
        assert f"\n    {setting}" in (inspect.getdoc(call) or "")
    assert inspect.signature(YOLO.train).parameters["epochs"].default == 100


def test_a_comparison_has_the_sides_and_settings_of_the_call(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = list[tuple[CompareConfig, Recipes]]()
    monkeypatch.setattr(comparer, "compare", lambda config, sides: asked.append((config, sides)))
    YOLO("yolov5n").compare("base", "lr0=0.1", data="shapes8", epochs=3, pairs=7)
    ((config, sides),) = asked
    assert (config.comparison.pairs, sides.a.model, sides.a.epochs, sides.a.data) == (7, "yolov5n", 3, "shapes8")
    assert (sides.a.optimizer.lr0, sides.b.optimizer.lr0) == (0.01, 0.1)
