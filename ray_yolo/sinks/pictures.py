"""Pictures of a training, drawn by a separate plot process, because matplotlib in this process would delay training.

The plot process starts after the first step, runs at idle priority, and follows the event log. It completes the
pictures at the end of the training, or after its driver has exited or was killed, which closes its pipe.
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
from threading import Lock
from time import monotonic, process_time

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
from ray_yolo.sinks.completion import FINISH_SECONDS, complete_records, start_detached

NUM_BATCHES = 3  # of pictures, as many as YOLOv5 draws
TRAIN_PICTURES, VAL_PICTURES = 16, 8  # in each
SHOWN_CONFIDENCE = 0.25

_CPU_SHARE = 0.04  # of one core, averaged since the start of the plot process, while training runs
_SHORTEST_PAUSE_SECONDS = 1.0

Failed = dict[str, str]
"""The reason by name of each picture that could not be drawn; the others are drawn."""


@contextmanager
def isolated(name: str, failed: Failed) -> Iterator[None]:
    """Record an error of one picture."""
    failed.pop(name, None)
    try:
        yield
    except Exception as error:  # of data or of any library
        failed[name] = reason_of(error)


def draw_training(folder: Path, spec: TrainSpec, failed: Failed) -> None:
    """train_batch0.jpg ...: the first pictures of the first epoch, generated again from their keys."""
    pictures = (picture for batch in first_batches(spec) for picture in _pictures(batch))
    for number in range(NUM_BATCHES):
        with isolated(name := f"train_batch{number}.jpg", failed):
            if some := list(islice(pictures, TRAIN_PICTURES)):
                plot_pictures(some, spec.names, folder / name)


def _pictures(batch: Mapping[str, Tensor]) -> Iterator[Picture]:
    """The images of a batch with their labels."""
    for number, image in enumerate(batch["images"]):
        rows = batch["targets"][batch["targets"][:, 0] == number].numpy()
        yield Picture(image.permute(1, 2, 0).numpy(), rows[:, 2:6], rows[:, 1].astype(np.int64))


def draw_detections(table: np.ndarray, index: AnnotationIndex, imgsz: int, folder: Path, failed: Failed) -> None:
    """Draw labels next to detections, curves and confusion matrices, from a (N, 7+) table of detections."""
    store = ImageStore(index, imgsz, smooth=True)
    for number in range(NUM_BATCHES):
        images = range(number * VAL_PICTURES, min((number + 1) * VAL_PICTURES, len(index)))
        with isolated(name := f"val_batch{number}_pred.jpg", failed):
            if images:
                truth, detected = zip(*(_compare(image, table, index, store) for image in images), strict=True)
                plot_truth_and_detections(truth, detected, index.names, folder / name)
    with isolated("curves", failed):
        plot_all_curves(metrics_of(table, index), index.names, folder)
    with isolated("confusion matrices", failed):
        owners = index.owners
        matrix = confusion_matrix(table, owners, index.classes, index.boxes, len(index.names))
        plot_confusion(matrix, index.names, folder / "confusion_matrix.png", normalised=False)
        plot_confusion(matrix, index.names, folder / "confusion_matrix_normalized.png", normalised=True)


def _compare(image: int, table: np.ndarray, index: AnnotationIndex, store: ImageStore) -> tuple[Picture, Picture]:
    """One validation image with its labels, and with its detections."""
    pixels, labelled = store.load_or_grey(image), index[image]
    scale = pixels.shape[1] / labelled.size[1]
    rows = table[(table[:, 0] == image) & (table[:, 5] > SHOWN_CONFIDENCE)]
    return (Picture(pixels, labelled.boxes * scale, labelled.classes, title=Path(labelled.path).name),
            Picture(pixels, rows[:, 1:5] * scale, rows[:, 6].astype(np.int64), rows[:, 5]))


class PlotSink(Sink):
    """The pictures of a training, drawn by the plot process. Those that cannot be drawn cause one warning.

    A job waits a minute for the last pictures, because its machine may be removed at its end. A prompt returns at once.

    Args:
        uri: the MLflow server to which the plot process makes pending deliveries after the driver's end.
    """

    name, interval_seconds, patience_seconds, prompt_seconds = "pictures", 0.5, 60.0, 0.5

    def __init__(self, run_dir: Path, spec: TrainSpec, warn: Callable[[str], None], uri: str | None = None) -> None:
        super().__init__()
        self.is_abandoned = False
        """Whether the driver ends while the plot process still draws."""
        self._run_dir, self._spec, self._warn, self._uri = run_dir, spec, warn, uri
        self._pipe: Connection | None = None
        self._process: subprocess.Popen[bytes] | None = None
        self._ending = Lock()

    def update(self, last: bool = False) -> None:
        """Start the plot process. The last call waits until it has drawn everything."""
        if not (self.is_training or last):
            return
        if self._pipe is None:
            self._pipe, self._process = start_process()
            self._pipe.send((self._run_dir, self._spec, self._uri))
        if not last:
            return
        pipe = self._pipe
        try:
            pipe.send(None)
            failed: Failed = pipe.recv()
            with self._ending:
                self._pipe = None
                pipe.send(self.is_abandoned)
        except (EOFError, ConnectionError) as error:
            raise ChildProcessError("the plot process has ended") from error
        finally:
            self._pipe = None
            pipe.close()
        if self._process:
            self._process.wait()
        if failed:
            pictures = ", ".join(f"{name} ({reason})" for name, reason in failed.items())
            self._warn(f"pictures that could not be drawn: {pictures}")

    def abandon(self) -> str:
        """Leave the rest to the plot process."""
        with self._ending:
            self.is_abandoned = self._pipe is not None
        return f"the last pictures are still being drawn into {self._run_dir}" if self.is_abandoned else ""


def start_process() -> tuple[Connection, subprocess.Popen[bytes] | None]:
    """Start a process that runs `follow_training`, and return the pipe to it."""
    parent_end, child_end = Pipe()
    with child_end:
        process = start_detached(__name__, str(child_end.fileno()), pass_fds=[child_end.fileno()])
    _set_priority(process.pid, "SCHED_IDLE", 19)  # from here: its imports would take seconds from training
    return parent_end, process


def _set_priority(pid: int, policy: str, nice: int) -> None:
    """Set the scheduling policy of a process and the niceness of its session, if the system permits it.

    Linux schedules each session as one group (autogroup), so in a separate session the policy alone has no effect.
    """
    try:
        os.sched_setscheduler(pid, getattr(os, policy), os.sched_param(0))
    except (AttributeError, OSError):
        with suppress(OSError):
            os.setpriority(os.PRIO_PROCESS, pid, nice)
    with suppress(OSError):
        Path(f"/proc/{pid}/autogroup").write_text(str(nice))


def follow_training(pipe: Connection) -> None:
    """Draw the run that a message names (run folder, spec, MLflow server) until another message or the end of the pipe.

    Then complete the pictures, and reply with those that could not be drawn. If the driver has not waited for them, or
    has exited, complete the records of the run as well.
    """
    run_dir, spec, uri = pipe.recv()
    plots, start, pause = PlotWorker(run_dir, spec), monotonic(), 0.0
    while not pipe.poll(pause):
        plots.update()
        pause = max(_SHORTEST_PAUSE_SECONDS, process_time() / _CPU_SHARE - (monotonic() - start))
    _set_priority(os.getpid(), "SCHED_OTHER", 0)
    plots.update()
    has_exited = is_abandoned = True
    with suppress(OSError, EOFError):
        pipe.recv()
        pipe.send(plots.failed)
        is_abandoned, has_exited = pipe.recv(), False
    if is_abandoned:
        complete_records(run_dir, uri, wait_seconds=0.0 if has_exited else FINISH_SECONDS)


class PlotWorker:
    """Draws the pictures in a run folder from its log and its newest detections."""

    def __init__(self, run_dir: Path, spec: TrainSpec) -> None:
        self.failed: Failed = {}
        """The reason by name of each picture that could not be drawn."""
        self._run_dir, self._spec = run_dir, spec
        self._new_events, self._events = follow(run_dir / EVENTS_FILE), list[Event]()
        self._detections_time = 0  # modification time of the detections that are drawn

    def update(self) -> None:
        """Draw everything new: first the training mosaics and labels, then results, and the detections of a better
        epoch.
        """
        if not (self._run_dir / "labels.jpg").exists() and "labels.jpg" not in self.failed:
            draw_training(self._run_dir, self._spec, self.failed)
            with isolated("labels.jpg", self.failed):
                plot_labels(self._spec.train, self._run_dir / "labels.jpg")
        events = next(self._new_events)
        new = [without_classes(event) for event in events if isinstance(event, (StartEvent, EpochEvent))]
        self._events += new
        if new and (rows := epoch_rows(surviving(self._events))):
            with isolated("results.png", self.failed):
                plot_results(rows, self._run_dir / "results.png")
        self._draw_detections()

    def _draw_detections(self) -> None:
        path = self._run_dir / DETECTIONS_FILE
        modified = path.stat().st_mtime_ns if path.exists() else 0
        if modified == self._detections_time:
            return
        with isolated(DETECTIONS_FILE, self.failed):  # one that is being written cannot be read; the next update can
            table = np.load(path, allow_pickle=False)
            draw_detections(table, self._spec.val, self._spec.recipe.imgsz, self._run_dir, self.failed)
            self._detections_time = modified


if __name__ == "__main__":
    cv2.setNumThreads(1)
    torch.set_num_threads(1)
    follow_training(Connection(int(sys.argv[1])))
