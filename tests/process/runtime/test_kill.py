"""kill -9 of everything, then the same command again: a user's view, with real processes."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch

from ray_yolo.core.events import CheckpointEvent, EndEvent, StartEvent, StepEvent
from ray_yolo.runs.event_log import read_events
from tests.support import run_log
from tests.support.checkpoints import newest
from tests.support.jobs import STEADY, TINY, make_dataset
from tests.support.processes import kill

EPOCHS = 4


def command(folder: Path, storage: Path, num_workers: int | str) -> list[str]:
    model = folder / "tiny.yaml"
    model.write_text(str(TINY).replace("'", '"'))
    settings = {"optimizer.nominal_batch": 16, "optimizer.clip_norm": 0.3, "schedule.warmup_epochs": 0}
    assert settings["optimizer.nominal_batch"] == STEADY["optimizer"]["nominal_batch"]
    return [sys.executable, "-m", "ray_yolo.train", "--data", str(make_dataset(folder / "data")), "--model", str(model),
            "--imgsz", "64", "--batch-size", "16", "--microbatch", "4", "--epochs", str(EPOCHS), "--exact",
            "--num-workers", str(num_workers), "--save-steps", "2", "--patience", "0", "--noplots",
            "--storage-path", str(storage), *(f"--set={path}={value}" for path, value in settings.items())]


def start(argv: list[str], folder: Path) -> subprocess.Popen[bytes]:
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    environment.pop("RAY_ADDRESS", None)
    ours = signal.signal(signal.SIGINT, signal.default_int_handler)  # a job in the background ignores it, as would this
    try:
        return subprocess.Popen(argv, cwd=folder, env=environment, start_new_session=True,
                                stdout=subprocess.DEVNULL, stderr=subprocess.PIPE)
    finally:
        signal.signal(signal.SIGINT, ours)


def log_of(storage: Path) -> Path:
    return storage / "runs" / "train" / "exp" / "events.jsonl"


def steps(storage: Path) -> list[int]:
    log = log_of(storage)
    return [event.step for event in run_log.only(StepEvent, read_events(log))]


def finish(process: subprocess.Popen[bytes]) -> None:
    _, errors = process.communicate(timeout=280)
    assert process.returncode == 0, errors.decode()


def kill_after(process: subprocess.Popen[bytes], storage: Path, step: int) -> None:
    """kill -9 of the driver and all that it has started, once a step has been recorded."""
    while step not in steps(storage):
        assert process.poll() is None, process.stderr.read().decode()
        time.sleep(0.005)
    kill(process)


def tensors(storage: Path) -> dict[str, Any]:
    state = newest(storage / "runs" / "train" / "exp")
    return {f"{part}.{name}": value for part in ("model", "ema") for name, value in state[part].items()} | {
        f"optimizer.{number}": entry["momentum_buffer"] for number, entry in state["optimizer"].items()}


@pytest.fixture(scope="module")
def uninterrupted(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    folder = tmp_path_factory.mktemp("calm")
    finish(start(command(folder, folder, 0), folder))
    return folder, folder


def check(storage: Path, uninterrupted: Path, interval: int, kills: int) -> None:
    expected = tensors(uninterrupted)
    assert all(torch.equal(value, expected[name]) for name, value in tensors(storage).items())
    total, events = len(steps(uninterrupted)), read_events(log_of(storage))
    places = [place for place, event in enumerate(events) if isinstance(event, StartEvent)]
    assert len(places) == kills + 1
    for place in places[1:]:
        start = events[place].step
        # the event of a checkpoint may be lost with the process that had just written it
        assert start >= max((event.step for event in run_log.only(CheckpointEvent, events[:place])), default=0)
        assert next(iter(run_log.only(StepEvent, events[place:]))).step == start + 1
    assert len(steps(storage)) <= total + kills * interval
    rows = (storage / "runs" / "train" / "exp" / "results.csv").read_text().splitlines()[1:]
    assert [int(row.split(",")[0]) for row in rows] == list(range(EPOCHS))
    client_rows(storage)


def client_rows(storage: Path) -> None:
    """MLflow has one run, finished, with each epoch's numbers once."""
    from mlflow.tracking import MlflowClient

    client = MlflowClient(f"sqlite:///{storage}/mlflow.db")
    [run] = client.search_runs([experiment.experiment_id for experiment in client.search_experiments()])
    assert run.info.status == "FINISHED"
    history = client.get_metric_history(run.info.run_id, "metrics/mAP50")
    assert sorted(point.step for point in history) == list(range(EPOCHS))


@pytest.mark.slow
@pytest.mark.parametrize("step", range(1, 12))
def test_killed_after_any_step_without_ray(uninterrupted: tuple[Path, Path], tmp_path: Path, step: int) -> None:
    argv = command(tmp_path, tmp_path, 0)
    kill_after(start(argv, tmp_path), tmp_path, step)
    finish(start(argv, tmp_path))
    check(tmp_path, uninterrupted[0], interval=2, kills=1)


@pytest.mark.slow
@pytest.mark.ray
def test_ray_workers_and_driver_killed_then_other_numbers_of_workers(
    uninterrupted: tuple[Path, Path], tmp_path: Path
) -> None:
    kill_after(start(command(tmp_path, tmp_path, 2), tmp_path), tmp_path, 5)  # inside the second epoch
    kill_after(start(command(tmp_path, tmp_path, 0), tmp_path), tmp_path, 8)
    finish(start(command(tmp_path, tmp_path, 2), tmp_path))
    check(tmp_path, uninterrupted[0], interval=2, kills=2)


def stop_and_go_on(uninterrupted: Path, folder: Path, signum: int, status: int, workers: int, loaders: int) -> None:
    """Signal a training's whole process group, as a terminal and `timeout` do."""
    process = start([*command(folder, folder, workers), "--workers", str(loaders)], folder)
    while 5 not in steps(folder):
        assert process.poll() is None, process.stderr.read().decode()
        time.sleep(0.005)
    os.killpg(process.pid, signum)
    _, errors = process.communicate(timeout=60)
    others = [line for line in errors.splitlines() if not re.fullmatch(rb".+, \d+ s", line)]  # a slow start's phases
    assert (process.returncode, others) == (status, [])
    last = read_events(log_of(folder))[-1]
    assert isinstance(last, EndEvent)
    assert (last.status, last.reason) == ("stopped", "interrupted")
    finish(start(command(folder, folder, 0), folder))
    assert len(set(steps(folder))) == len(steps(folder))  # none was trained twice
    expected = tensors(uninterrupted)
    assert all(torch.equal(value, expected[name]) for name, value in tensors(folder).items())
    client_rows(folder)


@pytest.mark.smoke
def test_ctrl_c_at_a_terminal_loses_no_step(uninterrupted: tuple[Path, Path], tmp_path: Path) -> None:
    stop_and_go_on(uninterrupted[0], tmp_path, signal.SIGINT, 130, 0, 2)


@pytest.mark.slow
@pytest.mark.ray
@pytest.mark.parametrize("loaders", [0, 1, 2])
@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize(("signum", "status"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_a_stopped_training_says_so_and_continues_at_the_next_step(
        uninterrupted: tuple[Path, Path], tmp_path: Path, signum: int, status: int, workers: int, loaders: int) -> None:
    stop_and_go_on(uninterrupted[0], tmp_path, signum, status, workers, loaders)
