"""Exact, sharded validation: each image once, with the same results for any number of workers.

Batches depend only on the data set. Workers evaluate whole batches. Their results are gathered as rows and sorted into
the data set's order before any sum. A training gathers them through its process group (`evaluate`); a validation on its
own combines what its workers return (`evaluate_batches`, `combine`).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from time import perf_counter
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from ray_yolo.config.sections import EvaluateConfig
from ray_yolo.core.events import ClassResult
from ray_yolo.core.structures import AnnotationIndex
from ray_yolo.data.labels import box_areas
from ray_yolo.engine.collectives import Collectives
from ray_yolo.models.criterion import Criterion
from ray_yolo.models.detector import Detector
from ray_yolo.models.families import Family
from ray_yolo.ops.average_precision import IOU_THRESHOLDS, Metrics, match
from ray_yolo.ops.average_precision import evaluate as average_precision
from ray_yolo.ops.boxes import to_original
from ray_yolo.ops.coco_metrics import Detected, Labelled, coco_metrics
from ray_yolo.ops.nms import select

STAGES = ("preprocess", "inference", "postprocess")
BITS = 2 ** np.arange(len(IOU_THRESHOLDS))


class EvaluatedBatches(NamedTuple):
    """The results of some batches of a validation."""

    sums: Tensor  # (batches, 1 + 2 x terms x counts) float64 rows [first image, numerators, counts]
    rows: Tensor  # (n, 8) float32 detections, as in `Evaluation`, in the order of the batches
    seconds: Tensor  # (1, 3) float64, by stage


@dataclass(frozen=True)
class Evaluation:
    """The results of a validation, equal on every worker."""

    metrics: Metrics
    losses: dict[str, float]  # each term with its gain, over the whole data set
    detections: np.ndarray  # (n, 8) rows [image, x1, y1, x2, y2, score, class, bits], original pixels, by image
    speed: dict[str, float] = field(default_factory=dict)  # mean ms per image by stage; the first includes reading

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
    return tuple(
        ClassResult.model_validate({
            "name": name, "images": len(np.unique(owners[index.classes == number])),
            "labels": int(metrics.num_labels[number]), "precision": float(metrics.class_precision[number]),
            "recall": float(metrics.class_recall[number]), "mAP50": float(metrics.ap[number, 0]),
            "mAP50-95": float(metrics.ap[number].mean())})
        for number, name in enumerate(index.names) if metrics.num_labels[number])


def twelve_numbers(evaluation: Evaluation, index: AnnotationIndex) -> dict[str, float]:
    """The twelve metrics of the COCO protocol, by name."""
    rows = evaluation.detections
    owners = index.owners
    crowds, areas = index.crowds, box_areas(index.boxes) if index.areas is None else index.areas
    truth = Labelled(np.concatenate([owners, crowds[:, 0].astype(np.int64)]),
                     np.concatenate([index.classes, crowds[:, 1].astype(np.int64)]),
                     np.concatenate([index.boxes.astype(np.float64), crowds[:, 2:6]]),
                     np.concatenate([areas, crowds[:, 6]]), np.arange(len(owners) + len(crowds)) >= len(owners))
    numbers = coco_metrics(Detected(rows[:, 0].astype(np.int64), rows[:, 6].astype(np.int64),
                                    rows[:, 5].astype(np.float64), rows[:, 1:5].astype(np.float64)), truth)
    return numbers._asdict()


def evaluate(model: Detector, family: Family, loss: Criterion, batches: Iterable[Mapping[str, Tensor]],
             index: AnnotationIndex, config: EvaluateConfig, precision: str, collectives: Collectives,
             device: torch.device) -> Evaluation:
    """Evaluate the model on the worker's `batches` and combine the results of all workers. Collective."""
    own = evaluate_batches(model, family, loss, batches, index, config, precision, device)
    everything = EvaluatedBatches(*(collectives.gather(part) for part in own))
    return combine([everything], loss, index)


def combine(parts: Sequence[EvaluatedBatches], loss: Criterion, index: AnnotationIndex) -> Evaluation:
    """The results of a validation from those of all its batches, whose division into parts has no effect.

    A loss is the sum of numerators divided by the sum of counts per level, added in the order of batches. It is not a
    mean of means.
    """
    table = torch.cat([part.rows for part in parts]).numpy()
    table = table[np.argsort(table[:, 0], kind="stable")]
    seconds = torch.cat([part.seconds for part in parts]).sum(0).tolist()
    speed = {name: 1e3 * each / len(index) for name, each in zip(STAGES, seconds, strict=True)}
    losses = _losses(loss, torch.cat([part.sums for part in parts]))
    return Evaluation(metrics_of(table, index), losses, table, speed)


