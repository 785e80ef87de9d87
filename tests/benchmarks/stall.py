"""How long training waits for a checkpoint: of ours, which a thread writes, against writing it at once.

    python tests/benchmarks/run.py stall [--model yolov5s] [--rounds 7]

The same state (model, average, momentum) to the same folder, durably both times. `ours` is the time until training goes
on; what the thread takes beside it is `written`.
"""

from __future__ import annotations

import argparse
import tempfile
import time
from pathlib import Path

from ray_yolo.checkpoints import local as checkpoint
from ray_yolo.checkpoints.writer import Saver
from ray_yolo.engine.state import TrainState, capture
from tests.benchmarks.contestant import timed
from tests.benchmarks.harness import report, take_turns
from tests.benchmarks.step import parts_of


def main(argv: list[str]) -> None:
    parser = argparse.ArgumentParser(prog="run.py stall")
    parser.add_argument("--model", default="yolov5s")
    parser.add_argument("--rounds", type=int, default=7)
    given = parser.parse_args(argv)
    case = argparse.Namespace(model=given.model, imgsz=64, batch=2, microbatch=None, threads=1, precision="fp32")
    state = capture(parts_of(case), TrainState(), {})
    written = []
    with tempfile.TemporaryDirectory(dir=Path.cwd()) as folder:  # not in memory, as /tmp may be
        Path(folder, "ours").mkdir()
        saver = Saver(Path(folder, "ours"), "", 2, lambda event: None)

        def ours() -> dict[str, float]:
            taken = timed(saver.save, state, saver.step + 1, 0, ["last"])
            began = time.perf_counter()
            saver.wait(needed=True)
            written.append(time.perf_counter() - began)
            return taken

        def at_once() -> dict[str, float]:
            return timed(checkpoint.save_checkpoint, Path(folder, "at once"), state, 0, "", ["last"])

        turns = take_turns({"ours": ours, "at once": at_once}, given.rounds)
    report("stall", turns, "wall", written=round(sorted(written)[len(written) // 2], 3))
