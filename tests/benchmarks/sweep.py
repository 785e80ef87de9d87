"""The share of time in which the slots of a sweep train: trials one after another on a standing worker pool.

    python tests/benchmarks/run.py sweep [--trials 12] [--epochs 60] [--slots 2] [--churn]

Trials of the tiny model on one worker each. A slot trains from a trial's `start` event to its `end`, or to the last
step before the next `start` if its workers changed. The rest, until the last end, is start-up and waiting. The sweep is
warm when the first slot starts its second trial: until then its processes start.

With `--churn` a second node of as many slots is drained, removed and added again, and three workers are killed. The
rows must equal those of an uninterrupted sweep.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import signal
import tempfile
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from itertools import pairwise
from pathlib import Path

import ray

from ray_yolo.core.events import EndEvent, Event, StartEvent, StepEvent, WorkerEvent
from ray_yolo.runs.event_log import EVENTS_FILE, read_events
from ray_yolo.runtime.cluster import own_token
from tests.benchmarks.harness import machine
from tests.support.faults import drain, ray_nodes
from tests.support.run_log import only
from tests.support.sweeps import assert_equal_rows, pool_sweep, wait_for_workers

PAUSE_SECONDS = 12.0  # between two interruptions

Rooms = list[tuple[float, int]]  # (time, number of slots from then on)


def main(argv: list[str]) -> None:
    """Run the benchmark and print its result."""
    parser = argparse.ArgumentParser(prog="run.py sweep")
    parser.add_argument("--trials", type=int, default=12)
    parser.add_argument("--epochs", type=int, default=60)
    parser.add_argument("--slots", type=int, default=2)
    parser.add_argument("--churn", action="store_true")
    given = parser.parse_args(argv)
    with tempfile.TemporaryDirectory() as folder:
        sweep, rooms = (churned if given.churn else uninterrupted)(Path(folder), given)
        logs = [read_events(log) for log in sorted(sweep.glob(f"trials/*/{EVENTS_FILE}"))]
    spans = [span for log in logs for span in worker_spans(log)]
    starts = sorted(min(event.time for event in only(StartEvent, log)) for log in logs)
    begin, warm, end = starts[0], starts[rooms[0][1]], max(span[1] for span in spans)
    print(json.dumps({
        "id": "sweep, churned" if given.churn else "sweep", "busy": busy(spans, begin, end, rooms),
        "busy after warm-up": busy(spans, warm, end, rooms), "seconds": round(end - begin, 1),
        "warm-up": round(warm - begin, 1), "starts": [round(start - begin, 1) for start in starts],
        "slots": [(round(since - begin, 1), slots) for since, slots in rooms], "machine": machine()}))


def uninterrupted(folder: Path, given: argparse.Namespace) -> tuple[Path, Rooms]:
    """An uninterrupted sweep. Returns its folder, and the slots over time."""
    own_token()
    ray.init(num_cpus=given.slots, log_to_driver=False, include_dashboard=False)
    try:
        return pool_sweep(folder / "sweep", trials=given.trials, epochs=given.epochs), [(0.0, given.slots)]
    finally:
        ray.shutdown()


def churned(folder: Path, given: argparse.Namespace) -> tuple[Path, Rooms]:
    """A sweep whose second node is removed and added, and whose workers are killed."""
    trials, draw = folder / "churned" / "runs" / "evolve" / "exp" / "trials", random.Random(0)

    def kill() -> None:
        time.sleep(PAUSE_SECONDS)
        pids = {event.pid for log in trials.glob(f"*/{EVENTS_FILE}") for event in only(WorkerEvent, read_events(log))}
        os.kill(draw.choice(sorted(pid for pid in pids if Path(f"/proc/{pid}").exists())), signal.SIGKILL)
        time.sleep(PAUSE_SECONDS)

    with ray_nodes(given.slots) as nodes, ThreadPoolExecutor(1) as pool:
        reference = pool.submit(pool_sweep, folder / "uninterrupted", trials=given.trials, epochs=given.epochs).result()
        node, rooms = nodes.add_node(num_cpus=given.slots), [(0.0, 2 * given.slots)]
        found = pool.submit(pool_sweep, folder / "churned", trials=given.trials, epochs=given.epochs)
        wait_for_workers(trials, lambda present: present == 2 * given.slots)
        kill()
        drain(node.node_id)
        rooms.append((time.time(), given.slots))
        wait_for_workers(trials, lambda present: present == given.slots)
        nodes.remove_node(node)
        kill()
        nodes.add_node(num_cpus=given.slots)
        rooms.append((time.time(), 2 * given.slots))
        kill()
        assert not found.done(), "the sweep ended before all interruptions: increase --trials"
        assert_equal_rows(found.result(), reference)
        return found.result(), rooms


def worker_spans(log: Sequence[Event]) -> list[tuple[float, float, int]]:
    """(start, end, number of workers) of each span of training."""
    marks = [event for event in log if isinstance(event, StartEvent | EndEvent)]
    spans = []
    for event, after in pairwise(marks):
        steps = [step.time for step in only(StepEvent, log) if event.time <= step.time <= after.time]
        until = after.time if isinstance(after, EndEvent) else max(steps, default=event.time)
        spans += [(event.time, until, event.num_workers)] if isinstance(event, StartEvent) else []
    return spans


def busy(spans: Sequence[tuple[float, float, int]], begin: float, end: float, rooms: Rooms) -> float:
    """The share of the slots' time in which they trained."""
    trained = sum(max(0.0, to - max(begin, since)) * workers for since, to, workers in spans)
    changes = [*((max(begin, since), slots) for since, slots in rooms), (end, 0)]
    return round(trained / sum((after - since) * slots for (since, slots), (after, _) in pairwise(changes)), 3)
