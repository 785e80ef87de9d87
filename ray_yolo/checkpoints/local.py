"""Checkpoints on disk. A crash at any moment leaves the previous one intact, and each is verified before use.

    checkpoints/step-N/state.pt           the whole state as plain tensors and JSON (loads with weights_only=True)
    checkpoints/step-N/MANIFEST.json      size, SHA-256, step, recipe digest, format, weights, and a checksum of these
                                          entries; written last
    checkpoints/damaged-step-N            a checkpoint that failed verification, set aside
    weights/last.pt, best.pt, epochK.pt   hard links to state.pt, each with its manifest beside it (last.json, ...);
                                          after training the first two become slim files of their own

A save is committed when its folder is renamed to step-N. Its manifest contains `weights`: the step that each file of
`weights/` must show. If a crash interrupts a save after the rename, `recover` completes it from there.

This module does not interpret states and unpickles nothing.
"""

from __future__ import annotations

import itertools
import math
import os
import re
import shutil
import uuid
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from ray_yolo.checkpoints.layout import MANIFEST, checkpoint_folder, step_of
from ray_yolo.checkpoints.state_file import (
    io_error,
    manifest_text,
    parse_manifest,
    read_state,
    verify_manifest,
    write_state,
)
from ray_yolo.core.errors import CheckpointError, TrainingError
from ray_yolo.core.files import atomic_write, replacing, sync
from ray_yolo.core.versioned import FORMAT, is_of_later_version

WRITING, REPLACED, PRUNED = ".writing-", ".replaced-", ".pruned-"  # prefixes of a checkpoint folder's name
_OWN = f"{WRITING}{uuid.uuid4().hex[:8]}-"
_START_OVER = "move checkpoints/ and weights/ away to train from the start, or choose another --name"
_numbers = itertools.count()
_in_use: set[Path] = set()  # Saves that have not returned use these; one that hangs may return after others.


def save_checkpoint(run_dir: Path, state: Mapping[str, Any], step: int, digest: str, kinds: Sequence[str]) -> Path:
    """Write a state durably and link it under `weights/` as each of `kinds`. Returns the checkpoint's folder.

    Raises:
        OSError: if storage fails; checkpoints of other steps are unchanged.
    """
    root = run_dir / "checkpoints"
    folder = checkpoint_folder(run_dir, step)
    temporary = root / f"{_OWN}{next(_numbers)}-{folder.name}"
    replaced = root / f"{REPLACED}{folder.name}"
    _sweep(root, others=False)  # what this process's failed saves have left
    _in_use.update((temporary, replaced))
    try:
        root.mkdir(exist_ok=True)  # only this folder: a run folder that is gone is not made again
        temporary.mkdir()
        manifest = {"format": FORMAT, "step": step, "recipe_digest": digest,
                    **write_state(temporary / "state.pt", state),
                    "weights": steps_of_weights(run_dir) | dict.fromkeys(kinds, step)}
        atomic_write(temporary / MANIFEST, manifest_text(manifest))
        if folder.exists():  # the same step again: training stopped after an epoch's last step, before its end
            folder.rename(replaced)
        temporary.rename(folder)
        sync(root)
    finally:
        _in_use.difference_update((temporary, replaced))
        _sweep(root, others=False)  # removes the replaced checkpoint, or restores it if there is no new one
    _link_weights(run_dir)
    return folder


def steps_of_weights(run_dir: Path) -> dict[str, int]:
    """The step that each file of `weights/` must show, by the newest manifest; empty before the first one."""
    for folder in newest_first(run_dir):
        with suppress(ValueError, FileNotFoundError):  # damaged: `recover` will set it aside
            return dict(parse_manifest((folder / MANIFEST).read_bytes())["weights"])
    return {}


def newest_first(run_dir: Path) -> Iterator[Path]:
    """Checkpoint folders by descending step, not by modification time, which clocks and copies change."""
    names = [name for name in _names(run_dir) if re.fullmatch(r"step-[0-9]+", name)]
    folders = [run_dir / "checkpoints" / name for name in names]
    return iter(sorted(folders, key=step_of, reverse=True))


