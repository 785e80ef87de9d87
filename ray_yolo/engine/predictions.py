"""What was found, as values and in the forms that are written: YOLOv5's text rows and JSON."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

import numpy as np


class Prediction(NamedTuple):
    """What was found in a picture or in a frame of a video."""

    image: str  # the file, by its path below the source
    frame: int | None  # of a video, counted from 1
    size: tuple[int, int]  # (height, width)
    detections: np.ndarray  # (n, 6) float32 rows [x1, y1, x2, y2, score, class] in pixels, best first
    error: str = ""  # why the file was left out


def unreadable(image: str, reason: str) -> Prediction:
    """The prediction of a file that had to be left out."""
    return Prediction(image, None, (0, 0), np.zeros((0, 6), np.float32), reason)


def label_rows(prediction: Prediction, *, scores: bool) -> str:
    """YOLO rows: class, centre x, centre y, width and height as shares of the image, and the score if asked for."""
    height, width = prediction.size
    boxes = prediction.detections[:, :4].astype(np.float64)
    low, high = boxes[:, :2], boxes[:, 2:]
    shares = np.concatenate([(low + high) / 2, high - low], 1) / (width, height, width, height)
    lines = [[kind, *share, score] for share, (score, kind) in
             zip(shares.tolist(), prediction.detections[:, 4:].tolist(), strict=True)]
    return "".join(" ".join(f"{number:g}" for number in line[:None if scores else -1]) + "\n" for line in lines)


def to_json(predictions: Iterable[Prediction], names: Sequence[str]) -> str:
    """The text of predictions.json: `names`, and `images` with their detections, each image on a line of its own.

    Boxes are x1, y1, x2, y2 in pixels. A frame of a video has its number, a file that was left out its `error`.
    """
    lines = ",\n".join(json.dumps(_entry(one, names)) for one in predictions)
    return f'{{"names": {json.dumps(list(names))}, "images": [\n{lines}\n]}}\n'


def _entry(prediction: Prediction, names: Sequence[str]) -> dict[str, Any]:
    if prediction.error:
        return {"image": prediction.image, "error": prediction.error}
    frame = {} if prediction.frame is None else {"frame": prediction.frame}
    height, width = prediction.size
    found = [{"class": int(row[5]), "name": names[int(row[5])], "score": round(row[4], 5),
              "box": [round(edge, 3) for edge in row[:4]]} for row in prediction.detections.tolist()]
    return {"image": prediction.image, **frame, "height": height, "width": width, "detections": found}


def to_wire(predictions: Iterable[Prediction]) -> str:
    """Predictions as JSON, exactly: every float32 comes back with its bits."""
    return json.dumps([[*one._replace(detections=one.detections.tolist())] for one in predictions])


def from_wire(text: str) -> list[Prediction]:
    """The predictions that `to_wire` sent."""
    return [Prediction(image, frame, tuple(size), np.array(rows, np.float32).reshape(-1, 6), error)
            for image, frame, size, rows, error in json.loads(text)]
