"""Detect in frames, and write the results as images, videos, crops, labels, tables and JSON.

Images pass through the network in parallel, each on one arithmetic thread. Results therefore do not depend on the
number of threads, and throughput is higher than with many threads on one image.
"""

from __future__ import annotations

import csv
import io
import json
import os
from collections import Counter, deque
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from itertools import chain, groupby
from operator import itemgetter
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import cv2
import numpy as np
import torch

from ray_yolo.config.commands import PredictConfig
from ray_yolo.core.documents import RESULTS_FILE
from ray_yolo.core.errors import InputError
from ray_yolo.core.files import atomic_write
from ray_yolo.core.formatting import encodable
from ray_yolo.core.structures import AnnotationIndex
from ray_yolo.data.sources import USUAL_RATE, Frame, InputSource, Media, frames_per_second, unique_stems
from ray_yolo.inference.predictor import Predictor
from ray_yolo.inference.results import LEAST_SIDE, Boxes, Results, label_rows, write_picture
from ray_yolo.labels import LabelSources

Item = TypeVar("Item")
Result = TypeVar("Result")
_Done = list[tuple[Media, Results, np.ndarray | None]]  # the array: a frame of a video with its boxes, BGR


class Prediction(NamedTuple):
    """The detections of an image or of a frame of a video, without pixels."""

    image: str  # path of the file below the source
    frame: int | None  # the frame's number in a video, from 1
    size: tuple[int, int]  # (height, width)
    detections: np.ndarray  # (n, 6) float32 rows [x1, y1, x2, y2, score, class] in pixels, best first
    error: str = ""  # why the file was left out
    speed: Mapping[str, float] = {}  # ms: preprocess, inference, postprocess


@dataclass(frozen=True)
class Output:
    """Writes the results of each image and frame below a folder."""

    folder: Path
    config: PredictConfig

    def write(self, media: Media, results: Results) -> np.ndarray | None:
        """Write the requested files. Returns the plotted frame (height, width, 3) BGR for a video, else None.

        Raises:
            OSError: if a file cannot be written.
        """
        config = self.config
        stem = media.stem if results.frame is None else f"{media.stem}_{results.frame}"
        if config.save_txt and len(results):
            results.save_txt(self.folder / "labels" / f"{stem}.txt", config.save_conf)
        if config.save_crop:
            results.save_crop(self.folder / "crops", stem)
        if config.placement.nosave:
            return None
        plot = results.plot(labels=not config.hide_labels, conf=not config.hide_conf, line_width=config.line_thickness,
                            least_side=LEAST_SIDE if results.frame is None else 0)
        if results.frame is not None:
            return plot
        write_picture(with_folder(self.folder / f"{stem}.jpg"), plot)
        return None


def detect_frames(predictor: Predictor, frames: Iterable[Frame], output: Output | None = None, *, threads: int,
                  batch_size: int = 1) -> Iterator[tuple[Media, Results]]:
    """The results of each frame, in order and lazily.

    Args:
        output: writes files on the way; None: no files.
        threads: batches in parallel; 0: this thread alone with its arithmetic threads and without reading ahead, for
            cameras.

    Raises:
        OSError: if a file cannot be written.
    """
    work = partial(_detect, predictor, output)
    batches = _batches(frames, batch_size)
    if not threads:
        yield from _with_videos(map(work, batches), output)
        return
    before = torch.get_num_threads()
    torch.set_num_threads(1)  # One thread for an image: the parallelism comes from the batches.
    try:
        with ThreadPoolExecutor(threads) as pool:
            yield from _with_videos(_in_order(pool, work, batches, ahead=2 * threads), output)
    finally:
        torch.set_num_threads(before)


def detect_files(predictor: Predictor, media: Iterable[Media], output: Output, *, threads: int
                 ) -> Generator[tuple[Media, list[Prediction]]]:
    """The predictions of each file, in order: one for an image, one for each frame of a video."""
    frames = InputSource([(one, None) for one in media]).frames(output.config.vid_stride)
    results = detect_frames(predictor, frames, output, threads=threads, batch_size=output.config.batch_size)
    for file, pairs in groupby(results, key=itemgetter(0)):
        yield file, [prediction_of(*pair) for pair in pairs]


