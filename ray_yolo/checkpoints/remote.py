"""A run's checkpoints in a store, where workers have no folder in common.

    states/SHA256.pt                  a state by its digest, so that an upload replaces nothing
    checkpoints/000002-step-123.json  manifest of the one that attempt 2 has saved at step 123; written last
    weights/best.json                 a pointer: the manifest of the checkpoint that it is; when training has ended
                                      weights/best.pt is an object of its own

They are written to and read from a folder of the worker's machine, which `engine.checkpoint` knows; the store decides.
The newest one is that of the last attempt: what one that was taken over still writes counts no more.
"""

from __future__ import annotations

import hashlib
import json
import re
import shutil
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple

from ray_yolo.checkpoints import local as checkpoint
from ray_yolo.checkpoints.state_file import MANIFEST, io_error, mismatch, verify_manifest
from ray_yolo.core.errors import CheckpointError, TrainingError
from ray_yolo.core.files import atomic_write, replacing
from ray_yolo.core.redact import redact
from ray_yolo.data.index_cache import cache_folder
from ray_yolo.storage.lease import read_terms
from ray_yolo.storage.store import Store, is_address, open_store

LEASE = "lease.json"


class _Name(NamedTuple):
    """Of a manifest; the greatest is the newest."""

    attempt: int
    step: int

    @property
    def key(self) -> str:
        return f"checkpoints/{self.attempt:06d}-step-{self.step}.json"


class RemoteCheckpoints:
    """Those of one run, for one attempt at it.

    Args:
        store: of the run.
    """

    def __init__(self, store: Store, attempt: int) -> None:
        self._store, self._attempt = store, attempt

    def put(self, folder: Path, keep: int) -> None:
        """Bring a saved checkpoint there; of older ones the newest stay, and those that `weights/` is to show.

        Raises:
            OSError: if storage refuses; every checkpoint that was there still is.
            TrainingError: if another attempt has begun.
        """
        told = json.loads((folder / MANIFEST).read_bytes())
        newest = next(iter(self._names()), None)
        known = self._read(newest)["weights"] if newest else {}
        weights: dict[str, int] = {}
        for kind, step in (*known.items(), *told["weights"].items()):  # who saves may know of no earlier ones
            if step <= told["step"]:
                weights[kind] = max(step, weights.get(kind, step))
        data = json.dumps(told | {"weights": weights}, indent=1).encode()
        self._store.put(state_key(told), folder / "state.pt")
        self._check_attempt()
        self._store.put(_Name(self._attempt, told["step"]).key, data)
        with suppress(OSError):  # the next one does the rest
            self._point({kind: data for kind, step in weights.items() if step == told["step"]})
            self._prune(keep, weights)

    def put_file(self, path: Path) -> None:
        """Bring a file of the run's folder there."""
        self._store.put(path.name, path)

    def download(self, run_dir: Path, step: int | None = None) -> list[str]:
        """Make the newest sound checkpoint the only one of a folder. Returns what was wrong with newer ones.

        Args:
            step: it is to be the one of this step, which was chosen before.

        Raises:
            CheckpointError: if there are checkpoints and none is sound, or storage keeps that from being told.
        """
        problems: list[str] = []
        try:
            names = [name for name in self._names() if step in (None, name.step)]
            for name in names:
                folder, data = run_dir / "checkpoints" / f"step-{name.step}", self._store.get(name.key).data
                problem = self._fetch(data, folder / "state.pt", folder / MANIFEST)
                if problem is None:
                    self._forget(run_dir, but=folder)
                    return problems
                problems.append(f"{name.key}: {problem}")
                if step is None:
                    self._store.put(f"checkpoints/damaged-{name.attempt:06d}-step-{name.step}.json", data)
                    self._store.delete(name.key)
        except OSError as error:
            raise io_error(run_dir, error) from error
        if names or step is not None:
            raise CheckpointError(f"nothing in checkpoints/ of the store can be gone on from ({'; '.join(problems)}); "
                                  "put a checkpoint back from a copy, or choose another --name")
        self._forget(run_dir)
        return problems

    def withdraw(self, newer_than: int) -> None:
        """Remove this attempt's checkpoints newer than a step; see `checkpoint.withdraw`.

        Raises:
            OSError: if storage refuses.
        """
        self._keep([name for name in self._names() if name.attempt != self._attempt or name.step <= newer_than])

    def download_weights(self, run_dir: Path) -> None:
        """The newest checkpoint, and weights/last.pt and best.pt as they are now, for a folder without them."""
        self.download(run_dir)
        for kind, step in checkpoint.steps_of_weights(run_dir).items():
            name = next((name for name in self._names() if name.step == step), None)
            if kind in ("last", "best") and name:
                weights = run_dir / "weights" / f"{kind}.pt"
                self._fetch(self._store.get(name.key).data, weights, weights.with_suffix(".json"))

    def download_all(self, run_dir: Path) -> None:
        """Every checkpoint as it is, sound or not."""
        for name in reversed(self._names()):
            folder = run_dir / "checkpoints" / f"step-{name.step}"
            self._fetch(self._store.get(name.key).data, folder / "state.pt", folder / MANIFEST)

    def download_pending(self, run_dir: Path) -> None:
        """Store the newest checkpoint of a folder that an attempt was kept from storing."""
        local, _ = checkpoint.newest_verified(run_dir)
        stored = max((name.step for name in self._names()), default=-1)
        if local and int(local.name[5:]) > stored:
            self.put(local, keep=len(self._names()) + 1)

    def drop(self) -> None:
        """Remove all of them."""
        for folder in ("checkpoints", "weights", "states"):  # what names a state before it
            for entry in self._store.list(f"{folder}/"):
                self._store.delete(f"{folder}/{entry.name}")

    def _names(self) -> list[_Name]:
        """Of all manifests, newest first."""
        found = (re.fullmatch(r"([0-9]{6})-step-([0-9]+)\.json", entry.name)
                 for entry in self._store.list("checkpoints/"))
        return sorted((_Name(int(match[1]), int(match[2])) for match in found if match), reverse=True)

    def _read(self, name: _Name) -> dict[str, Any]:
        found: dict[str, Any] = json.loads(self._store.get(name.key).data)
        return found

    def _check_attempt(self) -> None:
        told = read_terms(self._store, LEASE)
        if told and told[0].attempt != self._attempt:
            raise TrainingError(f"attempt {told[0].attempt} at this run has begun ({told[0].owner}): this one, "
                                f"{self._attempt}, was taken for dead and stores nothing any more")

    def _point(self, kinds: dict[str, bytes]) -> None:
        for kind, data in kinds.items():
            self._store.put(f"weights/{kind}.json", data)

    def _prune(self, keep: int, weights: dict[str, int]) -> None:
        names = self._names()
        shown = {next((name for name in names if name.step == step), None) for step in weights.values()}
        self._keep([name for name in names if name in names[:keep] or name in shown])

    def _keep(self, kept: list[_Name]) -> None:
        """Remove all checkpoints but these."""
        states = {state_key(self._read(name)) for name in kept}
        for name in self._names():
            if name not in kept:
                state = state_key(self._read(name))
                self._store.delete(name.key)
                if state not in states:
                    self._store.delete(state)

    def _fetch(self, data: bytes, state: Path, manifest: Path) -> str | None:
        """Put a stored state and its manifest into files, unless they are there. Returns what is wrong with them."""
        state.parent.mkdir(parents=True, exist_ok=True)
        try:
            told = json.loads(data)
            if _holds(state, manifest, key := state_key(told)):
                return None
            with replacing(state, durable=False) as temporary:
                fetched = self._store.fetch(key, temporary)
                manifest.unlink(missing_ok=True)
            atomic_write(manifest, data)
            return mismatch(told, fetched.size, fetched.sha256)
        except FileNotFoundError:
            return "its state is missing"
        except (ValueError, KeyError, TypeError) as error:
            return f"its manifest is unreadable ({error})"

    def _forget(self, run_dir: Path, but: Path | None = None) -> None:
        for folder in checkpoint.newest_first(run_dir):
            if folder != but:
                shutil.rmtree(folder, ignore_errors=True)


