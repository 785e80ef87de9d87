"""Sweeps through Ray Tune: every trial a distributed training, one ledger that holds true."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import threading
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
from mlflow import MlflowClient

from ray_yolo.config.placement import RunConfig
from ray_yolo.core.errors import ConfigError, InputError, ResourcesError, TrainingError
from ray_yolo.core.events import ShardEvent, StartEvent
from ray_yolo.runtime.trainer import fit
from ray_yolo.runtime.workers.watchdog import start_queue
from ray_yolo.tune import runner
from ray_yolo.tune.ledger import read_ledger, read_trials, verify
from ray_yolo.tune.ledger_events import ClaimedEvent, CountedEvent, FailedEvent, ProposedEvent, ScheduledEvent
from ray_yolo.tune.trials import Trial, overlay
from ray_yolo.tune.tuner import search
from ray_yolo.tune.verification import compare
from tests.support import run_log
from tests.support.jobs import make_config
from tests.support.sweeps import SPACE, assert_cpus_return, expect_states, make_sweep, tracked_runs, tracked_states
from tests.unit.tune.test_tuner import placed

GRID = """
optimizer.name: {type: choice, values: [SGD, Adam, AdamW]}
augment.close_mosaic: {type: int, low: 1, high: 2}
"""


@pytest.mark.smoke
@pytest.mark.ray
@pytest.mark.usefixtures("ray_session")
def test_trials_are_distributed_side_by_side_recorded_once_and_can_be_repeated(tmp_path: Path) -> None:
    config = make_sweep(tmp_path, trials=3, workers_per_trial=2)
    result = search(config, quiet=True)
    assert [trial.state for trial in result.trials] == ["finished"] * 3
    ledger = read_ledger(result.folder / "ledger.jsonl")
    assert verify(ledger) == []
    assert [type(line) for line in ledger[1:5]] == [ProposedEvent, ScheduledEvent] * 2  # side by side
    assert isinstance(ledger[-1], ClaimedEvent)
    assert result.claim == ledger[-1].claim
    for name in ("evolve.csv", "hyp_evolve.yaml", "evolve.png", "progress.png", "lineage.png", "weights/best.pt"):
        assert (result.folder / name).exists()
    shares = []
    for number in range(3):
        folder = result.folder / "trials" / f"trial{number}"
        assert max(start.num_workers for start in run_log.events_of(folder, StartEvent)) >= 2  # idle ones help
        shares += run_log.events_of(folder, ShardEvent)
    # an epoch whose group changes after its last step tells of no images
    assert {share.worker for share in shares if share.images} >= {0, 1}
    assert result.best == result.trials[ledger[-1].winner]
    check_tracking(tmp_path, len({(line.trial, line.seed) for line in ledger if isinstance(line, CountedEvent)}))
    repeat = result.trials[1]
    recipe = overlay(config.recipe, repeat.genes)
    alone = fit(RunConfig(recipe=recipe, placement=make_config(tmp_path, 0).placement), quiet=True)
    assert alone.best_fitness == pytest.approx(repeat.fitness, abs=1e-6)
    assert_cpus_return()


def check_tracking(folder: Path, trainings: int) -> None:
    """One parent, a child for each training, the best one marked."""
    client = MlflowClient(f"sqlite:///{folder}/mlflow.db")
    runs = client.search_runs([experiment.experiment_id for experiment in client.search_experiments()])
    [parent] = [run for run in runs if "mlflow.parentRunId" not in run.data.tags]
    children = [run for run in runs if run.data.tags.get("mlflow.parentRunId") == parent.info.run_id]
    assert len(children) == trainings
    assert all(run.info.status == "FINISHED" for run in runs)
    assert sum(run.data.tags.get("ray_yolo.best") == "true" for run in children) == 1
    assert len(client.get_metric_history(parent.info.run_id, "fitness")) == 3


def stand_in(monkeypatch: pytest.MonkeyPatch, trial: Callable[..., None]) -> None:
    """Have trials done by a function that needs no workers, but a queue that can be ordered to stop."""
    monkeypatch.setattr(runner, "train_task", trial)
    monkeypatch.setattr(runner, "standing_pool", lambda *given, **options: contextlib.nullcontext(start_queue()))


def formula_task(config: Mapping[str, Any], payload: Mapping[str, Any], queue: object) -> None:
    """A task without a training: its fitness follows from its genes, seed and epochs. Stands in for `train_task`."""
    import ray.tune

    from ray_yolo.tune.schedule import Outcome

    fitness = (1 - abs(config["genes"].get("lr0", 0.005) - 0.005) * 100) * (config["until"] + config["seed"] % 2) / 20
    with (Path(payload["placement"]["project"]).parent / "tasks").open("a") as file:
        file.write(f"{config['trial']} {config['until']}\n")
    ray.tune.report({"outcome": Outcome(fitness=fitness).model_dump_json(), "epochs": 0, "seconds": 0.0})


def tasks_of(folder: Path) -> list[str]:
    """The tasks that `formula_task` has done, each with its epochs."""
    return (folder / "tasks").read_text().splitlines()


def failing_task(config: Mapping[str, Any], payload: Mapping[str, Any], queue: object) -> None:
    """A task that fails by its recipe."""
    import ray.tune

    from ray_yolo.tune.schedule import Outcome

    outcome = Outcome(reason=f"DivergedError: the loss of {config['trial']} stays non-finite", diverged=True)
    ray.tune.report({"outcome": outcome.model_dump_json(), "epochs": 0, "seconds": 0.0})


@pytest.mark.ray
@pytest.mark.usefixtures("ray_session")
@pytest.mark.parametrize(("settings", "genes", "asked", "trials"), [
    ("{algorithm: evolve, scheduler: ladder}", SPACE, 12, 12),
    pytest.param("{algorithm: random}", SPACE.replace(", gain: 3", ""), 6, 6, marks=pytest.mark.slow),
    pytest.param("{algorithm: grid}", GRID, 300, 6, marks=pytest.mark.slow),  # which has no more points
    pytest.param("{algorithm: gp, scheduler: ladder}", SPACE, 13, 13, marks=pytest.mark.slow),
], ids=["ladder", "random", "grid", "gp"])
def test_every_way_to_search_tries_as_many_as_asked_and_frees_the_cluster(
        tmp_path: Path, monkeypatch: pytest.MonkeyPatch, settings: str, genes: str, asked: int, trials: int) -> None:
    stand_in(monkeypatch, formula_task)
    config = make_sweep(tmp_path, f"search: {settings}\n{genes}", recipe={"epochs": 9, "noval": False}, trials=asked)
    result = search(config, quiet=True)
    assert len({json.dumps(trial.genes) for trial in result.trials}) == len(result.trials) == trials
    lines = read_ledger(result.folder / "ledger.jsonl")
    assert verify(lines) == []
    assert isinstance(lines[-1], ClaimedEvent)
    pauses = "scheduler" in settings
    assert ("paused" in {trial.state for trial in result.trials}) == pauses
    tasks = tasks_of(result.folder)
    assert len(tasks) == len(set(tasks))  # nothing is trained twice
    assert {"trial0 1", "trial0 9", "trial0-seed1 9"} - set(tasks) == (set() if pauses else {"trial0 1"})  # a rung
    assert_cpus_return()
    with pytest.raises(Exception, match="finished"):
        search(config.model_copy(update={"placement": config.placement.model_copy(update={"name": "exp"})}), quiet=True)


@pytest.mark.ray
@pytest.mark.usefixtures("ray_session")
def test_a_finished_sweep_goes_on_where_more_trials_are_asked_for(
        tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    stand_in(monkeypatch, formula_task)

    def tune(trials: int, space: str = SPACE, name: str = "mine") -> tuple[Trial, ...]:
        config = make_sweep(tmp_path, space, trials=trials, max_concurrent=1)
        named = config.placement.model_copy(update={"name": name})
        return search(config.model_copy(update={"placement": named}), quiet=True).trials

    first = tune(1)
    with pytest.raises(InputError, match="mine is finished"):
        tune(1)
    with pytest.raises(InputError, match="started with another search space"):
        tune(2, "lr0: [0.001, 0.01]")
    assert [row.genes for row in tune(2)[:1]] == [row.genes for row in first]
    folder = tmp_path / "runs" / "evolve" / "mine"
    lines = read_ledger(folder / "ledger.jsonl")
    assert verify(lines) == []
    [parent] = tracked_runs(tmp_path)
    assert parent.info.status == "FINISHED"
    points = MlflowClient(f"sqlite:///{tmp_path}/mlflow.db").get_metric_history(parent.info.run_id, "fitness")
    assert sorted({point.step for point in points}) == [0, 1]
    [best] = [row for row in read_trials(lines).values() if row.number == lines[-1].winner]
    weights = folder / "trials" / best.folder_name / "weights"
    weights.mkdir(parents=True)
    (weights / "best.pt").write_text("its")
    tune(2, name="again")  # its trainings were done by the other sweep
    assert not (tmp_path / "runs/evolve/again/tasks").exists()
    assert (tmp_path / "runs/evolve/again/weights/best.pt").read_text() == "its"
    again = read_ledger(tmp_path / "runs/evolve/again/ledger.jsonl")
    assert [line for line in again if isinstance(line, CountedEvent)] == sorted(
        (line for line in lines if isinstance(line, CountedEvent)), key=lambda line: line.trial + 9 * line.seed)


@pytest.mark.ray
@pytest.mark.usefixtures("ray_session")
def test_a_sweep_whose_trials_all_fail_ends_with_their_reasons(
        tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    stand_in(monkeypatch, failing_task)
    with pytest.raises(TrainingError, match=r"all 2 trials failed: .* trial0 stays .* trial1 stays"):
        search(make_sweep(tmp_path, trials=2), quiet=True)
    [folder] = (tmp_path / "runs" / "evolve").iterdir()
    lines = read_ledger(folder / "ledger.jsonl")
    assert sorted(line.trial for line in lines if isinstance(line, FailedEvent) and line.seed == 0) == [0, 1]
    expect_states(tmp_path, FAILED=1)  # the sweep's own: no trial came to have one


def unlucky_task(config: Mapping[str, Any], payload: Mapping[str, Any], queue: object) -> None:
    """The first trial's first attempt dies, and its second finds no room."""
    import os

    import ray.tune

    attempts = Path(payload["placement"]["project"]).parent / f"attempts-{config['trial']}"
    with attempts.open("a") as file:
        file.write("x")
    if config["trial"] == "trial0" and attempts.stat().st_size == 1:
        os._exit(1)
    if config["trial"] == "trial0" and attempts.stat().st_size == 2:
        ray.tune.report({"lost": "ResourcesError: no room", "lacking": True})
        raise RuntimeError
    formula_task(config, payload, queue)