def prediction_of(media: Media, results: Results) -> Prediction:
    """Results without pixels."""
    return Prediction(media.name, results.frame, results.orig_shape, np.asarray(results.boxes.data), results.error,
                      results.speed)


def _batches(frames: Iterable[Frame], size: int) -> Iterator[list[Frame]]:
    """Lists of at most `size` frames."""
    batch = []
    for frame in frames:
        batch.append(frame)
        if len(batch) == size:
            yield batch
            batch = []
    if batch:
        yield batch


def _detect(predictor: Predictor, output: Output | None, batch: Sequence[Frame]) -> _Done:
    """Read, detect and write in a pool's thread; frames of videos are returned, to be written in order."""
    frames = [frame.read(predictor.pixel_range) for frame in batch]
    pixels = [frame.pixels for frame in frames if frame.pixels is not None]
    detected = iter(predictor.detect(pixels) if pixels else ())
    done: _Done = []
    names = dict(enumerate(predictor.names))
    for frame in frames:
        media, image = frame.media, frame.pixels
        if image is None:
            nothing = np.zeros((0, 0, 3), np.uint8)
            unread = Results(nothing, media.path, names, Boxes(torch.zeros(0, 6), (0, 0)), error=frame.error)
            done.append((media, unread, None))
            continue
        detections, speed = next(detected)
        height, width = image.shape[:2]
        bgr = np.ascontiguousarray(image[..., ::-1])
        boxes = Boxes(torch.from_numpy(detections), (height, width))
        results = Results(bgr, media.path, names, boxes, speed, frame.number)
        plot = output.write(media, results) if output else None
        done.append((media, results, plot))
    return done


def _with_videos(done: Iterable[_Done], output: Output | None) -> Iterator[tuple[Media, Results]]:
    """The results one by one; plotted frames are written to their videos."""
    for media, frames in groupby(chain.from_iterable(done), key=itemgetter(0)):
        video: cv2.VideoWriter | None = None
        try:
            for _, results, plot in frames:
                if plot is not None and output is not None:
                    video = video or _open_video(media, plot, output)
                    video.write(plot)
                yield media, results
        finally:
            if video is not None:
                video.release()


def _open_video(media: Media, frame: np.ndarray, output: Output) -> cv2.VideoWriter:
    path = with_folder(output.folder / f"{encodable(media.stem)}.mp4")  # OpenCV crashes with names of other encodings
    source_rate = USUAL_RATE if media.is_stream else frames_per_second(media.path)
    rate = source_rate / output.config.vid_stride  # the same duration with fewer frames
    size = frame.shape[1], frame.shape[0]
    video = cv2.VideoWriter(str(path), cv2.CAP_FFMPEG, cv2.VideoWriter.fourcc(*"mp4v"), rate, size)
    if not video.isOpened():
        raise OSError(f"{path}: the video cannot be written")
    return video


def with_folder(path: Path) -> Path:
    """The same path. Its folder is created if it is missing."""
    path.parent.mkdir(parents=True, exist_ok=True)
    return path


def _in_order(pool: ThreadPoolExecutor, work: Callable[[Item], Result], items: Iterable[Item],
              ahead: int) -> Iterator[Result]:
    """`pool.map` that reads at most `ahead` items ahead, so that a long video does not fill the memory."""
    waiting: deque[Future[Result]] = deque()
    for item in items:
        waiting.append(pool.submit(work, item))
        if len(waiting) > ahead:
            yield waiting.popleft().result()
    yield from (future.result() for future in waiting)


def to_json(predictions: Iterable[Prediction], names: Sequence[str]) -> str:
    """The text of predictions.json: `names`, and `images` with their detections, one line per image.

    Boxes are x1, y1, x2, y2 in pixels. A frame of a video has its number, a skipped file its `error`.
    """
    lines = ",\n".join(json.dumps(_entry(one, names)) for one in predictions)
    return f'{{"names": {json.dumps(list(names))}, "images": [\n{lines}\n]}}\n'


