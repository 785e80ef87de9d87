"""The share of time in which the slots of a sweep train: trials one after another on a standing worker pool.

    python tests/benchmarks/run.py sweep [--trials 12] [--epochs 60] [--slots 2] [--churn | --thrice | --beside]

Trials of the tiny model on one worker each. A slot trains from a trial's `start` event to its `end`, or to the last
step before the next `start` if its workers changed. The rest, until the last end, is start-up and waiting. The sweep is
warm when the first slot starts its second trial: until then its processes start.

With `--churn` a second node of as many slots is drained, removed and added again, and three workers are killed. The
rows must equal those of an uninterrupted sweep.

With `--thrice` a ladder runs three times: on one worker, on two, and on two to four. In the third run three workers and
the driver are killed. The ledgers, with the digests of all weights, must be equal. The figures are of the second.

With `--beside` a ladder runs alone on four slots, and once more beside a training of two fixed workers, for which it
gives two of its slots. The ledgers must be equal. The figures are of the two slots that it keeps, while the other
training trains.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import signal
import sys
import tempfile
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import ray

from ray_yolo.config.yaml import to_yaml
from ray_yolo.core.events import EndEvent, Event, StartEvent, StepEvent, WorkerEvent
from ray_yolo.runs.event_log import EVENTS_FILE, read_events
from ray_yolo.runtime.cluster import own_token
from ray_yolo.tune.verification import compare_studies
from tests.benchmarks.harness import machine
from tests.support.faults import drain, ray_nodes
from tests.support.jobs import make_config
from tests.support.machines import wait_for
from tests.support.run_log import only
from tests.support.sweeps import SPACE, assert_equal_rows, command, make_sweep, pool_sweep, start, wait_for_workers

PAUSE_SECONDS = 12.0  # between two interruptions
BESIDE_SECONDS = 40.0  # that another training holds two slots
LADDER = "search: {algorithm: evolve, scheduler: ladder}\n" + SPACE

Rooms = list[tuple[float, int]]  # (time, number of slots from then on)


def main(argv: list[str]) -> None:
    """Run the benchmark and print its result."""
    parser = argparse.ArgumentParser(prog="run.py sweep")
    parser.add_argument("--trials", type=int, default=12)
    parser.add_argument("--epochs", type=int, default=60)
    parser.add_argument("--slots", type=int, default=2)
    parser.add_argument("--churn", action="store_true")
    parser.add_argument("--thrice", action="store_true")
    parser.add_argument("--beside", action="store_true")
    given = parser.parse_args(argv)
    if given.beside:
        with tempfile.TemporaryDirectory() as folder:
            print(json.dumps({"id": "sweep, beside", **beside(Path(folder), given), "machine": machine()}))
        return
    run = churned if given.churn else thrice if given.thrice else uninterrupted
    with tempfile.TemporaryDirectory() as folder:
        sweep, rooms = run(Path(folder), given)
        logs = [read_events(log) for log in sorted(sweep.glob(f"trials/*/{EVENTS_FILE}"))]
    spans = [span for log in logs for span in worker_spans(log)]
    starts = sorted(min(event.time for event in only(StartEvent, log)) for log in logs)
    begin, warm, end = starts[0], starts[rooms[0][1]], max(span[1] for span in spans)
    print(json.dumps({
        "id": f"sweep, {run.__name__}", "waits": waits(logs), "busy": busy(spans, begin, end, rooms),
        "busy after warm-up": busy(spans, warm, end, rooms), "seconds": round(end - begin, 1),
        "warm-up": round(warm - begin, 1), "starts": [round(start - begin, 1) for start in starts],
        "slots": [(round(since - begin, 1), slots) for since, slots in rooms], "machine": machine()}))


def uninterrupted(folder: Path, given: argparse.Namespace) -> tuple[Path, Rooms]:
    """An uninterrupted sweep. Returns its folder, and the slots over time."""
    own_token()
    ray.init(address="local", num_cpus=given.slots, log_to_driver=False, include_dashboard=False)
    try:
        return pool_sweep(folder / "sweep", trials=given.trials, epochs=given.epochs), [(0.0, given.slots)]
    finally:
        ray.shutdown()


def churned(folder: Path, given: argparse.Namespace) -> tuple[Path, Rooms]:
    """A sweep whose second node is removed and added, and whose workers are killed."""
    trials, draw = folder / "churned" / "runs" / "evolve" / "exp" / "trials", random.Random(0)

    with ray_nodes(given.slots) as nodes, ThreadPoolExecutor(1) as pool:
        reference = pool.submit(pool_sweep, folder / "uninterrupted", trials=given.trials, epochs=given.epochs).result()
        node, rooms = nodes.add_node(num_cpus=given.slots), [(0.0, 2 * given.slots)]
        found = pool.submit(pool_sweep, folder / "churned", trials=given.trials, epochs=given.epochs)
        wait_for_workers(trials, lambda present: present == 2 * given.slots)
        kill_worker(trials, draw)
        drain(node.node_id)
        rooms.append((time.time(), given.slots))
        wait_for_workers(trials, lambda present: present == given.slots)
        nodes.remove_node(node)
        kill_worker(trials, draw)
        nodes.add_node(num_cpus=given.slots)
        rooms.append((time.time(), 2 * given.slots))
        kill_worker(trials, draw)
        assert not found.done(), "the sweep ended before all interruptions: increase --trials"
        assert_equal_rows(found.result(), reference)
        return found.result(), rooms


def thrice(folder: Path, given: argparse.Namespace) -> tuple[Path, Rooms]:
    """The same sweep on one worker, on two, and on two to four with kills; the second one."""
    sweeps = []
    for name, cpus in (("one", 1), ("two", 2), ("killed", 2)):
        (folder / name).mkdir()
        config = make_sweep(folder / name, LADDER, recipe={"epochs": given.epochs, "noval": False},
                            trials=given.trials, virtual_slots=4)
        argv = command(config, folder / name)
        sweeps.append(folder / name / "runs" / "evolve" / "exp")
        with ray_nodes(cpus) as nodes:
            process = start(argv, folder / name)
            if name == "killed":
                draw = random.Random(0)
                wait_for_workers(sweeps[-1] / "trials", lambda present: present == 2)
                kill_worker(sweeps[-1] / "trials", draw)
                nodes.add_node(num_cpus=2)
                kill_worker(sweeps[-1] / "trials", draw)
                process.kill()
                process.communicate()
                process = start(argv, folder / name)
                kill_worker(sweeps[-1] / "trials", draw)
                assert process.poll() is None, "the sweep ended before all kills: increase --trials"
            _, errors = process.communicate()
            assert process.returncode == 0, errors.decode()
    for sweep in sweeps[1:]:
        assert [result.problem for result in compare_studies(sweeps[0], sweep)] == [None]
    return sweeps[1], [(0.0, 2)]


def beside(folder: Path, given: argparse.Namespace) -> dict[str, Any]:
    """The same sweep alone, and beside a training that takes two of its four slots for a time."""
    sweeps = {}
    with ray_nodes(4):
        for name in ("alone", "beside"):
            (folder / name).mkdir()
            config = make_sweep(folder / name, LADDER, recipe={"epochs": given.epochs, "noval": False},
                                trials=given.trials, virtual_slots=4)
            sweeps[name] = folder / name / "runs" / "evolve" / "exp"
            process = start(command(config, folder / name), folder / name)
            if name == "beside":
                wait_for_workers(sweeps[name] / "trials", lambda present: present == 4)
                seconds_to_first_step, begin, end = train_beside(folder / "training")
                assert process.poll() is None, "the sweep ended before the training: increase --trials"
            _, errors = process.communicate()
            assert process.returncode == 0, errors.decode()
    assert [result.problem for result in compare_studies(sweeps["alone"], sweeps["beside"])] == [None]
    logs = [read_events(log) for log in sorted(sweeps["beside"].glob(f"trials/*/{EVENTS_FILE}"))]
    spans = [span for log in logs for span in worker_spans(log)]
    within = [(max(since, begin), min(to, end), workers) for since, to, workers in spans if since < end and to > begin]
    return {"busy": busy(within, begin, end, [(0.0, 2)]), "seconds": round(end - begin, 1),
            "seconds to the training's first step": round(seconds_to_first_step, 1)}


def train_beside(folder: Path) -> tuple[float, float, float]:
    """Train with two fixed workers for `BESIDE_SECONDS`. Returns the seconds from the command to the first step, and
    the times of the first and the last step."""
    folder.mkdir()
    config = make_config(folder, 2, epochs=100_000)
    (folder / "config.yaml").write_text(to_yaml(config.model_dump(mode="json")))
    started = time.time()
    process = start([sys.executable, "-m", "ray_yolo.train", "--config", str(folder / "config.yaml")], folder)
    log = folder / "runs" / "train" / "exp" / EVENTS_FILE
    wait_for(lambda: log.exists() and bool(only(StepEvent, read_events(log))), 180)
    time.sleep(BESIDE_SECONDS)
    process.send_signal(signal.SIGTERM)
    process.communicate()
    steps = only(StepEvent, read_events(log))
    return steps[0].time - started, steps[0].time, steps[-1].time


def kill_worker(trials: Path, draw: random.Random) -> None:
    """Kill one of the live workers of a sweep, between two pauses."""
    time.sleep(PAUSE_SECONDS)
    while not (pids := live_workers(trials)):  # after a driver was killed, its workers end and others start
        time.sleep(0.5)
    os.kill(draw.choice(pids), signal.SIGKILL)
    time.sleep(PAUSE_SECONDS)


def live_workers(trials: Path) -> list[int]:
    """The processes of a sweep's workers."""
    pids = {event.pid for log in trials.glob(f"*/{EVENTS_FILE}") for event in only(WorkerEvent, read_events(log))}
    return sorted(pid for pid in pids if is_of_ray(pid))


