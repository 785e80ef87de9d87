"""Small sweeps of the tiny model, as a user would configure them."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

import ray
import torch

from ray_yolo.config.yaml import to_yaml
from ray_yolo.core.events import StepEvent, WorkerEvent
from ray_yolo.engine.session import Session
from ray_yolo.runs.event_log import EVENTS_FILE, read_events, surviving
from ray_yolo.runtime.workers.worker import pool_worker
from ray_yolo.tune.ledger import read_ledger, read_trials, verify
from ray_yolo.tune.search import TuneConfig
from ray_yolo.tune.tuner import search
from tests.support.checkpoints import newest
from tests.support.jobs import make_config
from tests.support.machines import wait_for
from tests.support.run_log import only

SPACE = "lr0: {low: 0.0001, high: 0.01, gain: 3}\nscale: {low: 0.0, high: 0.9}\n"
RANDOM = "search: {algorithm: random}\nlr0: {low: 0.0001, high: 0.01}\nscale: {low: 0.0, high: 0.9}\n"


def make_sweep(folder: Path, space: str = SPACE, *, recipe: dict[str, Any] | None = None, **sweep: Any) -> TuneConfig:
    """A sweep over trainings of one epoch, tracked in `folder`/mlflow.db."""
    base = make_config(folder, 1, **{"epochs": 1, "noval": False, **(recipe or {})})
    (folder / "space.yaml").write_text(space)
    return TuneConfig.model_validate({
        "recipe": base.recipe.model_dump(), "sweep": {"space": str(folder / "space.yaml"), **sweep},
        "placement": {**base.placement.model_dump(), "project": "runs/evolve",
                      "num_workers": sweep.get("workers_per_trial", 1),
                      "mlflow_uri": f"sqlite:///{folder}/mlflow.db"}})


def pool_sweep(folder: Path, *, trials: int, workers_per_trial: int = 1, max_failures: int = 3,
               epochs: int = 60) -> Path:
    """Run a sweep whose proposals do not depend on the order in which trials end. Returns its folder."""
    folder.mkdir()
    config = make_sweep(folder, RANDOM, recipe={"epochs": epochs, "noval": True}, trials=trials,
                        workers_per_trial=workers_per_trial, keep_weights=True)
    placement = config.placement.model_copy(update={"max_failures": max_failures})
    return search(config.model_copy(update={"placement": placement}), quiet=True).folder


def slow_worker(config: dict[str, Any], number: int) -> bool:
    """Replaces `pool_worker`. A step takes two seconds more, as long as a file `slow` is beside the sweep's folder."""
    after_step = Session.after_step

    def slow_after_step(session: Session, *args: Any) -> None:
        if (Path(session.spec.run_dir).parents[5] / "slow").exists():
            time.sleep(2.0)
        after_step(session, *args)

    with mock.patch.object(Session, "after_step", slow_after_step):
        return pool_worker(config, number)


def command(config: TuneConfig, folder: Path) -> list[str]:
    """The command line of a sweep that `make_sweep` made."""
    placement = {"storage_path": str(folder), "project": "runs/evolve", "noplots": True,
                 "mlflow_uri": config.placement.mlflow_uri}
    (folder / "config.yaml").write_text(to_yaml({
        "recipe": config.recipe.model_dump(mode="json"), "placement": placement,
        "sweep": config.sweep.model_dump(mode="json")}))
    return [sys.executable, "-m", "ray_yolo.tune", "--config", str(folder / "config.yaml")]


def start(argv: list[str], folder: Path) -> subprocess.Popen[bytes]:
    """Start a command on the Ray cluster of this process."""
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "RAY_ADDRESS": ray.get_runtime_context().gcs_address}
    return subprocess.Popen(argv, cwd=folder, env=environment, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE)


def wait_for_workers(trials: Path, until: Callable[[int], bool], patience_seconds: float = 120.0) -> int:
    """Wait until `until(n)` holds for n, the live processes that have trained in a running sweep. Returns n."""
    deadline, present = time.monotonic() + patience_seconds, -1
    while not (present >= 0 and until(present)):
        assert time.monotonic() < deadline, present
        time.sleep(0.1)
        pids = {event.pid for log in trials.glob(f"*/{EVENTS_FILE}") for event in only(WorkerEvent, read_events(log))}
        present = sum(Path(f"/proc/{pid}").exists() for pid in pids) if pids else -1
    return present


def assert_equal_rows(sweep: Path, uninterrupted: Path) -> None:
    """Assert equal weights in each trial of two sweeps, and no repeated step in the first one."""
    events = read_ledger(sweep / "ledger.jsonl")
    assert verify(events) == []
    for row in read_trials(events).values():
        ours, theirs = (newest(folder / "trials" / row.folder_name)["ema"] for folder in (sweep, uninterrupted))
        assert all(torch.equal(ours[name], theirs[name]) for name in theirs), row.number
        events_of_row = surviving(read_events(sweep / "trials" / row.folder_name / EVENTS_FILE))
        steps = [event.step for event in only(StepEvent, events_of_row)]
        assert sorted(set(steps)) == steps, row.number


def assert_cpus_return(patience_seconds: float = 60.0) -> None:
    """Assert that all CPUs of the cluster become free: Ray frees those of a killed trial after a moment."""
    deadline = time.monotonic() + patience_seconds
    while ray.available_resources().get("CPU") != ray.cluster_resources()["CPU"]:
        assert time.monotonic() < deadline, ray.available_resources()
        time.sleep(0.5)


def tracked_runs(folder: Path) -> list[Any]:
    """All MLflow runs of `make_sweep`'s sweep: its own and its trials'."""
    from mlflow import MlflowClient

    client = MlflowClient(tracking_uri=f"sqlite:///{folder}/mlflow.db")
    return list(client.search_runs([experiment.experiment_id for experiment in client.search_experiments()]))


def tracked_states(folder: Path) -> Counter[str]:
    """How many of them have which status."""
    return Counter(run.info.status for run in tracked_runs(folder))


def expect_states(folder: Path, **expected: int) -> None:
    """Wait until so many of them have each status: a process delivers them after the end of the command."""
    wait_for(lambda: (folder / "mlflow.db").exists() and tracked_states(folder) == expected, 100)
