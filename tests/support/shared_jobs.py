"""Trainings on a range of workers that share a cluster, each with a driver of its own."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import ray

from ray_yolo.config.yaml import to_yaml
from ray_yolo.core.events import StepEvent, WarningEvent
from ray_yolo.runs.event_log import read_events
from ray_yolo.runs.status import read_members
from ray_yolo.runs.verification import compare_runs
from tests.support.faults import EXACT, PATIENCE
from tests.support.jobs import make_config
from tests.support.machines import Machines
from tests.support.run_log import only


class Node(NamedTuple):
    """One of two machines."""

    machines: Machines
    name: str


class Job:
    """A training with a driver of its own, by default on 1 to 4 workers. It trains until it is stopped.

    Args:
        node: of a cluster of two machines, on which its driver runs; None: it runs here.
    """

    def __init__(self, folder: Path, workers: Any = "1-4", node: Node | None = None, **placement: object) -> None:
        folder.mkdir()
        config = make_config(folder, workers, placement, **EXACT, imgsz=192)  # larger: fewer steps to train again
        (folder / "config.yaml").write_text(to_yaml(config.model_dump(mode="json")))
        self.run_dir = folder / "runs" / "train" / "exp"
        self.started = time.time()
        self._node, self._folder, self._output = node, folder, (folder / "output").open("w")
        command = [sys.executable, "-m", "ray_yolo.train", "--config", str(folder / "config.yaml")]
        if node:
            self._process = node.machines.start(node.name, *command, stdout=self._output, stderr=self._output)
            return
        environment = {**os.environ, "OMP_NUM_THREADS": "1"}
        if workers:
            environment["RAY_ADDRESS"] = ray.get_runtime_context().gcs_address
        self._process = subprocess.Popen(command, cwd=folder, env=environment, stdout=self._output,
                                         stderr=self._output, text=True)

    def workers(self) -> int:
        """The workers that train."""
        return len(read_members(self.run_dir) or ())

    def first_step(self) -> float:
        """The seconds from its start to its first step; infinite before it."""
        events = only(StepEvent, read_events(self.run_dir / "events.jsonl"))
        return events[0].time - self.started if events else float("inf")

    def wait(self, until: Callable[[], bool]) -> None:
        """Wait until something holds."""
        deadline = time.monotonic() + PATIENCE
        while not until():
            assert self._process.poll() is None, self.output()
            assert time.monotonic() < deadline, self.output()
            time.sleep(0.1)

    def output(self) -> str:
        """The end of what it has printed."""
        return (self._folder / "output").read_text()[-5000:]

    def steps(self) -> list[int]:
        """The numbers of its steps, in the order of the log."""
        return [event.step for event in only(StepEvent, read_events(self.run_dir / "events.jsonl"))]

    def given(self) -> dict[str, list[float]]:
        """When each of its places was given to others, by place."""
        found: dict[str, list[float]] = {}
        for event in only(WarningEvent, read_events(self.run_dir / "events.jsonl")):
            if place := re.match(r"worker place (\d+) is given", event.message):
                found.setdefault(place[1], []).append(event.time)
        return found

    def stop(self) -> None:
        """End it after the step in progress, which is saved."""
        if self._node:  # its process here is `nsenter`, which does not forward signals
            self._node.machines.run(self._node.name, "pkill", "-TERM", "-f", str(self._folder / "config.yaml"))
        else:
            self._process.send_signal(signal.SIGTERM)
        assert self._process.wait(PATIENCE) == 128 + signal.SIGTERM

    def kill(self) -> None:
        """End it however it is."""
        self._process.kill()
        self._process.wait()
        self._output.close()


@contextmanager
def job(folder: Path, workers: Any = "1-4", node: Node | None = None, **placement: object) -> Iterator[Job]:
    """A job that is gone at the end."""
    started = Job(folder, workers, node, **placement)
    try:
        yield started
    finally:
        started.kill()


def assert_bits_of_a_lone_run(jobs: Sequence[Job], folder: Path) -> None:
    """Each job has the weights of an undisturbed training after as many steps, and has done none twice."""
    last = max(shared.steps()[-1] for shared in jobs)
    with job(folder, workers=0) as lone:
        lone.wait(lambda: lone.first_step() < float("inf") and lone.steps()[-1] >= last)
        lone.stop()
    for shared in jobs:
        findings = compare_runs(shared.run_dir, lone.run_dir)
        assert len(findings) > 2
        assert not [finding for finding in findings if finding.problem]
        steps = shared.steps()
        assert steps == sorted(set(steps))
