"""The confusion matrix of a detector."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from ray_yolo.ops.boxes import AnyFloats, pairwise_iou

CONFIDENCE, IOU = 0.25, 0.45  # A detection counts above this confidence, a pair above this IoU, as in YOLOv5.

Ints = NDArray[np.int64]


def confusion_matrix(detections: AnyFloats, images: Ints, classes: Ints, boxes: AnyFloats, num_classes: int) -> Ints:
    """Counts of detected classes by labelled class.

    In every image detections and labels of any class are paired by falling overlap, each used once (ties: the first).
    The last row and column are the background, for labels without a detection and detections without a label.

    Args:
        detections: (n, 7 or more) rows [image, x1, y1, x2, y2, score, class, ...] of a dataset.
        images, classes, boxes: (m,), (m,) and (m, 4) of the labels, xyxy in the unit of the detections.

    Returns:
        (num_classes + 1, num_classes + 1), [detected, labelled].
    """
    detections = detections[detections[:, 5] > CONFIDENCE]
    detected_classes = detections[:, 6].astype(np.int64)
    detected = np.full(len(images), num_classes)  # class of each label's detection
    labelled = np.full(len(detections), num_classes)  # class of each detection's label
    for image in np.intersect1d(detections[:, 0], images):
        rows, labels = np.flatnonzero(detections[:, 0] == image), np.flatnonzero(images == image)
        for row, label in _pairs(detections[rows, 1:5], boxes[labels]):
            detected[labels[label]] = detected_classes[rows[row]]
            labelled[rows[row]] = classes[labels[label]]
    unpaired = labelled == num_classes
    matrix = np.zeros((num_classes + 1, num_classes + 1), dtype=np.int64)
    np.add.at(matrix, (detected, classes), 1)
    np.add.at(matrix, (detected_classes[unpaired], num_classes), 1)
    return matrix


def _pairs(a: AnyFloats, b: AnyFloats) -> list[tuple[int, int]]:
    """Greedy matching of the rows of `a` and `b` by falling overlap, each used once."""
    overlaps = pairwise_iou(a.astype(np.float64), b.astype(np.float64))
    rows, columns = np.nonzero(overlaps > IOU)
    order = (-overlaps[rows, columns]).argsort(kind="stable")
    pairs: dict[int, int] = {}
    for row, column in zip(rows[order].tolist(), columns[order].tolist(), strict=True):
        if row not in pairs and column not in pairs.values():
            pairs[row] = column
    return list(pairs.items())
