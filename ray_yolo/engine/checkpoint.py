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

import hashlib
import io
import json
import os
import re
import shutil
import uuid
import zipfile
from collections.abc import Collection, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, BinaryIO, cast

import torch

from ray_yolo.errors import CheckpointError, TrainingError

FORMAT = 1
MANIFEST = "MANIFEST.json"
WRITING, REPLACED, PRUNED = ".writing-", ".replaced-", ".pruned-"  # before the name of a checkpoint's folder
_OWN = f"{WRITING}{uuid.uuid4().hex[:8]}-"

CONVERT_HINT = (
    "convert it in the environment that made it: python -c \"import torch; "
    "torch.save(torch.load('best.pt', weights_only=False)['model'].float().state_dict(), 'weights.pt')\" "
    "and give weights.pt"
)


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
                    **_write_state(temporary / "state.pt", state),
                    "weights": steps_of_weights(run_dir) | dict.fromkeys(kinds, step)}
        write_durably(temporary / MANIFEST, json.dumps(manifest, indent=1).encode())
        _sync(temporary)
        if folder.exists():  # the same step again: training was stopped after an epoch's last step, before its end
            folder.rename(root / f"{REPLACED}step-{step}")
        temporary.rename(folder)
        _sync(root)
    finally:
        _sweep(root, others=False)
    _link_weights(run_dir)
    return folder


class _Hashed(io.RawIOBase):
    """A file that knows the SHA-256 of what is written to it, from its beginning to its end."""

    def __init__(self, file: BinaryIO) -> None:
        self._file, self.size, self.sha256 = file, 0, hashlib.sha256()

    def writable(self) -> bool:
        return True

    def write(self, data: Any) -> int:
        self._file.write(data)
        self.sha256.update(data)
        self.size += memoryview(data).nbytes
        return memoryview(data).nbytes


def _write_state(path: Path, state: Mapping[str, Any]) -> dict[str, Any]:
    """Write a state durably, without a copy of it in memory. Returns what its manifest knows it by."""
    with path.open("wb") as file:
        hashed = _Hashed(file)
        torch.save(dict(state), cast(BinaryIO, hashed))
        file.flush()
        os.fsync(file.fileno())
    return {"size": hashed.size, "sha256": hashed.sha256.hexdigest()}


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
        manifest = json.loads((folder / MANIFEST).read_bytes())
        return dict(manifest.get("weights", {"last": manifest["step"]}))  # 0.1.0 wrote none
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
            _sync(weights)


def _link(source: Path, target: Path) -> None:
    """Make a file another file's second name, in one moment."""
    temporary = target.with_name(f".{target.name}")
    temporary.unlink(missing_ok=True)
    try:
        try:
            os.link(source, temporary)
        except OSError:  # file systems without hard links
            shutil.copyfile(source, temporary)
            _sync(temporary)
        temporary.replace(target)
    finally:
        temporary.unlink(missing_ok=True)  # a replacement of a file by another name of itself leaves it, too


def digest(state: Mapping[str, Any]) -> str:
    """SHA-256 over names, kinds and bytes of a state's tensors: what an equal training has equal."""
    whole = hashlib.sha256()
    for name, tensor in tensors(state):
        whole.update(f"{name} {tensor.dtype} {tuple(tensor.shape)} ".encode())
        whole.update(tensor.detach().cpu().contiguous().flatten().view(torch.uint8).numpy().data)
    return whole.hexdigest()


def tensors(tree: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, torch.Tensor]]:
    """The tensors of a state by dotted name, sorted."""
    for name, value in sorted(tree.items()):
        if isinstance(value, torch.Tensor):
            yield prefix + name, value
        elif isinstance(value, Mapping):
            yield from tensors(value, f"{prefix}{name}.")


def prune(run_dir: Path, keep: int) -> None:
    """Remove all but the newest `keep` checkpoints; linked weights stay."""
    for folder in list(newest_first(run_dir))[keep:]:
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
        raise _unreadable(root, error) from error


def newest_verified(run_dir: Path) -> tuple[Path | None, list[str]]:
    """The newest checkpoint whose manifest holds true, None if there never was one; what was wrong with newer ones.

    Raises:
        CheckpointError: if storage or a newer format keeps it from being told, or if there are checkpoints and none is
            sound: to start over is for the user to say.
    """
    problems: list[str] = []
    for folder in newest_first(run_dir):
        problem = damage(folder / "state.pt", folder / MANIFEST)
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


