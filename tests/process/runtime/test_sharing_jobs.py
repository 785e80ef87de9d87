"""Two trainings on a range of workers share one cluster: the first gives places, and gets them back."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import ray

from ray_yolo.config.yaml import to_yaml
from ray_yolo.core.events import StepEvent
from ray_yolo.runs.event_log import read_events
from ray_yolo.runs.status import read_members
from ray_yolo.runs.verification import compare_runs
from tests.support.faults import EXACT, left_over, ray_nodes, uninterrupted_run
from tests.support.jobs import make_config
from tests.support.run_log import messages, only

pytestmark = [pytest.mark.faults, pytest.mark.ray, pytest.mark.timeout(900)]


class Job:
    """A training on 1 to 4 workers, with a driver of its own."""

    def __init__(self, folder: Path, **placement: object) -> None:
        folder.mkdir()
        config = make_config(folder, "1-4", placement, **EXACT)
        (folder / "config.yaml").write_text(to_yaml(config.model_dump(mode="json")))
        self.run_dir = folder / "runs" / "train" / "exp"
        self.started = time.time()
        environment = {**os.environ, "OMP_NUM_THREADS": "1", "RAY_ADDRESS": ray.get_runtime_context().gcs_address}
        self._output = (folder / "output").open("w")
        command = [sys.executable, "-m", "ray_yolo.train", "--config", str(folder / "config.yaml")]
        self._process = subprocess.Popen(command, cwd=folder, env=environment, stdout=self._output,
                                         stderr=self._output)

    def workers(self) -> int:
        """The workers that train."""
        return len(read_members(self.run_dir) or ())

    def first_step(self) -> float:
        """The seconds from its start to its first step; infinite before it."""
        steps = only(StepEvent, read_events(self.run_dir / "events.jsonl"))
        return steps[0].time - self.started if steps else float("inf")

    def wait(self, until: Callable[[], bool], seconds: float) -> None:
        """Wait until something holds."""
        deadline = time.monotonic() + seconds
        while not until():
            assert self._process.poll() is None, (self.run_dir.parents[2] / "output").read_text()
            assert time.monotonic() < deadline, (self.run_dir.parents[2] / "output").read_text()
            time.sleep(0.1)

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
def job(folder: Path, **placement: object) -> Iterator[Job]:
    """A job that is gone at the end."""
    started = Job(folder, **placement)
    try:
        yield started
    finally:
        started.kill()


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
        reached = max(event.step for event in only(StepEvent, read_events(first.run_dir / "events.jsonl")))
    lone = uninterrupted_run(tmp_path / "lone", reached)
    for run in (first, second):
        findings = compare_runs(run.run_dir, lone)
        assert len(findings) > 2
        assert not [finding for finding in findings if finding.problem]
        steps = [event.step for event in only(StepEvent, read_events(run.run_dir / "events.jsonl"))]
        assert steps == sorted(set(steps))  # none was trained twice
    print(f"the second one's first step after {second.first_step():.1f} s")
