"""Checkpoints on disk: written so that a crash at any moment leaves the previous one, verified before use.

    checkpoints/step-N/state.pt        everything, as plain tensors and JSON (loads with weights_only=True)
    checkpoints/step-N/MANIFEST.json   size and SHA-256 of state.pt, step, recipe digest, format, weights; written last
    checkpoints/damaged-step-N         one that did not verify, set aside
    weights/last.pt, best.pt, epochK.pt   hard links to state.pt, each with its manifest beside it (last.json, ...);
                                          of a training that has ended the first two are slim files of their own

A save happens in one moment: when its folder gets the name step-N. Its manifest brings along `weights`, which names
the step that each file of `weights/` is to show: however far a crash let a save come, `recover` does the rest.

Nothing here knows what a state means, and nothing is ever unpickled.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import uuid
from collections.abc import Collection, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from ray_yolo.checkpoints.state_file import FORMAT, MANIFEST, io_error, read_state, verify_manifest, write_state
from ray_yolo.core.errors import CheckpointError, TrainingError
from ray_yolo.core.files import atomic_write, replacing, sync

WRITING, REPLACED, PRUNED = ".writing-", ".replaced-", ".pruned-"  # before the name of a checkpoint's folder
_OWN = f"{WRITING}{uuid.uuid4().hex[:8]}-"



def save_checkpoint(run_dir: Path, state: Mapping[str, Any], step: int, digest: str, kinds: Sequence[str]) -> Path:
    """Write a state durably and show it under `weights/` as each of `kinds`. Returns the checkpoint's folder.

    Raises:
        OSError: if storage refuses; every checkpoint that was there still is.
    """
    root = run_dir / "checkpoints"
    folder = root / f"step-{step}"
    temporary = root / f"{_OWN}step-{step}"
    _sweep(root, others=False)
    try:
        temporary.mkdir(parents=True)
        manifest = {"format": FORMAT, "step": step, "recipe_digest": digest,
                    **write_state(temporary / "state.pt", state),
                    "weights": steps_of_weights(run_dir) | dict.fromkeys(kinds, step)}
        atomic_write(temporary / MANIFEST, json.dumps(manifest, indent=1))
        if folder.exists():  # the same step again: training was stopped after an epoch's last step, before its end
            folder.rename(root / f"{REPLACED}step-{step}")
        temporary.rename(folder)
        sync(root)
    finally:
        _sweep(root, others=False)
    _link_weights(run_dir)
    return folder


def _sweep(root: Path, *, others: bool) -> None:
    """Remove what saves have left half way; a replaced checkpoint whose successor never came gets its name back.

    Args:
        others: also what other processes write, which may live: where a worker was lost, a second one saves.
    """
    for path in root.glob(f"{REPLACED}*"):
        folder = root / path.name.removeprefix(REPLACED)
        if not folder.exists():
            path.rename(folder)
    for path in root.glob(".*"):
        if others or path.name.startswith(_OWN) or not path.name.startswith(WRITING):
            shutil.rmtree(path, ignore_errors=True)


def steps_of_weights(run_dir: Path) -> dict[str, int]:
    """The step that each file of `weights/` is to show, by the newest checkpoint; empty before the first one."""
    for folder in newest_first(run_dir):
        return dict(json.loads((folder / MANIFEST).read_bytes())["weights"])
    return {}


def _link_weights(run_dir: Path) -> None:
    """Make `weights/` what the newest manifest says; each name always shows an old or a new file.

    What shows a checkpoint that has been pruned is right already: pruning comes after this.
    """
    weights = run_dir / "weights"
    for kind, step in steps_of_weights(run_dir).items():
        folder = run_dir / "checkpoints" / f"step-{step}"
        state, manifest = weights / f"{kind}.pt", weights / f"{kind}.json"
        shown = state.exists() and manifest.exists() and manifest.read_bytes()
        if folder.exists() and shown != (folder / MANIFEST).read_bytes():
            weights.mkdir(exist_ok=True)
            _link(folder / "state.pt", state)
            _link(folder / MANIFEST, manifest)  # last: where it is right, the state is


def _link(source: Path, target: Path) -> None:
    """Make a file another file's second name, in one moment."""
    with replacing(target) as temporary:
        try:
            os.link(source, temporary)
        except OSError:  # file systems without hard links
            shutil.copyfile(source, temporary)


def prune(run_dir: Path, keep: int) -> None:
    """Remove all but the newest `keep` checkpoints; linked weights stay."""
    for folder in list(newest_first(run_dir))[keep:]:
        _remove(folder)


def withdraw(run_dir: Path, newer_than: int) -> None:
    """Remove checkpoints newer than a step, though they are sound: training goes back before them."""
    for folder in list(newest_first(run_dir)):
        if int(folder.name[5:]) > newer_than:
            _remove(folder)


def _remove(folder: Path) -> None:
    shutil.rmtree(folder.rename(folder.with_name(PRUNED + folder.name)), ignore_errors=True)


