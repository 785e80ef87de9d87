"""CPU time of a training sample (mosaic, zoom and shift, colour, flip), one thread, of ours and of peers.

    python tests/benchmarks/run.py data [--imgsz 640] [--rounds 3] [--python ENVIRONMENT/bin/python]

Pictures like photographs, 640 x 480, are made in a temporary folder. Ours are the batches of a loader of no processes,
decoded (`jpeg`) or kept in memory (`ram`), with mosaics of the whole data set (`window 0`, as 0.1.0) and of the default
window. With --python, an environment in which yolov5 and ultralytics are installed, also those of their own data set
classes (`peer_data.py`). Before anything is timed, loader processes, workers and caches have to give the same bytes.
Rounds alternate; the figures are medians of milliseconds of the processor. Prints one JSON line.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import statistics
import subprocess
import tempfile
import time
from pathlib import Path

import cv2
import numpy as np

from ray_yolo.config.recipe import Recipe, resolve
from ray_yolo.config.yaml import to_yaml
from ray_yolo.data.dataset_yaml import read_description
from ray_yolo.data.index import read_index
from ray_yolo.engine.build import Host, Job, build
from ray_yolo.engine.replicas import Replicas
from ray_yolo.ops.memory import keep_freed_memory

BATCH, CLASSES = 16, ("a", "b", "c")
PEERS = ("yolov5", "ultralytics")


def main(argv: list[str]) -> None:
    parser = argparse.ArgumentParser(prog="run.py data")
    parser.add_argument("--imgsz", type=int, default=640)
    parser.add_argument("--images", type=int, default=256, help="of the data set, and samples of a round")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--python", help="of the environment that the peers are installed in")
    given = parser.parse_args(argv)
    keep_freed_memory()
    with tempfile.TemporaryDirectory() as folder:
        os.environ["RAY_YOLO_CACHE"] = f"{folder}/cache"
        data = write_photos(Path(folder, "photos"), given.images)
        check_bytes(data, given.imgsz)
        rounds = [measure(data, given.imgsz, given.images, given.python) for _ in range(given.rounds)]
    medians = {name: round(statistics.median(each[name] for each in rounds), 2) for name in rounds[0]}
    best = {source: min((medians[f"{peer} {source}"] for peer in PEERS if f"{peer} {source}" in medians), default=None)
            for source in ("jpeg", "ram")}
    ours = {source: medians[f"window default {source}"] for source in best}
    print(json.dumps({
        "id": "data", "ms": medians, "rounds": rounds,
        "ratio": {source: round(peer / ours[source], 2) for source, peer in best.items() if peer},
        "env": {"cpus": os.cpu_count(), "imgsz": given.imgsz, "images": given.images, "load": os.getloadavg()[0]}}))


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


def make_job(data: Path, imgsz: int, window: int | None) -> Job:
    recipe = resolve(Recipe.model_validate({
        "data": str(data), "model": "yolov5n", "imgsz": imgsz, "batch_size": BATCH, "microbatch": BATCH,
        "augment": {"mosaic_window": window}}), 1, gpu=False)
    index = read_index(read_description(str(data)), "train")
    return Job(recipe, "", CLASSES, None, None, index, index, data.parent)


def check_bytes(data: Path, imgsz: int) -> None:
    """Refuse to time what depends on who reads it.

    Raises:
        SystemExit: if loader processes, two workers, or images in memory give other batches.
    """
    job = make_job(data, imgsz, None)
    hosts = {"plain": [Host()], "processes": [Host(loader_processes=2)], "memory": [Host(cache="ram")],
             "workers": [Host(replicas=Replicas(worker, 2)) for worker in (0, 1)]}
    digests = {name: sorted(digest for host in each for digest in batch_digests(job, host))
               for name, each in hosts.items()}
    for name, found in digests.items():
        if found != digests["plain"]:
            raise SystemExit(f"{name}: other batches than those of one process that decodes")
    print(f"the same {len(digests['plain'])} batches from {', '.join(digests)}")


def batch_digests(job: Job, host: Host) -> list[str]:
    parts = build(job, host)
    parts.sampler.start(0)
    found = [hashlib.sha256(b"".join(batch[name].numpy().tobytes() for name in ("images", "targets", "indices")))
             .hexdigest() for batch in parts.loader]
    for store in parts.stores:
        store.close()
    return found


def measure(data: Path, imgsz: int, count: int, python: str | None) -> dict[str, float]:
    """Milliseconds of the processor for a sample, by name."""
    found = {}
    for cache in ("none", "ram"):
        for name, window in (("0", 0), ("default", None)):
            found[f"window {name} {'jpeg' if cache == 'none' else 'ram'}"] = our_milliseconds(
                make_job(data, imgsz, window), Host(cache=cache))
    for peer in PEERS if python else ():
        command = [str(python), str(Path(__file__).with_name("peer_data.py")), peer, str(data),
                   str(data.parent / "images" / "train"), str(imgsz), str(count)]
        ended = subprocess.run(command, cwd=data.parent, capture_output=True, text=True, check=False,
                               env={**os.environ, "PYTHONPATH": "", "OMP_NUM_THREADS": "1"})
        if ended.returncode:
            raise SystemExit(ended.stderr)
        found.update({f"{peer} {name}": ms for name, ms in json.loads(ended.stdout.splitlines()[-1]).items()})
    return found


def our_milliseconds(job: Job, host: Host) -> float:
    """Of the second epoch: the first one warms the caches of the processor and of memory."""
    parts = build(job, host)
    for epoch in (0, 1):
        parts.sampler.start(epoch)
        began = time.process_time()
        for _ in parts.loader:
            pass
        seconds = time.process_time() - began
    for store in parts.stores:
        store.close()
    return seconds * 1e3 / len(job.train)
