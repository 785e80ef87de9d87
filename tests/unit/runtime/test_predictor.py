"""Predictions with the files they leave, the same in this process and on Ray workers."""

from __future__ import annotations

import json
import os
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from ray_yolo.api import YOLO
from ray_yolo.config.commands import PredictConfig
from ray_yolo.core.errors import CheckpointError, ConfigError, InputError, RayYoloError
from ray_yolo.inference.exported import Exported
from ray_yolo.inference.output import Prediction
from ray_yolo.runtime import predictor
from ray_yolo.runtime.predictor import PredictResult, predict, total
from ray_yolo.storage.store import FolderStore
from tests.support.pictures import smooth_picture, write_image
from tests.support.videos import write_video
from tests.support.weights import make_weights


@pytest.fixture(scope="module")
def weights(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_weights(tmp_path_factory.mktemp("weights"))


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("source")
    for number in range(6):
        write_image(folder / f"{number}.png", smooth_picture(40 + 7 * number, 60, seed=number))
    write_video(folder / "clip.avi", [smooth_picture(48, 64, seed=seed) for seed in range(3)])
    (folder / "broken.jpg").write_bytes(b"no picture")
    return folder


def run(weights: Path, source: Path, project: Path, name: str, *, quiet: bool = True,
        **settings: Any) -> PredictResult:
    return predict(PredictConfig.model_validate({
        "weights": str(weights), "source": str(source), "save_txt": True, "save_conf": True, "save_json": True,
        **settings, "placement": {"project": str(project), "name": name, **settings.get("placement", {})},
    }), quiet=quiet)


def contents(folder: Path) -> dict[str, bytes]:
    """Everything that was written, by its path."""
    return {path.relative_to(folder).as_posix(): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


@pytest.fixture(scope="module")
def local(weights: Path, source: Path, tmp_path_factory: pytest.TempPathFactory) -> PredictResult:
    return run(weights, source, tmp_path_factory.mktemp("local"), "x")


def test_every_file_leaves_its_picture_and_its_rows(local: PredictResult) -> None:
    pictures = {f"{number}.jpg" for number in range(6)} | {"clip.mp4"}
    labels = {f"labels/{number}.txt" for number in range(6)} | {f"labels/clip_{frame}.txt" for frame in (1, 2, 3)}
    assert contents(local.folder).keys() == pictures | labels | {"predictions.json", "results.json"}


def test_text_and_json_say_what_was_found(local: PredictResult) -> None:
    images = json.loads((local.folder / "predictions.json").read_text())["images"]
    assert [image["image"] for image in images] == [*[f"{n}.png" for n in range(6)], "broken.jpg", *["clip.avi"] * 3]
    assert [image.get("frame") for image in images] == [None] * 7 + [1, 2, 3]
    for image, found in zip(images, local.predictions, strict=True):
        boxes = [row["box"] for row in image.get("detections", [])]
        assert np.abs(np.array(boxes).reshape(-1, 4) - found.detections[:, :4]).max(initial=0) < 1e-3
    rows = [line.split() for line in (local.folder / "labels" / "5.txt").read_text().splitlines()]
    height, width = local.predictions[5].size
    assert (height, width) == (75, 60)
    expected = local.predictions[5].detections
    for row, (x1, y1, x2, y2, score, kind) in zip(rows, expected, strict=True):
        numbers = [kind, (x1 + x2) / 2 / width, (y1 + y2) / 2 / height, (x2 - x1) / width, (y2 - y1) / height, score]
        assert [float(word) for word in row] == pytest.approx(numbers, rel=1e-5)


def test_files_are_written_only_on_request(weights: Path, source: Path, tmp_path: Path) -> None:
    off: dict[str, Any] = {"save_txt": False, "save_json": False, "placement": {"nosave": True}}
    result = run(weights, source, tmp_path, "x", **off)
    assert contents(result.folder).keys() == {"results.json"}
    assert len(result.predictions) == 10


def test_a_new_folder_is_taken_each_time_unless_it_is_named_again(weights: Path, source: Path, tmp_path: Path) -> None:
    one = source / "0.png"
    names = [run(weights, one, tmp_path, "").folder.name for _ in range(2)]
    again = [run(weights, one, tmp_path, "x", placement={"exist_ok": True}).folder.name for _ in range(2)]
    assert (names, again) == (["exp", "exp2"], ["x", "x"])


def test_the_console_tells_of_each_file(
        weights: Path, source: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    result = run(weights, source, tmp_path, "x", quiet=False, confidence=0.99)
    assert not (result.folder / "labels").exists()
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == "1/8 0.png: nothing found"
    assert lines[6:] == ["7/8 broken.jpg: left out, it is not an image that can be read (UnidentifiedImageError)",
                         "8/8 clip.avi: 3 frames, nothing found", lines[-2], f"results in {tmp_path / 'x'}"]
    assert re.fullmatch(r"9 pictures: 0 objects, \d+\.\d ms each \(preprocess [\d.]+, inference .*\)", lines[-2])
    run(weights, source / "0.png", tmp_path, "y", quiet=False)
    assert re.match(r"1/1 0\.png: \d+ dark, \d+ bright\n", capsys.readouterr().out)


def test_the_last_line_counts_objects_and_the_mean_time_of_a_picture() -> None:
    rows = np.array([[0, 0, 9, 9, 0.9, 1], [0, 0, 9, 9, 0.8, 1], [0, 0, 9, 9, 0.7, 0]], np.float32)
    read = [Prediction("a.png", None, (9, 9), rows, speed={"preprocess": 1.0, "inference": 20.0}),
            Prediction("b.png", None, (9, 9), rows[:1], speed={"preprocess": 2.0, "inference": 30.0}),
            Prediction("c.png", None, (0, 0), rows[:0], error="is empty")]
    assert total(read, ("dark", "bright")) == (
        "2 pictures: 4 objects (1 dark, 3 bright), 26.5 ms each (preprocess 1.5, inference 25.0)")


def test_a_file_may_be_called_anything_and_has_one_line(
        weights: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "in").mkdir()
    for name in (b"new\nline.png", b"\x1b[31m.png", b"\xff\xfe.png", b"-rf.png", "漢.png".encode()):
        picture = write_image(tmp_path / "plain.png", smooth_picture(48, 64))
        picture.rename(tmp_path / "in" / os.fsdecode(name))
    result = run(weights, tmp_path / "in", tmp_path, "x", quiet=False)
    messages = capsys.readouterr().out
    assert len(messages.splitlines()) == 7
    assert "\x1b" not in messages.encode().decode()
    assert len(list((result.folder / "labels").iterdir())) == len(list(result.folder.glob("*.jpg"))) == 5


def stored_in(folder: Path) -> dict[str, bytes]:
    """Without what takes the name."""
    return {name: data for name, data in contents(folder).items() if name != ".begun"}


def test_results_are_stored_also_those_of_an_interrupted_prediction(
        weights: Path, source: Path, local: PredictResult, tmp_path: Path, capsys: pytest.CaptureFixture[str],
        monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RAY_YOLO_CACHE", str(tmp_path / "cache"))
    stored: dict[str, Any] = {"placement": {"storage_path": f"file://{tmp_path}/bucket"}}
    project = tmp_path / "bucket" / "p"
    run(weights, source, Path("p"), "", quiet=False, **stored)
    assert stored_in(project / "exp") == contents(local.folder)
    assert capsys.readouterr().out.splitlines()[-1] == f"results in file://{project}/exp"
    YOLO(str(weights)).predict(str(source), save_json=True, storage_path=f"file://{tmp_path}/bucket", project="p")
    assert stored_in(project / "exp2").keys() == {"predictions.json", "results.json"}

    def interrupt(found: list[Prediction], names: object) -> str:
        if found[0].frame:
            raise KeyboardInterrupt
        return ""

    monkeypatch.setattr(predictor, "summary", interrupt)
    with pytest.raises(KeyboardInterrupt):
        run(weights, source, Path("p"), "", quiet=False, **stored)
    assert stored_in(project / "exp3") == {
        name: data for name, data in contents(local.folder).items() if name not in ("predictions.json", "results.json")}


def test_results_that_cannot_be_stored_stay(weights: Path, source: Path, tmp_path: Path,
                                                           monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RAY_YOLO_CACHE", str(tmp_path / "cache"))

    def refuse(*_: object) -> None:
        raise OSError("SlowDown")

    monkeypatch.setattr(FolderStore, "put", refuse)
    monkeypatch.setattr(FolderStore, "put_if", lambda *_: "1")
    with pytest.raises(RayYoloError):
        run(weights, source / "0.png", Path("p"), "", placement={"storage_path": f"file://{tmp_path}/bucket"})
    assert list((tmp_path / "cache").rglob("p/exp/predictions.json"))


def test_bad_input_leaves_no_folder(weights: Path, source: Path, tmp_path: Path) -> None:
    with pytest.raises(InputError):
        run(weights, source, tmp_path, "x", classes=(2,))
    with pytest.raises(InputError):
        run(weights, source / "nowhere", tmp_path, "x")
    with pytest.raises(CheckpointError):
        run(source / "no.pt", source, tmp_path, "x")
    assert not list(tmp_path.iterdir())


def test_files_of_which_none_can_be_read_leave_no_folder(weights: Path, tmp_path: Path) -> None:
    (tmp_path / "source").mkdir()
    (tmp_path / "source" / "broken.jpg").write_bytes(b"no picture")
    with pytest.raises(InputError):
        run(weights, tmp_path / "source", tmp_path / "out", "x", save_csv=True)
    assert not list((tmp_path / "out").iterdir())


def test_the_precision_of_an_exported_file_is_checked_before_anything_starts(
        source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    exported = Exported(Path("best.onnx"), ("item",), 64, 32, suppress=True, batch_size=1, pixel_range={},
                        run=lambda images: pytest.fail("it predicts"))
    monkeypatch.setattr(predictor, "open_weights", lambda path: exported)
    (tmp_path / "best.onnx").touch()
    config = PredictConfig(weights=str(tmp_path / "best.onnx"), source=str(source))
    assert predictor.check(config)[0].imgsz == 64
    with pytest.raises(ConfigError):
        predictor.check(config.model_copy(update={"precision": "fp16"}))
