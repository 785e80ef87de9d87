"""A sweep's standing pool on Ray: lost workers and trials cost no row, and jobs leave nothing behind."""

from __future__ import annotations

import gc
import os
import signal
import threading
import time
from collections.abc import Callable
from pathlib import Path
from queue import SimpleQueue
from types import SimpleNamespace
from typing import Any

import pytest

from ray_yolo.core.errors import TrainingError
from ray_yolo.core.events import StartEvent
from ray_yolo.core.structures import Orders
from ray_yolo.runs.event_log import EVENTS_FILE, read_events
from ray_yolo.runs.status import read_members
from ray_yolo.runtime.workers import worker
from ray_yolo.runtime.workers.client import JobClient
from ray_yolo.runtime.workers.job_queue import JobAssignment, NextTask, PoolWorker
from tests.support.run_log import only
from tests.support.sweeps import assert_cpus_return, assert_equal_rows, pool_sweep
from tests.unit.runtime.workers.test_pool_jobs import LocalQueue, pool_process

__all__ = ["pool_process"]  # fixtures

TRIALS = 5


def workers_at(trial: Path, least_steps: int) -> list[int]:
    """The processes that train a trial now and have taken some steps. Others may have left it for another trial."""
    return [member.pid for member in read_members(trial) or () if member.step >= least_steps]


def churn(trials: Path, hits: dict[str, Callable[[Path, list[int]], None]], done: list[str]) -> None:
    """Hit each of these trials once while it is trained."""
    while len(done) < len(hits):
        for name in hits.keys() - set(done):
            if len(pids := workers_at(trials / name, 10)) >= 2:
                hits[name](trials / name, pids)
                done.append(name)
        time.sleep(0.02)


def kill_one(trial: Path, pids: list[int]) -> None:
    os.kill(pids[0], signal.SIGKILL)


def kill_all(trial: Path, pids: list[int]) -> None:
    for pid in pids:
        os.kill(pid, signal.SIGKILL)


def kill_a_trials_process(trial: Path, pids: list[int]) -> None:
    """The one that Tune has started for it; it holds the run folder's lock."""
    os.kill(int((trial / ".lock").read_text().split()[1]), signal.SIGKILL)


@pytest.mark.usefixtures("own_signal_handlers", "pool_process")
def test_a_pool_worker_that_gets_sigterm_acquires_no_more_jobs(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its process ends, and a new one is launched in its bundle."""
    def next_task(uid: str, place: PoolWorker) -> NextTask:
        asked.append(uid)
        signal.raise_signal(signal.SIGTERM)
        return NextTask(Orders(stop=True)) if len(asked) > 1 else NextTask(ask_again=0.1)

    asked: list[str] = []
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    monkeypatch.setattr(worker, "_sigterms", SimpleQueue())
    assert not worker.pool_worker({"queue": SimpleNamespace(next_task=SimpleNamespace(remote=next_task))}, 0)
    assert len(asked) == 1
    gc.unfreeze()


@pytest.mark.usefixtures("own_signal_handlers", "pool_process")
@pytest.mark.parametrize(("error", "jobs"), [(TrainingError("diverged"), 2), (OSError("odd"), 1)])
def test_a_process_that_may_have_caused_an_error_is_replaced(
        monkeypatch: pytest.MonkeyPatch, error: Exception, jobs: int) -> None:
    def fail(*_: Any) -> None:
        raise error

    def next_task(uid: str, place: PoolWorker) -> NextTask:
        return NextTask(task=JobAssignment("job", 0, [payload])) if len(results) < 2 else NextTask(Orders(stop=True))

    results = list[Any]()
    payload = {"coordinator": JobClient(LocalQueue(), "job", 1)}
    queue = SimpleNamespace(next_task=SimpleNamespace(remote=next_task),
                            ended=SimpleNamespace(remote=lambda *report: results.append(report[-1])))
    monkeypatch.setattr(worker, "train_job", fail)
    assert worker.pool_worker({"queue": queue}, 0) is (jobs == 2)
    assert results == [error] * jobs
    gc.unfreeze()


@pytest.mark.ray
@pytest.mark.faults
@pytest.mark.timeout(900)
@pytest.mark.usefixtures("ray_session")
def test_killed_workers_and_trials_do_not_change_a_sweeps_rows(tmp_path: Path) -> None:
    uninterrupted, done = pool_sweep(tmp_path / "calm", trials=TRIALS, workers_per_trial=2), []
    hits = {"trial0": kill_one, "trial1": kill_a_trials_process, "trial3": kill_all}
    trials = tmp_path / "churned" / "runs" / "evolve" / "exp" / "trials"
    threading.Thread(target=churn, args=(trials, hits, done), daemon=True).start()
    churned = pool_sweep(tmp_path / "churned", trials=TRIALS, workers_per_trial=2)
    assert sorted(done) == sorted(hits)
    assert_equal_rows(churned, uninterrupted)
    regrouped = only(StartEvent, read_events(churned / "trials" / "trial0" / EVENTS_FILE))
    assert regrouped[1].regrouped
    assert_cpus_return()
