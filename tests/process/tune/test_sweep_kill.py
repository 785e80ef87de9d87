"""kill -9 of a sweep's driver, again and again, on a cluster that lives on: nothing lost, nothing run twice."""

from __future__ import annotations

import random
import shlex
import signal
import subprocess
import sys
import time
from collections import Counter
from pathlib import Path

import pytest
import torch

from ray_yolo.core.events import EpochEvent, StepEvent
from ray_yolo.runs.event_log import read_events, read_lines
from ray_yolo.tune.ledger import read_ledger, read_trials, verify
from ray_yolo.tune.ledger_events import CountedEvent, ProposedEvent
from ray_yolo.tune.search import TuneConfig
from ray_yolo.tune.trials import Trial
from ray_yolo.tune.tuner import search
from ray_yolo.tune.verification import compare
from tests.support import run_log
from tests.support.checkpoints import newest
from tests.support.sweeps import assert_cpus_return, command, expect_states, make_sweep, start, tracked_runs

TRIALS, KILLS = 8, 5
EPOCHS = 8
SPACE = ("search: {algorithm: evolve, scheduler: none}\n"  # each trial is one training
         "lr0: {low: 0.002, high: 0.05, gain: 3}\nscale: {low: 0.0, high: 0.9, gain: 3}\n")
RECIPE = {"epochs": EPOCHS, "noval": False, "batch_size": 8, "exact": True,  # learns enough for trials to differ
          "optimizer": {"name": "AdamW", "lr0": 0.01, "nominal_batch": 8}, "augment": {"mosaic": 0.0, "scale": 0.1},
          "schedule": {"warmup_epochs": 0, "ema_ramp": 10}}
PAUSE_SECONDS = 1.5  # a kill comes so long, or less, after the ledger has got some new events


def kill_later(process: subprocess.Popen[bytes], ledger: Path, num_events: int, pause_seconds: float) -> None:
    """kill -9 of the driver alone, a while after the ledger has got so many more events."""
    wanted = len(read_ledger(ledger)) + num_events
    while len(read_ledger(ledger)) < wanted:
        assert process.poll() is None, process.stderr.read().decode()
        time.sleep(0.05)
    time.sleep(pause_seconds)
    process.kill()
    process.communicate()


def run_with_kills(config: TuneConfig, folder: Path) -> dict[int, Trial]:
    argv, rng, ledger = command(config, folder), random.Random(1), folder / "runs" / "evolve" / "exp" / "ledger.jsonl"
    for _ in range(KILLS):
        kill_later(start(argv, folder), ledger, rng.randint(1, 4), rng.random() * PAUSE_SECONDS)
    process = start(argv, folder)
    _, errors = process.communicate(timeout=600)
    assert process.returncode == 0, errors.decode()
    events = read_ledger(ledger)
    assert verify(events) == []
    assert [event.trial for event in events if isinstance(event, ProposedEvent)] == list(range(TRIALS))
    counted = [(event.trial, event.seed) for event in events if isinstance(event, CountedEvent)]
    assert sorted(trial for trial, seed in counted if not seed) == list(range(TRIALS))
    check_tracking(folder, len(counted))
    trials = read_trials(events)
    assert len({trial.fitness for trial in trials.values()}) > 1
    return trials


def check_tracking(folder: Path, trainings: int) -> None:
    """One parent, a child for each training, one point for each key and epoch, which count from 1. The metrics of an
    earlier best epoch are the last point once more."""
    from mlflow import MlflowClient

    client, runs = MlflowClient(f"sqlite:///{folder}/mlflow.db"), tracked_runs(folder)
    children = [run for run in runs if "mlflow.parentRunId" in run.data.tags]
    assert (len(children), len(runs)) == (trainings, trainings + 1)
    for run in children:
        for key in ("metrics/mAP50", "train/box_loss"):
            history = client.get_metric_history(run.info.run_id, key)
            best_again = len({point.value for point in history if point.step == EPOCHS}) - 1 if "metrics" in key else 0
            assert best_again in (0, 1)
            points = Counter(point.step for point in history)
            assert points == {**dict.fromkeys(range(1, EPOCHS), 1), EPOCHS: 1 + best_again}, (run.info.run_name, key)


