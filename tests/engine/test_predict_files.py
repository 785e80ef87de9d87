"""Files in, predictions and pictures out: in order, each on its own, whatever stands beside it;
and what was found, as text and JSON.
"""

from __future__ import annotations

import json
from collections.abc import Generator
from pathlib import Path

import cv2
import numpy as np
import pytest
import torch

from ray_yolo.config.commands import DetectConfig
from ray_yolo.data.images import read_image
from ray_yolo.data.media import find_media, frames_per_second, read_video
from ray_yolo.engine.predict import Predictor, build_predictor, load_trained
from ray_yolo.engine.predict_files import (
    Prediction,
    detect_files,
    from_wire,
    label_rows,
    to_json,
    to_wire,
    unreadable,
)
from tests.support.pictures import smooth_picture, write_image
from tests.support.videos import write_video
from tests.support.weights import make_weights

FOUND = np.array([[10, 20, 30, 60, 0.9, 1], [0, 0, 100, 200, 1 / 3, 0]], np.float32)
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


def detect(predictor: Predictor, source: Path, folder: Path | None = None, threads: int = 2) -> list[Prediction]:
    found = detect_files(predictor, find_media(str(source)), folder, threads=threads)
    return [prediction for _, predictions in found for prediction in predictions]


def test_predictions_come_in_the_order_of_files_and_frames(predictor: Predictor, source: Path) -> None:
    found = detect(predictor, source)
    videos = [("m/clip.avi", number) for number in range(1, 8)]
    assert [(one.image, one.frame) for one in found] == [
        ("a/0.png", None), ("b/1.png", None), ("broken.jpg", None), ("broken.mp4", None), *videos, ("x/2.png", None),
        ("y/3.png", None)]
    assert [one.size for one in found if not one.error] == [(60, 80), (48, 64), *[(48, 64)] * 7, (90, 40), (200, 300)]


def test_each_picture_and_frame_is_found_as_if_alone(predictor: Predictor, source: Path) -> None:
    for one in detect(predictor, source):
        if not one.error:
            path = str(source / one.image)
            pixels = read_image(path) if one.frame is None else list(read_video(path))[one.frame - 1]
            assert one.detections.tobytes() == predictor(pixels).tobytes()
            assert len(one.detections)


def test_what_cannot_be_read_is_left_out_with_the_reason(predictor: Predictor, source: Path) -> None:
    assert {one.image: one.error for one in detect(predictor, source) if one.error} == {
        "broken.jpg": "is not an image that can be read (UnidentifiedImageError)",
        "broken.mp4": "is not a video that can be read"}


def test_threads_change_nothing(predictor: Predictor, source: Path) -> None:
    assert to_wire(detect(predictor, source, threads=1)) == to_wire(detect(predictor, source, threads=5))


def test_arithmetic_is_single_threaded_meanwhile_and_as_before_afterwards(predictor: Predictor, source: Path) -> None:
    before = torch.get_num_threads()
    torch.set_num_threads(3)
    try:
        running = detect_files(predictor, find_media(str(source)), None, threads=1)
        assert isinstance(running, Generator)
        next(running)
        assert torch.get_num_threads() == 1
        running.close()
        assert torch.get_num_threads() == 3
    finally:
        torch.set_num_threads(before)


def test_pictures_and_videos_with_boxes_are_written_under_their_stems(
        predictor: Predictor, source: Path, tmp_path: Path) -> None:
    detect(predictor, source, tmp_path)
    written = sorted(path.relative_to(tmp_path).as_posix() for path in tmp_path.rglob("*.*"))
    assert written == ["a/0.jpg", "b/1.jpg", "m/clip.mp4", "x/2.jpg", "y/3.jpg"]
    picture, drawn = read_image(str(source / "y/3.png")), read_image(str(tmp_path / "y/3.jpg"))
    assert drawn.shape == picture.shape
    assert np.abs(drawn.astype(int) - picture).max(2).mean() > 5  # boxes
    frames = list(read_video(str(tmp_path / "m/clip.mp4")))
    assert [frame.shape for frame in frames] == [(48, 64, 3)] * 7
    assert frames_per_second(str(tmp_path / "m/clip.mp4")) == 12.0


def test_a_folder_that_cannot_be_written_is_an_error(
        predictor: Predictor, source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(OSError, match="file"):
        detect(predictor, source / "a", tmp_path / "file")
    monkeypatch.setattr(cv2.VideoWriter, "isOpened", lambda self: False)
    with pytest.raises(OSError, match=r"clip\.mp4: the video cannot be written"):
        detect(predictor, source / "m", tmp_path)


def test_label_rows_are_shares_of_the_image() -> None:
    assert label_rows(PICTURE, scores=False) == "1 0.2 0.2 0.2 0.2\n0 0.5 0.5 1 1\n"


def test_label_rows_end_with_the_score_if_asked_for() -> None:
    assert label_rows(PICTURE, scores=True) == "1 0.2 0.2 0.2 0.2 0.9\n0 0.5 0.5 1 1 0.333333\n"


def test_nothing_found_is_no_rows() -> None:
    assert label_rows(PICTURE._replace(detections=FOUND[:0]), scores=True) == ""


def test_json_has_boxes_in_pixels_frames_and_errors() -> None:
    frame = Prediction("clip.mp4", 7, (200, 100), FOUND[1:])
    told = json.loads(to_json([PICTURE, frame, unreadable("c.jpg", "is empty (0 bytes)")], ("cat", "dog")))
    dog = {"class": 1, "name": "dog", "score": 0.9, "box": [10.0, 20.0, 30.0, 60.0]}
    cat = {"class": 0, "name": "cat", "score": 0.33333, "box": [0.0, 0.0, 100.0, 200.0]}
    assert told == {"names": ["cat", "dog"], "images": [
        {"image": "a/b.jpg", "height": 200, "width": 100, "detections": [dog, cat]},
        {"image": "clip.mp4", "frame": 7, "height": 200, "width": 100, "detections": [cat]},
        {"image": "c.jpg", "error": "is empty (0 bytes)"}]}


def test_json_of_nothing_is_json() -> None:
    assert json.loads(to_json([], ())) == {"names": [], "images": []}


def test_the_wire_keeps_every_bit() -> None:
    odd = PICTURE._replace(detections=np.random.default_rng(0).normal(size=(50, 6)).astype(np.float32))
    sent = [odd, PICTURE._replace(frame=3, detections=FOUND[:0]), unreadable("c\n.jpg", "is empty")]
    for one, other in zip(sent, from_wire(to_wire(sent)), strict=True):
        assert one[:3] == other[:3]
        assert one.error == other.error
        assert one.detections.dtype == other.detections.dtype
        assert one.detections.tobytes() == other.detections.tobytes()
        assert one.detections.shape == other.detections.shape
