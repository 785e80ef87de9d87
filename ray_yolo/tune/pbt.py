"""Forks a training from another run's checkpoint with other hyperparameters, for population based training.

Ray's schedulers exchange Tune checkpoints. Here a Tune checkpoint is only a pointer (`Origin`) to a checkpoint of a
distributed training. An exploit forks that checkpoint into a new run folder: the workers of the old folder may still
write to it for some seconds.
"""

from __future__ import annotations

import json
import shlex
import shutil
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path

from ray_yolo.checkpoints.local import save_checkpoint
from ray_yolo.checkpoints.state_file import parse_manifest, read_state
from ray_yolo.config.recipe import Recipe, recipe_digest
from ray_yolo.core.errors import CheckpointError
from ray_yolo.runs.event_log import EVENTS_FILE
from ray_yolo.runs.run_record import RunRecord, read_record, write_record
from ray_yolo.sinks.mlflow_client import RUN_FILE
from ray_yolo.tune.evolution import GeneValue
from ray_yolo.tune.trials import Origin, changed_recipe, train_command, trial_folder

KEPT = (EVENTS_FILE, RUN_FILE)  # copied to each new folder: a trial has one log and one MLflow run


def open_fork(trials: Path, number: int, origin: Origin | None, genes: Mapping[str, GeneValue]) -> str:
    """The name of the run folder in which trial `number` continues from `origin` with `genes`; created if missing.

    Args:
        origin: a checkpoint of another trial, or of its own if it was only paused; None: it starts at its first epoch.

    Raises:
        CheckpointError: if the origin's file is missing, damaged, or another one than recorded.
    """
    if origin and origin.trial == number:
        return origin.folder_name
    folders = [trials / trial_folder(number, 0)]
    while (following := trials / trial_folder(number, len(folders))).joinpath("run.json").exists():
        folders.append(following)
    if origin is None:
        return folders[0].name
    for folder in reversed(folders[1:]):
        record = read_record(folder)
        if isinstance(record, RunRecord) and (record.origin, record.genes) == (asdict(origin), genes):
            return folder.name
    _fork(origin, folders[-1], following, genes)
    return following.name


def newest_origin(folder: Path, number: int, epochs: int) -> Origin | None:
    """The newest permanent checkpoint (`save_period`) with epochs left to train, if any."""
    manifests = (folder / "weights").glob("epoch*.json")  # written after the files that they describe
    kept = {int(path.stem.removeprefix("epoch")) + 1: path for path in manifests}
    trained = max((count for count in kept if count < epochs), default=None)
    if trained is None:
        return None
    manifest = parse_manifest(kept[trained].read_bytes())
    return Origin(number, trained, str(kept[trained].with_suffix(".pt")), manifest["sha256"])


def asked_recipe(folder: Path) -> Recipe | None:
    """The recipe that was requested for the training of a run folder; None if it has not started."""
    record = read_record(folder)
    return record.asked if isinstance(record, RunRecord) else None


def _fork(origin: Origin, before: Path, folder: Path, genes: Mapping[str, GeneValue]) -> None:
    """Fill `folder`. Its run.json is written last and makes it valid."""
    source = Path(origin.state)
    state = read_state(source)
    manifest = parse_manifest(source.with_suffix(".json").read_bytes())
    if manifest["sha256"] != origin.sha256:
        raise CheckpointError(f"{source}: not the checkpoint that the exploit recorded ({origin.sha256[:8]}); restore "
                              "it, or start a new sweep with another --name")
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    for name in KEPT:
        if (before / name).exists():
            shutil.copyfile(before / name, folder / name)
    record = read_record(source.parent.parent)
    assert isinstance(record, RunRecord)
    asked, recipe = (changed_recipe(one, origin.epoch, genes) for one in (record.asked, record.recipe))
    digest = recipe_digest(asked)
    changed = {"digest": digest, "recipe": recipe.model_dump(mode="json")}
    state["meta"] = json.dumps({**json.loads(state["meta"]), **changed, "last_epoch": None})  # the donor's
    save_checkpoint(folder, state, manifest["step"], digest, ["last"])
    write_record(folder, record.model_copy(update={
        "digest": digest, "recipe": recipe, "asked": asked, "command": shlex.join(train_command(asked)),
        "origin": asdict(origin), "genes": dict(genes)}))
