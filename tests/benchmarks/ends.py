"""Orderly ends: `python tests/benchmarks/run.py ends`.

A training in this process, on a fixed number of workers, on a range of workers, and a sweep each get Ctrl-C, SIGTERM
and SIGHUP in the middle. One line for each case: the exit status, the seconds from the signal to the exit, the newest
step and the newest checkpoint. Every completed step must be saved, and each exit must fit the 30 s that a job has.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

from ray_yolo.core.events import CheckpointEvent, StepEvent
from ray_yolo.runs.event_log import read_events
from tests.support.jobs import TINY
from tests.support.run_log import only

EXIT_SECONDS = 30.0
START_SECONDS = 400.0
STEPS = 6  # before the signal
MODES = {"in this process": ("train", "--num-workers", "0"), "2 workers": ("train", "--num-workers", "2"),
         "1-2 workers": ("train", "--num-workers", "1-2"),
         "sweep": ("tune", "--space", "quick", "--trials", "2", "--workers-per-trial", "1")}
SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


def end_of(mode: str, number: signal.Signals, folder: Path) -> dict[str, object]:
    """Start a command, send it a signal, and say how it has ended."""
    model = folder / "tiny.yaml"
    model.write_text(str(TINY).replace("'", '"'))
    name, *flags = MODES[mode]
    command = [sys.executable, "-m", f"ray_yolo.{name}", *flags, "--data", "shapes8", "--model", str(model),
               "--imgsz", "64", "--batch-size", "4", "--epochs", "1000", "--noval", "--cpus-per-worker", "1",
               "--storage-path", str(folder)]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    environment.pop("RAY_ADDRESS", None)
    for each in SIGNALS:
        signal.signal(each, signal.SIG_DFL)  # else the command inherits what a shell's background ignores
    with (folder / "output.txt").open("w") as output:
        process = subprocess.Popen(command, cwd=folder, env=environment, stdout=output, stderr=output,
                                   start_new_session=True)
    try:
        deadline = time.monotonic() + START_SECONDS
        while max(newest_steps(folder, StepEvent), default=0) < STEPS:
            assert process.poll() is None, (folder / "output.txt").read_text()
            assert time.monotonic() < deadline, (folder / "output.txt").read_text()
            time.sleep(0.2)
        process.send_signal(number)
        begun = time.monotonic()
        status = process.wait(120)
        seconds = time.monotonic() - begun
    finally:
        process.kill()
    steps, saved = newest_steps(folder, StepEvent), newest_steps(folder, CheckpointEvent)
    return {"mode": mode, "signal": number.name, "status": status, "seconds": round(seconds, 1), "steps": steps,
            "saved": saved}


def newest_steps(folder: Path, kind: type) -> list[int]:
    """The newest step of an event in each log below a folder."""
    logs = sorted(folder.glob("runs/**/events.jsonl"))
    return [max((event.step for event in only(kind, read_events(log))), default=0) for log in logs]


def main(argv: Sequence[str]) -> None:
    """Run the benchmark and print its result."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--modes", nargs="*", default=list(MODES), choices=list(MODES))
    given = parser.parse_args(argv)
    ends = []
    for mode in given.modes:
        for number in SIGNALS:
            with tempfile.TemporaryDirectory(prefix="ends-") as folder:
                end = end_of(mode, number, Path(folder))
            print(end, file=sys.stderr, flush=True)
            assert end["status"] == 128 + number, end
            assert end["seconds"] < EXIT_SECONDS, end
            assert end["saved"] == end["steps"], end
            ends.append(end)
    print(json.dumps({"benchmark": "ends", "ends": ends}))
