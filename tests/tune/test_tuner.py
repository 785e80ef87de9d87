"""Sweeps through Ray Tune: every trial a distributed training, one ledger that holds true."""

from __future__ import annotations

import contextlib
import json
import shlex
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from mlflow import MlflowClient

from ray_yolo.cli import parse_train
from ray_yolo.config.placement import RunConfig
from ray_yolo.config.recipe import Recipe
from ray_yolo.core.errors import ConfigError, InputError, ResourcesError, TrainingError
from ray_yolo.core.events import ShardEvent, StartEvent
from ray_yolo.runtime.preflight import resolve_recipe
from ray_yolo.runtime.trainer import fit
from ray_yolo.tune import tuner
from ray_yolo.tune.console import closing_message
from ray_yolo.tune.evolution import Space
from ray_yolo.tune.ledger import Begun, Failed, Ledger, Lost, Proposed, Started, Sweep, read_ledger, verify
from ray_yolo.tune.search import Search, TuneConfig
from ray_yolo.tune.trial import trial_config
from ray_yolo.tune.trials import Trial, new_trial, overlay
from ray_yolo.tune.tuner import search
from tests.support import run_log
from tests.support.jobs import make_config, make_index
from tests.support.sweeps import SPACE, assert_cpus_return, make_sweep, tracked_runs, tracked_states

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
    begun = [type(event) for event in ledger if isinstance(event, Proposed | Started)]
    assert begun == [Proposed] * 3 + [Started] * 3  # their processes start side by side, the one that gets ready too
    for name in ("evolve.csv", "hyp_evolve.yaml", "evolve.png", "progress.png", "lineage.png", "weights/best.pt"):
        assert (result.folder / name).exists()
    shares = []
    for number in range(3):
        folder = result.folder / "trials" / f"trial{number}"
        assert max(start.num_workers for start in run_log.events_of(folder, StartEvent)) >= 2  # idle ones help
        shares += run_log.events_of(folder, ShardEvent)
    # an epoch whose group changes after its last step tells of no images
    assert {share.worker for share in shares if share.images} >= {0, 1}
    assert result.best.fitness == max(trial.fitness for trial in result.trials if trial.fitness is not None)
    check_tracking(tmp_path)
    repeat = result.trials[1]
    recipe = overlay(config.recipe, repeat.genes)
    alone = fit(RunConfig(recipe=recipe, placement=make_config(tmp_path, 0).placement), quiet=True)
    assert alone.best_fitness == pytest.approx(repeat.fitness, abs=1e-6)
    assert_cpus_return()


def test_what_a_sweep_says_at_its_end_can_be_copied(tmp_path: Path) -> None:
    folder, data = tmp_path / "Ann's sweeps", "Ann's data/birds.yaml"
    best = replace(new_trial(4, {"lr0": 0.02}), fitness=0.5)
    lines = closing_message(folder, Recipe(data=data), best).splitlines()
    commands = {name: shlex.split(words) for name, _, words in (line.partition(": ") for line in lines[1:])}
    assert commands["train with it"] == ["--hyp", str(folder / "hyp_evolve.yaml")]
    assert parse_train(commands["repeat it"][3:]).config.recipe == overlay(Recipe(data=data), best.genes)


def check_tracking(folder: Path) -> None:
    """One parent, a child for each trial, the best one marked."""
    client = MlflowClient(f"sqlite:///{folder}/mlflow.db")
    runs = client.search_runs([experiment.experiment_id for experiment in client.search_experiments()])
    [parent] = [run for run in runs if "mlflow.parentRunId" not in run.data.tags]
    children = [run for run in runs if run.data.tags.get("mlflow.parentRunId") == parent.info.run_id]
    assert len(children) == 3
    assert all(run.info.status == "FINISHED" for run in runs)
    assert sum(run.data.tags.get("ray_yolo.best") == "true" for run in children) == 1
    assert len(client.get_metric_history(parent.info.run_id, "fitness")) == 3


def placed(config: TuneConfig, **placement: Any) -> TuneConfig:
    """The sweep with another placement of its trials."""
    return config.model_copy(update={"placement": config.placement.model_copy(update=placement)})


def stand_in(monkeypatch: pytest.MonkeyPatch, trial: Callable[..., None]) -> None:
    """Have trials done by a function that needs no workers."""
    monkeypatch.setattr(tuner, "train_trial", trial)
    monkeypatch.setattr(tuner, "standing_pool", lambda *given, **options: contextlib.nullcontext())


