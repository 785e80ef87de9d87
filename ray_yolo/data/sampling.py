"""Statistics of the labels that steer a training: rare and badly detected classes are drawn more often."""

from __future__ import annotations

import numpy as np

from ray_yolo.data.image_cache import loaded_sizes
from ray_yolo.structures import AnnotationIndex


def class_weights(classes: np.ndarray, num_classes: int) -> np.ndarray:
    """(num_classes,) weights in proportion to 1 / number of labels, with sum 1; absent classes count as one label."""
    counts = np.maximum(np.bincount(classes, minlength=num_classes), 1)
    return (1 / counts) / (1 / counts).sum()


def image_weights(index: AnnotationIndex, average_precisions: np.ndarray) -> np.ndarray:
    """(images,) weights: the sum over an image's labels of class weight x (1 - average precision)^2.

    Uniform where every weight is 0: no labels at all, or nothing left to learn.

    Args:
        average_precisions: (classes,) mAP50-95 of the last validation, 0 before the first one.
    """
    missing = (1 - average_precisions) ** 2
    label_weights = (class_weights(index.classes, len(index.names)) * missing)[index.classes]
    image_of_label = np.arange(len(index)).repeat(np.diff(index.offsets))
    weights = np.bincount(image_of_label, label_weights, minlength=len(index))
    return weights if weights.sum() > 0 else np.ones(len(index))


def label_sizes(index: AnnotationIndex, imgsz: int) -> np.ndarray:
    """(labels, 2) width and height of every box once its image's long side is `imgsz`, pixels."""
    scales = (loaded_sizes(index.sizes, imgsz) / index.sizes).repeat(np.diff(index.offsets), axis=0)
    return (index.boxes[:, 2:] - index.boxes[:, :2]) * scales[:, ::-1]