@pytest.mark.ray
@pytest.mark.usefixtures("ray_session")
def test_what_is_not_a_recipes_fault_is_queued_again_and_leaves_no_line(
        tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    stand_in(monkeypatch, unlucky_task)
    config = placed(make_sweep(tmp_path, trials=2, max_concurrent=1), max_failures=1)
    with pytest.raises(ResourcesError, match="no room; the same command continues"):
        search(config)
    [folder] = (tmp_path / "runs" / "evolve").iterdir()
    assert "trial0 is queued again: its process died" in capsys.readouterr().out
    assert not [line for line in read_ledger(folder / "ledger.jsonl") if isinstance(line, CountedEvent | FailedEvent)]
    assert not (folder / "finished").exists()
    result = search(placed(config, max_failures=2), quiet=True)
    assert (folder / "attempts-trial0").stat().st_size == 3
    stand_in(monkeypatch, formula_task)
    calm = search(placed(config, name="calm"), quiet=True)
    assert compare(*(read_ledger(each.folder / "ledger.jsonl") for each in (result, calm))) is None
    assert_cpus_return()


@pytest.mark.ray
@pytest.mark.usefixtures("ray_session")
def test_an_interrupted_sweep_has_not_ended_and_goes_on(
        tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    def interrupted(*arguments: object) -> None:
        raise KeyboardInterrupt

    config = make_sweep(tmp_path, trials=1)
    with monkeypatch.context() as patch:
        patch.setattr(runner.Study, "_train", interrupted)
        with pytest.raises(KeyboardInterrupt):
            search(config)
    assert "interrupted; the same command continues" in capsys.readouterr().out
    expect_states(tmp_path, KILLED=1)
    stand_in(monkeypatch, formula_task)
    result = search(config, quiet=True)
    assert len(result.trials) == 1
    expect_states(tmp_path, FINISHED=1)


def endless_task(config: Mapping[str, Any], payload: Mapping[str, Any], queue: object) -> None:
    """A task that notes its start and does not end."""
    import time

    with (Path(payload["placement"]["project"]).parent / "tasks").open("a") as file:
        file.write(f"{config['trial']} {config['until']}\n")
    time.sleep(300)


@pytest.mark.ray
@pytest.mark.usefixtures("ray_session")
def test_after_an_interruption_ray_tune_ends_in_a_process_that_goes_on(
        tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """As a notebook. Otherwise the thread of Tune would start the trials again, and write to the ledger."""
    config = make_sweep(tmp_path, trials=2)
    folder = tmp_path / "runs" / "evolve" / "exp"

    def interrupt() -> None:
        until = time.monotonic() + 60
        while not (folder / "tasks").exists() and time.monotonic() < until:
            time.sleep(0.1)
        os.kill(os.getpid(), signal.SIGINT)

    stand_in(monkeypatch, endless_task)
    threading.Thread(target=interrupt).start()
    with pytest.raises(KeyboardInterrupt):
        search(config)
    lines = (folder / "ledger.jsonl").read_text()
    until = time.monotonic() + 20
    while any(thread.name == "ray_yolo background" for thread in threading.enumerate()) and time.monotonic() < until:
        time.sleep(0.1)
    assert "ray_yolo background" not in [thread.name for thread in threading.enumerate()]
    assert (folder / "ledger.jsonl").read_text() == lines
    assert "queued again" not in capsys.readouterr().out
    assert_cpus_return()


@pytest.mark.ray
@pytest.mark.slow
@pytest.mark.usefixtures("ray_session")
def test_twenty_trials_on_four_slots_come_to_an_end(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    stand_in(monkeypatch, formula_task)
    result = search(make_sweep(tmp_path, trials=20), quiet=True)
    assert sum(trial.state == "finished" for trial in result.trials) == 20


@pytest.mark.ray
@pytest.mark.slow
@pytest.mark.usefixtures("ray_session")
def test_real_trainings_pause_and_continue_and_their_records_are_complete(tmp_path: Path) -> None:
    space = ("search: {algorithm: random, scheduler: {name: ladder, first_epochs: 4}}\n"
             "lr0: {type: loguniform, low: 0.00001, high: 0.03}\n")  # most of it learns little, at any rung
    recipe = {"epochs": 12, "noval": False, "batch_size": 8, "optimizer": {"name": "AdamW", "nominal_batch": 8},
              "augment": {"mosaic": 0.0}, "schedule": {"warmup_epochs": 0, "ema_ramp": 10}}
    config = make_sweep(tmp_path, space, recipe=recipe, trials=13, max_concurrent=2)
    result = search(config, quiet=True)
    paused = [trial for trial in result.trials if trial.state == "paused"]
    assert {trial.epochs for trial in paused} == {4}
    assert {trial.epochs for trial in result.trials if trial.state == "finished"} == {12}
    for trial in paused:
        checkpoints = [path.name for path in (result.folder / "trials" / trial.folder_name / "checkpoints").iterdir()]
        assert len(checkpoints) == 1
    assert_cpus_return()
    assert set(tracked_states(tmp_path)) == {"FINISHED"}  # the runs of paused trials end with the sweep


@pytest.mark.ray
@pytest.mark.usefixtures("ray_session")
def test_a_trial_that_can_never_fit_is_refused_and_leaves_nothing(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="5 workers need 5 CPU"):
        search(make_sweep(tmp_path, trials=1, workers_per_trial=5, recipe={"microbatch": 2}), quiet=True)
    assert not (tmp_path / "runs").exists()
    assert not (tmp_path / "mlflow.db").exists()