def formula_trial(config: Mapping[str, Any], payload: Mapping[str, Any], queue: None) -> None:
    """A trial without a training: its curve follows from its genes. Stands in for `train_trial`."""
    import ray.tune

    genes = config["genes"]
    end = 1 - abs(genes.get("lr0", 0.005) - 0.005) * 100
    for epoch in range(1, payload["recipe"]["epochs"] + 1):
        fitness = end * epoch / 9
        ray.tune.report({"fitness": fitness, "epoch": epoch, "row": json.dumps(
            {"fitness": fitness, "metrics": {}, "losses": {}})})


def failing_trial(config: Mapping[str, Any], payload: Mapping[str, Any], queue: None) -> None:
    """A trial that fails with a reason, or whose process dies without one."""
    import os

    import ray.tune

    if config["trial"]:
        os._exit(1)
    ray.tune.report({"failed": "TrainingError: the loss stays non-finite"})


@pytest.mark.ray
@pytest.mark.usefixtures("ray_session")
@pytest.mark.parametrize(("settings", "genes", "asked", "trials"), [
    ("{algorithm: evolve, scheduler: asha}", SPACE, 8, 8),
    pytest.param("{algorithm: random}", SPACE, 6, 6, marks=pytest.mark.slow),
    pytest.param("{algorithm: grid}", GRID, 300, 6, marks=pytest.mark.slow),  # which has no more points
    pytest.param("{algorithm: tpe}", SPACE, 13, 13, marks=pytest.mark.slow),
    pytest.param("{algorithm: random, scheduler: {name: median, grace_epochs: 3, min_trials: 2}}", SPACE, 8, 8,
                 marks=pytest.mark.slow),
], ids=["asha", "random", "grid", "tpe", "median"])
def test_every_way_to_search_tries_as_many_as_asked_and_frees_the_cluster(
        tmp_path: Path, monkeypatch: pytest.MonkeyPatch, settings: str, genes: str, asked: int, trials: int) -> None:
    stand_in(monkeypatch, formula_trial)
    config = make_sweep(tmp_path, f"search: {settings}\n{genes}", recipe={"epochs": 9, "noval": False}, trials=asked,
                        max_concurrent=2)
    result = search(config, quiet=True)
    assert [trial.state for trial in result.trials] == ["finished"] * trials
    assert len({json.dumps(trial.genes) for trial in result.trials}) == trials
    assert verify(read_ledger(result.folder / "ledger.jsonl")) == []
    assert (min(trial.epochs for trial in result.trials) < 9) == ("scheduler" in settings)
    assert_cpus_return()
    with pytest.raises(Exception, match="finished"):
        search(config.model_copy(update={"placement": config.placement.model_copy(update={"name": "exp"})}), quiet=True)


