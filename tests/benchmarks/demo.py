"""`make demo` after set-up, on several seeds: how long it takes, and what it reaches.

    python tests/benchmarks/run.py demo [--seeds 0 1 2] [-- FLAG ...]

Runs what the Makefile says, with `--seed`; flags behind `--` are added. Prints one JSON line.
"""

from __future__ import annotations

import argparse
import json
import os
import shlex
import subprocess
import tempfile
from pathlib import Path

from ray_yolo.runs.event_log import EVENTS_FILE, epoch_rows, read_events
from tests.benchmarks.commands import follow
from tests.benchmarks.harness import HERE, machine


def main(argv: list[str]) -> None:
    parser = argparse.ArgumentParser(prog="run.py demo")
    parser.add_argument("--seeds", type=int, nargs="*", default=[0])
    parser.add_argument("flags", nargs="*")
    given = parser.parse_args(argv)
    said = subprocess.run(["make", "-n", "-o", ".venv/.base", "demo"], cwd=HERE.parents[1], capture_output=True,
                          text=True, check=True)
    program, *rest = shlex.split(said.stdout.replace("\\\n", " "))
    found = []
    for seed in given.seeds:
        with tempfile.TemporaryDirectory() as folder:
            end = follow([str(HERE.parents[1] / program), *rest, "--seed", str(seed), "--storage-path", folder,
                          *given.flags], lambda: 0, Path(folder))[-1]
            [log] = Path(folder).glob(f"runs/*/*/{EVENTS_FILE}")
            metrics = epoch_rows(read_events(log))[-1].metrics
        found.append({"seed": seed, "wall": round(end["wall"]), "cpu": round(end["cpu"]),
                      **{name: round(metrics[name], 3) for name in ("mAP50", "mAP50-95")}})
    print(json.dumps({"id": "demo", "seeds": found, "least_map50": min(each["mAP50"] for each in found),
                      "machine": machine(), "cpus": os.cpu_count()}))
