"""Pictures while a training goes on, drawn by a process of their own: matplotlib would hold up training in this one.

It starts after the training, gives way to it (nice), follows the event log, and is told the end by the closing of its
pipe: so the pictures of an interrupted training, or of one whose driver was killed, are complete too.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from contextlib import suppress
from multiprocessing.connection import Connection, Pipe
from pathlib import Path
from time import monotonic

import cv2
import numpy as np
import torch

from ray_yolo.engine.build import Job
from ray_yolo.engine.session import DETECTIONS_FILE
from ray_yolo.events import EpochEvent, Event, StartEvent
from ray_yolo.plots.labels import plot_labels
from ray_yolo.plots.results import plot_results
from ray_yolo.runlog.event_log import EVENTS_FILE, epoch_rows, follow, surviving
from ray_yolo.runlog.plots import Failed, alone, draw_detections, draw_training
from ray_yolo.runlog.projections import Projection, without_classes

_NICENESS = 5  # a quarter of a core that training keeps busy: the first pictures are there within the first minute
_SHORTEST_PAUSE_SECONDS = 1.0
_PAUSE_SHARE = 9  # as long as the last drawing took, this many times: of short epochs not each one is drawn


class Pictures(Projection):
    """The pictures of a training, in another process; those that cannot be drawn are one warning.

    Somebody at a prompt waits 3 s for the last ones, which are drawn all the same; a job, which may take its machine
    with it, a minute.
    """

    name, interval_seconds, patience_seconds = "pictures", 0.5, 60.0

    def __init__(self, run_dir: Path, job: Job, warn: Callable[[str], None]) -> None:
        super().__init__()
        if sys.stdout.isatty():
            self.patience_seconds = 3.0
        self._run_dir, self._job, self._warn = run_dir, job, warn
        self._drawing: Connection | None = None
        self._process: subprocess.Popen[bytes] | None = None

    def update(self, last: bool = False) -> None:
        """See to it that somebody draws; the last time, wait until all is drawn."""
        if not (self.trains or last):
            return
        if self._drawing is None:
            self._drawing, self._process = start_process()
            self._drawing.send((self._run_dir, self._job))
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
    drawing, pause = Drawing(*told.recv()), 0.0
    while not told.poll(pause):
        begun = monotonic()
        drawing.update()
        pause = max(_SHORTEST_PAUSE_SECONDS, _PAUSE_SHARE * (monotonic() - begun))
    drawing.update()
    with suppress(OSError):
        told.send(drawing.failed)


class Drawing:
    """The pictures in a run folder, as far as its log and its newest detections go."""

    def __init__(self, run_dir: Path, job: Job) -> None:
        self.failed: Failed = {}
        """Pictures that could not be drawn, with the reason."""
        self._run_dir, self._job = run_dir, job
        self._news, self._events = follow(run_dir / EVENTS_FILE), list[Event]()
        self._detections = 0  # when the file was written whose detections are drawn

    def update(self) -> None:
        """Draw what is new: at first training mosaics and labels, then results, and what a better epoch detected."""
        if not (self._run_dir / "labels.jpg").exists() and "labels.jpg" not in self.failed:
            draw_training(self._run_dir, self._job, self.failed)
            with alone("labels.jpg", self.failed):
                plot_labels(self._job.train, self._run_dir / "labels.jpg")
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
            draw_detections(table, self._job.val, self._job.recipe.imgsz, self._run_dir, self.failed)
            self._detections = written


if __name__ == "__main__":
    os.nice(_NICENESS)
    cv2.setNumThreads(1)
    torch.set_num_threads(1)
    follow_training(Connection(int(sys.argv[1])))