def state_key(manifest: dict[str, Any]) -> str:
    """Where the state of a manifest lies, below the run."""
    return f"states/{manifest['sha256']}.pt"


def _holds(state: Path, manifest: Path, key: str) -> bool:
    """Whether a file is that state already."""
    with suppress(OSError, ValueError, KeyError):
        return state_key(json.loads(manifest.read_bytes())) == key and verify_manifest(state, manifest) is None
    return False


def anywhere(weights: str) -> str:
    """The same file by a name that holds in every working folder."""
    return weights if is_address(weights) else str(Path(weights).absolute())


def local_file(weights: str) -> Path:
    """The file; of an object the copy on this machine.

    Raises:
        CheckpointError: if there is no such object, it is not what its manifest says, or storage refuses.
    """
    if not is_address(weights):
        return Path(weights).absolute()
    folder, _, name = weights.rpartition("/")
    run, _, last = folder.rpartition("/")  # the pointers of a run that is trained are beside its states
    address, prefix = (run, f"{last}/") if last == "weights" else (folder, "")
    store = open_store(address, "weights")
    path = cache_folder() / "weights" / hashlib.sha256(weights.encode()).hexdigest()[:16] / name
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        return _fetched(store, f"{prefix}{name}", path)
    except FileNotFoundError:
        raise CheckpointError(f"{redact(weights)}: there is no such object") from None
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise CheckpointError(f"{redact(weights)}: {error}") from error


def _fetched(store: Store, key: str, path: Path) -> Path:
    """The copy, fetched unless it is there; without a manifest each time."""
    manifest = path.with_suffix(".json")
    told = b""
    with suppress(FileNotFoundError):
        told = store.get(f"{key.removesuffix(path.suffix)}.json").data
    if told and manifest.exists() and manifest.read_bytes() == told and verify_manifest(path, manifest) is None:
        return path
    with replacing(path, durable=False) as temporary:
        try:
            fetched = store.fetch(key, temporary)
        except FileNotFoundError:
            if not told:
                raise
            fetched = store.fetch(state_key(json.loads(told)), temporary)
        manifest.unlink(missing_ok=True)
    if told:
        atomic_write(manifest, told)
        if problem := mismatch(json.loads(told), fetched.size, fetched.sha256):
            raise CheckpointError(f"{problem} (see the .json beside it)")
    return path
