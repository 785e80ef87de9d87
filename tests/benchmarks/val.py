"""Validation of the same network, weights and pictures by ours and by Ultralytics: CPU seconds of an image.

    python tests/benchmarks/run.py val [--images 64] [--imgsz 320] [--threads 1] [--rounds 3]

yolov5nu with weights at random, whose scores are raised until as many boxes pass 0.001 as early in a training. Reading,
network, suppression and metrics are counted. Before anything is timed both have to detect as many boxes, to 2 %.
"""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch

from ray_yolo.config.sections import EvaluateConfig, LossConfig
from ray_yolo.config.yaml import to_yaml
from ray_yolo.core.system import keep_freed_memory
from ray_yolo.data.dataset_yaml import read_description
from ray_yolo.data.image_cache import ImageStore
from ray_yolo.data.index import read_index
from ray_yolo.engine.collectives import Collectives
from ray_yolo.engine.evaluate import evaluate
from ray_yolo.engine.spec import CPU, WorkerContext
from ray_yolo.engine.team import val_loader
from ray_yolo.models.families import build_model, find_family
from tests.benchmarks.contestant import serve
from tests.benchmarks.data import write_photos
from tests.benchmarks.harness import contestant, report, take_turns

MODEL, CLASSES, BATCH, SAME = "yolov5nu", 80, 32, 0.02


def main(argv: list[str]) -> None:
    parser = argparse.ArgumentParser(prog="run.py val")
    parser.add_argument("--images", type=int, default=64)
    parser.add_argument("--imgsz", type=int, default=320)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--contestant", help=argparse.SUPPRESS)
    given = parser.parse_args(argv)
    if given.contestant:
        return answer(given)
    with tempfile.TemporaryDirectory() as folder:
        os.environ["RAY_YOLO_CACHE"] = f"{folder}/cache"
        data, weights = write_photos(Path(folder, "photos"), given.images), Path(folder, "weights.pt")
        data.write_text(to_yaml({"path": str(data.parent), "train": "images/train", "val": "images/train",
                                 "names": [str(number) for number in range(CLASSES)]}))
        torch.save(draw(), weights)
        with (contestant("run.py", *sys.argv[1:], "--contestant", data, threads=given.threads) as ours,
              contestant("peer_val.py", weights, data, given.imgsz, BATCH, threads=given.threads, peer=True) as peer):
            turns = take_turns({"ours": ours, "ultralytics": peer}, given.rounds)
    found = {name: each[-1]["result"] for name, each in turns.items()}
    if abs(found["ours"] / found["ultralytics"] - 1) > SAME:
        raise SystemExit(f"not the same detections: {found}")
    report("val", turns, scale=1 / given.images, detections=found)


def draw() -> dict[str, torch.Tensor]:
    """Weights whose class scores lie around 0.001."""
    torch.manual_seed(0)
    state = build_model(MODEL, CLASSES).state_dict()
    raised = [name for name in state if ".cv3." in name and name.endswith("2.bias")]
    return state | {name: state[name] + 3.0 for name in raised}


def answer(given: argparse.Namespace) -> None:
    """Be our side: each answer is the number of detections in all images."""
    keep_freed_memory()
    torch.set_num_threads(given.threads)
    data, family, model = Path(given.contestant), find_family(MODEL), build_model(MODEL, CLASSES)
    model.load_state_dict(torch.load(data.parent.parent / "weights.pt", weights_only=True))
    model = model.eval().to(memory_format=torch.channels_last)
    index = read_index(read_description(str(data)), "val")
    loss = family.build_loss(model.head, LossConfig(box=7.5), CLASSES, given.imgsz)

    def validate(_: Any) -> int:
        batches = val_loader(
            index, ImageStore(index, given.imgsz, smooth=True), given.imgsz, 32, BATCH, WorkerContext(), Collectives()
        )
        found = evaluate(model, family, loss, batches, index, EvaluateConfig(), "fp32", Collectives(), CPU)
        return len(found.detections)

    serve(validate)
