"""Trainings on a range of workers share one cluster: they give places to each other, and get them back."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import ray

from ray_yolo.config.yaml import to_yaml
from ray_yolo.core.events import StepEvent, WarningEvent
from ray_yolo.runs.event_log import read_events
from ray_yolo.runs.status import read_members
from ray_yolo.runs.verification import compare_runs
from ray_yolo.runtime.sharing import CALM_SECONDS
from tests.support.faults import EXACT, left_over, ray_nodes
from tests.support.jobs import make_config
from tests.support.run_log import messages, only

pytestmark = [pytest.mark.faults, pytest.mark.ray, pytest.mark.timeout(900)]


class Job:
    """A training with a driver of its own, by default on 1 to 4 workers."""

    def __init__(self, folder: Path, workers: Any = "1-4", **placement: object) -> None:
        folder.mkdir()
        config = make_config(folder, workers, placement, **EXACT, imgsz=192)  # larger: fewer steps to train again
        (folder / "config.yaml").write_text(to_yaml(config.model_dump(mode="json")))
        self.run_dir = folder / "runs" / "train" / "exp"
        self.started = time.time()
        environment = {**os.environ, "OMP_NUM_THREADS": "1"}
        if workers:
            environment["RAY_ADDRESS"] = ray.get_runtime_context().gcs_address
        self._folder, self._output = folder, (folder / "output").open("w")
        command = [sys.executable, "-m", "ray_yolo.train", "--config", str(folder / "config.yaml")]
        self._process = subprocess.Popen(command, cwd=folder, env=environment, stdout=self._output,
                                         stderr=self._output)

    def workers(self) -> int:
        """The workers that train."""
        return len(read_members(self.run_dir) or ())

    def first_step(self) -> float:
        """The seconds from its start to its first step; infinite before it."""
        events = only(StepEvent, read_events(self.run_dir / "events.jsonl"))
        return events[0].time - self.started if events else float("inf")

    def wait(self, until: Callable[[], bool], seconds: float) -> None:
        """Wait until something holds."""
        deadline = time.monotonic() + seconds
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
        self._process.send_signal(signal.SIGTERM)
        assert self._process.wait(60) == 128 + signal.SIGTERM

    def kill(self) -> None:
        """End it however it is."""
        self._process.kill()
        self._process.wait()
        self._output.close()


@contextmanager
def job(folder: Path, workers: Any = "1-4", **placement: object) -> Iterator[Job]:
    """A job that is gone at the end."""
    started = Job(folder, workers, **placement)
    try:
        yield started
    finally:
        started.kill()


def assert_bits_of_a_lone_run(jobs: Sequence[Job], folder: Path) -> None:
    """Each job has the weights of an undisturbed training after as many steps, and has done none twice."""
    last = max(shared.steps()[-1] for shared in jobs)
    with job(folder, workers=0) as lone:
        lone.wait(lambda: lone.first_step() < float("inf") and lone.steps()[-1] >= last, 600)
        lone.stop()
    for shared in jobs:
        findings = compare_runs(shared.run_dir, lone.run_dir)
        assert len(findings) > 2
        assert not [finding for finding in findings if finding.problem]
        steps = shared.steps()
        assert steps == sorted(set(steps))


def test_a_range_gives_places_to_another_and_both_end_with_the_bits_of_a_lone_run(tmp_path: Path) -> None:
    """A minute after the end of the second one, the first one has all places again."""
    with ray_nodes(4), job(tmp_path / "first") as first:
        first.wait(lambda: first.workers() == 4, 120)
        time.sleep(30)
        with job(tmp_path / "second") as second:
            second.wait(lambda: second.first_step() < float("inf"), 90)
            second.wait(lambda: first.workers() == second.workers() == 2, 90)
            second.stop()
        first.wait(lambda: first.workers() == 4, 120)
        first.stop()
        assert left_over() == ""
        said = [text for text in messages(first.run_dir) if "place" in text]
        assert len([text for text in said if "is given to" in text]) == 2
        assert [text for text in said if "requested again" in text and "given" not in text]
    assert_bits_of_a_lone_run((first, second), tmp_path / "lone")
    print(f"the second one's first step after {second.first_step():.1f} s")


def test_of_three_priorities_the_lower_ones_keep_their_minimum_until_the_higher_one_ends(tmp_path: Path) -> None:
    """Afterwards the middle one gets its places back before the lowest one does, and no place was given twice in a
    minute."""
    with ray_nodes(4), job(tmp_path / "low", priority=-1) as low:
        low.wait(lambda: low.workers() == 4, 120)
        with job(tmp_path / "middle") as middle:
            middle.wait(lambda: (low.workers(), middle.workers()) == (1, 3), 180)
            with job(tmp_path / "high", priority=1) as high:
                high.wait(lambda: (low.workers(), middle.workers(), high.workers()) == (1, 1, 2), 180)
                high.stop()
            middle.wait(lambda: (low.workers(), middle.workers()) == (1, 3), 300)
            middle.stop()
        low.stop()
        assert left_over() == ""
    assert_bits_of_a_lone_run((low, middle, high), tmp_path / "lone")
    for run in (low, middle):
        for times in run.given().values():
            assert all(after - before >= CALM_SECONDS for before, after in pairwise(times))
    print(f"first steps after {low.first_step():.1f}, {middle.first_step():.1f} and {high.first_step():.1f} s")
