"""Forks: a new run that starts from another run's recipe and from the weights of one of its checkpoints.

A fork begins a new schedule at epoch 0, as a training with `--weights` does; the optimiser's state is not taken over.
Nothing is written into the folder of the other run. This module imports neither torch nor Ray.
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from ray_yolo.checkpoints.layout import manifest_of
from ray_yolo.config.fine_tuning import OPTIMIZER_SETTINGS
from ray_yolo.config.recipe import Recipe
from ray_yolo.config.settings import SourcedValue, leaves
from ray_yolo.core.errors import CheckpointError, InputError
from ray_yolo.core.events import CheckpointEvent, Event, ForkOrigin, RunEvent
from ray_yolo.core.versioned import parse_versioned
from ray_yolo.runs.event_log import EVENTS_FILE, epoch_rows, last_of, read_events, surviving
from ray_yolo.runs.location import is_active
from ray_yolo.runs.run_record import RECORD_FILE, RunRecord, read_record
from ray_yolo.storage.store import is_address

_NOT_INHERITED = ("weights", "allow_names", "match_classes")
"""Settings of the other run that concern its own initial weights."""
_BATCH_SETTINGS = ("batch_size", "microbatch", "sync_bn", "quad", "optimizer.nominal_batch")
"""With one of these given, the other run's microbatch may not fit any more, unless a user has chosen it."""


def fork_settings(source: str, given: Mapping[str, SourcedValue]) -> dict[str, SourcedValue]:
    """The settings of a fork by config path: the recipe of the other run, and its weights as the initial ones.

    Settings that the other run's start has decided (batch size, microbatch, precision, threads) keep these values.
    Settings at the default of its model are left out, so that another `--model` has its own defaults.

    Args:
        source: RUN or RUN@EPOCH. Epochs count from 0, as in `epochN.pt` and results.csv.
        given: the settings of the command line, which override those returned.

    Raises:
        InputError: if there is no such run or epoch, or the run is in a bucket or still being trained, or `given`
            contradicts a fork.
    """
    for path in ("weights", "resume"):
        if path in given:
            raise InputError(f"--from {source}: starts from the weights of that run, and {given[path].origin} names "
                             "others; drop one of them")
    folder, epoch = _split(source)
    record = _training_record(folder, source)
    weights = _weights_of(folder, epoch, source)
    is_permanent = re.fullmatch(r"epoch[0-9]+\.pt", weights.name)
    if is_active(folder) and not is_permanent:
        raise InputError(f"--from {source}: the run is being trained, so {weights} may change before the fork has "
                         "read it; wait for its end, or fork a permanent checkpoint (--save-period makes epochN.pt, "
                         "--from RUN@N takes it)")
    inherited = _differing(_recipe_of(record, given))
    for path in _NOT_INHERITED:
        inherited.pop(path, None)
    if "classes" in inherited and "data" in given and "classes" not in given:
        raise InputError(f"--from {source}: that run was trained on the classes {inherited['classes']} of its data "
                         f"set, and {given['data'].origin} names another one, whose numbers may differ; give --classes")
    inherited |= {"weights": str(weights), "match_classes": True}
    return {path: SourcedValue(value, f"--from {source}") for path, value in inherited.items()}


def recipe_settings(record: RunRecord, origin: str, given: Mapping[str, SourcedValue]) -> dict[str, SourcedValue]:
    """The recipe of a run by config path, with its seed and its initial weights, to train it again.

    Settings are kept and left out as in `fork_settings`.

    Args:
        origin: of the values, for messages.
        given: the settings that will override those returned.
    """
    return {path: SourcedValue(value, origin) for path, value in _differing(_recipe_of(record, given)).items()}


def lineage_of(weights: str) -> ForkOrigin | None:
    """The run that a weights file belongs to, and its position there; None if it belongs to no run of this machine."""
    if not weights or is_address(weights):
        return None
    file = Path(weights).absolute()
    folder = next((parent for parent in file.parents if (parent / RECORD_FILE).is_file()), None)
    if folder is None:
        return None
    step = _step_shown(file)
    events = read_events(folder / EVENTS_FILE)
    run = last_of(events, RunEvent)
    if run is None or step is None:
        return None
    epochs = {row_step: epoch for epoch, row_step in _epoch_ends(events).items()}
    saved = [event for event in events if isinstance(event, CheckpointEvent) and event.step == step and event.digest]
    return ForkOrigin(run=str(folder), run_id=run.run_id, epoch=epochs.get(step), step=step,
                   weights=saved[-1].digest if saved else "")


