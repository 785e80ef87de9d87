"""What was found, in text and JSON."""

from __future__ import annotations

import json

import numpy as np

from ray_yolo.engine.predictions import Prediction, from_wire, label_rows, to_json, to_wire, unreadable

FOUND = np.array([[10, 20, 30, 60, 0.9, 1], [0, 0, 100, 200, 1 / 3, 0]], np.float32)
PICTURE = Prediction("a/b.jpg", None, (200, 100), FOUND)


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
