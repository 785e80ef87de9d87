"""From frames to results, and to pictures, videos, crops, tables and JSON of them.

Images go through the network side by side, each on one arithmetic thread: so they are found the same whatever the
number of threads, and many are found sooner than by many threads on one.
"""

from __future__ import annotations

import csv
import io
import json
import os
from collections import deque
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from itertools import chain, groupby, islice
from operator import itemgetter
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import cv2
import numpy as np
import torch

from ray_yolo.config.commands import PredictConfig
from ray_yolo.core.files import atomic_write
from ray_yolo.core.structures import AnnotationIndex
from ray_yolo.data.dataset_yaml import DatasetDescription
from ray_yolo.data.label_files import LabelSources
from ray_yolo.data.sources import USUAL_RATE, Frame, Media, frames_of, frames_per_second, unique_stems
from ray_yolo.inference.predictor import Predictor
from ray_yolo.inference.results import NOTHING, Boxes, Results

Item = TypeVar("Item")
Result = TypeVar("Result")


class Prediction(NamedTuple):
    """What was found in a picture or in a frame of a video."""

    image: str  # the file, by its path below the source
    frame: int | None  # of a video, counted from 1
    size: tuple[int, int]  # (height, width)
    detections: np.ndarray  # (n, 6) float32 rows [x1, y1, x2, y2, score, class] in pixels, best first
    error: str = ""  # why the file was left out


@dataclass(frozen=True)
class Output:
    """What is written of each picture and frame below a folder, by whoever detects in it."""

    folder: Path
    config: PredictConfig

    def write(self, media: Media, found: Results) -> np.ndarray | None:
        """Write what is asked for of a picture; of a frame all but its picture (height, width, 3) BGR, which comes back
        for the video.

        Raises:
            OSError: if it cannot be written.
        """
        config, frame = self.config, "" if found.frame is None else f"_{found.frame}"
        if config.save_txt and len(found):
            rows = label_rows(prediction_of(media, found), scores=config.save_conf)
            place(self.folder / "labels", media, f"{frame}.txt").write_text(rows)
        if config.save_crop:
            found.save_crop(self.folder / "crops", f"{media.stem}{frame}")
        if config.placement.nosave:
            return None
        drawn = found.plot(labels=not config.hide_labels, conf=not config.hide_conf, line_width=config.line_thickness)
        if found.frame is not None:
            return drawn
        place(self.folder, media, ".jpg").write_bytes(cv2.imencode(".jpg", drawn)[1].tobytes())
        return None


def detect_frames(predictor: Predictor, frames: Iterable[Frame], output: Output | None = None, *, threads: int,
                  batch_size: int = 1) -> Iterator[tuple[Media, Results]]:
    """What is found in each frame, in their order, as it is asked for.

    Args:
        output: what is written on the way; None: nothing.
        threads: batches that are worked on side by side; 0: by this thread, with its own arithmetic threads, and no
            frame ahead of its turn, as cameras need it.

    Raises:
        OSError: if something cannot be written.
    """
    work, batches = partial(_detect, predictor, output), _batches(frames, batch_size)
    if not threads:
        yield from _with_videos(map(work, batches), output)
        return
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        with ThreadPoolExecutor(threads) as pool:
            yield from _with_videos(_in_order(pool, work, batches, ahead=2 * threads), output)
    finally:
        torch.set_num_threads(before)


def detect_files(predictor: Predictor, media: Iterable[Media], output: Output, *, threads: int
                 ) -> Generator[tuple[Media, list[Prediction]]]:
    """What is found in each file, in their order: one prediction for a picture, one for each frame of a video."""
    found = detect_frames(predictor, frames_of(media, output.config.vid_stride), output, threads=threads,
                          batch_size=output.config.batch_size)
    for one, results in groupby(found, key=itemgetter(0)):
        yield one, [prediction_of(*pair) for pair in results]


def prediction_of(media: Media, found: Results) -> Prediction:
    """The same without pixels."""
    return Prediction(media.name, found.frame, found.orig_shape, np.asarray(found.boxes.data), found.error)


_Done = list[tuple[Media, Results, np.ndarray | None]]  # with a frame and its boxes, BGR


def _batches(frames: Iterable[Frame], size: int) -> Iterator[list[Frame]]:
    frames = iter(frames)
    while batch := list(islice(frames, size)):
        yield batch


