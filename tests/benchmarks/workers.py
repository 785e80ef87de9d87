"""Images per second of two workers against one, one thread each, alternating in one Ray session.

    python tests/benchmarks/run.py workers [--rounds 3] [--imgsz 320]

The same recipe (batch 16, microbatch 8) on both; the first epoch of each training is not counted. Prints one JSON line.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import tempfile
from pathlib import Path

from ray_yolo.config.placement import RunConfig
from ray_yolo.runlog.event_log import EVENTS_FILE, epoch_rows, read_events
from ray_yolo.runtime.trainer import fit


def main(argv: list[str]) -> None:
    parser = argparse.ArgumentParser(prog="run.py workers")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--imgsz", type=int, default=320)
    parser.add_argument("--epochs", type=int, default=4)
    given = parser.parse_args(argv)
    rates: dict[int, list[float]] = {1: [], 2: []}
    with tempfile.TemporaryDirectory() as folder:
        for _ in range(given.rounds):
            for workers in (1, 2):
                rates[workers].append(images_per_second(workers, given.imgsz, given.epochs, Path(folder)))
    ratios = [two / one for one, two in zip(rates[1], rates[2], strict=True)]
    print(json.dumps({"id": "workers", "one": rates[1], "two": rates[2], "ratio": statistics.median(ratios),
                      "ratios": ratios, "env": {"cpus": os.cpu_count(), "imgsz": given.imgsz}}))


def images_per_second(workers: int, imgsz: int, epochs: int, folder: Path) -> float:
    """Median over the epochs after the first, as the event log has it (validation not counted)."""
    config = RunConfig.model_validate({
        "recipe": {"data": "shapes", "model": "yolov5n", "imgsz": imgsz, "batch_size": 16, "microbatch": 8,
                   "epochs": epochs, "noval": True, "threads": 1, "seed": workers},
        "placement": {"num_workers": workers, "storage_path": str(folder), "mlflow_uri": "off", "noplots": True,
                      "cache": "ram"}})
    result = fit(config, quiet=True)
    rows = epoch_rows(read_events(result.run_dir / EVENTS_FILE))
    return statistics.median(row.images_per_second or 0.0 for row in rows[1:])