@pytest.mark.ray
@pytest.mark.usefixtures("ray_session")
def test_a_finished_sweep_goes_on_where_more_trials_are_asked_for(
        tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    stand_in(monkeypatch, formula_trial)

    def tune(trials: int, space: str = SPACE) -> tuple[Trial, ...]:
        config = make_sweep(tmp_path, space, trials=trials, max_concurrent=1)
        named = config.placement.model_copy(update={"name": "mine"})
        return search(config.model_copy(update={"placement": named}), quiet=True).trials

    first = tune(1)
    with pytest.raises(InputError, match="mine is finished"):
        tune(1)
    with pytest.raises(InputError, match="started with another search space"):
        tune(2, "lr0: [0.001, 0.01]")
    assert tune(2)[:1] == first
    folder = tmp_path / "runs" / "evolve" / "mine"
    assert verify(read_ledger(folder / "ledger.jsonl")) == []
    [parent] = tracked_runs(tmp_path)
    assert parent.info.status == "FINISHED"
    points = MlflowClient(f"sqlite:///{tmp_path}/mlflow.db").get_metric_history(parent.info.run_id, "fitness")
    assert sorted(point.step for point in points) == [0, 1]


@pytest.mark.ray
@pytest.mark.usefixtures("ray_session")
def test_a_sweep_whose_trials_all_fail_ends_with_their_reasons(
        tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    stand_in(monkeypatch, failing_trial)
    with pytest.raises(TrainingError, match=r"all 2 trials failed: .*the loss stays non-finite; its process died"):
        search(placed(make_sweep(tmp_path, trials=2), max_failures=1), quiet=True)
    [folder] = (tmp_path / "runs" / "evolve").iterdir()
    events = read_ledger(folder / "ledger.jsonl")
    assert sorted(event.trial for event in events if isinstance(event, Failed)) == [0, 1]
    assert sorted(event.trial for event in events if isinstance(event, Lost)) == [1]  # the recipe's own is not
    assert tracked_states(tmp_path) == {"FAILED": 1}  # the sweep's own: no trial came to have one


def unlucky_trial(config: Mapping[str, Any], payload: Mapping[str, Any], queue: None) -> None:
    """The first trial's first attempt dies, and its second finds no room."""
    import os

    import ray.tune

    attempts = Path(payload["placement"]["project"]).parent / f"attempts{config['trial']}"
    attempts.touch()
    with attempts.open("a") as file:
        file.write("x")
    if config["trial"] == 0 and attempts.stat().st_size == 1:
        os._exit(1)
    if config["trial"] == 0 and attempts.stat().st_size == 2:
        ray.tune.report({"lost": "ResourcesError: no room", "lacking": True})
        raise RuntimeError
    formula_trial(config, payload, queue)


@pytest.mark.ray
@pytest.mark.usefixtures("ray_session")
def test_what_is_not_a_recipes_fault_is_queued_again_and_a_sweep_without_room_ends_and_goes_on(
        tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    stand_in(monkeypatch, unlucky_trial)
    config = placed(make_sweep(tmp_path, trials=2, max_concurrent=1), max_failures=1)
    with pytest.raises(ResourcesError, match="no room; the same command continues"):
        search(config, quiet=True)
    [folder] = (tmp_path / "runs" / "evolve").iterdir()
    events = read_ledger(folder / "ledger.jsonl")
    assert [type(event) for event in events] == [Begun, Proposed, Started, Lost, Started]
    assert (events[3].reason, (folder / "finished").exists()) == ("its process died", False)
    result = search(placed(config, max_failures=2), quiet=True)
    assert [(trial.state, trial.attempts) for trial in result.trials] == [("finished", 3), ("finished", 1)]
    assert verify(read_ledger(folder / "ledger.jsonl")) == []
    assert_cpus_return()


@pytest.mark.ray
@pytest.mark.usefixtures("ray_session")
def test_an_interrupted_sweep_has_not_ended_and_goes_on(
        tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    def interrupted(*arguments: object) -> None:
        ledger = next(each for each in arguments if isinstance(each, Ledger))
        ledger.start(ledger.propose().number)
        raise KeyboardInterrupt

    config = make_sweep(tmp_path, trials=1)
    with monkeypatch.context() as patch:
        patch.setattr(tuner, "_run_trials", interrupted)
        with pytest.raises(KeyboardInterrupt):
            search(config)
    assert "interrupted; the same command continues" in capsys.readouterr().out
    assert tracked_states(tmp_path) == {"KILLED": 1}
    stand_in(monkeypatch, formula_trial)
    result = search(config, quiet=True)
    assert [trial.attempts for trial in result.trials] == [2]
    assert tracked_states(tmp_path) == {"FINISHED": 1}


@pytest.mark.ray
@pytest.mark.slow
@pytest.mark.usefixtures("ray_session")
def test_twenty_trials_on_four_slots_come_to_an_end(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    stand_in(monkeypatch, formula_trial)
    result = search(make_sweep(tmp_path, trials=20), quiet=True)
    assert sum(trial.state == "finished" for trial in result.trials) == 20


@pytest.mark.ray
@pytest.mark.slow
@pytest.mark.usefixtures("ray_session")
def test_asha_stops_real_trainings_early_and_their_records_are_complete(tmp_path: Path) -> None:
    settings = "search: {algorithm: random, scheduler: {name: asha, grace_epochs: 10, reduction: 2}}\n"
    config = make_sweep(tmp_path, settings + SPACE, recipe={"epochs": 60, "noval": False}, trials=5, max_concurrent=2)
    result = search(config, quiet=True)
    assert [trial.state for trial in result.trials] == ["finished"] * 5
    stopped = [trial for trial in result.trials if trial.epochs < 60]
    assert stopped
    assert_cpus_return()
    client = MlflowClient(f"sqlite:///{tmp_path}/mlflow.db")
    runs = client.search_runs([experiment.experiment_id for experiment in client.search_experiments()])
    assert sorted(run.info.status for run in runs) == ["FINISHED"] * (6 - len(stopped)) + ["KILLED"] * len(stopped)


@pytest.mark.ray
@pytest.mark.usefixtures("ray_session")
def test_a_trial_that_can_never_fit_is_refused_and_leaves_nothing(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="5 workers need 5 CPU"):
        search(make_sweep(tmp_path, trials=1, workers_per_trial=5, recipe={"microbatch": 2}), quiet=True)
    assert not (tmp_path / "runs").exists()
    assert not (tmp_path / "mlflow.db").exists()


@pytest.mark.parametrize(("space", "message"), [
    ("lr0: {low: 0.1, high: 0.01}", "low 0.1 is above high 0.01"),
    ("num_workers: [1, 4]", "decides where a trial is trained"),
    ("search: {scheduler: asha}\nlr0: [0.0001, 0.1]", "leave --noval out"),
])
def test_a_space_that_cannot_be_searched_is_refused_before_any_cluster_work(
        tmp_path: Path, space: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        search(make_sweep(tmp_path, space), quiet=True)


@pytest.mark.parametrize(("space", "recipe", "message"), [
    ("batch_size: {type: choice, values: [16, 4]}\noptimizer.nominal_batch: {type: fixed, value: 4}", {},
     "2 workers, but a step of batch size 4 and microbatch 4 has only 1 parts"),
    ("model: {type: choice, values: [yolov5n, yolov5q]}", {}, "yolov5q"),
    ("weights: {type: choice, values: ['', none.pt]}", {}, "none.pt: no such weights file"),
    ("search: {objective: {mAP50: 1}}", {"objective": {"recall": 1}}, "leave objective out"),
])
def test_what_some_trials_would_fail_by_is_refused_before_any_cluster_work(
        tmp_path: Path, space: str, recipe: dict[str, Any], message: str) -> None:
    with pytest.raises(InputError, match=message):
        search(make_sweep(tmp_path, f"{space}\n{SPACE}", workers_per_trial=2, recipe=recipe), quiet=True)


def test_a_model_file_is_named_so_that_trials_find_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    config = make_sweep(tmp_path, f"model: {{type: choice, values: [yolov5n, tiny.yaml]}}\n{SPACE}")
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ConfigError, match=r"model: tiny.yaml: give an absolute path"):
        search(config, quiet=True)


def test_what_a_sweep_is_given_by_relative_paths_its_trials_find_from_their_own_folders(
        tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    config = placed(make_sweep(tmp_path), callbacks="hooks.py:Hooks", mlflow_uri="sqlite:///mine.db",
                    registered_name="birds")
    for name in ("hooks.py", "weights.pt", "yolov5n"):  # the last one has the name of a model
        (tmp_path / name).touch()
    monkeypatch.chdir(tmp_path)

    def trained_by(recipe: dict[str, str]) -> RunConfig:
        asked = config.recipe.model_copy(update=recipe)
        decided = resolve_recipe(asked, config.placement, make_index(tmp_path / "images", 1), 0)
        ledger = Ledger(tmp_path / f"{len(recipe)}.jsonl", Sweep(Space((), ()), Search(), asked, ""), decided)
        requested = config.model_copy(update={"recipe": asked})
        payload = tuner._payload(requested, ledger, tmp_path / "sweep", Search(), None)
        return trial_config(payload, 0, {})

    trial = trained_by({"data": "data", "model": "tiny.yaml", "weights": "weights.pt"})
    assert [trial.recipe.data, trial.recipe.model, trial.recipe.weights, trial.placement.callbacks] == [
        str(tmp_path / name) for name in ("data", "tiny.yaml", "weights.pt", "hooks.py:Hooks")]
    assert (trial.placement.mlflow_uri, trial.placement.registered_name) == (f"sqlite:///{tmp_path}/mine.db", "")
    known = trained_by({"data": "shapes8", "model": "yolov5n"}).recipe
    assert (known.data, known.model, known.weights) == ("shapes8", "yolov5n", "")
    assert trained_by({"data": f"file://{tmp_path}/data/data.yaml"}).recipe.data == f"file://{tmp_path}/data/data.yaml"


def test_changes_of_the_users_and_of_population_based_training_exclude_each_other(tmp_path: Path) -> None:
    recipe = {"epochs": 4, "noval": False, "changes": ["2: box=0.1"]}
    with pytest.raises(ConfigError, match="leave --changes out"):
        search(make_sweep(tmp_path, f"search: {{scheduler: pbt}}\n{SPACE}", recipe=recipe), quiet=True)
