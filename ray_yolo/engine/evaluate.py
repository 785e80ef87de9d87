"""Exact, sharded validation: each image once, with the same results for any number of workers.

Batches depend only on the data set. Workers evaluate whole batches. Their results are gathered as rows and sorted into
the data set's order before any sum. A training gathers them through its process group (`evaluate`); a validation on its
own combines what its workers return (`evaluate_batches`, `combine`).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from time import perf_counter
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from ray_yolo.config.sections import EvaluateConfig
from ray_yolo.core.events import ClassResult
from ray_yolo.core.structures import AnnotationIndex
from ray_yolo.data.geometry import box_areas
from ray_yolo.engine.collectives import Collectives
from ray_yolo.engine.devices import Mark, mark, seconds_between, to_device, wait_for
from ray_yolo.models.criterion import Criterion, image_numerators
from ray_yolo.models.detector import Detector
from ray_yolo.models.families import Family
from ray_yolo.ops.average_precision import IOU_THRESHOLDS, Curves, Metrics, match
from ray_yolo.ops.average_precision import evaluate as average_precision
from ray_yolo.ops.boxes import to_original
from ray_yolo.ops.coco_metrics import Detected, Labelled, coco_metrics
from ray_yolo.ops.network_input import unit_range
from ray_yolo.ops.nms import Selector

DETECTIONS_FILE = "detections.npy"  # A run's folder has those of the best epoch, from which plots are drawn.
STAGES = ("preprocess", "inference", "postprocess")
BITS = 2 ** np.arange(len(IOU_THRESHOLDS))


class EvaluatedBatches(NamedTuple):
    """The results of some batches of a validation."""

    sums: Tensor  # (batches, 1 + 2 x terms x counts) float64 rows [first image, numerators, counts]
    rows: Tensor  # (n, 8) float32 detections, as in `Evaluation`, in the order of the batches
    seconds: Tensor  # (1, 3) float64, by stage
    images: Tensor  # (images, 1 + terms x counts) float64 rows [image, numerators]; without rows unless requested


@dataclass(frozen=True)
class Evaluation:
    """The results of a validation, equal on every worker but for the detections."""

    metrics: Metrics
    losses: dict[str, float]  # each term with its gain, over the whole data set
    detections: np.ndarray
    """(n, 8) rows [image, x1, y1, x2, y2, score, class, bits], original pixels, by image. Only worker 0 has them: a
    million images have up to 9.6 GB."""
    speed: dict[str, float] = field(default_factory=dict)
    """Mean ms per image by stage. The first includes reading, the last suppression; on a GPU both overlap the rest."""
    image_losses: np.ndarray | None = None
    """(images, terms) float32 in the data set's order, if requested: the part of each image in the losses, times the
    number of images. Their mean over the images is `losses`, up to rounding."""

    @property
    def summary(self) -> dict[str, float]:
        """The four metrics of an epoch."""
        metrics = self.metrics
        return {"precision": metrics.precision, "recall": metrics.recall, "mAP50": metrics.map50,
                "mAP50-95": metrics.map}


def per_class(evaluation: Evaluation, index: AnnotationIndex) -> tuple[ClassResult, ...]:
    """The results of each class that has labels."""
    metrics = evaluation.metrics
    owners = index.owners
    results = []
    for number, name in enumerate(index.names):
        if not metrics.num_labels[number]:
            continue
        images = np.unique(owners[index.classes == number])
        results.append(ClassResult.model_validate({
            "name": name,
            "images": len(images),
            "labels": int(metrics.num_labels[number]),
            "precision": float(metrics.class_precision[number]),
            "recall": float(metrics.class_recall[number]),
            "mAP50": float(metrics.ap[number, 0]),
            "mAP50-95": float(metrics.ap[number].mean()),
        }))
    return tuple(results)


def twelve_numbers(evaluation: Evaluation, index: AnnotationIndex) -> dict[str, float]:
    """The twelve metrics of the COCO protocol, by name."""
    rows = evaluation.detections
    found = Detected(
        images=rows[:, 0].astype(np.int64),
        classes=rows[:, 6].astype(np.int64),
        scores=rows[:, 5].astype(np.float64),
        boxes=rows[:, 1:5].astype(np.float64),
    )
    owners = index.owners
    crowds = index.crowds  # rows [image, class, x1, y1, x2, y2, area]
    areas = box_areas(index.boxes) if index.areas is None else index.areas
    truth = Labelled(
        images=np.concatenate([owners, crowds[:, 0].astype(np.int64)]),
        classes=np.concatenate([index.classes, crowds[:, 1].astype(np.int64)]),
        boxes=np.concatenate([index.boxes.astype(np.float64), crowds[:, 2:6]]),
        areas=np.concatenate([areas, crowds[:, 6]]),
        crowd=np.repeat([False, True], [len(owners), len(crowds)]),
    )
    return coco_metrics(found, truth)._asdict()


def evaluate(model: Detector, family: Family, loss: Criterion, batches: Iterable[Mapping[str, Tensor]],
             index: AnnotationIndex, config: EvaluateConfig, precision: str, collectives: Collectives,
             device: torch.device) -> Evaluation:
    """Evaluate the model on the worker's `batches` and combine the results of all workers. Collective.

    Only worker 0 receives all detections, and computes the metrics.
    """
    own = evaluate_batches(model, family, loss, batches, index, config, precision, device)
    totals = collectives.gather(own.sums)
    table = _by_image(collectives.gather_on_first(own.rows))
    metrics = share_metrics(metrics_of(table, index) if collectives.rank == 0 else None, collectives)
    seconds = collectives.gather(own.seconds)
    return Evaluation(metrics, _losses(loss, totals), table, _speed(seconds, index))


def combine(parts: Sequence[EvaluatedBatches], loss: Criterion, index: AnnotationIndex) -> Evaluation:
    """The results of a validation from those of all its batches, whose division into parts has no effect."""
    table = _by_image(torch.cat([part.rows for part in parts]))
    losses = _losses(loss, torch.cat([part.sums for part in parts]))
    seconds = torch.cat([part.seconds for part in parts])
    rows = torch.cat([part.images for part in parts])
    image_losses = _image_losses(loss, rows, torch.cat([part.sums for part in parts])) if len(rows) else None
    return Evaluation(metrics_of(table, index), losses, table, _speed(seconds, index), image_losses)


def _by_image(rows: Tensor) -> np.ndarray:
    """Detections in the data set's order; those of an image keep their order."""
    table = rows.numpy()
    return table[np.argsort(table[:, 0], kind="stable")]


