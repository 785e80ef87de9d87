"""One training of a sweep or a comparison: its configuration, and its outcome as its run folder has it. Without Ray."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ray_yolo.config.placement import RunConfig
from ray_yolo.core.events import CheckpointEvent
from ray_yolo.runs.event_log import EVENTS_FILE, best_row, epoch_rows, read_events, surviving
from ray_yolo.tune.schedule import Outcome
from ray_yolo.tune.trials import overlay


def task_config(payload: Mapping[str, Any], config: Mapping[str, Any]) -> RunConfig:
    """The training of a task: the base recipe with its genes and seed, in its own run folder, up to its pause."""
    base = RunConfig.model_validate({"recipe": payload["recipe"], "placement": payload["placement"]})
    recipe = overlay(base.recipe, config["genes"]).model_copy(update={"seed": config["seed"]})
    placement = {"name": config["trial"], "stop_after": config["until"] % recipe.epochs, "keep_checkpoints": 1}
    return RunConfig(recipe=recipe, placement=base.placement.model_copy(update=placement))


def read_outcome(folder: Path, until: int) -> Outcome | None:
    """The result of a training after `until` epochs, or at its earlier end, from its log; None: not yet known.

    Fitness, metrics and losses are those of the best epoch so far, the epoch of best.pt.
    """
    events = read_events(folder / EVENTS_FILE)
    rows = [row for row in epoch_rows(surviving(events)) if row.epoch < until]
    digests = {event.step: event.digest for event in events if isinstance(event, CheckpointEvent)}
    best = best_row(rows)
    if best is None:
        return None
    last = rows[-1]
    is_over = last.epoch + 1 == until or (folder / "finished").exists()
    if not is_over or last.step not in digests:  # without its checkpoint the trial could not continue
        return None
    return Outcome(fitness=best.fitness, metrics=best.metrics or {}, losses=best.val or {}, weights=digests[last.step])
