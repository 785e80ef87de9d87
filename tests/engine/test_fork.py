"""Going on from another run: exactly its state, under other hyper-parameters, in a folder of its own."""

from __future__ import annotations

import json
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest
import torch

from ray_yolo.config import Recipe, RunConfig
from ray_yolo.engine.events import read_events, surviving
from ray_yolo.engine.fork import open_fork
from ray_yolo.engine.ledger import Origin
from ray_yolo.errors import CheckpointError
from ray_yolo.runtime.trainer import fit
from ray_yolo.runtime.trial import run_folder
from tests.support.jobs import make_config

EXACT = {"exact": True, "noval": False, "epochs": 4}


@pytest.fixture(scope="module")
def trials(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder in which trial 0 and trial 1 have been trained, every epoch kept."""
    folder = tmp_path_factory.mktemp("fork")
    for number, seed in enumerate((0, 1)):
        config = make_config(folder, 0, {"project": "trials", "name": f"trial{number}", "save_period": 1}, **EXACT)
        fit(RunConfig(recipe=config.recipe.model_copy(update={"seed": seed}), placement=config.placement), quiet=True)
    return folder / "trials"


def recipe_of(trials: Path, **optimizer: float) -> Recipe:
    recipe = Recipe.model_validate(json.loads((trials / "trial0" / "run.json").read_text())["recipe"])
    return recipe.model_copy(update={"optimizer": recipe.optimizer.model_copy(update=optimizer)})


def origin_of(trials: Path, epoch: int) -> Origin:
    weights = trials / "trial0" / "weights" / f"epoch{epoch - 1}.pt"
    return Origin(0, epoch, str(weights), json.loads(weights.with_suffix(".json").read_text())["sha256"])


def go_on(trials: Path, name: str, recipe: Recipe) -> dict[str, Any]:
    placement = make_config(trials.parent, 0, {"project": "trials", "name": name}).placement
    return torch.load(fit(RunConfig(recipe=recipe, placement=placement), quiet=True).last, weights_only=True)


def test_under_its_own_hyper_parameters_the_heir_ends_as_the_donor(trials: Path) -> None:
    name = open_fork(trials, 1, origin_of(trials, 2), recipe_of(trials))
    assert name.startswith("trial1-")
    heir, donor = go_on(trials, name, recipe_of(trials)), torch.load(
        trials / "trial0" / "weights" / "last.pt", weights_only=True)
    assert all(torch.equal(value, heir["model"][key]) for key, value in donor["model"].items())
    assert all(torch.equal(value, heir["ema"][key]) for key, value in donor["ema"].items())


def test_the_heir_begins_with_the_donors_tensors_and_trains_by_its_own_genes(trials: Path) -> None:
    recipe, origin = recipe_of(trials, lr0=1e-4), origin_of(trials, 3)
    folder = trials / open_fork(trials, 1, origin, recipe)
    heir, donor = (torch.load(path, weights_only=True) for path in (folder / "weights" / "last.pt", origin.state))
    for part in ("model", "ema"):
        assert all(torch.equal(value, heir[part][key]) for key, value in donor[part].items())
    for number, entry in donor["optimizer"].items():
        assert all(torch.equal(value, heir["optimizer"][number][key]) for key, value in entry.items())
    go_on(trials, folder.name, recipe)
    events = read_events(folder / "events.jsonl")
    starts = [event["epoch"] for event in events if event["type"] == "start"]
    assert (starts[0], starts[-1]) == (0, 3)  # its own history goes on, from the donor's place
    steps = [event for event in surviving(events) if event["type"] == "step" and event["epoch"] == 3]
    assert steps[-1]["lr"][0] < 1e-4
    assert len({event["run_id"] for event in events if event["type"] == "run"}) == 1


def test_the_same_order_twice_is_one_fork(trials: Path) -> None:
    recipe, origin = recipe_of(trials, lr0=2e-4), origin_of(trials, 2)
    first = open_fork(trials, 1, origin, recipe)
    assert open_fork(trials, 1, origin, recipe) == first
    assert open_fork(trials, 1, origin_of(trials, 3), recipe_of(trials, lr0=3e-4)) != first
    assert open_fork(trials, 1, origin, recipe) == first
    assert open_fork(trials, 1, None, recipe) == "trial1"


def test_a_fork_that_was_cut_off_is_made_again(trials: Path) -> None:
    recipe, origin = recipe_of(trials, lr0=4e-4), origin_of(trials, 4)
    folder = trials / open_fork(trials, 0, origin, recipe)
    (folder / "run.json").unlink()
    (folder / "rest").touch()
    assert trials / open_fork(trials, 0, origin, recipe) == folder
    assert not (folder / "rest").exists()


def test_a_file_that_is_not_the_one_that_was_meant_is_refused(trials: Path) -> None:
    with pytest.raises(CheckpointError, match="not the checkpoint"):
        open_fork(trials, 1, replace(origin_of(trials, 2), sha256="0" * 64), recipe_of(trials))
    with pytest.raises(CheckpointError, match="no such weights"):
        open_fork(trials, 1, replace(origin_of(trials, 2), state=str(trials / "gone.pt")), recipe_of(trials))


def test_a_trial_that_was_only_paused_goes_on_in_its_own_folder(trials: Path) -> None:
    recipe, origin = recipe_of(trials, lr0=5e-4), origin_of(trials, 2)
    heir = run_folder(trials, 1, origin, None, recipe)
    own = replace(origin, trial=1, state=str(trials / heir / "weights" / "epoch3.pt"))
    assert run_folder(trials, 1, own, None, recipe) == heir
    assert run_folder(trials, 1, None, asdict(origin), recipe) == heir  # after a restart of the sweep
    assert run_folder(trials, 1, None, None, recipe) == "trial1"
