"""CPU seconds of a training sample (mosaic, zoom and shift, colour, flip), one thread, of ours and of peers.

    python tests/benchmarks/run.py data [--imgsz 640] [--source ram] [--rounds 3]

Pictures like photographs, 640 x 480, are made in a temporary folder. Ours are the batches of a loader of no processes,
decoded (`jpeg`) or kept in memory (`ram`). The peers' are those of their own data set classes (`peer_data.py`). Before
anything is timed, loader processes, workers and caches have to give the same bytes.
"""

from __future__ import annotations

import argparse
import hashlib
import os
import tempfile
from pathlib import Path

import cv2
import numpy as np
import torch

from ray_yolo.config.model_facts import GRID
from ray_yolo.config.recipe import Recipe, resolve
from ray_yolo.config.yaml import to_yaml
from ray_yolo.core.system import keep_freed_memory
from ray_yolo.data.dataset_yaml import read_description
from ray_yolo.data.index import read_index
from ray_yolo.engine.collectives import Collectives
from ray_yolo.engine.spec import TrainSpec, WorkerContext
from ray_yolo.engine.team import image_stores, make_loaders
from tests.benchmarks.contestant import timed
from tests.benchmarks.harness import contestant, report, take_turns

BATCH, CLASSES = 16, ("a", "b", "c")


def main(argv: list[str]) -> None:
    parser = argparse.ArgumentParser(prog="run.py data")
    parser.add_argument("--imgsz", type=int, default=640)
    parser.add_argument("--images", type=int, default=256, help="of the data set, and samples of a turn")
    parser.add_argument("--source", choices=("jpeg", "ram"), default="ram")
    parser.add_argument("--rounds", type=int, default=3)
    given = parser.parse_args(argv)
    keep_freed_memory()
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as folder:
        os.environ["RAY_YOLO_CACHE"] = f"{folder}/cache"
        data = write_photos(Path(folder, "photos"), given.images)
        check_bytes(data, given.imgsz)
        spec, context = make_spec(data, given.imgsz), WorkerContext(cache="ram" if given.source == "ram" else "none")
        stores = image_stores(spec, context)
        loaders = make_loaders(spec, GRID, context, Collectives(), stores)

        def ours() -> None:
            loaders.sampler.start(0)
            for _ in loaders.train:
                pass

        peer = ["peer_data.py", "yolov5", data, data.parent / "images" / "train", given.imgsz, given.source]
        other = [peer[0], "ultralytics", *peer[2:]]
        with contestant(*peer, peer=True) as first, contestant(*other, peer=True) as second:
            turns = take_turns({"ours": lambda: timed(ours), "yolov5": lambda: first(given.images),
                                "ultralytics": lambda: second(given.images)}, given.rounds)
        for store in (stores.train, stores.val):
            store.close()
    report("data", turns, scale=1 / given.images)


def write_photos(folder: Path, count: int) -> Path:
    """A data set of JPEGs with detail at every scale and eight boxes each; returns its description."""
    for kind in ("images", "labels"):
        (folder / kind / "train").mkdir(parents=True)
    for number in range(count):
        rng, picture = np.random.default_rng(number), np.full((480, 640, 3), 114, np.float32)
        for cells in (4, 8, 16, 32, 64, 128, 256, 480):
            noise = rng.normal(0, 160 / cells**0.65, (cells, cells * 4 // 3, 3)).astype(np.float32)
            picture += cv2.resize(noise, (640, 480), interpolation=cv2.INTER_CUBIC)
        file = folder / "images" / "train" / f"{number:04d}.jpg"
        cv2.imwrite(str(file), picture.clip(0, 255).astype(np.uint8), [cv2.IMWRITE_JPEG_QUALITY, 90])
        boxes = np.hstack([rng.uniform(0.25, 0.75, (8, 2)), rng.uniform(0.05, 0.4, (8, 2))])
        rows = [f"{rng.integers(3)} " + " ".join(map(str, box)) for box in boxes.round(4).tolist()]
        (folder / "labels" / "train" / f"{number:04d}.txt").write_text("\n".join(rows) + "\n")
    file = folder / "data.yaml"
    file.write_text(to_yaml({"path": str(folder), "train": "images/train", "val": "images/train",
                             "names": list(CLASSES)}))
    return file


def make_spec(data: Path, imgsz: int) -> TrainSpec:
    recipe = resolve(Recipe.model_validate({
        "data": str(data), "model": "yolov5n", "imgsz": imgsz, "batch_size": BATCH, "microbatch": BATCH}), 1, gpu=False)
    index = read_index(read_description(str(data)), "train")
    return TrainSpec(recipe, "", CLASSES, None, None, index, index, data.parent)


def check_bytes(data: Path, imgsz: int) -> None:
    """Refuse to time what depends on who reads it.

    Raises:
        SystemExit: if loader processes, two workers, or images in memory give other batches.
    """
    job = make_spec(data, imgsz)
    hosts = {
        "plain": [(WorkerContext(), Collectives())],
        "processes": [(WorkerContext(loader_processes=2), Collectives())],
        "memory": [(WorkerContext(cache="ram"), Collectives())],
        "workers": [(WorkerContext(), Collectives(worker, 2)) for worker in (0, 1)],
    }
    digests = {name: sorted(digest for host in each for digest in batch_digests(job, *host))
               for name, each in hosts.items()}
    for name, found in digests.items():
        if found != digests["plain"]:
            raise SystemExit(f"{name}: other batches than those of one process that decodes")


def batch_digests(job: TrainSpec, host: WorkerContext, collectives: Collectives) -> list[str]:
    stores = image_stores(job, host)
    loaders = make_loaders(job, GRID, host, collectives, stores)
    loaders.sampler.start(0)
    found = [hashlib.sha256(b"".join(batch[name].numpy().tobytes() for name in ("images", "targets", "indices")))
             .hexdigest() for batch in loaders.train]
    for store in (stores.train, stores.val):
        store.close()
    return found