def _speed(seconds: Tensor, index: AnnotationIndex) -> dict[str, float]:
    """Mean milliseconds per image by stage, from rows of seconds by stage."""
    totals = seconds.sum(0).tolist()
    return {name: 1e3 * total / len(index) for name, total in zip(STAGES, totals, strict=True)}


@torch.no_grad()
def evaluate_batches(model: Detector, family: Family, loss: Criterion, batches: Iterable[Mapping[str, Tensor]],
                     index: AnnotationIndex, config: EvaluateConfig, precision: str, device: torch.device, *,
                     per_image: bool = False) -> EvaluatedBatches:
    """Evaluate the model on some batches of the data set. The results are on the host.

    While a device computes a batch, the host finishes the one before. It waits once a batch.

    Args:
        per_image: also measure the loss of each image, which computes the loss twice, and waits for each image.
    """
    model.eval()
    selector = Selector(config.confidence, iou=config.iou if family.suppress else None,
                        max_detections=config.max_detections, multi_label=model.num_classes > 1)
    evaluator = _Evaluator(model, family, loss, selector, index, precision, device, per_image)
    results = [evaluator.no_batches()]
    queued: _Queued | None = None
    reading, began = 0.0, perf_counter()
    for batch in batches:
        reading += perf_counter() - began
        previous, queued = queued, evaluator.queue(batch)
        if previous is not None:
            results.append(evaluator.finish(previous))
        began = perf_counter()
    if queued is not None:
        results.append(evaluator.finish(queued))
    seconds = torch.cat([result.seconds for result in results]).sum(0, keepdim=True)
    seconds[0, STAGES.index("preprocess")] += reading
    return EvaluatedBatches(
        sums=torch.cat([result.sums for result in results]),
        rows=torch.cat([result.rows for result in results]),
        seconds=seconds,
        images=torch.cat([result.images for result in results]),
    )


