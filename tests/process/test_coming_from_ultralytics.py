"""Runs every call that the page calls the same, in its order; checks that the others are accepted."""

from __future__ import annotations

import re
import shlex
from pathlib import Path
from typing import Any

import cv2
import pytest
import torch
from PIL import Image

from ray_yolo import YOLO
from ray_yolo.cli import parse_export, parse_predict, parse_train, parse_val
from tests.support.jobs import make_dataset
from tests.support.pictures import smooth_picture, write_image
from tests.support.videos import write_video
from tests.support.weights import make_weights

PAGE = (Path(__file__).parents[2] / "docs" / "coming_from_ultralytics.md").read_text()
ROWS = re.findall(r"^\| `(.+?)` \| (.+) \|$", PAGE, re.MULTILINE)
SAME = [call for call, here in ROWS if here.startswith("the same") and "supervision" not in call]
INSTEAD = [line for _, here in ROWS if (line := (re.match(r"`(.+?)`", here) or [None, ""])[1])]
COMMANDS = {"train": parse_train, "val": parse_val, "predict": parse_predict, "export": parse_export}


@pytest.fixture
def names(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """The names that the page's lines use, in a folder with their files."""
    monkeypatch.chdir(tmp_path)
    make_weights(tmp_path / "made", data=str(make_dataset(tmp_path))).rename("best.pt")
    for number, name in enumerate(("bus.jpg", "zidane.jpg", "pictures/a.jpg")):
        write_image(tmp_path / name, smooth_picture(90, 120, seed=number))
    write_video(tmp_path / "clip.avi", [smooth_picture(48, 64, seed=seed) for seed in range(4)])
    return {"YOLO": YOLO, "cv2": cv2, "Image": Image, "torch": torch}


def run(lines: list[str], names: dict[str, Any]) -> None:
    for line in lines:
        exec(compile(line, line, "exec"), names)


def test_calls_that_are_the_same_run(names: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Image.Image, "show", lambda self: None)
    lines = [line for line in SAME if "train(" not in line]
    assert len(lines) > 25
    saving = next(number for number, line in enumerate(lines) if "save=True" in line)
    run(lines[:saving], names)
    assert not (tmp_path / "runs").exists()
    run(lines[saving:], names)
    results = tmp_path / "runs" / "detect" / "exp"
    assert {path.name for path in results.iterdir()} == {"bus.jpg", "labels", "crops", "results.json"}
    assert len(names["boxes"]) > 2
    written = {path.name for path in tmp_path.iterdir()}
    assert {"a.jpg", "b.jpg", "crops", "labels", "best.onnx", "best.torchscript"} <= written


def test_replacement_lines_run(names: dict[str, Any]) -> None:
    other = re.compile(r"ray_yolo |from |model = |.*(train|tune|rtsp|fp16)")
    lines = [line for line in INSTEAD if line and not other.match(line)]
    assert len(lines) >= 5
    run(['model = YOLO("best.pt")', 'results = model("bus.jpg")', "metrics = model.val()", *lines], names)


@pytest.mark.ray
@pytest.mark.slow
@pytest.mark.usefixtures("ray_session")
def test_trainings_that_are_the_same_run(names: dict[str, Any]) -> None:
    lines = [line for line in SAME if "train(" in line]
    assert len(lines) == 2
    run(['model = YOLO("best.pt")', lines[0].replace("model.train(", "YOLO('yolov5n').train(gpus_per_worker=0, "),
         lines[1].replace("model.train(", "YOLO('yolov5n').train(num_workers=0, ")], names)


def test_replacement_commands_are_accepted() -> None:
    commands = [shlex.split(line) for line in INSTEAD if line.startswith("ray_yolo ")]
    assert len(commands) == 5
    for _, command, *words in commands:
        COMMANDS[command](words)
