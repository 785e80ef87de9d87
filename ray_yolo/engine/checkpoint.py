"""Checkpoints on disk: written so that a crash at any moment leaves the previous one, verified before use.

    checkpoints/step-N/state.pt        everything, as plain tensors and JSON (loads with weights_only=True)
    checkpoints/step-N/MANIFEST.json   size and SHA-256 of state.pt, step, recipe digest, format; written last
    weights/last.pt, best.pt, epochK.pt   hard links to state.pt, each with its manifest beside it (last.json, ...)

Nothing here knows what a state means, and nothing is ever unpickled.
"""

from __future__ import annotations

import hashlib
import io
import json
import os
import shutil
import zipfile
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from ray_yolo.errors import CheckpointError

FORMAT = 1

CONVERT_HINT = (
    "it holds pickled objects, which are never loaded; in the environment that made it run: python -c \"import torch; "
    "torch.save(torch.load('best.pt', weights_only=False)['model'].float().state_dict(), 'weights.pt')\" "
    "and give weights.pt"
)


def save_checkpoint(run_dir: Path, state: Mapping[str, Any], step: int, digest: str, kinds: Sequence[str]) -> Path:
    """Write a state durably and link it under `weights/` as each of `kinds`. Returns the checkpoint's folder.

    Raises:
        OSError: if storage refuses; what was there before is untouched.
    """
    buffer = io.BytesIO()
    torch.save(dict(state), buffer)
    data = buffer.getvalue()
    manifest = {"format": FORMAT, "step": step, "recipe_digest": digest, "size": len(data),
                "sha256": hashlib.sha256(data).hexdigest()}
    root = run_dir / "checkpoints"
    folder, temporary = root / f"step-{step}", root / f".writing-step-{step}"
    shutil.rmtree(temporary, ignore_errors=True)
    try:
        temporary.mkdir(parents=True)
        write_durably(temporary / "state.pt", data)
        write_durably(temporary / "MANIFEST.json", json.dumps(manifest, indent=1).encode())
        _sync_folder(temporary)
        if folder.exists():  # the same step again after a restart from an older one
            shutil.rmtree(folder)
        temporary.rename(folder)
    finally:
        shutil.rmtree(temporary, ignore_errors=True)
    _sync_folder(root)
    for kind in kinds:
        link_weights(run_dir, folder, kind)
    return folder


def link_weights(run_dir: Path, folder: Path, kind: str) -> None:
    """Make weights/<kind>.pt and its manifest name a checkpoint; each name always shows an old or a new file."""
    weights = run_dir / "weights"
    weights.mkdir(parents=True, exist_ok=True)
    for source, target in (("state.pt", f"{kind}.pt"), ("MANIFEST.json", f"{kind}.json")):
        temporary = weights / f".{target}"
        temporary.unlink(missing_ok=True)
        try:
            os.link(folder / source, temporary)
        except OSError:  # file systems without hard links
            shutil.copyfile(folder / source, temporary)
        temporary.replace(weights / target)
    _sync_folder(weights)


def prune(run_dir: Path, keep: int) -> None:
    """Remove all but the newest `keep` checkpoints; linked weights stay."""
    for folder in list(newest_first(run_dir))[keep:]:
        shutil.rmtree(folder, ignore_errors=True)


def newest_first(run_dir: Path) -> Iterator[Path]:
    """Checkpoint folders by falling step number; never by modification time, which clocks and copies change."""
    folders = [p for p in (run_dir / "checkpoints").glob("step-*") if p.name[5:].isdigit()]
    return iter(sorted(folders, key=lambda p: int(p.name[5:]), reverse=True))


def newest_verified(run_dir: Path) -> tuple[Path | None, list[str]]:
    """The newest checkpoint whose manifest holds true, and what was wrong with newer ones."""
    problems: list[str] = []
    for folder in newest_first(run_dir):
        problem = damage(folder / "state.pt", folder / "MANIFEST.json")
        if problem is None:
            return folder, problems
        problems.append(f"{folder.name}: {problem}")
    return None, problems


def set_aside(run_dir: Path, newer_than: int) -> None:
    """Rename damaged checkpoints newer than a step so that nothing considers them again."""
    for folder in newest_first(run_dir):
        if int(folder.name[5:]) > newer_than:
            shutil.rmtree(folder.with_name(f"damaged-{folder.name}"), ignore_errors=True)
            folder.rename(folder.with_name(f"damaged-{folder.name}"))


def damage(state: Path, manifest: Path) -> str | None:
    """Why a state file does not match its manifest, or None if it does."""
    try:
        expected = json.loads(manifest.read_text())
        data = state.read_bytes()
        if expected["format"] > FORMAT:
            return f"format {expected['format']} is newer than this ray_yolo reads ({FORMAT})"
        if len(data) != expected["size"]:
            return f"{len(data)} bytes instead of {expected['size']}"
        return None if hashlib.sha256(data).hexdigest() == expected["sha256"] else "its SHA-256 does not match"
    except (OSError, ValueError, KeyError, TypeError) as error:
        return f"unreadable ({error})"


def read_state(path: Path) -> dict[str, Any]:
    """What a weights file holds: a state of ours, or a plain dict of tensors; verified if a manifest lies beside it.

    Raises:
        CheckpointError: if it is missing, damaged, or would have to be unpickled.
    """
    if not os.path.isfile(path):
        raise CheckpointError(f"{path}: no such weights file; give a .pt file of a run or of plain tensors")
    manifest = path.with_name("MANIFEST.json") if path.name == "state.pt" else path.with_suffix(".json")
    if manifest.is_file() and (problem := damage(path, manifest)):
        raise CheckpointError(f"{path}: {problem} (see {manifest.name}); use an older checkpoint of the run")
    if _is_compressed(path):
        raise CheckpointError(f"{path}: its contents are compressed, which torch never does, and may inflate beyond "
                              "all memory; save it again with torch.save")
    try:
        state = torch.load(path, map_location="cpu", weights_only=True)
    except (RuntimeError, ValueError, EOFError, OSError, KeyError) as error:
        reason = (str(error) or "it ends early").splitlines()[0]
        raise CheckpointError(f"{path}: not a readable weights file ({reason})") from None
    except Exception as error:  # pickle.UnpicklingError: weights_only refused an object
        raise CheckpointError(f"{path}: {CONVERT_HINT} ({type(error).__name__})") from None
    if not isinstance(state, dict):
        raise CheckpointError(f"{path}: holds a {type(state).__name__}, not tensors by name")
    return state


def _is_compressed(path: Path) -> bool:
    """Whether reading a file would take more memory than its size tells: torch stores tensors as they are."""
    try:
        with zipfile.ZipFile(path) as archive:
            return any(entry.compress_type != zipfile.ZIP_STORED for entry in archive.infolist())
    except (zipfile.BadZipFile, OSError, ValueError, NotImplementedError):  # no zip, or none that torch reads either
        return False


def write_durably(path: Path, data: bytes) -> None:
    """Write a file and wait until the device has it."""
    with path.open("wb") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())


def _sync_folder(folder: Path) -> None:
    """Make renames and new names in a folder durable."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