class _Queued(NamedTuple):
    """A batch whose results are on their way to the host. They are there at the last mark."""

    batch: Mapping[str, Tensor]
    candidates: Tensor | list[Tensor]  # what `Selector` returns
    sums: Tensor  # (2, terms, counts) float32 numerators and counts
    numerators: Tensor  # (B, terms, counts) float32 of each image; B is 0 unless requested
    marks: Sequence[Mark]  # start, images ready, boxes predicted, losses measured, candidates found


@dataclass(frozen=True)
class _Evaluator:
    """Evaluates a batch in two halves: `queue` waits for nothing, `finish` waits for the device."""

    model: Detector
    family: Family
    loss: Criterion
    selector: Selector
    index: AnnotationIndex
    precision: str
    device: torch.device
    per_image: bool

    def no_batches(self) -> EvaluatedBatches:
        """The results of no batch."""
        width = len(self.loss.names) * self.loss.num_counts
        return EvaluatedBatches(torch.zeros(0, 1 + 2 * width, dtype=torch.double), torch.zeros(0, 8),
                                torch.zeros(0, len(STAGES), dtype=torch.double),
                                torch.zeros(0, 1 + width, dtype=torch.double))

    def queue(self, batch: Mapping[str, Tensor]) -> _Queued:
        """Queue the device's part of a batch, up to the copies to the host."""
        start = mark(self.device)
        pixels, targets = to_device(self.device, batch["images"], batch["targets"])
        images = unit_range(pixels)
        prepared = mark(self.device)
        with autocast(self.device, self.precision):
            levels = self.model(images)
        boxes, scores = self.family.decode(self.model.head, levels)
        predicted = mark(self.device)

        image_size = images.shape[2], images.shape[3]
        measured = self.loss.measure(levels, targets, image_size)
        sums = torch.stack([measured.numerators, measured.counts])
        numerators = sums.new_zeros(0, *sums.shape[1:])
        if self.per_image:
            numerators = image_numerators(self.loss, levels, targets, image_size)

        before_search = mark(self.device)
        if len(self.index.names) == 1:  # the model's classes are ignored
            scores = scores.amax(-1, keepdim=True)
        candidates = self.selector.candidates(boxes, scores)
        sums = sums.to("cpu", non_blocking=True)
        numerators = numerators.to("cpu", non_blocking=True)
        found = mark(self.device)
        return _Queued(batch, candidates, sums, numerators, (start, prepared, predicted, before_search, found))

    def finish(self, queued: _Queued) -> EvaluatedBatches:
        """The results of a batch."""
        batch = queued.batch
        start, prepared, predicted, before_search, found = queued.marks
        wait_for(found)  # the only wait for the device
        began = perf_counter()
        selected = self.selector.detections(queued.candidates)
        suppression = perf_counter() - began
        seconds = [seconds_between(start, prepared), seconds_between(prepared, predicted),
                   seconds_between(before_search, found) + suppression]
        rows = [_match_image(detections.numpy(), batch, number, self.index)
                for number, detections in enumerate(selected)]
        indices = batch["indices"].double()
        return EvaluatedBatches(
            sums=torch.cat([indices[:1], queued.sums.double().flatten()])[None],
            rows=torch.from_numpy(np.concatenate(rows)),
            seconds=torch.tensor([seconds], dtype=torch.double),
            images=torch.cat([indices[: len(queued.numerators), None], queued.numerators.double().flatten(1)], 1),
        )


