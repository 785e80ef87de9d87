"""Sweeps through Ray Tune: every trial a distributed training, one ledger that holds true."""

from __future__ import annotations

import shlex
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest import mock

import pytest

import ray_yolo
from ray_yolo.cli import parse_train
from ray_yolo.config.placement import RunConfig
from ray_yolo.config.recipe import Recipe
from ray_yolo.core.errors import ConfigError, InputError
from ray_yolo.runs.run_record import SweepRecord, write_record
from ray_yolo.runtime.preflight import resolve_recipe
from ray_yolo.sinks.mlflow_client import tracking_uri
from ray_yolo.tune import identity, tuner
from ray_yolo.tune.console import closing_message
from ray_yolo.tune.evolution import Gene, Space
from ray_yolo.tune.ledger import Ledger
from ray_yolo.tune.search import Search, TuneConfig
from ray_yolo.tune.study import SweepEvent
from ray_yolo.tune.task import payload_of, task_config
from ray_yolo.tune.trials import Trial, overlay
from ray_yolo.tune.tuner import search
from tests.support.jobs import make_index
from tests.support.messages.sweeps import continue_on
from tests.support.schedules import run_sweep
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


def test_a_refused_space_starts_no_cluster_and_no_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """By itself, under the recipe, and in some of its trials; the texts are in `tests.support.messages.sweeps`."""
    monkeypatch.setattr(tuner.cluster, "connect", None)
    for space, recipe in (("lr0: {low: 0.1, high: 0.01}\n", {}), (SPACE, {"noval": True}),
                          (f"model: {{type: choice, values: [yolov5n, yolov5q]}}\n{SPACE}", {})):
        with pytest.raises(ConfigError):
            search(make_sweep(tmp_path, space, recipe=recipe), quiet=True)
    assert not (tmp_path / "runs").exists()


@pytest.mark.parametrize("algorithm", ["gp", "evolve", "random", "grid"])
@pytest.mark.parametrize("hours", [0.0, 8.0])
def test_a_sweep_that_has_tried_each_combination_has_ended(
        tmp_path: Path, monkeypatch: pytest.MonkeyPatch, algorithm: Any, hours: float) -> None:
    monkeypatch.setattr(tuner.cluster, "connect", None)
    start = {"lr0": 0.01, "augment.close_mosaic": 1}
    genes = Gene("lr0", "choice", values=(0.01, 0.02)), Gene("augment.close_mosaic", "int", 1, 2)
    folder = tmp_path / "runs/evolve/mine"
    ledger = run_sweep(folder / "ledger.jsonl", 300, space=Space(genes, (start,), algorithm))
    assert ledger.claim
    assert len(ledger.trials) < 300
    write_record(folder, SweepRecord(digest="ab", space="", trials=300))
    (folder / "finished").touch()
    space = (f"search: {{algorithm: {algorithm}}}\nlr0: {{type: choice, values: [0.01, 0.02]}}\n"
             "augment.close_mosaic: [1, 2]\n")
    with pytest.raises(InputError, match="mine is finished"):
        search(placed(make_sweep(tmp_path, space, hours=hours), name="mine"), quiet=True)


@pytest.mark.parametrize("virtual_slots", [0, 3])
def test_a_sweep_continues_on_its_own_virtual_slots(
        tmp_path: Path, monkeypatch: pytest.MonkeyPatch, virtual_slots: int) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(InterruptedError):
        continue_on(virtual_slots)


@pytest.mark.parametrize("library", ["torch", "ray_yolo"])
def test_another_version_cannot_continue_a_sweep(
        tmp_path: Path, monkeypatch: pytest.MonkeyPatch, library: str) -> None:
    monkeypatch.setattr(tuner.cluster, "connect", lambda *_: 0.0)
    for name, reply in (("concurrent_trials", 1), ("check_cluster", [])):
        monkeypatch.setattr(tuner, name, lambda *_, reply=reply: reply)
    monkeypatch.setattr(tuner, "Sweep", mock.Mock(side_effect=InterruptedError))
    config = make_sweep(tmp_path)
    for _ in range(2):
        with pytest.raises(InterruptedError):
            search(config, quiet=True)
    if library == "torch":
        monkeypatch.setattr(identity, "version", lambda name: "9.9", raising=False)
    else:
        monkeypatch.setattr(ray_yolo, "__version__", "9.9")
    with pytest.raises(InputError, match=f"started with another {library}; give the original one to continue it"):
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
