"""CPU milliseconds of a training sample from JPEG files, by `augment.partners` and the images of a microbatch.

    python tests/benchmarks/run.py partners [--imgsz 640] [--rounds 3]

Pictures like photographs, 640 x 480, are made in a temporary folder. One thread loads them; the settings take turns.
"""

from __future__ import annotations

import argparse
import json
import os
import tempfile
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from statistics import median

import cv2
import torch

from ray_yolo.config.model_facts import GRID
from ray_yolo.config.recipe import Recipe
from ray_yolo.core.system import keep_freed_memory
from ray_yolo.engine.collectives import Collectives
from ray_yolo.engine.spec import WorkerContext
from ray_yolo.engine.team import Loaders, image_stores, make_loaders
from tests.benchmarks.contestant import timed
from tests.benchmarks.data import make_spec, write_photos
from tests.benchmarks.harness import machine, take_turns

SETTINGS = ((16, 0), (16, 16), (16, 32), (16, 64), (64, 0), (64, 64))  # microbatch, partners


def main(argv: Sequence[str] | None = None) -> None:
    """Load an epoch with each setting in turns, and print one JSON line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--imgsz", type=int, default=640)
    parser.add_argument("--images", type=int, default=128, help="of the data set, and samples of a turn")
    parser.add_argument("--rounds", type=int, default=3)
    given = parser.parse_args(argv)
    keep_freed_memory()
    torch.set_num_threads(1)
    cv2.setNumThreads(0)
    with tempfile.TemporaryDirectory() as folder:
        os.environ["RAY_YOLO_CACHE"] = f"{folder}/cache"
        data = write_photos(Path(folder, "photos"), given.images)
        epochs = {}
        for microbatch, partners in SETTINGS:
            loaders = loaders_of(data, given.imgsz, microbatch, partners)
            epochs[f"microbatch {microbatch}, partners {partners}"] = partial(timed, load_epoch, loaders)
        turns = take_turns(epochs, given.rounds)
    found = {name: round(1000 * median(turn["cpu"] for turn in each) / given.images, 2) for name, each in turns.items()}
    print(json.dumps({"id": "partners", "CPU ms a sample": found, "machine": machine()}))


def loaders_of(data: Path, imgsz: int, microbatch: int, partners: int) -> Loaders:
    """Those of a training, in this process."""
    spec = make_spec(data, imgsz)
    fields = spec.recipe.model_dump() | {"batch_size": microbatch, "microbatch": microbatch}
    fields["augment"]["partners"] = partners
    spec, context = replace(spec, recipe=Recipe.model_validate(fields)), WorkerContext(cache="none")
    return make_loaders(spec, GRID, context, Collectives(), image_stores(spec, context))


def load_epoch(loaders: Loaders) -> None:
    """All batches of the first epoch."""
    loaders.sampler.start(0)
    for _ in loaders.train:
        pass