def copy_newest_whole(run_dir: Path, before: int, target: Path) -> tuple[int, list[str]]:
    """Copy the newest intact state of fewer than `before` steps into `target`, another run folder, as a checkpoint.

    The states are those of `checkpoints/` and the whole ones of `weights/`, which outlive the checkpoints: epochK.pt,
    and last.pt and best.pt until the end of training. The copy is verified, so a run may be in training.

    Returns:
        The step of the copy, 0 if there is no such state; the problems of newer ones.
    """
    files = [(folder / "state.pt", folder / MANIFEST) for folder in newest_first(run_dir)]
    files += [(state, state.with_suffix(".json")) for state in weights_files(run_dir)]
    candidates: list[tuple[int, Path, Path]] = []
    problems = []
    for state, manifest in files:
        try:
            content = parse_manifest(manifest.read_bytes())
            is_whole = "whole" not in content  # else reduced to what inference needs
            if content["step"] < before and is_whole:
                candidates.append((content["step"], state, manifest))
        except (OSError, ValueError) as error:
            problems.append(f"{manifest.relative_to(run_dir)}: cannot be read ({error})")
    for step, state, manifest in sorted(candidates, key=lambda each: each[0], reverse=True):
        folder = checkpoint_folder(target, step)
        folder.mkdir(parents=True, exist_ok=True)
        try:
            shutil.copyfile(state, folder / "state.pt")
            shutil.copyfile(manifest, folder / MANIFEST)
            problem = verify_manifest(folder / "state.pt", folder / MANIFEST)
        except FileNotFoundError:
            problem = "it was removed while it was read"
        if problem is None:
            return step, problems
        problems.append(f"{state.relative_to(run_dir)}: {problem}")
        shutil.rmtree(folder)
    return 0, problems


def weights_files(run_dir: Path) -> list[Path]:
    """The files of `weights/`, without those that a killed process has left half written."""
    return sorted((run_dir / "weights").glob("[!.]*.pt"))


def prune(run_dir: Path, keep: int) -> None:
    """Remove all but the newest `keep` checkpoints; linked weights stay."""
    for folder in list(newest_first(run_dir))[keep:]:
        _remove(folder)


def remove_newer(run_dir: Path, newer_than: int) -> None:
    """Remove intact checkpoints newer than a step: training returns to an earlier one, or starts again.

    Files of `weights/` that show a removed step show the one of the newest remaining checkpoint. Without any, they are
    removed.

    Raises:
        OSError: if storage fails.
    """
    for folder in _newer(run_dir, newer_than):
        _remove(folder)
    for manifest in (run_dir / "weights").glob("[!.]*.json"):
        if step_shown(manifest.read_bytes()) > newer_than:
            manifest.unlink()  # first: a state without a manifest is linked anew
            manifest.with_suffix(".pt").unlink(missing_ok=True)
    _link_weights(run_dir)


def step_shown(manifest: bytes) -> float:
    """The step of a manifest of `weights/`; infinite if it is damaged, so that it is replaced."""
    try:
        return float(parse_manifest(manifest)["step"])
    except ValueError:
        return math.inf


def set_aside(run_dir: Path, newer_than: int) -> None:
    """Rename damaged checkpoints newer than a step so that they are not considered again."""
    for folder in _newer(run_dir, newer_than):
        damaged = folder.with_name(f"damaged-{folder.name}")
        shutil.rmtree(damaged, ignore_errors=True)
        folder.rename(damaged)


def recover(run_dir: Path, digest: str) -> tuple[int, list[str]]:
    """Clean up after a crash and set damaged checkpoints aside, before training continues.

    Returns:
        The step of the checkpoint to continue from, -1 if there has never been one; the problems of newer checkpoints.

    Raises:
        CheckpointError: if storage fails, or the checkpoint belongs to another recipe than `digest`, or to a later
            version; nothing is set aside then.
    """
    root = run_dir / "checkpoints"
    try:
        _sweep(root, others=True)
        for path in (run_dir / "weights").glob(".*"):
            path.unlink()
        newest, problems = newest_verified(run_dir)
        if newest is None:
            return -1, problems
        manifest = parse_manifest((newest / MANIFEST).read_bytes())
        if is_of_later_version(manifest):
            raise CheckpointError(f"{newest}: written by a later ray_yolo (format {manifest['format']}; this one reads "
                                  f"{FORMAT}); continue with that one")
        trained = manifest["recipe_digest"]
        step = step_of(newest)
        if trained != digest:
            raise CheckpointError(f"{newest}: was trained by another recipe ({trained}) than this run's ({digest}); "
                                  f"{_START_OVER}")
        set_aside(run_dir, newer_than=step)
        _link_weights(run_dir)
        return step, problems
    except OSError as error:
        raise io_error(root, error) from error


def newest_verified(run_dir: Path) -> tuple[Path | None, list[str]]:
    """The newest checkpoint that matches its manifest, None if there has never been one; the problems of newer ones.

    Raises:
        CheckpointError: if checkpoints cannot be read, or if there are some and none is intact, or if there are none
        although `weights/` shows one. Only the user may decide to start over.
    """
    problems: list[str] = []
    for folder in newest_first(run_dir):
        problem = verify_manifest(folder / "state.pt", folder / MANIFEST)
        if problem is None:
            return folder, problems
        problems.append(f"{folder.name}: {problem}")
    names = _names(run_dir)
    if names:
        reasons = "; ".join(problems or sorted(names))
        raise CheckpointError(f"{run_dir / 'checkpoints'}: no usable checkpoint ({reasons}); restore a checkpoint from "
                              f"a copy, {_START_OVER}")
    shown = sorted((run_dir / "weights").glob("[!.]*.json"))
    if shown:
        raise CheckpointError(f"{run_dir / 'checkpoints'}: has no checkpoint, although this run has saved some "
                              f"({shown[0]}); restore a checkpoint from a copy, {_START_OVER}")
    return None, problems