@pytest.mark.ray
@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.usefixtures("ray_session")
@pytest.mark.parametrize(("signum", "status"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_a_sweep_that_was_stopped_continues(tmp_path: Path, signum: int, status: int) -> None:
    recipe = {**RECIPE, "epochs": 5 * EPOCHS}  # long enough to be stopped
    config = make_sweep(tmp_path, SPACE, recipe=recipe, trials=2, max_concurrent=1)
    argv, ledger = command(config, tmp_path), tmp_path / "runs" / "evolve" / "exp" / "ledger.jsonl"
    process = start(argv, tmp_path)
    log = ledger.parent / "trials" / "trial1" / "events.jsonl"
    while len(steps_in(log)) < 3:
        assert process.poll() is None, process.stderr.read().decode()
        time.sleep(0.05)
    process.send_signal(signum)
    _, errors = process.communicate(timeout=60)
    assert (process.returncode, (ledger.parent / "finished").exists()) == (status, False), errors.decode()
    expect_states(tmp_path, FINISHED=1, KILLED=2)  # the second trial's and the sweep's own
    process = start(argv, tmp_path)
    _, errors = process.communicate(timeout=200)
    assert process.returncode == 0, errors.decode()
    counted = [event for event in read_ledger(ledger) if isinstance(event, CountedEvent)]
    assert [event.trial for event in counted if not event.seed] == [0, 1]
    assert len(set(steps_in(log))) == len(steps_in(log))  # none was trained twice
    expect_states(tmp_path, FINISHED=len(counted) + 1)
    assert_cpus_return()


def steps_in(log: Path) -> list[int]:
    return [event.step for event in run_log.only(StepEvent, read_events(log))]


def repeat(number: int, folder: Path) -> Path:
    """Train a row again by the command in the ledger, with one worker. Returns the run folder."""
    lines = read_lines(folder / "runs" / "evolve" / "exp" / "ledger.jsonl")
    [row] = [line for line in lines if line["type"] == "proposed" and line["trial"] == number]
    words = shlex.split(row["command"])
    name = f"again{number}"
    process = start([sys.executable, *words[1:], "--num-workers", "1", "--storage-path", str(folder), "--name", name,
                     "--mlflow-uri", "off", "--noplots"], folder)
    _, errors = process.communicate(timeout=300)
    assert process.returncode == 0, errors.decode()
    return folder / "runs" / "train" / name


@pytest.mark.ray
@pytest.mark.slow
@pytest.mark.timeout(1500)
@pytest.mark.usefixtures("ray_session")
def test_a_killed_sweep_on_one_slot_equals_an_uninterrupted_one(tmp_path: Path) -> None:
    folders = [tmp_path / name for name in ("uninterrupted", "killed")]
    for folder in folders:
        folder.mkdir()
    sweeps = [make_sweep(folder, SPACE, recipe=RECIPE, trials=TRIALS, max_concurrent=1) for folder in folders]
    uninterrupted = search(sweeps[0], quiet=True)
    killed = run_with_kills(sweeps[1], folders[1])
    assert len(killed) == len(uninterrupted.trials)
    ledgers = [read_ledger(folder / "runs/evolve/exp/ledger.jsonl") for folder in folders]
    assert compare(*ledgers) is None  # with the digests of all weights
    assert_cpus_return()


@pytest.mark.ray
@pytest.mark.slow
@pytest.mark.timeout(1500)
@pytest.mark.usefixtures("ray_session")
def test_rows_of_a_killed_sweep_are_repeated_by_their_commands_with_one_worker(tmp_path: Path) -> None:
    config = make_sweep(tmp_path, SPACE, recipe=RECIPE, trials=TRIALS, workers_per_trial=2, keep_weights=True)
    killed = run_with_kills(config, tmp_path)
    trials = tmp_path / "runs" / "evolve" / "exp" / "trials"
    for number in random.Random(2).sample(range(TRIALS), 2):
        again = repeat(number, tmp_path)
        best = max(event.fitness for event in run_log.events_of(again, EpochEvent) if event.fitness is not None)
        assert best == pytest.approx(killed[number].fitness, abs=1e-6)
        first, second = (newest(folder) for folder in (trials / f"trial{number}", again))
        for part in ("model", "ema"):
            assert all(torch.equal(tensor, second[part][name]) for name, tensor in first[part].items())
    assert_cpus_return()
