"""From files to predictions, and to pictures and videos with boxes.

Images go through the network side by side, each on one arithmetic thread: so they are found the same whatever the
number of threads, and many are found sooner than by many threads on one.
"""

from __future__ import annotations

import json
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from itertools import groupby
from operator import itemgetter
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import cv2
import numpy as np
import torch

from ray_yolo.data.images import UnreadableImageError, check_image, read_image
from ray_yolo.data.media import Media, frames_per_second, read_video
from ray_yolo.engine.predict import Predictor
from ray_yolo.plots.boxes import draw_detections

Item = TypeVar("Item")
Result = TypeVar("Result")


class Prediction(NamedTuple):
    """What was found in a picture or in a frame of a video."""

    image: str  # the file, by its path below the source
    frame: int | None  # of a video, counted from 1
    size: tuple[int, int]  # (height, width)
    detections: np.ndarray  # (n, 6) float32 rows [x1, y1, x2, y2, score, class] in pixels, best first
    error: str = ""  # why the file was left out


Found = Iterator[tuple[Media, list[Prediction]]]
_Task = tuple[Media, int | None, np.ndarray | str | None]  # a frame; why there is none; a picture, read where needed
_Done = tuple[Media, Prediction, np.ndarray | None]  # with a frame and its boxes, (height, width, 3) uint8 BGR


def unreadable(image: str, reason: str) -> Prediction:
    """The prediction of a file that had to be left out."""
    return Prediction(image, None, (0, 0), np.zeros((0, 6), np.float32), reason)


def detect_files(predictor: Predictor, media: Iterable[Media], folder: Path | None, *, threads: int) -> Found:
    """What is found in each file, in their order: one prediction for a picture, one for each frame of a video.

    Args:
        folder: pictures are written there as STEM.jpg and videos as STEM.mp4; None writes none.
        threads: images that are worked on side by side.

    Raises:
        OSError: if a picture or a video cannot be written.
    """
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        with ThreadPoolExecutor(threads) as pool:
            done = _in_order(pool, partial(_detect, predictor, folder), _tasks(media), ahead=2 * threads)
            for one, results in groupby(done, key=itemgetter(0)):
                yield one, _collect(results, folder)
    finally:
        torch.set_num_threads(before)


def _tasks(media: Iterable[Media]) -> Iterator[_Task]:
    for one in media:
        try:
            if one.is_video:
                yield from ((one, number, pixels) for number, pixels in enumerate(read_video(one.path), 1))
            else:
                yield one, None, None
        except UnreadableImageError as error:
            yield one, None, str(error)


def _detect(predictor: Predictor, folder: Path | None, task: _Task) -> _Done:
    """The work of one thread: read, detect, draw; a picture is written here, a frame by whoever keeps the order."""
    media, frame, pixels = task
    if pixels is None:
        pixels = _read(media.path)
    if isinstance(pixels, str):
        return media, unreadable(media.name, pixels), None
    found = predictor(pixels)
    height, width = pixels.shape[:2]
    prediction = Prediction(media.name, frame, (height, width), found)
    if folder is None:
        return media, prediction, None
    drawn = cv2.cvtColor(draw_detections(pixels, found, predictor.names), cv2.COLOR_RGB2BGR)
    if frame is not None:
        return media, prediction, drawn
    place(folder, media, ".jpg").write_bytes(cv2.imencode(".jpg", drawn)[1].tobytes())
    return media, prediction, None


def _read(path: str) -> np.ndarray | str:
    """The pixels of a picture, or why there are none."""
    try:
        check_image(path)
        return read_image(path)
    except UnreadableImageError as error:
        return str(error)
    except OSError as error:
        return f"cannot be read: {error.strerror}"


def _collect(results: Iterable[_Done], folder: Path | None) -> list[Prediction]:
    """The predictions of one file; frames are written on the way."""
    found: list[Prediction] = []
    video: cv2.VideoWriter | None = None
    try:
        for media, prediction, drawn in results:
            found.append(prediction)
            if drawn is not None and folder is not None:
                video = video or _open_video(place(folder, media, ".mp4"), frames_per_second(media.path), drawn)
                video.write(drawn)
    finally:
        if video is not None:
            video.release()
    return found


def _open_video(path: Path, rate: float, frame: np.ndarray) -> cv2.VideoWriter:
    size = frame.shape[1], frame.shape[0]
    video = cv2.VideoWriter(str(path), cv2.CAP_FFMPEG, cv2.VideoWriter.fourcc(*"mp4v"), rate, size)
    if not video.isOpened():
        raise OSError(f"{path}: the video cannot be written")
    return video


def place(folder: Path, media: Media, ending: str) -> Path:
    """Where a file of STEM + ending lies below a folder, which is made."""
    path = folder / f"{media.stem}{ending}"
    path.parent.mkdir(parents=True, exist_ok=True)
    return path


def _in_order(pool: ThreadPoolExecutor, work: Callable[[Item], Result], items: Iterable[Item],
              ahead: int) -> Iterator[Result]:
    """`pool.map` that takes at most `ahead` items before their turn, so that a long video need not be in memory."""
    waiting: deque[Future[Result]] = deque()
    for item in items:
        waiting.append(pool.submit(work, item))
        if len(waiting) > ahead:
            yield waiting.popleft().result()
    yield from (future.result() for future in waiting)


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
