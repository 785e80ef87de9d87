"""From files to predictions, and to pictures and videos with boxes.

Images go through the network side by side, each on one arithmetic thread: so they are found the same whatever the
number of threads, and many are found sooner than by many threads on one.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from functools import partial
from itertools import groupby
from pathlib import Path
from typing import NamedTuple, TypeVar

import cv2
import numpy as np
import torch

from ray_yolo.data.images import UnreadableImageError, check_image, read_image
from ray_yolo.data.media import Media, frames_per_second, read_video
from ray_yolo.engine.predict import Predictor
from ray_yolo.engine.predictions import Prediction, unreadable
from ray_yolo.plots.boxes import draw_detections

Item = TypeVar("Item")
Result = TypeVar("Result")


class _Task(NamedTuple):
    """A picture, whose pixels are read where they are needed, or a frame."""

    media: Media
    frame: int | None = None
    pixels: np.ndarray | None = None
    error: str = ""


class _Done(NamedTuple):
    media: Media
    prediction: Prediction
    drawn: np.ndarray | None  # a frame with its boxes, (height, width, 3) uint8 BGR


def detect_files(predictor: Predictor, media: Iterable[Media], folder: Path | None, *,
                 threads: int) -> Iterator[tuple[Media, list[Prediction]]]:
    """What is found in each file, in their order: one prediction for a picture, one for each frame of a video.

    Args:
        folder: pictures are written there as STEM.jpg and videos as STEM.mp4; None writes none.
        threads: images that are worked on side by side.

    Raises:
        OSError: if a picture or a video cannot be written.
    """
    with _one_arithmetic_thread(), ThreadPoolExecutor(threads) as pool:
        done = _in_order(pool, partial(_detect, predictor, folder), _tasks(media), ahead=2 * threads)
        for one, results in groupby(done, key=lambda result: result.media):
            yield one, _collect(results, folder)


def _tasks(media: Iterable[Media]) -> Iterator[_Task]:
    for one in media:
        if not one.is_video:
            yield _Task(one)
            continue
        try:
            for number, pixels in enumerate(read_video(one.path), 1):
                yield _Task(one, number, pixels)
        except UnreadableImageError as error:
            yield _Task(one, error=str(error))


def _detect(predictor: Predictor, folder: Path | None, task: _Task) -> _Done:
    """The work of one thread: read, detect, draw; a picture is written here, a frame by whoever keeps the order."""
    media, pixels, error = task.media, task.pixels, task.error
    if pixels is None and not error:
        pixels, error = _read(media.path)
    if pixels is None:
        return _Done(media, unreadable(media.name, error), None)
    found = predictor(pixels)
    height, width = pixels.shape[:2]
    prediction = Prediction(media.name, task.frame, (height, width), found)
    if folder is None:
        return _Done(media, prediction, None)
    drawn = cv2.cvtColor(draw_detections(pixels, found, predictor.names), cv2.COLOR_RGB2BGR)
    if task.frame is not None:
        return _Done(media, prediction, drawn)
    _place(folder, media, ".jpg").write_bytes(cv2.imencode(".jpg", drawn)[1].tobytes())
    return _Done(media, prediction, None)


def _read(path: str) -> tuple[np.ndarray | None, str]:
    """The pixels of a picture, or why there are none."""
    try:
        check_image(path)
        return read_image(path), ""
    except UnreadableImageError as error:
        return None, str(error)
    except OSError as error:
        return None, f"cannot be read: {error.strerror}"


def _collect(results: Iterable[_Done], folder: Path | None) -> list[Prediction]:
    """The predictions of one file; frames are written on the way."""
    found: list[Prediction] = []
    video: cv2.VideoWriter | None = None
    try:
        for media, prediction, drawn in results:
            found.append(prediction)
            if drawn is not None and folder is not None:
                video = video or _open_video(_place(folder, media, ".mp4"), frames_per_second(media.path), drawn)
                video.write(drawn)
    finally:
        if video is not None:
            video.release()
    return found


def _open_video(path: Path, rate: float, frame: np.ndarray) -> cv2.VideoWriter:
    height, width = frame.shape[:2]
    video = cv2.VideoWriter(str(path), cv2.CAP_FFMPEG, cv2.VideoWriter.fourcc(*"mp4v"), rate, (width, height))
    if not video.isOpened():
        raise OSError(f"{path}: the video cannot be written")
    return video


def _place(folder: Path, media: Media, suffix: str) -> Path:
    path = folder / f"{media.stem}{suffix}"
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
    while waiting:
        yield waiting.popleft().result()


@contextmanager
def _one_arithmetic_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)
