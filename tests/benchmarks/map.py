"""The twelve COCO numbers of ours against pycocotools and faster-coco-eval, from arrays of detections and labels.

    python tests/benchmarks/run.py map [--images 500] [--detections 100] [--rounds 3]

Before anything is timed all of them have to agree to 1e-6. The others get what their interface asks for, rows as
dictionaries, the making of which is counted: ours takes the arrays that a validation has.
"""

from __future__ import annotations

import argparse

import faster_coco_eval
import numpy as np
from pycocotools.coco import COCO
from pycocotools.cocoeval import COCOeval

from ray_yolo.ops.coco_metrics import Detected, Labelled, coco_metrics
from tests.benchmarks.contestant import timed
from tests.benchmarks.harness import report, take_turns
from tests.support.coco_oracle import reference

CLASSES, LABELS = 80, 7  # labels of an image, as COCO has


def main(argv: list[str]) -> None:
    parser = argparse.ArgumentParser(prog="run.py map")
    parser.add_argument("--images", type=int, default=500)
    parser.add_argument("--detections", type=int, default=100, help="of an image")
    parser.add_argument("--rounds", type=int, default=3)
    given = parser.parse_args(argv)
    case = draw(given.images, given.detections)
    ways = {"ours": lambda: list(coco_metrics(*case)),
            "pycocotools": lambda: reference(*case, COCO, COCOeval),
            "faster-coco-eval": lambda: reference(*case, faster_coco_eval.COCO, faster_coco_eval.COCOeval_faster)}
    numbers = {name: np.array(way()) for name, way in ways.items()}
    furthest = max(float(np.abs(each - numbers["ours"]).max()) for each in numbers.values())
    if furthest > 1e-6:
        raise SystemExit(f"other numbers: they differ by {furthest:.1e}")
    turns = take_turns({name: (lambda way=way: timed(way)) for name, way in ways.items()}, given.rounds, warm_up=0)
    report("map", turns, gate=furthest)


def draw(images: int, detections: int) -> tuple[Detected, Labelled]:
    """Labels at random, and detections around them, by and by further off and of other classes."""
    rng = np.random.default_rng(0)
    count = images * LABELS
    low, size = rng.uniform(0, 500, (count, 2)), np.exp(rng.uniform(2, 5.3, (count, 2)))
    boxes, classes = np.hstack([low, low + size]), rng.integers(0, CLASSES, count)
    truth = Labelled(np.repeat(np.arange(images), LABELS), classes, boxes, size.prod(1), rng.random(count) < 0.01)
    which = (np.arange(images)[:, None] * LABELS + rng.integers(0, LABELS, (images, detections))).ravel()
    off = rng.exponential(0.2, len(which))
    moved = boxes[which] + np.tile(size[which], 2) * rng.normal(0, 1, (len(which), 4)) * off[:, None]
    moved[:, 2:] = np.maximum(moved[:, 2:], moved[:, :2] + 1)
    other = rng.random(len(which)) < off
    guessed = np.where(other, rng.integers(0, CLASSES, len(which)), classes[which])
    scores = np.exp(-3 * off) * rng.uniform(0.3, 1, len(which))
    return Detected(which // LABELS, guessed, scores, moved), truth
