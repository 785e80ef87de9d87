"""Images per second of training against a peer's, alternating: the same data set, size, batch, cores and cache.

    python tests/benchmarks/run.py peers --peer ultralytics --python ENVIRONMENT/bin/python [--imgsz 320]

The peer is installed in an environment of its own and trains through its own public interface (`peer_train.py`); we
train as `python -m ray_yolo.train --num-workers 0` does, or on Ray workers that share the cores. Ultralytics' yolov5n
has another head than YOLOv5's, which costs it some time; the `yolov5` package has the same model as ours. The first
epoch of each training is not counted, validation never. Prints one JSON line.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import tempfile
from pathlib import Path

from ray_yolo.config.placement import RunConfig
from ray_yolo.config.yaml import to_yaml
from ray_yolo.data.dataset_yaml import read_description
from ray_yolo.runlog.event_log import EVENTS_FILE, epoch_rows, read_events
from ray_yolo.runtime.trainer import fit

DATA, NUM_IMAGES, BATCH = "shapes1k", 1000, 16


def main(argv: list[str]) -> None:
    parser = argparse.ArgumentParser(prog="run.py peers")
    parser.add_argument("--peer", choices=("ultralytics", "yolov5"), required=True)
    parser.add_argument("--python", required=True, help="of the environment that the peer is installed in")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--imgsz", type=int, default=320)
    parser.add_argument("--epochs", type=int, default=3)
    parser.add_argument("--num-workers", type=int, default=0, help="of ours; the cores are shared out over them")
    given = parser.parse_args(argv)
    cpus = len(os.sched_getaffinity(0))
    ours: list[float] = []
    theirs: list[float] = []
    with tempfile.TemporaryDirectory() as folder:
        for number in range(given.rounds):
            ours.append(our_rate(given.imgsz, given.epochs, given.num_workers, cpus, number, Path(folder)))
            theirs.append(peer_rate(given.peer, given.python, given.imgsz, given.epochs, cpus, Path(folder)))
    ratios = [our / their for our, their in zip(ours, theirs, strict=True)]
    print(json.dumps({
        "id": f"peers {given.peer}", "ours": ours, "theirs": theirs, "ratio": statistics.median(ratios),
        "ratios": ratios, "env": {"cpus": cpus, "imgsz": given.imgsz, "num_workers": given.num_workers}}))


def our_rate(imgsz: int, epochs: int, num_workers: int, cpus: int, seed: int, folder: Path) -> float:
    """Median images per second over the epochs after the first."""
    parts = max(1, num_workers)
    config = RunConfig.model_validate({
        "recipe": {"data": DATA, "model": "yolov5n", "imgsz": imgsz, "batch_size": BATCH, "microbatch": BATCH // parts,
                   "epochs": epochs, "noval": True, "seed": seed},
        "placement": {"num_workers": num_workers, "cpus_per_worker": cpus // parts, "workers": 0, "cache": "ram",
                      "storage_path": str(folder), "mlflow_uri": "off", "noplots": True}})
    result = fit(config, quiet=True)
    rows = epoch_rows(read_events(result.run_dir / EVENTS_FILE))
    return statistics.median(row.images_per_second or 0.0 for row in rows[1:])


def peer_rate(peer: str, python: str, imgsz: int, epochs: int, cpus: int, folder: Path) -> float:
    """The same of the peer."""
    description = read_description(DATA)
    data = folder / "data.yaml"
    data.write_text(to_yaml({"path": str(description.root), "train": "images/train", "val": "images/val",
                             "names": list(description.names)}))
    command = [python, str(Path(__file__).with_name("peer_train.py")), peer, str(data),
               *map(str, (imgsz, BATCH, epochs, cpus)), str(folder)]
    ended = subprocess.run(command, cwd=folder, capture_output=True, text=True, check=False,
                           env={**os.environ, "PYTHONPATH": ""})
    if ended.returncode:
        raise SystemExit(ended.stderr)
    seconds = json.loads(ended.stdout.strip().splitlines()[-1])
    return NUM_IMAGES / statistics.median(seconds[1:])