def newest_first(run_dir: Path) -> Iterator[Path]:
    """Checkpoint folders by falling step number; never by modification time, which clocks and copies change."""
    names = [name for name in _names(run_dir) if re.fullmatch(r"step-[0-9]+", name)]
    return (run_dir / "checkpoints" / name for name in sorted(names, key=lambda name: int(name[5:]), reverse=True))


def _names(run_dir: Path) -> list[str]:
    """What lies in `checkpoints/`, but for what a save has not finished."""
    try:
        return [name for name in os.listdir(run_dir / "checkpoints") if not name.startswith(".")]
    except FileNotFoundError:
        return []


def recover(run_dir: Path, digest: str) -> tuple[int, list[str]]:
    """Bring what a crash has left into order and set aside what is damaged, before training goes on.

    Returns:
        the step of the checkpoint to go on from, -1 if there never was one, and what was wrong with newer ones.

    Raises:
        CheckpointError: if that cannot be told, or the checkpoint is of another recipe than `digest`; then nothing is
            set aside.
    """
    root = run_dir / "checkpoints"
    try:
        _sweep(root, others=True)
        for path in (run_dir / "weights").glob(".*"):
            path.unlink()
        newest, problems = newest_verified(run_dir)
        if newest is None:
            return -1, problems
        trained, step = json.loads((newest / MANIFEST).read_bytes())["recipe_digest"], int(newest.name[5:])
        if trained != digest:
            raise CheckpointError(f"{newest}: was trained by another recipe ({trained}) than this run's ({digest}); "
                                  f"move {root} away to train from the start, or choose another --name")
        set_aside(run_dir, newer_than=step)
        _link_weights(run_dir)
        return step, problems
    except OSError as error:
        raise io_error(root, error) from error


def newest_verified(run_dir: Path) -> tuple[Path | None, list[str]]:
    """The newest checkpoint whose manifest holds true, None if there never was one; what was wrong with newer ones.

    Raises:
        CheckpointError: if storage or a newer format keeps it from being told, or if there are checkpoints and none is
            sound: to start over is for the user to say.
    """
    problems: list[str] = []
    for folder in newest_first(run_dir):
        problem = verify_manifest(folder / "state.pt", folder / MANIFEST)
        if problem is None:
            return folder, problems
        problems.append(f"{folder.name}: {problem}")
    if names := _names(run_dir):
        raise CheckpointError(f"{run_dir / 'checkpoints'}: nothing there can be gone on from "
                              f"({'; '.join(problems or sorted(names))}); put a checkpoint back from a copy, move that "
                              "folder away to train from the start, or choose another --name")
    return None, problems


def set_aside(run_dir: Path, newer_than: int) -> None:
    """Rename damaged checkpoints newer than a step so that nothing considers them again."""
    for folder in newest_first(run_dir):
        if int(folder.name[5:]) > newer_than:
            shutil.rmtree(folder.with_name(f"damaged-{folder.name}"), ignore_errors=True)
            folder.rename(folder.with_name(f"damaged-{folder.name}"))


def check_weights(run_dir: Path, step: int) -> None:
    """Refuse to call a training finished whose weights are not there.

    Args:
        step: at which training has ended.

    Raises:
        TrainingError: if weights/last.pt, or best.pt where one was saved, does not verify, or is an older one.
    """
    try:
        steps = steps_of_weights(run_dir) | {"last": step}
        for kind in {"last", "best"} & steps.keys():
            weights, manifest = (run_dir / "weights" / f"{kind}.{suffix}" for suffix in ("pt", "json"))
            problem = verify_manifest(weights, manifest)
            if problem is None and (shown := json.loads(manifest.read_bytes())["step"]) != steps[kind]:
                problem = f"it is of step {shown}, not of step {steps[kind]}"
            if problem:
                raise TrainingError(f"{weights}: {problem}; put it back from a copy, or remove it, and run the same "
                                    "command again")
    except (OSError, ValueError) as error:
        raise TrainingError(str(error)) from error


def slim_weights(run_dir: Path, parts: Collection[str]) -> None:
    """Leave weights/last.pt and best.pt only these parts of their states, now that nothing goes on from them.

    Each manifest comes first and knows both files, the `whole` one too: after a crash, either is what it says.

    Raises:
        OSError: if storage refuses; what is there is sound.
    """
    for path in filter(Path.exists, (run_dir / "weights" / f"{kind}.pt" for kind in ("last", "best"))):
        manifest, state = path.with_suffix(".json"), read_state(path)
        if state.keys() <= set(parts):
            continue
        told = json.loads(manifest.read_bytes())
        whole = told.get("whole", {name: told[name] for name in ("size", "sha256")})
        with replacing(path) as temporary:
            told |= {**write_state(temporary, {name: state[name] for name in parts}), "whole": whole}
            atomic_write(manifest, json.dumps(told, indent=1))