def _detect(predictor: Predictor, output: Output | None, batch: Sequence[Frame]) -> _Done:
    """The work of one thread: read, detect, write; a video's frames are written by whoever keeps the order."""
    frames = [frame.read() for frame in batch]
    pixels = [frame.pixels for frame in frames if frame.pixels is not None]
    found = iter(predictor.detect(pixels) if pixels else ())
    done: _Done = []
    names = dict(enumerate(predictor.names))
    for media, number, image, error in frames:
        if image is None:
            empty = Boxes(torch.from_numpy(NOTHING), (0, 0))
            done.append((media, Results(np.zeros((0, 0, 3), np.uint8), media.path, names, empty, error=error), None))
            continue
        detections, speed = next(found)
        height, width = image.shape[:2]
        results = Results(np.ascontiguousarray(image[..., ::-1]), media.path, names,
                          Boxes(torch.from_numpy(detections), (height, width)), speed, number)
        done.append((media, results, output.write(media, results) if output else None))
    return done


def _with_videos(done: Iterable[_Done], output: Output | None) -> Iterator[tuple[Media, Results]]:
    """The results one by one; frames that come with them are written into their videos."""
    video: cv2.VideoWriter | None = None
    path = None
    try:
        for media, results, drawn in chain.from_iterable(done):
            if drawn is not None and output is not None:
                if path != media.path or video is None:
                    if video is not None:
                        video.release()
                    video, path = _open_video(media, drawn, output), media.path
                video.write(drawn)
            yield media, results
    finally:
        if video is not None:
            video.release()


def _open_video(media: Media, frame: np.ndarray, output: Output) -> cv2.VideoWriter:
    path = place(output.folder, media, ".mp4")
    rate = (USUAL_RATE if media.is_stream else frames_per_second(media.path)) / output.config.vid_stride
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


def to_csv(predictions: Iterable[Prediction], names: Sequence[str]) -> str:
    """The text of predictions.csv, a row for each detection: image, frame (of a video), class, name, score, corners."""
    text = io.StringIO()
    table = csv.writer(text, lineterminator="\n")
    table.writerow(("image", "frame", "class", "name", "score", "x1", "y1", "x2", "y2"))
    for one in predictions:
        table.writerows((one.image, one.frame, int(kind), names[int(kind)], f"{score:.5f}", *(f"{e:.3f}" for e in box))
                        for *box, score, kind in one.detections.tolist())
    return text.getvalue()


def write_tables(output: Output, predictions: Sequence[Prediction], names: Sequence[str]) -> None:
    """Write predictions.json and predictions.csv as far as they are asked for."""
    config = output.config
    for asked, name, form in ((config.save_json, "predictions.json", to_json),
                              (config.save_csv, "predictions.csv", to_csv)):
        if asked:
            atomic_write(output.folder / name, form(predictions, names))


def to_payload(predictions: Iterable[Prediction]) -> str:
    """Predictions as JSON, exactly: every float32 comes back with its bits."""
    return json.dumps([[*one._replace(detections=one.detections.tolist())] for one in predictions])


def from_payload(text: str) -> list[Prediction]:
    """The predictions that `to_wire` sent."""
    return [Prediction(image, frame, tuple(size), np.array(rows, np.float32).reshape(-1, 6), error)
            for image, frame, size, rows, error in json.loads(text)]


def coco_results(table: np.ndarray, index: AnnotationIndex, description: DatasetDescription, split: str
                 ) -> list[dict[str, Any]]:
    """Rows of image_id, category_id, bbox (x, y, width, height) and score, as COCO's evaluators load them.

    Ids are those of the split's COCO files; without such files an image's id is its name, as a number if it is one, and
    a category's the number of the class.

    Args:
        table: detections as `Evaluation` has them.
    """
    sources = LabelSources(description, split)
    owns = [sources.own_ids(path) for path in index.paths]
    rows = []
    for number, x1, y1, x2, y2, score, kind, _ in table.tolist():
        image, categories = owns[int(number)]
        rows.append({"image_id": image, "category_id": categories.get(int(kind), int(kind)),
                     "bbox": [round(value, 3) for value in (x1, y1, x2 - x1, y2 - y1)], "score": round(score, 5)})
    return rows


def write_label_files(table: np.ndarray, index: AnnotationIndex, folder: Path, *, scores: bool) -> None:
    """Write labels/NAME.txt for each image with detections, as prediction does."""
    root = os.path.commonpath([os.path.dirname(path) for path in index.paths])
    names = [os.path.relpath(path, root) for path in index.paths]
    for number, (path, name, stem) in enumerate(zip(index.paths, names, unique_stems(names), strict=True)):
        rows = table[table[:, 0] == number, 1:7]
        if len(rows):
            found = Prediction(name, None, index[number].size, rows)
            place(folder / "labels", Media(path, name, stem), ".txt").write_text(label_rows(found, scores=scores))
