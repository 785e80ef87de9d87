"""From files to predictions and images, in order and independent of each other; and their text and JSON forms."""

from __future__ import annotations

import json
from collections.abc import Generator
from itertools import combinations
from pathlib import Path

import cv2
import numpy as np
import pytest
import torch

from ray_yolo.config.commands import DetectConfig, PredictConfig
from ray_yolo.data.images import read_image
from ray_yolo.data.sources import find_media, frames_per_second, read_video
from ray_yolo.inference.output import (
    Output,
    Prediction,
    detect_files,
    to_csv,
    to_json,
)
from ray_yolo.inference.predictor import Predictor, build_predictor, load_trained
from tests.support.pictures import smooth_picture, write_image
from tests.support.videos import write_video
from tests.support.weights import make_weights

FOUND = np.array([[10, 20, 30, 60, 0.9, 1], [0, 0, 100, 200, 1 / 3, 0]], np.float32)


def left_out(image: str, reason: str) -> Prediction:
    return Prediction(image, None, (0, 0), FOUND[:0], reason)


PICTURE = Prediction("a/b.jpg", None, (200, 100), FOUND)


@pytest.fixture(scope="module")
def predictor(tmp_path_factory: pytest.TempPathFactory) -> Predictor:
    return build_predictor(load_trained(make_weights(tmp_path_factory.mktemp("weights"))), DetectConfig())


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Pictures of several sizes, a video of 7 frames between them, and two files that cannot be read."""
    folder = tmp_path_factory.mktemp("source")
    for number, size in enumerate([(60, 80), (48, 64), (90, 40), (200, 300)]):
        write_image(folder / "abxy"[number] / f"{number}.png", smooth_picture(*size, seed=number))
    write_video(folder / "m" / "clip.avi", [smooth_picture(48, 64, seed=seed) for seed in range(7)], rate=12.0)
    (folder / "broken.jpg").write_bytes(b"no picture")
    (folder / "broken.mp4").write_bytes(b"no video")
    return folder


def output_in(folder: Path, **settings: object) -> Output:
    return Output(folder, PredictConfig.model_validate({"weights": "", "source": "", **settings}))


SILENT = output_in(Path("nowhere"), placement={"nosave": True})


def detect(predictor: Predictor, source: Path, output: Output = SILENT, threads: int = 2) -> list[Prediction]:
    results = detect_files(predictor, find_media(str(source)), output, threads=threads)
    return [prediction for _, predictions in results for prediction in predictions]


def test_predictions_come_in_the_order_of_files_and_frames(predictor: Predictor, source: Path) -> None:
    results = detect(predictor, source)
    videos = [("m/clip.avi", number) for number in range(1, 8)]
    assert [(one.image, one.frame) for one in results] == [
        ("a/0.png", None), ("b/1.png", None), ("broken.jpg", None), ("broken.mp4", None), *videos, ("x/2.png", None),
        ("y/3.png", None)]
    assert [one.size for one in results if not one.error] == [(60, 80), (48, 64), *[(48, 64)] * 7, (90, 40), (200, 300)]


def test_results_do_not_depend_on_other_files(predictor: Predictor, source: Path) -> None:
    for one in detect(predictor, source):
        if not one.error:
            path = str(source / one.image)
            pixels = read_image(path) if one.frame is None else list(read_video(path))[one.frame - 1]
            assert one.detections.tobytes() == predictor(pixels).tobytes()
            assert len(one.detections)


def test_unreadable_files_are_left_out_with_the_reason(predictor: Predictor, source: Path) -> None:
    assert {one.image: one.error for one in detect(predictor, source) if one.error} == {
        "broken.jpg": "is not an image that can be read (UnidentifiedImageError)",
        "broken.mp4": "is not a video that can be read"}


def bits_of(predictions: list[Prediction]) -> list[object]:
    """Everything in predictions, the detections as bytes."""
    return [(*one[:3], one.detections.shape, one.detections.tobytes(), one.error) for one in predictions]


def test_threads_change_nothing(predictor: Predictor, source: Path) -> None:
    assert bits_of(detect(predictor, source, threads=1)) == bits_of(detect(predictor, source, threads=5))


def test_arithmetic_is_single_threaded_meanwhile_and_as_before_afterwards(predictor: Predictor, source: Path) -> None:
    before = torch.get_num_threads()
    torch.set_num_threads(3)
    try:
        running = detect_files(predictor, find_media(str(source)), SILENT, threads=1)
        assert isinstance(running, Generator)
        next(running)
        assert torch.get_num_threads() == 1
        running.close()
        assert torch.get_num_threads() == 3
    finally:
        torch.set_num_threads(before)


def test_pictures_and_videos_with_boxes_are_written_under_their_stems(
        predictor: Predictor, source: Path, tmp_path: Path) -> None:
    detect(predictor, source, output_in(tmp_path))
    written = sorted(path.relative_to(tmp_path).as_posix() for path in tmp_path.rglob("*.*"))
    assert written == ["a/0.jpg", "b/1.jpg", "m/clip.mp4", "x/2.jpg", "y/3.jpg"]
    picture, drawn = read_image(str(source / "y/3.png")), read_image(str(tmp_path / "y/3.jpg"))
    assert drawn.shape == picture.shape
    assert np.abs(drawn.astype(int) - picture).max(2).mean() > 5  # boxes
    frames = list(read_video(str(tmp_path / "m/clip.mp4")))
    assert [frame.shape for frame in frames] == [(48, 64, 3)] * 7
    assert frames_per_second(str(tmp_path / "m/clip.mp4")) == 12.0


def test_a_picture_too_wide_for_jpeg_is_written_as_png(predictor: Predictor, tmp_path: Path) -> None:
    """And it ends no prediction."""
    for name, width in (("narrow", 80), ("wide", 70_000)):
        write_image(tmp_path / "in" / f"{name}.png", np.zeros((60, width, 3), np.uint8))
    predictions = detect(predictor, tmp_path / "in", output_in(tmp_path / "out"))
    assert [(one.size, one.error) for one in predictions] == [((60, 80), ""), ((60, 70_000), "")]
    assert sorted(path.name for path in (tmp_path / "out").iterdir()) == ["narrow.jpg", "wide.png"]
    assert read_image(str(tmp_path / "out" / "wide.png")).shape[:2] == (60, 70_000)


def test_a_folder_that_cannot_be_written_is_an_error(
        predictor: Predictor, source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(FileExistsError):
        detect(predictor, source / "a", output_in(tmp_path / "file"))
    monkeypatch.setattr(cv2.VideoWriter, "isOpened", lambda self: False)
    with pytest.raises(OSError, match=r"clip\.mp4"):
        detect(predictor, source / "m", output_in(tmp_path))


def test_batches_find_the_same_up_to_rounding(predictor: Predictor, source: Path) -> None:
    alone = detect(predictor, source)
    together = detect(predictor, source, output_in(Path("nowhere"), batch_size=4, placement={"nosave": True}))
    assert [one[:3] for one in together] == [one[:3] for one in alone]
    for one, other in zip(together, alone, strict=True):
        assert one.detections.shape == other.detections.shape
        assert np.abs(one.detections - other.detections).max(initial=0) < 1e-3


def test_every_other_frame_is_found_as_before_and_the_video_lasts_as_long(
        predictor: Predictor, source: Path, tmp_path: Path) -> None:
    every = detect(predictor, source / "m")
    results = detect(predictor, source / "m", output_in(tmp_path, vid_stride=2))
    assert bits_of(results) == bits_of(every[::2])
    assert len(list(read_video(str(tmp_path / "clip.mp4")))) == 4
    assert frames_per_second(str(tmp_path / "clip.mp4")) == 6.0


def test_crops_are_what_the_boxes_enclose(predictor: Predictor, source: Path, tmp_path: Path) -> None:
    results = detect(predictor, source, output_in(tmp_path, save_crop=True, placement={"nosave": True}))
    written = {path.relative_to(tmp_path).as_posix() for path in tmp_path.rglob("*.jpg")}
    assert written == {f"crops/{('dark', 'bright')[int(row[5])]}/{one.image[:-4]}{f'_{one.frame}' * bool(one.frame)}"
                       f".{number}.jpg" for one in results for number, row in enumerate(one.detections, 1)}


def test_what_is_drawn_can_be_hidden(predictor: Predictor, source: Path, tmp_path: Path) -> None:
    def drawn(name: str, **settings: object) -> np.ndarray:
        detect(predictor, source / "y", output_in(tmp_path / name, **settings))
        return read_image(str(tmp_path / name / "3.jpg"))

    pictures = [drawn("a"), drawn("b", hide_labels=True), drawn("c", hide_conf=True), drawn("d", line_thickness=9),
                drawn("e", hide_labels=True, hide_conf=True)]
    changed = [np.abs(one.astype(int) - other).max(2).mean() for one, other in combinations(pictures, 2)]
    assert min(changed) > 0.5
    assert drawn("f").tobytes() == pictures[0].tobytes()


def test_json_has_boxes_in_pixels_frames_and_errors() -> None:
    frame = Prediction("clip.mp4", 7, (200, 100), FOUND[1:])
    content = json.loads(to_json([PICTURE, frame, left_out("c.jpg", "is empty (0 bytes)")], ("cat", "dog")))
    dog = {"class": 1, "name": "dog", "score": 0.9, "box": [10.0, 20.0, 30.0, 60.0]}
    cat = {"class": 0, "name": "cat", "score": 0.33333, "box": [0.0, 0.0, 100.0, 200.0]}
    assert content == {"names": ["cat", "dog"], "images": [
        {"image": "a/b.jpg", "height": 200, "width": 100, "detections": [dog, cat]},
        {"image": "clip.mp4", "frame": 7, "height": 200, "width": 100, "detections": [cat]},
        {"image": "c.jpg", "error": "is empty (0 bytes)"}]}


def test_csv_has_a_row_for_each_detection() -> None:
    frame = Prediction("clip, 1.mp4", 7, (200, 100), FOUND[1:])
    assert to_csv([PICTURE, frame, left_out("c.jpg", "is empty")], ("cat", "dog")).splitlines() == [
        "image,frame,class,name,score,x1,y1,x2,y2",
        "a/b.jpg,,1,dog,0.90000,10.000,20.000,30.000,60.000",
        "a/b.jpg,,0,cat,0.33333,0.000,0.000,100.000,200.000",
        '"clip, 1.mp4",7,0,cat,0.33333,0.000,0.000,100.000,200.000']


def test_json_of_nothing_is_json() -> None:
    assert json.loads(to_json([], ())) == {"names": [], "images": []}