def check_weights(run_dir: Path, step: int) -> None:
    """Check the weights of a training that ended at `step`.

    Raises:
        TrainingError: if weights/last.pt, or best.pt where one was saved, fails verification or shows an older step.
    """
    try:
        steps = steps_of_weights(run_dir) | {"last": step}
        for kind in ("best", "last"):
            if kind not in steps:
                continue
            weights = run_dir / "weights" / f"{kind}.pt"
            manifest = weights.with_suffix(".json")
            problem = verify_manifest(weights, manifest)
            if problem is None:
                shown = parse_manifest(manifest.read_bytes())["step"]
                if shown != steps[kind]:
                    problem = f"it is of step {shown}, not of step {steps[kind]}"
            if problem:
                raise TrainingError(f"{weights}: {problem}; restore it from a copy, or remove it, and run the same "
                                    "command again")
    except (OSError, ValueError) as error:
        raise TrainingError(str(error)) from error


def slim_weights(run_dir: Path, parts: Collection[str]) -> None:
    """Reduce weights/last.pt and best.pt of a finished training to these parts of their states.

    Each manifest is written first and describes both files, the complete one as `whole`: after a crash it matches
    either.

    Raises:
        OSError: if storage fails; the files remain intact.
    """
    for kind in ("last", "best"):
        weights = run_dir / "weights" / f"{kind}.pt"
        if not weights.exists():
            continue
        state = read_state(weights)
        if state.keys() <= set(parts):  # reduced before
            continue
        manifest = parse_manifest(weights.with_suffix(".json").read_bytes())
        manifest.setdefault("whole", {"size": manifest["size"], "sha256": manifest["sha256"]})
        slim = {name: state[name] for name in parts}
        with replacing(weights) as temporary:
            manifest |= write_state(temporary, slim)
            atomic_write(weights.with_suffix(".json"), manifest_text(manifest))


def _sweep(root: Path, *, others: bool) -> None:
    """Remove the remains of interrupted saves; a replaced checkpoint without a successor is restored.

    Args:
        others: also those of other processes, which may be alive: after a worker has departed, a second one saves.
    """
    for path in root.glob(f"{REPLACED}*"):
        folder = root / path.name.removeprefix(REPLACED)
        if not folder.exists() and path not in _in_use:
            path.rename(folder)
    for path in root.glob(".*"):
        is_in_use = path in _in_use
        may_be_anothers = path.name.startswith(WRITING) and not path.name.startswith(_OWN)
        if not is_in_use and (others or not may_be_anothers):
            shutil.rmtree(path, ignore_errors=True)


def _link_weights(run_dir: Path) -> None:
    """Link the files of `weights/` as the newest manifest says; each name always shows an old or a new file.

    A file whose checkpoint has been pruned is up to date: pruning follows linking.
    """
    weights = run_dir / "weights"
    for kind, step in steps_of_weights(run_dir).items():
        folder = checkpoint_folder(run_dir, step)
        if not folder.exists():
            continue
        state, manifest = weights / f"{kind}.pt", weights / f"{kind}.json"
        is_whole = state.exists() and manifest.exists()
        is_current = is_whole and manifest.read_bytes() == (folder / MANIFEST).read_bytes()
        if not is_current:
            weights.mkdir(exist_ok=True)
            _link(folder / "state.pt", state)
            _link(folder / MANIFEST, manifest)  # last: a correct manifest implies a correct state


def _link(source: Path, target: Path) -> None:
    """Atomically make `target` another name of `source`."""
    with replacing(target) as temporary:
        try:
            os.link(source, temporary)
        except OSError:  # file systems without hard links
            shutil.copyfile(source, temporary)


def _names(run_dir: Path) -> list[str]:
    """The entries of `checkpoints/` without unfinished saves."""
    try:
        return [name for name in os.listdir(run_dir / "checkpoints") if not name.startswith(".")]
    except FileNotFoundError:
        return []


def _newer(run_dir: Path, step: int) -> list[Path]:
    return [folder for folder in newest_first(run_dir) if step_of(folder) > step]


def _remove(folder: Path) -> None:
    """Remove a checkpoint at once for readers, then its files."""
    pruned = folder.rename(folder.with_name(PRUNED + folder.name))
    shutil.rmtree(pruned, ignore_errors=True)
