"""One task of a study, a training to one epoch: its configuration, and its outcome. Without Ray Tune."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch

from ray_yolo.config.placement import Placement, RunConfig
from ray_yolo.config.recipe import Recipe
from ray_yolo.core.cache_folder import cache_folder
from ray_yolo.core.errors import ConfigError, DivergedError, WorkerError
from ray_yolo.core.events import CheckpointEvent
from ray_yolo.data.synthetic import BUILT_IN
from ray_yolo.runs.event_log import EVENTS_FILE, best_row, epoch_rows, read_events, surviving
from ray_yolo.runs.folders import project_folder
from ray_yolo.runs.working_copy import FINISHED
from ray_yolo.tune.schedule import Outcome
from ray_yolo.tune.trials import overlay

# The failures that a recipe has caused. The files and folders that a task lacks raise other errors.
_OF_RECIPE = (ConfigError, DivergedError, WorkerError, torch.OutOfMemoryError)


def payload_of(placement: Placement, recipe: Recipe, folder: Path, uri: str | None, *, is_stored: bool
               ) -> dict[str, Any]:
    """The settings that all tasks of a study share, as plain JSON; see `task_config`.

    Args:
        placement: of the study; the workers are those of each training.
        recipe: the base of all tasks.
        folder: of the study.
        uri: its MLflow server; None: no tracking.
        is_stored: whether the study is in a store; `folder` is then a working copy.
    """
    where = {"project": str((folder / "trials").absolute()), "storage_path": ""}
    if is_stored:
        where = {"project": f"{placement.project}/{folder.name}/trials"}
    file, colon, name = placement.callbacks.partition(":")
    return {
        "recipe": with_absolute_paths(recipe).model_dump(mode="json"),
        "placement": {
            **placement.model_dump(mode="json"), **where, "resume": "", "registered_name": "",
            "mlflow_uri": uri or "off",
            "cpus_per_worker": placement.cpus if placement.num_workers else placement.cpus_per_worker,
            "callbacks": f"{absolute_file(file)}{colon}{name}"},
        "cache": str(cache_folder().absolute()) if is_stored else ""}


def task_config(payload: Mapping[str, Any], config: Mapping[str, Any]) -> RunConfig:
    """The training of a task: the base recipe with its genes and seed, in its own run folder, up to its pause."""
    base = RunConfig.model_validate({"recipe": payload["recipe"], "placement": payload["placement"]})
    recipe = overlay(base.recipe, config["genes"]).model_copy(update={"seed": config["seed"]})
    placement = {"name": config["trial"], "stop_after": config["until"] % recipe.epochs, "keep_checkpoints": 1}
    return RunConfig(recipe=recipe, placement=base.placement.model_copy(update=placement))


def with_absolute_paths(recipe: Recipe) -> Recipe:
    """The recipe with names that are valid in the working folder of any training."""
    data = recipe.data if recipe.data in BUILT_IN else _absolute(recipe.data)
    return recipe.model_copy(update={"data": data, "model": absolute_file(recipe.model)})


def absolute_file(name: str) -> str:
    """The absolute path of a model file or of a file with callbacks; another name stays."""
    return _absolute(name) if name.endswith((".yaml", ".yml", ".py")) else name


def _absolute(name: str) -> str:
    """The absolute path of a file or folder; another name, such as an address, stays."""
    path = Path(name).expanduser()
    return str(path.absolute()) if name and path.exists() else name


def train_to_outcome(config: RunConfig, until: int, train: Callable[[RunConfig], None]) -> tuple[Outcome, bool]:
    """The outcome of a task, and whether it was trained now: an earlier process may have left it in the run folder.

    Args:
        train: trains until log and weights are complete.

    Raises:
        Exception: of a failure that the recipe has not caused, after which the same task may be tried again.
    """
    folder = project_folder(config.placement) / config.placement.name
    known = read_outcome(folder, until)
    if known:
        return known, False
    try:
        train(config)
    except _OF_RECIPE as error:
        return Outcome(reason=line_of(error), diverged=isinstance(error, DivergedError)), True
    return read_outcome(folder, until) or Outcome(reason="it ended without a validation"), True


def line_of(error: BaseException) -> str:
    """The type and the first line of an error: the reason why a task failed."""
    return f"{type(error).__name__}: {error}".splitlines()[0]


def read_outcome(folder: Path, until: int) -> Outcome | None:
    """The result of a training after `until` epochs, or at its earlier end, from its log; None: not yet known.

    Fitness, metrics, losses and classes are those of the best epoch so far, the epoch of best.pt.
    """
    events = read_events(folder / EVENTS_FILE)
    rows = [row for row in epoch_rows(surviving(events)) if row.epoch < until]
    digests = {event.step: event.digest for event in events if isinstance(event, CheckpointEvent)}
    best = best_row(rows)
    if best is None:
        return None
    last = rows[-1]
    is_over = last.epoch + 1 == until or (folder / FINISHED).exists()
    if not is_over or last.step not in digests:  # without its checkpoint the trial could not continue
        return None
    return Outcome(fitness=best.fitness, metrics=best.metrics or {}, losses=best.val or {}, weights=digests[last.step],
                   classes={each.name: each.map50_95 for each in best.per_class})