def damage(state: Path, manifest: Path) -> str | None:
    """Why a state file does not match its manifest, or None if it does.

    Raises:
        CheckpointError: if that cannot be told: storage does not let them be read, or their format is a newer one.
    """
    try:
        expected = json.loads(manifest.read_bytes())
        if expected["format"] > FORMAT:
            raise CheckpointError(f"{state}: format {expected['format']} is newer than this ray_yolo reads ({FORMAT}); "
                                  "use the version that wrote it")
        with state.open("rb") as file:
            size, sha256 = os.fstat(file.fileno()).st_size, hashlib.file_digest(file, "sha256").hexdigest()
        both = (expected, expected.get("whole", expected))
        if (size, sha256) in [(known["size"], known["sha256"]) for known in both]:
            return None
        wrong = f"{size} bytes instead of {expected['size']}"
        return "its SHA-256 does not match" if size == expected["size"] else wrong
    except CheckpointError:
        raise
    except (FileNotFoundError, NotADirectoryError) as error:
        return f"{Path(error.filename).name} is missing"
    except OSError as error:
        raise _unreadable(state, error) from error
    except (ValueError, KeyError, TypeError) as error:
        return f"{manifest.name} is unreadable ({error})"


def check_weights(run_dir: Path) -> None:
    """Refuse to call a training finished whose weights are not there.

    Raises:
        TrainingError: if weights/last.pt, or best.pt where one was saved, does not verify, or is an older one.
    """
    try:
        steps = {"last": 0} | steps_of_weights(run_dir)
        for kind in {"last", "best"} & steps.keys():
            weights, manifest = (run_dir / "weights" / f"{kind}.{suffix}" for suffix in ("pt", "json"))
            problem = damage(weights, manifest)
            if problem is None and (step := json.loads(manifest.read_bytes())["step"]) < steps[kind]:
                problem = f"it is of step {step}, not of step {steps[kind]}"
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
        hidden, hidden_manifest = (target.with_name(f".{target.name}") for target in (path, manifest))
        try:
            told |= {**_write_state(hidden, {name: state[name] for name in parts}), "whole": whole}
            write_durably(hidden_manifest, json.dumps(told, indent=1).encode())
            hidden_manifest.replace(manifest)
            hidden.replace(path)
        finally:
            hidden.unlink(missing_ok=True)
            hidden_manifest.unlink(missing_ok=True)
        _sync(path.parent)


def read_state(path: Path) -> dict[str, Any]:
    """What a checkpoint of ours holds; verified if a manifest lies beside it.

    Raises:
        CheckpointError: if it is missing, damaged, or would have to be unpickled.
    """
    check_file(path)
    state = load_plain(path)
    if not isinstance(state, dict):
        raise CheckpointError(f"{path}: holds a {type(state).__name__}, not tensors by name")
    return state


def check_file(path: Path) -> None:
    """Refuse a weights file that is missing, does not match its manifest, or would not fit into memory when read."""
    if not os.path.isfile(path):
        raise CheckpointError(f"{path}: no such weights file; give a .pt file of a run or of plain tensors")
    manifest = path.with_name(MANIFEST) if path.name == "state.pt" else path.with_suffix(".json")
    if manifest.is_file() and (problem := damage(path, manifest)):
        raise CheckpointError(f"{path}: {problem} (see {manifest.name}); use an older checkpoint of the run")
    if _inflates(path):
        raise CheckpointError(f"{path}: its contents are compressed, which torch never does, and may inflate beyond "
                              "all memory; save it again with torch.save")


def load_plain(path: Path) -> object:
    """What `torch.save` has written to a file that was checked, by torch's reader of plain values.

    Raises:
        CheckpointError: if it is damaged, or would have to be unpickled.
    """
    try:
        return torch.load(path, map_location="cpu", weights_only=True)
    except (RuntimeError, ValueError, EOFError, OSError, KeyError) as error:
        reason = (str(error) or "it ends early").splitlines()[0]
        raise CheckpointError(f"{path}: not a readable weights file ({reason})") from None
    except Exception as error:  # pickle.UnpicklingError: weights_only refused an object
        raise CheckpointError(f"{path}: holds pickled objects, which are never loaded ({type(error).__name__}); "
                              f"{CONVERT_HINT}") from None


def _inflates(path: Path) -> bool:
    """Whether reading a file would take more memory than its size tells: torch stores tensors as they are, once."""
    try:
        with zipfile.ZipFile(path) as archive:
            entries = archive.infolist()
    except (zipfile.BadZipFile, OSError, ValueError, NotImplementedError):  # no zip, or none that torch reads either
        return False
    return (any(entry.compress_type != zipfile.ZIP_STORED for entry in entries)
            or sum(entry.file_size for entry in entries) > path.stat().st_size)


def _unreadable(path: Path, error: OSError) -> CheckpointError:
    """What says nothing about a checkpoint, good or bad."""
    return CheckpointError(f"{error.filename or path}: {error.strerror or error}; repair the storage or its "
                           "permissions and run the same command again (nothing was given up)")


def write_durably(path: Path, data: bytes) -> None:
    """Write a file and wait until the device has it."""
    with path.open("wb") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())


def _sync(path: Path) -> None:
    """Wait until the device has a file, or the names in a folder."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
