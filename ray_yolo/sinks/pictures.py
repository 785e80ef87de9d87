"""Pictures while a training goes on, drawn by a process of their own: matplotlib would hold up training in this one.

It starts after the training, gives way to it (nice), follows the event log, and is told the end by the closing of its
pipe: so the pictures of an interrupted training, or of one whose driver was killed, are complete too.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from itertools import islice
from multiprocessing.connection import Connection, Pipe
from pathlib import Path
from time import monotonic

import cv2
import numpy as np
import torch
from torch import Tensor

from ray_yolo.core.events import EpochEvent, Event, StartEvent
from ray_yolo.core.redact import reason_of
from ray_yolo.core.structures import AnnotationIndex
from ray_yolo.data.image_cache import ImageStore
from ray_yolo.engine.build import TrainSpec, first_batches
from ray_yolo.engine.evaluate import metrics_of
from ray_yolo.engine.session import DETECTIONS_FILE
from ray_yolo.ops.confusion import confusion_matrix
from ray_yolo.plots.boxes import Picture, plot_pictures, plot_truth_and_detections
from ray_yolo.plots.labels import plot_labels
from ray_yolo.plots.metrics import plot_all_curves, plot_confusion
from ray_yolo.plots.results import plot_results
from ray_yolo.runs.event_log import EVENTS_FILE, epoch_rows, follow, surviving
from ray_yolo.sinks.base import Sink, without_classes

NUM_BATCHES = 3  # of pictures, as many as YOLOv5 draws
TRAIN_PICTURES, VAL_PICTURES = 16, 8  # in each
SHOWN_CONFIDENCE = 0.25

Failed = dict[str, str]
"""Pictures that could not be drawn, each with the reason; they do not keep the others from being drawn."""


@contextmanager
def alone(name: str, failed: Failed) -> Iterator[None]:
    """Notes what goes wrong with one picture."""
    failed.pop(name, None)
    try:
        yield
    except Exception as error:  # of data or libraries: a picture is worth no more than a word
        failed[name] = reason_of(error)


def draw_training(folder: Path, spec: TrainSpec, failed: Failed) -> None:
    """train_batch0.jpg ...: the first pictures of the first epoch, made again from their keys."""
    shown = (picture for batch in first_batches(spec) for picture in _pictures(batch))
    for number in range(NUM_BATCHES):
        with alone(name := f"train_batch{number}.jpg", failed):
            if pictures := list(islice(shown, TRAIN_PICTURES)):
                plot_pictures(pictures, spec.names, folder / name)


def _pictures(batch: Mapping[str, Tensor]) -> Iterator[Picture]:
    """The images of a batch with their labels."""
    for number, image in enumerate(batch["images"]):
        rows = batch["targets"][batch["targets"][:, 0] == number].numpy()
        yield Picture(image.permute(1, 2, 0).numpy(), rows[:, 2:6], rows[:, 1].astype(np.int64))


def draw_detections(table: np.ndarray, index: AnnotationIndex, imgsz: int, folder: Path, failed: Failed) -> None:
    """Pictures with labels beside detections, curves and confusion matrices, from a table of detections."""
    store = ImageStore(index, imgsz, smooth=True)
    for number in range(NUM_BATCHES):
        images = range(number * VAL_PICTURES, min((number + 1) * VAL_PICTURES, len(index)))
        with alone(name := f"val_batch{number}_pred.jpg", failed):
            if images:
                truth, found = zip(*(_compare(image, table, index, store) for image in images), strict=True)
                plot_truth_and_detections(truth, found, index.names, folder / name)
    with alone("curves", failed):
        plot_all_curves(metrics_of(table, index), index.names, folder)
    with alone("confusion matrices", failed):
        owners = np.repeat(np.arange(len(index)), np.diff(index.offsets))
        matrix = confusion_matrix(table, owners, index.classes, index.boxes, len(index.names))
        plot_confusion(matrix, index.names, folder / "confusion_matrix.png", normalised=False)
        plot_confusion(matrix, index.names, folder / "confusion_matrix_normalized.png", normalised=True)


def _compare(image: int, table: np.ndarray, index: AnnotationIndex, store: ImageStore) -> tuple[Picture, Picture]:
    """One validation image with its labels, and with what was detected."""
    pixels, shown = store.load_or_grey(image), index[image]
    scale = pixels.shape[1] / shown.size[1]
    rows = table[(table[:, 0] == image) & (table[:, 5] > SHOWN_CONFIDENCE)]
    return (Picture(pixels, shown.boxes * scale, shown.classes, title=Path(shown.path).name),
            Picture(pixels, rows[:, 1:5] * scale, rows[:, 6].astype(np.int64), rows[:, 5]))


_NICENESS = 5  # a quarter of a core that training keeps busy: the first pictures are there within the first minute
_SHORTEST_PAUSE_SECONDS = 1.0
_PAUSE_SHARE = 9  # as long as the last drawing took, this many times: of short epochs not each one is drawn


class PlotSink(Sink):
    """The pictures of a training, in another process; those that cannot be drawn are one warning.

    Somebody at a prompt waits 3 s for the last ones, which are drawn all the same; a job, which may take its machine
    with it, a minute.
    """

    name, interval_seconds, patience_seconds = "pictures", 0.5, 60.0

    def __init__(self, run_dir: Path, spec: TrainSpec, warn: Callable[[str], None]) -> None:
        super().__init__()
        if sys.stdout.isatty():
            self.patience_seconds = 3.0
        self._run_dir, self._spec, self._warn = run_dir, spec, warn
        self._drawing: Connection | None = None
        self._process: subprocess.Popen[bytes] | None = None

    def update(self, last: bool = False) -> None:
        """See to it that somebody draws; the last time, wait until all is drawn."""
        if not (self.trains or last):
            return
        if self._drawing is None:
            self._drawing, self._process = start_process()
            self._drawing.send((self._run_dir, self._spec))
        if not last:
            return
        drawing, self._drawing = self._drawing, None
        try:
            drawing.send(None)
            failed: Failed = drawing.recv()
        except (EOFError, ConnectionError) as error:
            raise ChildProcessError("the process that draws them has ended") from error
        finally:
            drawing.close()
        if self._process:
            self._process.wait()
        if failed:
            told = ", ".join(f"{name} ({reason})" for name, reason in failed.items())
            self._warn(f"pictures that could not be drawn: {told}")

    def abandon(self) -> str:
        """What is not drawn yet."""
        return f"the last pictures are still being drawn into {self._run_dir}"


def start_process() -> tuple[Connection, subprocess.Popen[bytes] | None]:
    """A process that runs `follow_training`, and the pipe to it. Ctrl-C does not reach it.

    Not one of multiprocessing's, which imports the main module of its parent: a user's script would train again.
    """
    ours, theirs = Pipe()
    with theirs:
        process = subprocess.Popen(
            [sys.executable, "-m", __name__, str(theirs.fileno())], pass_fds=[theirs.fileno()], start_new_session=True,
            stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL,
            env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path), "CUDA_VISIBLE_DEVICES": ""})
    return ours, process


def follow_training(told: Connection) -> None:
    """Draw what a pipe tells of (run folder, job) until it tells more, or is closed; tell what could not be drawn."""
    drawing, pause = PlotWorker(*told.recv()), 0.0
    while not told.poll(pause):
        begun = monotonic()
        drawing.update()
        pause = max(_SHORTEST_PAUSE_SECONDS, _PAUSE_SHARE * (monotonic() - begun))
    drawing.update()
    with suppress(OSError):
        told.send(drawing.failed)


class PlotWorker:
    """The pictures in a run folder, as far as its log and its newest detections go."""

    def __init__(self, run_dir: Path, spec: TrainSpec) -> None:
        self.failed: Failed = {}
        """Pictures that could not be drawn, with the reason."""
        self._run_dir, self._spec = run_dir, spec
        self._news, self._events = follow(run_dir / EVENTS_FILE), list[Event]()
        self._detections = 0  # when the file was written whose detections are drawn

    def update(self) -> None:
        """Draw what is new: at first training mosaics and labels, then results, and what a better epoch detected."""
        if not (self._run_dir / "labels.jpg").exists() and "labels.jpg" not in self.failed:
            draw_training(self._run_dir, self._spec, self.failed)
            with alone("labels.jpg", self.failed):
                plot_labels(self._spec.train, self._run_dir / "labels.jpg")
        new = [without_classes(event) for event in next(self._news) if isinstance(event, (StartEvent, EpochEvent))]
        self._events += new
        if new and (rows := epoch_rows(surviving(self._events))):
            with alone("results.png", self.failed):
                plot_results(rows, self._run_dir / "results.png")
        self._draw_detections()

    def _draw_detections(self) -> None:
        path = self._run_dir / DETECTIONS_FILE
        written = path.stat().st_mtime_ns if path.exists() else 0
        if written == self._detections:
            return
        with alone(DETECTIONS_FILE, self.failed):  # while it is written it cannot be read, and is read again
            table = np.load(path, allow_pickle=False)
            draw_detections(table, self._spec.val, self._spec.recipe.imgsz, self._run_dir, self.failed)
            self._detections = written


if __name__ == "__main__":
    os.nice(_NICENESS)
    cv2.setNumThreads(1)
    torch.set_num_threads(1)
    follow_training(Connection(int(sys.argv[1])))
