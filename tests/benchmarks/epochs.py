"""Whole epochs with validation, bare command against bare command (the first epoch of each does not count).

    python tests/benchmarks/run.py epochs [--data shapes1k] [--imgsz 320] [--epochs 3] [--peer yolov5] [-- FLAG ...]

Everything is at its default on both sides: threads, loader processes, cache. What stands behind `--` is added to our
command (`-- --num-workers 0`). Seconds of an epoch.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
from itertools import pairwise
from pathlib import Path

from tests.benchmarks.commands import Mark, train_ours, train_peer
from tests.benchmarks.harness import report, take_turns
from tests.benchmarks.start import own_data

BATCH = 16


def main(argv: list[str]) -> None:
    parser = argparse.ArgumentParser(prog="run.py epochs")
    parser.add_argument("--data", default="shapes1k")
    parser.add_argument("--imgsz", type=int, default=320)
    parser.add_argument("--epochs", type=int, default=3)
    parser.add_argument("--rounds", type=int, default=1)
    parser.add_argument("--peer", choices=("yolov5", "ultralytics"), default="yolov5")
    parser.add_argument("flags", nargs="*")
    given = parser.parse_args(argv)

    def ours() -> Mark:
        with tempfile.TemporaryDirectory() as folder:
            flags = ("--imgsz", str(given.imgsz), "--batch-size", str(BATCH), "--epochs", str(given.epochs))
            data = given.data if not Path(given.data).exists() else str(Path(given.data).resolve())
            return one_epoch(train_ours(data, Path(folder), *flags, *given.flags)("epoch")[:-1])

    def theirs() -> Mark:
        with tempfile.TemporaryDirectory() as folder:
            data = own_data(given.data, Path(folder))
            return one_epoch(train_peer(given.peer, data, Path(folder), given.imgsz, BATCH, given.epochs)("epoch")[:-1])

    report("epochs", take_turns({"ours": ours, given.peer: theirs}, given.rounds, warm_up=0))


def one_epoch(marks: list[Mark]) -> Mark:
    """What an epoch after the first takes."""
    return {clock: statistics.median(after[clock] - before[clock] for before, after in pairwise(marks))
            for clock in ("cpu", "wall")}