@torch.no_grad()
def evaluate_batches(model: Detector, family: Family, loss: Criterion, batches: Iterable[Mapping[str, Tensor]],
                     index: AnnotationIndex, config: EvaluateConfig, precision: str, device: torch.device
                     ) -> EvaluatedBatches:
    """Evaluate the model on some batches of the data set. The results are on the host."""
    model.eval()
    rows: list[Tensor] = [torch.zeros(0, 8)]
    sums: list[Tensor] = []
    timer = _StageTimer(device)
    for batch in batches:
        images = batch["images"].to(device).float().div_(255).contiguous(memory_format=torch.channels_last)
        timer.lap(0)
        with autocast(device, precision):
            levels = model(images)
        boxes, scores = family.decode(model.head, levels)
        timer.lap(1)
        measured = loss.measure(levels, batch["targets"].to(device), (images.shape[2], images.shape[3]))
        sums.append(torch.cat([batch["indices"][:1].double().to(device),
                               measured.numerators.double().flatten(), measured.counts.double().flatten()]))
        timer.lap(None)
        if len(index.names) == 1:  # the model's classes are ignored
            scores = scores.amax(-1, keepdim=True)
        selected = select(boxes, scores, confidence=config.confidence, iou=config.iou if family.suppress else None,
                       max_detections=config.max_detections, multi_label=model.num_classes > 1)
        timer.lap(2)
        rows += [_match_image(detections.cpu(), batch, number, index) for number, detections in enumerate(selected)]
        timer.lap(None)
    width = 1 + 2 * len(loss.names) * loss.num_counts
    totals = torch.stack(sums).cpu() if sums else torch.zeros(0, width, dtype=torch.double)
    return EvaluatedBatches(totals, torch.cat(rows), torch.tensor([timer.seconds], dtype=torch.double))


class _StageTimer:
    """Seconds by stage. It synchronises with the device at the end of each."""

    def __init__(self, device: torch.device) -> None:
        self._device, self._last = device, perf_counter()
        self.seconds = [0.0] * len(STAGES)

    def lap(self, stage: int | None) -> None:
        """Add the time since the last lap to a stage; None: to no stage."""
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)
        now = perf_counter()
        if stage is not None:
            self.seconds[stage] += now - self._last
        self._last = now


def autocast(device: torch.device, precision: str) -> torch.autocast:
    """The context in which a forward pass runs at a recipe's precision."""
    return torch.autocast(device.type, torch.float16 if precision == "fp16" else torch.bfloat16,
                          enabled=precision != "fp32")


def _match_image(detections: Tensor, batch: Mapping[str, Tensor], number: int, index: AnnotationIndex) -> Tensor:
    """Rows of the `number`-th image of a batch, (n, 8): detections in original pixels, and the IoU thresholds at which
    each is correct, as bits."""
    image = int(batch["indices"][number])
    truth = index[image]
    (ratio_y, ratio_x), (top, left) = batch["ratios"][number].tolist(), batch["pads"][number].tolist()
    boxes = to_original(detections[:, :4], (ratio_y, ratio_x), (top, left), truth.size)
    detections = torch.cat([boxes, detections[:, 4:]], 1)
    correct = match(detections, torch.from_numpy(truth.classes.copy()), torch.from_numpy(truth.boxes.copy()))
    bits = (correct * torch.from_numpy(BITS)).sum(1, keepdim=True)
    return torch.cat([torch.full_like(bits, image), detections, bits], 1).float()


def metrics_of(table: np.ndarray, index: AnnotationIndex) -> Metrics:
    """The metrics of a table of detections (see `Evaluation`)."""
    correct = (table[:, 7:].astype(np.int64) & BITS) > 0  # (n, 10): whether each is correct at each IoU threshold
    return average_precision(correct, table[:, 5].astype(np.float64), table[:, 6].astype(np.int64), index.classes,
                             len(index.names))


def _losses(loss: Criterion, totals: Tensor) -> dict[str, float]:
    """Losses of the data set from rows [first image of a batch, numerators, counts]."""
    ordered = totals[totals[:, 0].argsort(stable=True), 1:]
    numerators, counts = ordered.sum(0).view(2, len(loss.names), -1).float()
    return dict(zip(loss.names, loss.terms(numerators, counts).tolist(), strict=True))