def check_lineage(recorded: ForkOrigin | None, weights: str) -> None:
    """Refuse initial weights that have changed since the first start.

    Raises:
        CheckpointError: if the file is now of another step, or of another run.
    """
    now = lineage_of(weights)
    if recorded is None or now is None or (now.run_id, now.step) == (recorded.run_id, recorded.step):
        return
    raise CheckpointError(f"{weights}: shows step {now.step} now, but this run was started from step {recorded.step}; "
                          "its own checkpoints are gone, so start a new run with --name")


def lineage_line(lineage: ForkOrigin) -> str:
    """The origin of the initial weights in one line; epochs count from 1, as on the console."""
    at = f"step {lineage.step}" if lineage.epoch is None else f"epoch {lineage.epoch + 1}, step {lineage.step}"
    return f"initial weights: {lineage.run} after {at} (run id {lineage.run_id}); the schedule begins anew"


def _split(source: str) -> tuple[Path, int | None]:
    """The folder and the epoch of RUN or RUN@EPOCH."""
    if is_address(source):
        raise InputError(f"--from {source}: a run in a bucket cannot be forked; start from its weights with --weights "
                         f"{source.rpartition('@')[0] or source}/weights/best.pt")
    run, at, epoch = source.rpartition("@")
    if at and re.fullmatch(r"[0-9]{1,9}", epoch) and not os.path.isdir(source):
        return Path(run).absolute(), int(epoch)
    return Path(source).absolute(), None


def _training_record(folder: Path, source: str) -> RunRecord:
    record = read_record(folder) if folder.is_dir() else None
    if not isinstance(record, RunRecord):
        what = "is a sweep; give one of its trials" if record else "is not the folder of a run"
        raise InputError(f"--from {source}: {folder} {what}; write --from RUN or --from RUN@EPOCH, such as "
                         "runs/train/exp@9")
    return record


def _recipe_of(record: RunRecord, given: Mapping[str, SourcedValue]) -> Recipe:
    """The resolved recipe, without decisions that depend on a setting that is given anew."""
    reopened = []
    if any(path in given for path in _BATCH_SETTINGS):
        reopened.append("microbatch")
    if "exact" in given:
        reopened += ["precision", "threads"]
    return record.recipe.model_copy(update={name: getattr(record.asked, name) for name in reopened})


def _differing(recipe: Recipe) -> dict[str, Any]:
    """The settings that are not at the default of the recipe's model, by config path; the model and, because a training
    from weights may have another default, the optimiser in any case."""
    defaults = dict(leaves(Recipe(model=recipe.model).model_dump(mode="json")))
    settings = {}
    for keys, value in leaves(recipe.model_dump(mode="json")):
        path = ".".join(keys)
        if path == "model" or path in OPTIMIZER_SETTINGS or value != defaults.get(keys):
            settings[path] = value
    return settings


def _weights_of(folder: Path, epoch: int | None, source: str) -> Path:
    """The weights file of an epoch; without an epoch, the best weights, or the last ones without these."""
    if epoch is None:
        for name in ("best.pt", "last.pt"):
            file = folder / "weights" / name
            if file.is_file():
                return file
        raise InputError(f"--from {source}: {folder} has no weights yet")
    kept = _kept_epochs(folder)
    if epoch in kept:
        return kept[epoch]
    listed = ", ".join(map(str, sorted(kept))) or "none"
    raise InputError(f"--from {source}: {folder} has no checkpoint of epoch {epoch}; epochs with one: {listed} "
                     "(counted from 0, as in epochN.pt; --save-period and --keep-checkpoints keep more of them)")


def _kept_epochs(folder: Path) -> dict[int, Path]:
    """The file with the weights at the end of each epoch that has one, the most lasting file first."""
    epochs = {step: epoch for epoch, step in _epoch_ends(read_events(folder / EVENTS_FILE)).items()}
    files = [*sorted((folder / "weights").glob("epoch*.pt")), folder / "weights" / "best.pt",
             folder / "weights" / "last.pt", *sorted((folder / "checkpoints").glob("step-*/state.pt"))]
    kept: dict[int, Path] = {}
    for file in files:
        step = _step_shown(file) if file.is_file() else None
        epoch = None if step is None else epochs.get(step)
        if epoch is not None:
            kept.setdefault(epoch, file)
    return kept


def _epoch_ends(events: list[Event]) -> dict[int, int]:
    """Epoch -> its last step."""
    return {row.epoch: row.step for row in epoch_rows(surviving(events))}


def _step_shown(weights: Path) -> int | None:
    """The step that the manifest of a weights file states; None without a readable one."""
    with suppress(OSError, ValueError, KeyError, TypeError):
        return int(parse_versioned(manifest_of(weights).read_bytes())["step"])
    return None
