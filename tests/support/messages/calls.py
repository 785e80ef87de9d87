"""Calls of `YOLO`, predictions and exports that are refused or fail."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import cv2
import numpy as np
import yaml

from ray_yolo import YOLO, api
from ray_yolo.cli import EXPORT, PREDICT
from ray_yolo.config.commands import ExportConfig, PredictConfig
from ray_yolo.config.keywords import read_keywords
from ray_yolo.config.settings import resolve_config, sourced_by_keyword
from ray_yolo.core.errors import ConfigError, RayYoloError, ResourcesError
from ray_yolo.data.sources import read_source
from ray_yolo.inference import export, output, predictor
from ray_yolo.inference.output import Output
from tests.support.jobs import TINY
from tests.support.messages import Refusal

NO_WEIGHTS = "this model has no weights yet; train it, or open it as YOLO('best.pt')"
PATH = "give an object's Python path"
CALLS: list[tuple[str, Callable[[YOLO], object], str]] = [
    ("val", lambda model: model.val(), f"val: {NO_WEIGHTS}"),
    ("predict", lambda model: model.predict("a.png"), f"predict: {NO_WEIGHTS}"),
    ("export", lambda model: model.export(), f"export: {NO_WEIGHTS}"),
    ("predict on workers", lambda model: model.predict("a.png", num_workers=2),
     "num_workers: this call uses its own process; python -m ray_yolo.predict has workers"),
    ("predict with other weights", lambda model: model.predict("a.png", weights="other.pt"),
     "weights: this model has its own; use YOLO('other.pt').predict(...)"),
    ("predict with nosave", lambda model: model.predict("a.png", nosave=False),
     "nosave: use save=True or save=False; the default writes no pictures"),
    ("tune with functions", lambda model: model.tune(callbacks={"on_epoch_end": print}),
     f"callbacks: the trials of a search run in other processes; {PATH}"),
    ("compare with functions", lambda model: model.compare("base", "lr0=0.1", callbacks={"on_epoch_end": print}),
     f"callbacks: trainings may run in other processes; {PATH}"),
]
"""Calls of a model without weights."""

BESIDE = "cannot be written to; give another folder by --project"
EXPORTS: list[tuple[dict[str, Any], str]] = [
    ({"project": "s3://bucket"}, "project: s3://bucket is in a store; give a local folder"),
    ({"weights": "s3://bucket/best.pt"},
     "weights: the export would be written beside them, in a store; give a local folder by --project"),
    ({"project": "file/out"}, f"project: …/here/file {BESIDE}"),
    ({"weights": "file/w.pt"}, f"weights: …/here/file {BESIDE}"),
    ({"format": "openvino", "nms": True},
     "nms: OpenVINO files have none; leave it out, or export with --format onnx --nms, which OpenVINO reads too"),
]
"""Settings of an export beside the file `file`."""

OUTPUTS: list[tuple[tuple[int, ...], str]] = [
    ((2, 4), "the exported model differs from torch by up to 1.0e+00 (allowed …); nothing was written"),
    ((2, 5), "the exported model gives (2, 5) numbers where torch gives (2, 4); nothing was written"),
]
"""The shape of an exported model's outputs, which are all 1."""


def _call(call: Callable[[YOLO], object]) -> None:
    Path("tiny.yaml").write_text(yaml.safe_dump(TINY))
    call(YOLO("tiny.yaml", nc=2))


def _open_folder() -> None:
    Path("exp/weights").mkdir(parents=True)
    YOLO("exp")


def _detect_no_picture() -> None:
    Path("b.png").write_bytes(b"no picture")
    config = PredictConfig(weights="w.pt", source="b.png")
    list(api._detect(mock.Mock(names=("a",)), read_source(config.source), config, None))


def _resolve(command: Any, settings: dict[str, Any]) -> None:
    resolve_config(command.model, sourced_by_keyword(read_keywords(command, settings)))


def _check(settings: dict[str, Any]) -> None:
    Path("file").touch()
    trained: Any = SimpleNamespace(trained_classes=None)
    with mock.patch.dict(export._REQUIRED, openvino=()), \
            mock.patch.multiple(export, load_trained=lambda _: trained, warn_of_iou=mock.DEFAULT):
        export.check(ExportConfig.model_validate({"weights": "w.pt", "format": "torchscript", **settings}))


def _lack(package: str) -> None:
    find = importlib.util.find_spec
    with mock.patch.object(importlib.util, "find_spec", lambda name: None if name == package else find(name)):
        export.check(ExportConfig(weights="w.pt"))


def _write_no_video() -> None:
    config = PredictConfig(weights="w.pt", source="clip.mp4")
    with mock.patch.object(output, "frames_per_second", return_value=25.0), mock.patch.object(cv2, "VideoWriter"):
        cv2.VideoWriter.return_value.isOpened.return_value = False
        media: Any = SimpleNamespace(stem="clip", path="clip.mp4", is_stream=False)
        output._open_video(media, np.zeros((4, 4, 3), np.uint8), Output(Path("out").absolute(), config))


def _refusals() -> Iterator[Refusal]:
    for name, call, message in CALLS:
        yield Refusal(name, message, partial(_call, call))
    yield Refusal("a folder without weights", "exp: is a folder without weights/best.pt; give the folder of a run, "
                  "or a .pt file", _open_folder)
    yield Refusal("a model file that is not there", "yolov99n.yaml: cannot be read: No such file or directory",
                  partial(YOLO, "yolov99n.yaml"))
    yield Refusal("a model of no class", "nc: 0: a model has at least one class", partial(YOLO, "yolov5n", nc=0))
    yield Refusal("no device", "device: 'gpu' is no device; give 'cpu', 'cuda', or the number of one GPU",
                  partial(api._device, "gpu"))
    yield Refusal("a device that is not there", "device: xla was requested, but this machine has … that torch can use; "
                  "use device='cpu', or leave it out", partial(api._device, "xla"), ResourcesError)
    yield Refusal("no picture", "source: b.png is not an image…", _detect_no_picture)
    yield Refusal("a confidence above 1", "confidence=: got 2; expected a number >= 0.0 and < 1.0",
                  partial(_resolve, PREDICT, {"weights": "w.pt", "source": "a.png", "confidence": 2}))
    yield Refusal("a setting that is none", "opsets=: unknown setting 'opsets'; did you mean opset?",
                  partial(_resolve, EXPORT, {"weights": "w.pt", "opsets": 3}))
    yield Refusal("an image size off the grid", "imgsz: 96 must be a multiple of 64, at least 128; nearest: 128 "
                  "(these weights have cells of 64 px)", partial(
                      predictor.input_size, SimpleNamespace(imgsz=64, grid=64), 96), ConfigError)
    for number in (2, -1):
        yield Refusal(f"class {number}", f"classes: {number} is none of the classes (0 dark, 1 bright)",
                      partial(predictor.check_classes, (0, number), ("dark", "bright")))
    for package in ("onnx", "onnxruntime", "onnxscript"):
        yield Refusal(f"an export without {package}", f"format: onnx needs {package}; install with pip install "
                      "ray_yolo[export]", partial(_lack, package))
    for settings, message in EXPORTS:
        yield Refusal(f"an export: {settings}", message, partial(_check, settings))
    for shape, message in OUTPUTS:
        yield Refusal(f"an exported model with outputs {shape}", message, partial(
            export._difference, np.zeros((2, 4)), np.ones(shape), slice(0), 64), RayYoloError)
    yield Refusal("a video that cannot be written", "…/here/out/clip.mp4: the video cannot be written", _write_no_video,
                  OSError)


REFUSALS = list(_refusals())
