"""Pictures of a training: mosaics and labels, curves, detections next to labels, confusion matrices."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import islice
from pathlib import Path
from typing import TypeVar

import numpy as np
from torch import Tensor

from ray_yolo.core.errors import InputError
from ray_yolo.core.events import DatasetEvent, EpochEvent, Event, StartEvent, StepEvent
from ray_yolo.core.redact import reason_of
from ray_yolo.core.structures import AnnotationIndex
from ray_yolo.data.image_cache import ImageStore
from ray_yolo.data.index import read_splits, select_part
from ray_yolo.engine.evaluate import DETECTIONS_FILE, metrics_of
from ray_yolo.engine.spec import TrainSpec
from ray_yolo.engine.team import first_batches
from ray_yolo.ops.confusion import confusion_matrix
from ray_yolo.ops.label_errors import DoubtfulLabel
from ray_yolo.plots.boxes import Picture, plot_pictures, plot_truth_and_detections
from ray_yolo.plots.labels import plot_labels
from ray_yolo.plots.metrics import plot_all_curves, plot_confusion
from ray_yolo.plots.results import plot_results
from ray_yolo.runs.event_log import epoch_rows, last_of, surviving
from ray_yolo.runs.run_record import RECORD_FILE, RunRecord, read_record
from ray_yolo.sinks.retry import RecordError

NUM_BATCHES = 3  # YOLOv5 draws as many
TRAIN_PICTURES, VAL_PICTURES = 16, 8  # each batch shows this many pictures
SHEET_PICTURES = 24  # each picture of `val --worst` shows this many
SHOWN_CONFIDENCE = 0.25

LAST_PICTURE = "confusion_matrix_normalized.png"
"""The last one that `draw_detections` draws."""

Item = TypeVar("Item")
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
        name = f"train_batch{number}.jpg"
        with isolated(name, failed):
            shown = list(islice(pictures, TRAIN_PICTURES))
            if shown:
                plot_pictures(shown, spec.names, folder / name)


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
        plot_confusion(matrix, index.names, folder / LAST_PICTURE, normalised=True)


def draw_worst_images(images: Sequence[int], losses: np.ndarray, table: np.ndarray, index: AnnotationIndex, imgsz: int,
                      folder: Path, failed: Failed) -> None:
    """worst_images0.jpg ...: labels next to detections of some images, with their losses (all images,)."""
    store = ImageStore(index, imgsz, smooth=True)
    for number, some in enumerate(_sheets(images)):
        with isolated(name := f"worst_images{number}.jpg", failed):
            pairs = [_compare(image, table, index, store) for image in some]
            truth = [labelled._replace(title=f"{losses[image]:.3g} {labelled.title}")
                     for image, (labelled, _) in zip(some, pairs, strict=True)]
            plot_truth_and_detections(truth, [detected for _, detected in pairs], index.names, folder / name)


def draw_doubtful_labels(labels: Sequence[DoubtfulLabel], index: AnnotationIndex, imgsz: int, folder: Path,
                         failed: Failed) -> None:
    """worst_labels0.jpg ...: each label, or the detection without one, on its image, with its kind and doubt."""
    store = ImageStore(index, imgsz, smooth=True)
    for number, some in enumerate(_sheets(labels)):
        with isolated(name := f"worst_labels{number}.jpg", failed):
            plot_pictures([_doubtful(label, index, store) for label in some], index.names, folder / name)


def _doubtful(label: DoubtfulLabel, index: AnnotationIndex, store: ImageStore) -> Picture:
    """The image of a doubtful label with its box."""
    pixels, labelled = store.load_or_grey(label.image), index[label.image]
    scale = pixels.shape[1] / labelled.size[1]
    shown = label.detected if label.labelled is None else label.labelled
    instead = f", {index.names[label.detected]}?" if label.kind == "wrong class" and label.detected is not None else ""
    return Picture(pixels, np.array([label.box]) * scale, np.array([shown], np.int64),
                   title=f"{label.kind} {label.doubt:.2f}{instead} {Path(labelled.path).name}")


def _sheets(items: Sequence[Item]) -> Iterator[Sequence[Item]]:
    """Parts that fit into one picture each."""
    for first in range(0, len(items), SHEET_PICTURES):
        yield items[first : first + SHEET_PICTURES]


def _compare(image: int, table: np.ndarray, index: AnnotationIndex, store: ImageStore) -> tuple[Picture, Picture]:
    """One validation image with its labels, and with its detections."""
    pixels, labelled = store.load_or_grey(image), index[image]
    scale = pixels.shape[1] / labelled.size[1]
    rows = table[(table[:, 0] == image) & (table[:, 5] > SHOWN_CONFIDENCE)]
    return (Picture(pixels, labelled.boxes * scale, labelled.classes, title=Path(labelled.path).name),
            Picture(pixels, rows[:, 1:5] * scale, rows[:, 6].astype(np.int64), rows[:, 5]))


class Pictures:
    """The pictures of a training, drawn from its log, its data set and its newest detections.

    A picture is drawn if its file is missing or older than what it shows, so nothing is drawn twice.

    Args:
        data_folders: where a relative path of the data set may start.
    """

    name, uses_time = "pictures", True

    def __init__(self, folder: Path, data_folders: Sequence[Path]) -> None:
        self._folder, self._data_folders = folder, data_folders
        self._spec: TrainSpec | None = None
        self._failed: Failed = {}

    def update(self, events: Sequence[Event], ended: bool) -> None:
        """Draw everything new: first mosaics and labels, then results, and the detections of a better epoch.

        Raises:
            RecordError: if some could not be drawn; the others are. The cause may pass: a full disk, a table that is
                being written.
            InputError: if the data set cannot be read, or its labels are others now.
        """
        rows = epoch_rows(surviving(events))
        # A start may void rows, so it changes the curves, too.
        changed_at = max((event.time for event in events if isinstance(event, (StartEvent, EpochEvent))), default=0.0)
        if rows and _is_older(self._folder / "results.png", changed_at):
            with isolated("results.png", self._failed):
                plot_results(rows, self._folder / "results.png")
        if any(isinstance(event, (StepEvent, EpochEvent)) for event in events):
            self._draw_images(last_of(events, DatasetEvent))
        if self._failed:
            raise RecordError("not drawn: " + ", ".join(f"{name} ({reason})" for name, reason in self._failed.items()))

    def _draw_images(self, dataset: DatasetEvent | None) -> None:
        folder, table = self._folder, self._folder / DETECTIONS_FILE
        needs_training = bool(self._failed) or not (folder / "labels.jpg").exists()
        needs_detections = table.exists() and (
            bool(self._failed) or _is_older(folder / LAST_PICTURE, table.stat().st_mtime))
        if not (needs_training or needs_detections):
            return
        spec = self._spec = self._spec or recorded_spec(folder, self._data_folders, dataset)
        if needs_training:
            draw_training(folder, spec, self._failed)
            with isolated("labels.jpg", self._failed):
                plot_labels(spec.train, folder / "labels.jpg")
        if needs_detections:
            # A table that is being written cannot be read; the next update can.
            with isolated(DETECTIONS_FILE, self._failed):
                detections = np.load(table, allow_pickle=False)
                draw_detections(detections, spec.val, spec.recipe.imgsz, folder, self._failed)


def recorded_spec(folder: Path, data_folders: Sequence[Path], dataset: DatasetEvent | None) -> TrainSpec:
    """The training of a run folder, with its data set as it is now.

    Args:
        dataset: the data set at the last start; without it or in an older log, validation labels are not compared.

    Raises:
        InputError: if the data set cannot be read, or its labels are not those that were trained.
    """
    record = read_record(folder)
    if not isinstance(record, RunRecord):
        raise InputError(f"{folder.resolve() / RECORD_FILE}: is not the record of a training")
    recipe = record.recipe
    data = recipe.data
    for folder_of_data in data_folders:  # the first that has it
        if (folder_of_data / recipe.data).exists():
            data = str(folder_of_data / recipe.data)
            break
    recipe = recipe.model_copy(update={"data": data})
    _, train, val = read_splits(recipe)
    train, val = select_part(recipe, train, val)
    validated = dataset.splits["val"].digest if dataset and "val" in dataset.splits else ""
    for kind, then, now in (("training", record.labels, train.digest),
                            ("validation", validated or val.digest, val.digest)):
        if now != then:
            raise InputError(f"{data}: the {kind} labels have changed since the training, so its images are not drawn")
    return TrainSpec(recipe=recipe, digest=record.digest, names=record.names, run_dir=folder,
                     architecture=record.architecture, anchors=record.anchors, train=train, val=val)


def _is_older(path: Path, seconds: float) -> bool:
    """Whether a file is missing, or was written before a time."""
    return not path.exists() or path.stat().st_mtime < seconds
