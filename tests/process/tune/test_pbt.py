"""Forks of another run: its exact state, with other hyper-parameters, in a new folder."""

from __future__ import annotations

import json
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest
import torch

from ray_yolo.checkpoints.state_file import manifest_text
from ray_yolo.config.placement import RunConfig
from ray_yolo.config.recipe import Recipe
from ray_yolo.core.errors import CheckpointError
from ray_yolo.core.events import RunEvent, StartEvent, StepEvent
from ray_yolo.runs.event_log import read_events, surviving
from ray_yolo.runtime.trainer import fit
from ray_yolo.tune.pbt import asked_recipe, newest_origin, open_fork
from ray_yolo.tune.trials import Origin
from tests.support import run_log
from tests.support.checkpoints import newest
from tests.support.jobs import STEADY, make_config

EXACT = {"exact": True, "noval": False, "epochs": 4}
OWN = STEADY["optimizer"]["lr0"]


@pytest.fixture(scope="module")
def trials(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder in which trial 0 and trial 1 have been trained, every epoch kept."""
    folder = tmp_path_factory.mktemp("fork")
    for number, seed in enumerate((0, 1)):
        config = make_config(folder, 0, {"project": "trials", "name": f"trial{number}", "save_period": 1}, **EXACT)
        fit(RunConfig(recipe=config.recipe.model_copy(update={"seed": seed}), placement=config.placement), quiet=True)
    return folder / "trials"


def origin_of(trials: Path, epoch: int, folder: str = "trial0") -> Origin:
    weights, number = trials / folder / "weights" / f"epoch{epoch - 1}.pt", int(folder[len("trial")])
    return Origin(number, epoch, str(weights), json.loads(weights.with_suffix(".json").read_text())["sha256"])


def go_on(trials: Path, name: str) -> dict[str, Any]:
    """Train a folder to its end. Returns its last checkpoint."""
    recipe = asked_recipe(trials / name)
    assert recipe
    return train(trials, name, recipe)


def train(trials: Path, name: str, recipe: Recipe) -> dict[str, Any]:
    placement = make_config(trials.parent, 0, {"project": "trials", "name": name, "save_period": 1}).placement
    return newest(fit(RunConfig(recipe=recipe, placement=placement), quiet=True).run_dir)


def assert_same(one: dict[str, Any], other: dict[str, Any]) -> None:
    for part in ("model", "ema"):
        assert all(torch.equal(value, other[part][key]) for key, value in one[part].items())
    for number, entry in one["optimizer"].items():
        assert all(torch.equal(value, other["optimizer"][number][key]) for key, value in entry.items())


def last(trials: Path, name: str) -> dict[str, Any]:
    return newest(trials / name)


def test_a_fork_with_the_donors_genes_ends_as_the_donor(trials: Path) -> None:
    name = open_fork(trials, 1, origin_of(trials, 2), {"lr0": OWN})
    assert name.startswith("trial1-")
    assert_same(go_on(trials, name), last(trials, "trial0"))


def test_one_recipe_with_changes_trains_the_weights_of_a_fork_of_a_fork(trials: Path) -> None:
    first = open_fork(trials, 1, origin_of(trials, 1), {"lr0": 0.001, "mosaic": 0.0})
    go_on(trials, first)
    second = open_fork(trials, 0, origin_of(trials, 3, first), {"lr0": 0.002, "mosaic": 0.0, "weight_decay": 0.05})
    fork_trial, recipe = go_on(trials, second), asked_recipe(trials / second)
    assert recipe
    assert [change.model_dump() for change in recipe.changes] == [
        "1: augment.mosaic=0.0 optimizer.lr0=0.001", "3: optimizer.lr0=0.002 optimizer.weight_decay=0.05"]
    again = train(trials, "again", recipe)
    assert_same(again, fork_trial)
    metas = [json.loads(state["meta"]) for state in (again, fork_trial)]
    assert metas[0]["last_epoch"]["fitness"] == metas[1]["last_epoch"]["fitness"]
    assert metas[0]["digest"] == metas[1]["digest"]


def test_a_fork_starts_with_the_donors_tensors_and_trains_with_its_own_genes(trials: Path) -> None:
    origin = origin_of(trials, 3)
    folder = trials / open_fork(trials, 1, origin, {"lr0": 1e-4})
    assert_same(torch.load(origin.state, weights_only=True), last(trials, folder.name))
    go_on(trials, folder.name)
    events = read_events(folder / "events.jsonl")
    starts = [event.epoch for event in run_log.only(StartEvent, events)]
    assert (starts[0], starts[-1]) == (0, 3)  # its own history goes on, from the donor's place
    steps = [event for event in run_log.only(StepEvent, surviving(events)) if event.epoch == 3]
    assert steps[-1].lr[0] < 1e-4
    runs = run_log.only(RunEvent, events)
    assert len({event.run_id for event in runs}) == 1
    assert "3: optimizer.lr0=0.0001" in runs[-1].command


def test_the_same_order_twice_is_one_fork(trials: Path) -> None:
    origin = origin_of(trials, 2)
    first = open_fork(trials, 1, origin, {"lr0": 2e-4})
    assert open_fork(trials, 1, origin, {"lr0": 2e-4}) == first
    assert open_fork(trials, 1, origin_of(trials, 3), {"lr0": 2e-4}) != first
    assert open_fork(trials, 1, origin, {"lr0": 3e-4}) != first
    assert open_fork(trials, 1, origin, {"lr0": 2e-4}) == first
    assert open_fork(trials, 1, None, {"lr0": 2e-4}) == "trial1"


def test_a_fork_that_was_cut_off_is_made_again(trials: Path) -> None:
    origin = origin_of(trials, 3)
    folder = trials / open_fork(trials, 1, origin, {"lr0": 4e-4})
    (folder / "run.json").unlink()
    (folder / "rest").touch()
    assert trials / open_fork(trials, 1, origin, {"lr0": 4e-4}) == folder
    assert not (folder / "rest").exists()


def test_a_file_that_is_not_the_one_that_was_meant_is_refused(trials: Path) -> None:
    with pytest.raises(CheckpointError, match="not the checkpoint"):
        open_fork(trials, 1, replace(origin_of(trials, 2), sha256="0" * 64), {"lr0": OWN})
    with pytest.raises(CheckpointError, match="no such weights"):
        open_fork(trials, 1, replace(origin_of(trials, 2), state=str(trials / "gone.pt")), {"lr0": OWN})


def test_a_trial_that_was_only_paused_goes_on_in_its_own_folder(trials: Path) -> None:
    genes, origin = {"lr0": 5e-4}, origin_of(trials, 2)
    fork_trial = open_fork(trials, 1, origin, genes)
    own = replace(origin, trial=1, state=str(trials / fork_trial / "weights" / "epoch3.pt"))
    assert open_fork(trials, 1, own, genes) == fork_trial
    assert open_fork(trials, 1, Origin(**asdict(origin)), genes) == fork_trial  # after a restart of the sweep
    assert open_fork(trials, 1, None, genes) == "trial1"


def test_others_go_on_from_checkpoints_whose_manifests_are_there(tmp_path: Path) -> None:
    weights = tmp_path / "weights"
    weights.mkdir()
    assert newest_origin(tmp_path, 3, 6) is None
    for epoch in (1, 3, 5):  # after the last one nothing is left to train
        (weights / f"epoch{epoch}.pt").touch()
        if epoch != 3:  # which is being written
            (weights / f"epoch{epoch}.json").write_text(manifest_text(
                {"format": 2, "step": epoch, "recipe_digest": "", "size": 1, "sha256": str(epoch), "weights": {}}))
    assert newest_origin(tmp_path, 3, 6) == Origin(3, 2, str(weights / "epoch1.pt"), "1")
