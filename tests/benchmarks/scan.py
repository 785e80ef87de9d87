"""CPU seconds until the labels of a data set are known that no cache knows: ours against the peers'.

    python tests/benchmarks/run.py scan [--images 3000] [--rounds 3]

Small pictures with ten boxes each. Seconds of all processes that take part. Before anything is timed all have to find
the same number of images and boxes.
"""

from __future__ import annotations

import argparse
import os
import shutil
import tempfile
from pathlib import Path
from typing import Any

import cv2
import numpy as np

from ray_yolo.config.yaml import to_yaml
from ray_yolo.data.dataset_yaml import read_description
from ray_yolo.data.index import read_index
from tests.benchmarks.contestant import timed
from tests.benchmarks.harness import contestant, report, take_turns

PEERS, BOXES = ("yolov5", "ultralytics"), 10


def main(argv: list[str]) -> None:
    parser = argparse.ArgumentParser(prog="run.py scan")
    parser.add_argument("--images", type=int, default=3000)
    parser.add_argument("--rounds", type=int, default=3)
    given = parser.parse_args(argv)
    with tempfile.TemporaryDirectory() as folder:
        os.environ["RAY_YOLO_CACHE"] = f"{folder}/cache"
        data = write(Path(folder, "data"), given.images)

        def ours() -> list[int]:
            shutil.rmtree(f"{folder}/cache", ignore_errors=True)
            index = read_index(read_description(str(data)), "train")
            return [len(index), len(index.boxes)]

        with (contestant("peer_scan.py", "yolov5", data, peer=True) as first,
              contestant("peer_scan.py", "ultralytics", data, peer=True) as second):
            sides: dict[str, Any] = dict(zip(PEERS, (first, second), strict=True))
            turns = take_turns({"ours": lambda: timed(ours), **sides}, given.rounds)
    found = {name: each[-1]["result"] for name, each in turns.items()}
    if any(each != [given.images, given.images * BOXES] for each in found.values()):
        raise SystemExit(f"not the same images and boxes: {found}")
    report("scan", turns)


def write(folder: Path, count: int) -> Path:
    """A data set in YOLO's layout; returns its description."""
    rng = np.random.default_rng(0)
    for kind in ("images", "labels"):
        (folder / kind / "train").mkdir(parents=True)
    picture = cv2.imencode(".jpg", rng.integers(0, 255, (120, 160, 3), dtype=np.uint8))[1].tobytes()
    for number in range(count):
        boxes = np.hstack([rng.uniform(0.3, 0.7, (BOXES, 2)), rng.uniform(0.05, 0.4, (BOXES, 2))])
        rows = [f"{rng.integers(3)} " + " ".join(f"{value:.6f}" for value in box) for box in boxes]
        (folder / "images" / "train" / f"{number:05d}.jpg").write_bytes(picture)
        (folder / "labels" / "train" / f"{number:05d}.txt").write_text("\n".join(rows) + "\n")
    file = folder / "data.yaml"
    file.write_text(to_yaml({"path": str(folder), "train": "images/train", "val": "images/train",
                             "names": ["a", "b", "c"]}))
    return file