def is_of_ray(pid: int) -> bool:
    """Whether a process is one of Ray's: numbers are used again."""
    try:
        return b"ray::" in Path(f"/proc/{pid}/cmdline").read_bytes()
    except OSError:
        return False


def waits(logs: Sequence[Sequence[Event]]) -> dict[str, list[float]]:
    """Quartiles of the seconds from the end of a worker's task to the first step of its next one, by kind of trial."""
    tasks: dict[int, list[tuple[float, float, str]]] = {}  # by worker: first step, end, kind
    for log in logs:
        kind = "new"
        for group in split_after(log, EndEvent):
            workers, steps = only(WorkerEvent, group), only(StepEvent, group)
            if workers and steps and isinstance(group[-1], EndEvent):
                tasks.setdefault(workers[0].pid, []).append((steps[0].time, group[-1].time, kind))
            kind = "resumed"
    found: dict[str, list[float]] = {"new": [], "resumed": []}
    for each in tasks.values():
        for (_, end, _), (step, _, kind) in pairwise(sorted(each)):
            found[kind].append(step - end)
    return {kind: [round(float(np.quantile(seconds, share)), 2) for share in (0.25, 0.5, 0.75)]
            for kind, seconds in found.items() if seconds}


def split_after(log: Sequence[Event], kind: type[Event]) -> list[list[Event]]:
    """The events in groups, each of which ends with an event of a kind, but for the last one."""
    groups: list[list[Event]] = [[]]
    for event in log:
        groups[-1].append(event)
        if isinstance(event, kind):
            groups.append([])
    return groups


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
