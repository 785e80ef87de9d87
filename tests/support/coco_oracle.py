"""The COCO numbers of a reference implementation, and random cases full of ties to try them on."""

import contextlib
import io
from typing import Any

import numpy as np

from ray_yolo.ops.coco_metrics import Detected, Floats, Labelled


def reference(found: Detected, truth: Labelled, coco: Any, evaluator: Any) -> list[float]:
    """The twelve numbers by the given pair of classes (`COCO`, `COCOeval`) of pycocotools or of its kin."""
    images = range(1 + max(found.images.max(initial=0), truth.images.max(initial=0)))
    classes = range(1 + max(found.classes.max(initial=0), truth.classes.max(initial=0)))
    shared: dict[str, Any] = {
        "info": {}, "images": [{"id": i} for i in images], "categories": [{"id": c, "name": str(c)} for c in classes]}
    labels = zip(truth.images, truth.classes, truth.boxes, truth.areas, truth.crowd, strict=True)
    detections = zip(found.images, found.classes, found.boxes, found.scores, strict=True)
    with contextlib.redirect_stdout(io.StringIO()):  # they print
        known = load(coco, shared, [
            entry(number, *label[:3]) | {"area": float(label[3]), "iscrowd": int(label[4])}
            for number, label in enumerate(labels, start=1)])
        guessed = load(coco, shared, [
            entry(number, *row[:3]) | {"area": float(np.prod(row[2][2:] - row[2][:2])), "iscrowd": 0,
                                       "score": float(row[3])}
            for number, row in enumerate(detections, start=1)])
        evaluation = evaluator(known, guessed, "bbox")
        evaluation.evaluate()
        evaluation.accumulate()
        evaluation.summarize()
    return [float(value) for value in evaluation.stats[:12]]


def entry(number: int, image: int, index: int, box: Floats) -> dict[str, Any]:
    left, top, right, bottom = box.tolist()
    return {"id": number, "image_id": int(image), "category_id": int(index),
            "bbox": [left, top, right - left, bottom - top]}


def load(coco: Any, shared: dict[str, Any], annotations: list[dict[str, Any]]) -> Any:
    result = coco()
    result.dataset = shared | {"annotations": annotations}
    result.createIndex()
    return result


def random_case(seed: int) -> tuple[Detected, Labelled]:
    """Up to five images, three classes: empty images, crowds, equal scores, overlaps on the very thresholds."""
    rng = np.random.default_rng(seed)
    num_images, num_classes = int(rng.integers(1, 6)), int(rng.integers(1, 4))
    grid = int(rng.choice([0, 0, 4]))  # whole multiples make equal overlaps
    num_labels, num = int(rng.integers(0, 13)), int(rng.integers(0, 41))

    images, classes = rng.integers(0, num_images, num_labels), rng.integers(0, num_classes, num_labels)
    boxes = snapped(random_boxes(rng, num_labels), grid)
    shares = rng.choice([1.0, 0.6], num_labels)  # an outline covers less than its box
    truth = Labelled(images, classes, boxes, shares * np.prod(boxes[:, 2:] - boxes[:, :2], axis=1),
                     rng.random(num_labels) < 0.15)

    scores = rng.integers(1, 8, num) / 8 if rng.random() < 0.5 else rng.random(num)
    guessed_images, guessed_classes = rng.integers(0, num_images, num), rng.integers(0, num_classes, num)
    guessed = random_boxes(rng, num)
    if num_labels:
        target, near = rng.integers(0, num_labels, num), rng.random(num) < 0.85
        sides = np.tile(boxes[target, 2:] - boxes[target, :2], 2)
        guessed = np.where(near[:, None], boxes[target] + rng.normal(0, 0.12, (num, 4)) * sides, guessed)
        guessed_images = np.where(near, images[target], guessed_images)
        guessed_classes = np.where(near, classes[target], guessed_classes)
    return Detected(guessed_images, guessed_classes, scores, snapped(guessed, grid)), truth


def random_boxes(rng: np.random.Generator, num: int) -> Floats:
    corner, size = rng.uniform(0, 100, (num, 2)), np.exp(rng.normal(3.7, 1.0, (num, 2)))  # sizes around 40 px
    return np.concatenate([corner, corner + size], axis=1)


def snapped(boxes: Floats, grid: int) -> Floats:
    """Boxes on whole multiples of `grid` (as they are for 0), at least one wide and high."""
    if grid:
        boxes = np.round(boxes / grid) * grid
    return np.concatenate([boxes[:, :2], np.maximum(boxes[:, 2:], boxes[:, :2] + max(grid, 1))], axis=1)
