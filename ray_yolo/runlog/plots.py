"""Which pictures of a data set and of a validation there are, and what goes into each."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from itertools import islice
from pathlib import Path

import numpy as np
from torch import Tensor

from ray_yolo.data.image_cache import ImageStore
from ray_yolo.engine.build import Job, first_batches
from ray_yolo.engine.evaluate import metrics_of
from ray_yolo.ops.confusion import confusion_matrix
from ray_yolo.plots.boxes import Picture, plot_pictures, plot_truth_and_detections
from ray_yolo.plots.metrics import plot_all_curves, plot_confusion
from ray_yolo.runlog.projections import reason_of
from ray_yolo.structures import AnnotationIndex

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


def draw_training(folder: Path, job: Job, failed: Failed) -> None:
    """train_batch0.jpg ...: the first pictures of the first epoch, made again from their keys."""
    shown = (picture for batch in first_batches(job) for picture in _pictures(batch))
    for number in range(NUM_BATCHES):
        with alone(name := f"train_batch{number}.jpg", failed):
            if pictures := list(islice(shown, TRAIN_PICTURES)):
                plot_pictures(pictures, job.names, folder / name)


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
