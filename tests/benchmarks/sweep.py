"""How much of their time the slots of a sweep train: trials one after another on a standing crew.

    python tests/benchmarks/run.py sweep [--trials 12] [--epochs 60] [--slots 2]

Trials of the tiny model on one worker each. A slot trains from a trial's `start` event to its `end`, or to the next
`start`, when its workers have changed; the rest, between the first start and the last end, is building and waiting.
"""

from __future__ import annotations

import argparse
import json
import tempfile
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path

import ray

from ray_yolo.events import EndEvent, Event, StartEvent
from ray_yolo.runlog.event_log import EVENTS_FILE, read_events
from ray_yolo.runtime.cluster import own_token
from tests.benchmarks.harness import machine
from tests.support.run_log import only
from tests.support.sweeps import crew_sweep


def main(argv: list[str]) -> None:
    """Run it, and print what it was."""
    parser = argparse.ArgumentParser(prog="run.py sweep")
    parser.add_argument("--trials", type=int, default=12)
    parser.add_argument("--epochs", type=int, default=60)
    parser.add_argument("--slots", type=int, default=2)
    given = parser.parse_args(argv)
    with tempfile.TemporaryDirectory() as folder:
        own_token()
        ray.init(num_cpus=given.slots, log_to_driver=False, include_dashboard=False)
        sweep = crew_sweep(Path(folder) / "sweep", trials=given.trials, epochs=given.epochs)
        logs = [read_events(log) for log in sorted(sweep.glob(f"trials/*/{EVENTS_FILE}"))]
        ray.shutdown()
    starts, ends = ([[event.time for event in only(kind, log)] for log in logs] for kind in (StartEvent, EndEvent))
    first, last = min(map(min, starts)), max(map(max, ends))
    seconds = [end[-1] - start[0] for start, end in zip(starts, ends, strict=True)]
    print(json.dumps({
        "id": "sweep", "busy": round(sum(map(worker_seconds, logs)) / (given.slots * (last - first)), 3),
        "seconds of a trial": [round(min(seconds), 1), round(max(seconds), 1)], "seconds": round(last - first, 1),
        "first start to last end": sorted((round(start[0] - first, 1), round(end[-1] - first, 1), len(start))
                                          for start, end in zip(starts, ends, strict=True)), "machine": machine()}))


def worker_seconds(log: Sequence[Event]) -> float:
    """Of all workers of a trial together."""
    told = [event for event in log if isinstance(event, StartEvent | EndEvent)]
    return sum((after.time - event.time) * event.num_workers for event, after in pairwise(told)
               if isinstance(event, StartEvent))
