"""Two Ray workers against one (`workers`), and one Ray worker against in-process training (`ray`), one thread each.

    python tests/benchmarks/run.py workers|ray [--rounds 3] [--imgsz 320]

The same recipe (batch 16, microbatch 8) on both; the first epoch of each training does not count, validation never.
Seconds of an image by the clock, which have to be taken on a quiet machine.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import tempfile
from pathlib import Path

from ray_yolo.config.placement import RunConfig
from ray_yolo.runs.event_log import EVENTS_FILE, epoch_rows, read_events
from ray_yolo.runtime.trainer import fit
from tests.benchmarks.harness import report, take_turns

SIDES = {"workers": {"ours": 2, "one worker": 1}, "ray": {"ours": 1, "in-process": 0}}


def main(argv: list[str]) -> None:
    parser = argparse.ArgumentParser(prog="run.py workers")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--imgsz", type=int, default=320)
    parser.add_argument("--epochs", type=int, default=4)
    given = parser.parse_args(argv)
    with tempfile.TemporaryDirectory() as folder:
        sides = {name: (lambda workers=workers: {"wall": seconds(workers, given.imgsz, given.epochs, Path(folder))})
                 for name, workers in SIDES[sys.argv[1]].items()}
        report(sys.argv[1], take_turns(sides, given.rounds, warm_up=0), "wall")


def seconds(workers: int, imgsz: int, epochs: int, folder: Path) -> float:
    """Median over the epochs after the first, as the event log has it (validation not counted)."""
    config = RunConfig.model_validate({
        "recipe": {"data": "shapes", "model": "yolov5n", "imgsz": imgsz, "batch_size": 16, "microbatch": 8,
                   "epochs": epochs, "noval": True, "threads": 1},
        "placement": {"num_workers": workers, "storage_path": str(folder), "mlflow_uri": "off", "noplots": True,
                      "cache": "ram", "workers": 0}})
    result = fit(config, quiet=True)
    rows = epoch_rows(read_events(result.run_dir / EVENTS_FILE))
    return statistics.median(1 / row.images_per_second for row in rows[1:] if row.images_per_second)
