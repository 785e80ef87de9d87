"""How much of their time the slots of a sweep train: trials one after another on a standing crew.

    python tests/benchmarks/run.py sweep [--trials 12] [--epochs 60] [--slots 2]

Trials of the tiny model on one worker each. A slot trains from a trial's `start` event to its `end`, or to the next
`start`, when its workers have changed; the rest, until the last end, is building and waiting. The sweep is warm when
the first slot begins its second trial: until then its processes start.
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
    spans = [span for log in logs for span in worker_spans(log)]
    starts = sorted(min(event.time for event in only(StartEvent, log)) for log in logs)
    begin, warm, end = starts[0], starts[given.slots], max(span[1] for span in spans)
    print(json.dumps({
        "id": "sweep", "busy": busy(spans, begin, end, given.slots), "busy after warm-up": busy(
            spans, warm, end, given.slots), "seconds": round(end - begin, 1), "warm-up": round(warm - begin, 1),
        "starts": [round(start - begin, 1) for start in starts], "machine": machine()}))


def worker_spans(log: Sequence[Event]) -> list[tuple[float, float, int]]:
    """From when to when how many workers trained."""
    told = [event for event in log if isinstance(event, StartEvent | EndEvent)]
    return [(event.time, after.time, event.num_workers) for event, after in pairwise(told)
            if isinstance(event, StartEvent)]


def busy(spans: Sequence[tuple[float, float, int]], begin: float, end: float, slots: int) -> float:
    """The share of the slots' time."""
    trained = sum(max(0.0, to - max(begin, since)) * workers for since, to, workers in spans)
    return round(trained / (slots * (end - begin)), 3)