def autocast(device: torch.device, precision: str) -> torch.autocast:
    """The context in which a forward pass runs at a recipe's precision."""
    return torch.autocast(device.type, torch.float16 if precision == "fp16" else torch.bfloat16,
                          enabled=precision != "fp32")


def _match_image(detections: np.ndarray, batch: Mapping[str, Tensor], number: int, index: AnnotationIndex
                 ) -> np.ndarray:
    """Rows of the `number`-th image of a batch, (n, 8): detections in original pixels, and the IoU thresholds at which
    each is correct, as bits."""
    image = int(batch["indices"][number])
    truth = index[image]
    ratio_y, ratio_x = batch["ratios"][number].tolist()
    top, left = batch["pads"][number].tolist()
    rows = np.empty((len(detections), 8), np.float32)
    rows[:, 0] = image
    rows[:, 1:5] = to_original(detections[:, :4], (ratio_y, ratio_x), (top, left), truth.size)
    rows[:, 5:7] = detections[:, 4:]
    rows[:, 7] = match(rows[:, 1:7], truth.classes, truth.boxes) @ BITS
    return rows


def metrics_of(table: np.ndarray, index: AnnotationIndex) -> Metrics:
    """The metrics of a table of detections (see `Evaluation`)."""
    correct = (table[:, 7:].astype(np.int64) & BITS) > 0  # (n, 10): whether each is correct at each IoU threshold
    return average_precision(correct, table[:, 5].astype(np.float64), table[:, 6].astype(np.int64), index.classes,
                             len(index.names))


def share_metrics(metrics: Metrics | None, collectives: Collectives) -> Metrics:
    """The metrics that worker 0 has computed, bit for bit, on every worker. Collective."""
    if collectives.num_workers == 1:
        assert metrics is not None
        return metrics
    state = _tensors(asdict(metrics)) if metrics else None
    shared = _arrays(collectives.broadcast_state(state, source=0))
    return Metrics(**{**shared, "curves": Curves(**shared["curves"])})


def _tensors(fields: Mapping[str, Any]) -> dict[str, Any]:
    """Nested fields with tensors in place of arrays."""
    converted: dict[str, Any] = {}
    for name, value in fields.items():
        if isinstance(value, dict):
            converted[name] = _tensors(value)
        else:
            converted[name] = torch.from_numpy(value) if isinstance(value, np.ndarray) else value
    return converted


def _arrays(fields: Mapping[str, Any]) -> dict[str, Any]:
    """The inverse of `_tensors`."""
    converted: dict[str, Any] = {}
    for name, value in fields.items():
        if isinstance(value, dict):
            converted[name] = _arrays(value)
        else:
            converted[name] = value.numpy() if isinstance(value, Tensor) else value
    return converted


def _losses(loss: Criterion, totals: Tensor) -> dict[str, float]:
    """Losses of the data set from rows [first image of a batch, numerators, counts].

    A loss is the sum of numerators divided by the sum of counts per level, added in the order of batches. It is not a
    mean of means.
    """
    numerators, counts = _sums(loss, totals)
    return dict(zip(loss.names, loss.terms(numerators, counts).tolist(), strict=True))


def _sums(loss: Criterion, totals: Tensor) -> Tensor:
    """(2, terms, k) float32 numerators and counts of the data set, added in the order of batches."""
    ordered = totals[totals[:, 0].argsort(stable=True), 1:]
    return ordered.sum(0).view(2, len(loss.names), -1).float()


def _image_losses(loss: Criterion, rows: Tensor, totals: Tensor) -> np.ndarray:
    """(images, terms), as in `Evaluation`, from rows [image, numerators] and the rows of `_losses`.

    An image's numerators are divided by the counts of the whole data set, so that the losses of images compare.
    """
    _, counts = _sums(loss, totals)
    ordered = rows[rows[:, 0].argsort(stable=True), 1:].float()
    numerators = ordered.view(len(rows), len(loss.names), -1)
    losses = torch.stack([loss.terms(own, counts) for own in numerators]) * len(rows)
    return losses.numpy()
