"""Sweeps through Ray Tune: every trial a distributed training, one ledger that holds true."""

from __future__ import annotations

import shlex
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from ray_yolo.cli import parse_train
from ray_yolo.config.placement import RunConfig
from ray_yolo.config.recipe import Recipe
from ray_yolo.core.errors import ConfigError, InputError
from ray_yolo.runtime.preflight import resolve_recipe
from ray_yolo.sinks.mlflow_client import tracking_uri
from ray_yolo.tune import tuner
from ray_yolo.tune.console import closing_message
from ray_yolo.tune.evolution import Space
from ray_yolo.tune.ledger import Ledger
from ray_yolo.tune.search import Search, TuneConfig
from ray_yolo.tune.study import SweepEvent
from ray_yolo.tune.task import payload_of, task_config
from ray_yolo.tune.trials import Trial, overlay
from ray_yolo.tune.tuner import search
from tests.support.jobs import make_index
from tests.support.sweeps import SPACE, make_sweep


def test_what_a_sweep_says_at_its_end_can_be_copied(tmp_path: Path) -> None:
    folder, data = tmp_path / "Ann's sweeps", "Ann's data/birds.yaml"
    best = replace(Trial(4, {"lr0": 0.02}), fitness=0.5)
    lines = closing_message(folder, Recipe(data=data), best).splitlines()
    commands = {name: shlex.split(words) for name, _, words in (line.partition(": ") for line in lines[1:])}
    assert commands["train with it"] == ["--hyp", str(folder / "hyp_evolve.yaml")]
    assert parse_train(commands["repeat it"][3:]).config.recipe == overlay(Recipe(data=data), best.genes)


def placed(config: TuneConfig, **placement: Any) -> TuneConfig:
    """The sweep with another placement of its trials."""
    return config.model_copy(update={"placement": config.placement.model_copy(update=placement)})


def test_a_dry_run_reads_everything_once(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    (tmp_path / "hyp.yaml").write_text("lr0: 5\n")
    config = make_sweep(tmp_path, "lr0: [0.001, 0.1]", warm_start=str(tmp_path / "hyp.yaml"), trials=3)
    planned = tuner.dry_run(config)
    warm_starts = [record.getMessage() for record in caplog.records if record.name == "ray_yolo.tune.files"]
    assert [message.rpartition("/")[2] for message in warm_starts] == [
        "hyp.yaml: lr0 5 is not in the space: the start has 0.1"]
    assert planned.config.sweep.trials == 3
    assert any("genes: lr0" in line for line in planned.notes)
    assert not (tmp_path / "runs").exists()


@pytest.mark.parametrize(("space", "message"), [
    ("lr0: {low: 0.1, high: 0.01}", "low 0.1 is above high 0.01"),
    ("num_workers: [1, 4]", "decides where a trial is trained"),
    ("lr0: [0.0001, 0.1]", "leave --noval out"),
])
def test_a_space_that_cannot_be_searched_is_refused_before_any_cluster_work(
        tmp_path: Path, space: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        search(make_sweep(tmp_path, space, recipe={"noval": True}), quiet=True)


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
        ledger = Ledger(tmp_path / f"{len(recipe)}.jsonl", SweepEvent(
            identity={}, space=Space((), ()), search=Search(), recipe=decided, rungs=(1,), virtual_slots=1))
        requested = config
        payload = payload_of(requested.placement, ledger.begun.recipe, tmp_path / "sweep",
                             tracking_uri(requested.placement.mlflow_uri, tmp_path), is_stored=False)
        return task_config(payload, {"trial": "trial0", "genes": {}, "seed": 0, "until": 1})

    trial = trained_by({"data": "data", "model": "tiny.yaml", "weights": "weights.pt"})
    assert [trial.recipe.data, trial.recipe.model, trial.recipe.weights, trial.placement.callbacks] == [
        str(tmp_path / name) for name in ("data", "tiny.yaml", "weights.pt", "hooks.py:Hooks")]
    assert (trial.placement.mlflow_uri, trial.placement.registered_name) == (f"sqlite:///{tmp_path}/mine.db", "")
    known = trained_by({"data": "shapes8", "model": "yolov5n"}).recipe
    assert (known.data, known.model, known.weights) == ("shapes8", "yolov5n", "")
    assert trained_by({"data": f"file://{tmp_path}/data/data.yaml"}).recipe.data == f"file://{tmp_path}/data/data.yaml"