def _entry(prediction: Prediction, names: Sequence[str]) -> dict[str, Any]:
    """An image's object in predictions.json; the order of its keys is that of the file."""
    entry: dict[str, Any] = {"image": encodable(prediction.image)}
    if prediction.error:
        return {**entry, "error": prediction.error}
    if prediction.frame is not None:
        entry["frame"] = prediction.frame
    entry["height"], entry["width"] = prediction.size
    entry["detections"] = []
    for *box, score, number in prediction.detections.tolist():
        kind = int(number)
        entry["detections"].append({"class": kind, "name": names[kind], "score": round(score, 5),
                                    "box": [round(edge, 3) for edge in box]})
    return entry


def to_csv(predictions: Iterable[Prediction], names: Sequence[str]) -> str:
    """The text of predictions.csv, one row per detection: image, frame (of a video), class, name, score, corners.

    A file that could not be read has no row.
    """
    text = io.StringIO()
    table = csv.writer(text, lineterminator="\n")
    table.writerow(("image", "frame", "class", "name", "score", "x1", "y1", "x2", "y2"))
    for one in predictions:
        image = encodable(one.image)
        for *box, score, number in one.detections.tolist():
            kind = int(number)
            corners = [f"{edge:.3f}" for edge in box]
            table.writerow((image, one.frame, kind, names[kind], f"{score:.5f}", *corners))
    return text.getvalue()


def write_tables(output: Output, predictions: Sequence[Prediction], names: Sequence[str]) -> None:
    """Write results.json, which says what the folder holds, and on request predictions.json and predictions.csv."""
    config = output.config
    counts = Counter(names[int(row[5])] for one in predictions for row in one.detections)
    summary = {"weights": config.weights, "pictures": sum(not one.error for one in predictions),
               "detections": counts.total(), "per_class": {name: counts[name] for name in names if counts[name]}}
    atomic_write(output.folder / RESULTS_FILE, json.dumps(summary, indent=1))
    if config.save_json:
        atomic_write(output.folder / "predictions.json", to_json(predictions, names))
    if config.save_csv:
        atomic_write(output.folder / "predictions.csv", to_csv(predictions, names))


class CocoIds(NamedTuple):
    """The ids of an image and of its classes in `coco_results`."""

    image: int | str
    categories: dict[int, object]  # ids by class number; a class without one has its number


def coco_ids(index: AnnotationIndex, sources: LabelSources) -> list[CocoIds]:
    """The ids of each image: those of the split's COCO files. Without them, the image id is the file's stem (as an
    integer if it is one).

    Raises:
        InputError: if two images have the same id.
    """
    ids = [CocoIds(*sources.own_ids(path)) for path in index.paths]
    paths: dict[int | str, str] = {}
    for path, own in zip(index.paths, ids, strict=True):
        if own.image in paths:
            raise InputError(f"save_json: {paths[own.image]} and {path} have the same image_id, {own.image}; give the "
                             "images names of their own, or their COCO files ids of their own, or use --coco")
        paths[own.image] = path
    return ids


def coco_results(table: np.ndarray, ids: Sequence[CocoIds]) -> list[dict[str, Any]]:
    """Rows of image_id, category_id, bbox (x, y, width, height) and score for COCO evaluators.

    `table` has the detections of an `Evaluation`, `ids` those of its images.
    """
    rows = []
    for image, x1, y1, x2, y2, score, kind, _ in table.tolist():
        own = ids[int(image)]
        bbox = (x1, y1, x2 - x1, y2 - y1)
        rows.append({"image_id": own.image,
                     "category_id": own.categories.get(int(kind), int(kind)),
                     "bbox": [round(value, 3) for value in bbox],
                     "score": round(score, 5)})
    return rows


def write_label_files(table: np.ndarray, index: AnnotationIndex, folder: Path, *, scores: bool) -> None:
    """Write labels/STEM.txt for each image with detections, as `predict` does."""
    root = os.path.commonpath([os.path.dirname(path) for path in index.paths])
    names = [os.path.relpath(path, root) for path in index.paths]
    for number, stem in enumerate(unique_stems(names)):
        rows = table[table[:, 0] == number, 1:7]
        if len(rows):
            text = label_rows(rows, index[number].size, scores=scores)
            with_folder(folder / "labels" / f"{stem}.txt").write_text(text)
