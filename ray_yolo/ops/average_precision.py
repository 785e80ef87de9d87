"""Average precision as in YOLOv5; `coco_metrics` has the COCO protocol.

`match` finds the correct detections of one image; `evaluate` computes the metrics of a dataset from these.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from ray_yolo.ops.boxes import AnyFloats, pairwise_iou

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]

IOU_THRESHOLDS = (0.5, 0.55, 0.6, 0.65, 0.7, 0.75, 0.8, 0.85, 0.9, 0.95)
GRID = np.linspace(0.0, 1.0, 1000)  # confidences and recalls at which curves are sampled
RECALLS = np.linspace(0.0, 1.0, 101)  # nodes of the trapezoidal rule for the area under the curve
_THRESHOLDS = np.array(IOU_THRESHOLDS, np.float32)  # the precision of overlaps
SMOOTHING = 0.1  # width of the box filter over mean F1, as a share of the grid


@dataclass(frozen=True)
class Curves:
    """Curves for plots, at IoU 0.5 on `GRID`; each (classes, 1000), zero for classes without labels."""

    precision: Floats  # against confidence
    recall: Floats  # against confidence
    f1: Floats  # against confidence
    precision_at_recall: Floats  # the interpolated envelope, against recall


@dataclass(frozen=True)
class Metrics:
    """Detection metrics of a dataset. Classes without labels have zeros and are left out of means."""

    ap: Floats  # (classes, 10) average precision at `IOU_THRESHOLDS`
    class_precision: Floats  # (classes,) at `confidence`, IoU 0.5
    class_recall: Floats  # (classes,)
    num_labels: Ints  # (classes,)
    confidence: float  # the one with the highest smoothed mean F1
    precision: float  # mean at `confidence`, IoU 0.5
    recall: float  # mean at `confidence`, IoU 0.5
    map50: float  # mean average precision at IoU 0.5
    map: float  # mean average precision over `IOU_THRESHOLDS`
    curves: Curves


def match(detections: AnyFloats, classes: Ints, boxes: AnyFloats) -> NDArray[np.bool_]:
    """The correct detections of one image, for each of `IOU_THRESHOLDS`.

    A detection claims the label of its class with the largest IoU, if it reaches the threshold. A label with several
    claims goes to the detection of highest score. Ties go to the first. If the largest IoU decided instead, a box of
    score 0.002 could turn a confident neighbour into an error.

    Args:
        detections: (n, 6) float32 rows [x1, y1, x2, y2, score, class] in any order.
        classes: (m,) classes of the labels.
        boxes: (m, 4) float32 boxes of the labels, xyxy in the unit of the detections.

    Returns:
        (n, 10) bool.
    """
    num_levels = len(IOU_THRESHOLDS)
    if not len(detections) or not len(boxes):
        return np.zeros((len(detections), num_levels), bool)
    same_class = detections[:, 5, None] == classes
    overlaps = pairwise_iou(detections[:, :4], boxes)
    overlaps = np.where(same_class & (overlaps > 0), overlaps, 0)  # NaN, of boxes without area, is not > 0
    label = overlaps.argmax(axis=1)
    reached = np.searchsorted(_THRESHOLDS, overlaps.max(axis=1), side="right")  # (n,): claims at the first so many

    # Claims of a label by falling score: each gets the thresholds above all that its betters reached. One running
    # maximum serves all labels, since the numbers of a label exceed those of the labels before.
    order = np.lexsort((-detections[:, 4], label))
    base = label * (num_levels + 1)
    numbers = np.maximum.accumulate((base + reached)[order])
    taken = np.zeros_like(reached)  # (n,): the first so many thresholds belong to better detections
    taken[order[1:]] = numbers[:-1] - base[order[1:]]  # negative for the first of a label
    level = np.arange(num_levels)
    return (taken[:, None] <= level) & (level < reached[:, None])


def evaluate(correct: NDArray[np.bool_], scores: Floats, detected_classes: Ints, true_classes: Ints, num_classes: int
             ) -> Metrics:
    """Precision, recall and average precision of a dataset.

    Ties of scores keep the order of the rows, so equal rows in equal order give equal bits.

    Args:
        correct: (n, 10) concatenated results of `match` of all images.
        scores: (n,) scores of these detections.
        detected_classes: (n,) their classes.
        true_classes: (m,) classes of all labels.
    """
    true_classes, detected_classes = true_classes.astype(np.int64), detected_classes.astype(np.int64)
    num_labels = np.bincount(true_classes, minlength=num_classes)
    num_detections = np.bincount(detected_classes, minlength=num_classes)
    order = np.lexsort((-scores, detected_classes))
    ends = np.cumsum(num_detections)

    ap = np.zeros((num_classes, len(IOU_THRESHOLDS)))
    curves = Curves(*(np.zeros((num_classes, len(GRID))) for _ in range(4)))
    for index in np.flatnonzero(num_labels * num_detections):
        rows = order[ends[index] - num_detections[index]:ends[index]]
        hits = correct[rows].cumsum(axis=0)  # (n, 10)
        recall = hits / num_labels[index]
        precision = hits / np.arange(1, len(rows) + 1)[:, None]
        for level in range(len(IOU_THRESHOLDS)):
            envelope = np.interp(RECALLS, *_envelope(recall[:, level], precision[:, level]))
            ap[index, level] = np.trapezoid(envelope, RECALLS)
        # np.interp needs ascending abscissae, but scores descend. Above the highest score there are no detections.
        curves.recall[index] = np.interp(-GRID, -scores[rows], recall[:, 0], left=0.0)
        curves.precision[index] = np.interp(-GRID, -scores[rows], precision[:, 0], left=1.0)
        curves.precision_at_recall[index] = np.interp(GRID, *_envelope(recall[:, 0], precision[:, 0]))
    total = curves.precision + curves.recall
    np.divide(2 * curves.precision * curves.recall, total, out=curves.f1, where=total > 0)
    return _summary(ap, curves, num_labels)


def _summary(ap: Floats, curves: Curves, num_labels: Ints) -> Metrics:
    labelled = num_labels > 0
    best = int(_smooth(_mean(curves.f1[labelled])).argmax())
    precision, recall = curves.precision[:, best], curves.recall[:, best]
    return Metrics(ap=ap, class_precision=precision, class_recall=recall, num_labels=num_labels,
                   confidence=float(GRID[best]), precision=float(_mean(precision[labelled])),
                   recall=float(_mean(recall[labelled])), map50=float(_mean(ap[labelled, 0])),
                   map=float(_mean(ap[labelled].mean(axis=1))), curves=curves)


def _mean(values: Floats) -> Floats:
    """Mean over the first axis; zero if it is empty."""
    return values.sum(axis=0) / max(len(values), 1)


def _envelope(recall: Floats, precision: Floats) -> tuple[Floats, Floats]:
    """Recall and the highest precision at that recall or above, from (0, 1) to (1, 0).

    As in YOLOv5, curves that reach recall 1 also end at precision 0: a perfect detector has area 0.995.
    """
    recall = np.concatenate([[0.0], recall, [1.0]])
    precision = np.concatenate([[1.0], precision, [0.0]])
    return recall, np.maximum.accumulate(precision[::-1])[::-1]


def _smooth(values: Floats) -> Floats:
    """Moving average over an odd number of points, `SMOOTHING` of the grid, with the end values repeated."""
    half = round(len(values) * SMOOTHING / 2)
    return np.convolve(np.pad(values, half, mode="edge"), np.full(2 * half + 1, 1 / (2 * half + 1)), mode="valid")
