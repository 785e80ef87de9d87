"""The actors beside a training, each killed in the middle of it: `python -m pytest -m faults`.

The coordinator alone: test_coordinator.py; the job queue alone: test_job_queue.py.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import psutil
import pytest
from ray.cluster_utils import Cluster

from ray_yolo.core.events import StartEvent
from ray_yolo.runtime.workers import worker
from tests.support.faults import Training, breakable_worker, check, left_over, ray_nodes, uninterrupted_run
from tests.support.sweeps import assert_equal_rows, pool_sweep, wait_for_workers

pytestmark = [pytest.mark.faults, pytest.mark.ray, pytest.mark.timeout(900)]


@pytest.fixture(scope="module", autouse=True)
def nodes() -> Iterator[Cluster]:
    with ray_nodes(2) as found, pytest.MonkeyPatch.context() as patch:
        patch.setattr(worker, "pool_worker", breakable_worker)
        yield found


@pytest.fixture(scope="module")
def uninterrupted(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return uninterrupted_run(tmp_path_factory.mktemp("calm"), steps=100)


def kill_actor(kind: str) -> float:
    """kill -9 the newest actor of a class that this process has started. Returns when."""
    found = {}
    for process in psutil.Process().children(recursive=True):
        with contextlib.suppress(psutil.NoSuchProcess):  # others end meanwhile
            if "".join(process.cmdline()).startswith(f"ray::{kind}"):
                found[process.create_time()] = process
    found[max(found)].kill()
    return time.time()


@pytest.mark.parametrize("kind", ["Recorder", "JobQueue"])
def test_one_that_is_killed_is_started_again_and_no_step_is_lost(
    uninterrupted: Path, tmp_path: Path, kind: str
) -> None:
    """Its members train on; a worker that is killed at the same time is replaced, and joins them."""
    training = Training(tmp_path, "1-2")
    training.wait_for_workers(2)
    fault = kill_actor(kind)
    training.hit(1)
    training.wait(lambda events: len(training.events_of(StartEvent)) > 2)
    training.wait_for_workers(2)
    training.stop()
    assert all(start.regrouped for start in training.events_of(StartEvent) if start.time > fault)
    assert training.cost(fault).lost == 0
    check(training, uninterrupted)
    assert left_over() == ""


def test_the_controller_is_killed_and_all_restart_from_the_checkpoint(uninterrupted: Path, tmp_path: Path) -> None:
    """It takes its workers along."""
    training = Training(tmp_path, 2)
    training.wait_for_workers(2)
    fault = kill_actor("TrainController")
    training.wait(lambda events: training.events_of(StartEvent)[-1].time > fault)
    training.wait_for_workers(2)
    training.stop()
    check(training, uninterrupted)


def test_the_job_queue_is_killed_and_its_trials_continue(tmp_path: Path) -> None:
    trials = tmp_path / "churned" / "runs" / "evolve" / "exp" / "trials"
    uninterrupted = pool_sweep(tmp_path / "calm", trials=3, epochs=30)
    with ThreadPoolExecutor(1) as pool:
        churned = pool.submit(pool_sweep, tmp_path / "churned", trials=3, epochs=30)
        wait_for_workers(trials, lambda present: present == 2)
        kill_actor("JobQueue")
        assert_equal_rows(churned.result(), uninterrupted)
    assert left_over() == ""
