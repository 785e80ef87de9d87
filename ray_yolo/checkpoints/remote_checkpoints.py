"""A run's checkpoints in object storage, for workers without a common folder.

    states/SHA256.pt                  a state under its digest, so that an upload never replaces an object
    checkpoints/000002-step-123.json  manifest of the checkpoint that attempt 2 saved at step 123; written last
    weights/best.json                 a pointer: the manifest of the checkpoint to use; after training, weights/best.pt
                                      is an object of its own

Workers write to and read from a local folder (`checkpoints.local`); the store is authoritative. The newest checkpoint
is that of the last attempt. Anything that a superseded attempt (a zombie) still writes is ignored.
"""

from __future__ import annotations

import re
import shutil
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple

from ray_yolo.checkpoints import local as checkpoint
from ray_yolo.checkpoints.layout import MANIFEST, checkpoint_folder, step_of
from ray_yolo.checkpoints.state_file import (
    io_error,
    manifest_text,
    mismatch,
    parse_manifest,
    verify_manifest,
)
from ray_yolo.core.errors import CheckpointError, TrainingError
from ray_yolo.core.files import atomic_write, replacing
from ray_yolo.storage.lease import LEASE, read_terms
from ray_yolo.storage.store import Fetched, Store, in_parallel


class _Name(NamedTuple):
    """The name of a manifest; the greatest is the newest."""

    attempt: int
    step: int

    @property
    def key(self) -> str:
        return f"checkpoints/{self.attempt:06d}-step-{self.step}.json"


class RemoteCheckpoints:
    """The checkpoints of one run, from the view of one attempt."""

    def __init__(self, store: Store, attempt: int) -> None:
        self._store, self._attempt = store, attempt
        # By name and tag: a step may be saved twice.
        self._manifests: dict[tuple[_Name, str], dict[str, Any]] = {}

    def put(self, folder: Path, keep: int) -> None:
        """Upload a saved checkpoint. The `keep` newest remain, this one among them, and those that `weights/` shows.

        Raises:
            OSError: if storage fails, or the newest manifest there is damaged; existing checkpoints are unchanged.
            TrainingError: if another attempt has started.
        """
        manifest = parse_manifest((folder / MANIFEST).read_bytes())
        own = _Name(self._attempt, manifest["step"])
        listed = self._listed()  # the only names that this save removes: a later one may be of the next attempt
        weights = self._merged_weights(listed, manifest)
        data = manifest_text(manifest | {"weights": weights}).encode()

        self._store.put(state_key(manifest), folder / "state.pt")
        self._check_attempt()  # as late as possible: from the next line on, the checkpoint exists
        self._store.put(own.key, data)
        with suppress(OSError):  # the next upload repeats it
            for kind, step in weights.items():
                if step == own.step:
                    self._store.put(f"weights/{kind}.json", data)
            names = sorted({*listed, own}, reverse=True)
            shown = {_newest_of_step(names, step) for step in weights.values()}
            self._remove(listed, [name for name in names[keep:] if name not in shown])

    def _merged_weights(self, listed: Mapping[_Name, str], manifest: Mapping[str, Any]) -> dict[str, int]:
        """The step of each file of `weights/`: the later of what this save and the newest stored manifest name.

        The stored one counts too, because this worker may lack weights that another one has saved. Steps after this
        save do not count: they are trained again.
        """
        earlier: dict[str, int] = {}
        newest = next(iter(listed), None)
        if newest is not None:
            try:
                earlier = self._read(newest, listed[newest])["weights"]
            except ValueError as error:  # the storage fails until the next start, which sets this manifest aside
                raise OSError(f"{newest.key}: the manifest is damaged ({error})") from error
        weights: dict[str, int] = {}
        for steps in (earlier, manifest["weights"]):
            for kind, step in steps.items():
                is_later = kind not in weights or step > weights[kind]
                if is_later and step <= manifest["step"]:
                    weights[kind] = step
        return weights

    def put_file(self, path: Path) -> None:
        """Upload a file of the run's folder."""
        self._store.put(path.name, path)

    def download(self, run_dir: Path, step: int | None = None) -> list[str]:
        """Make the newest intact checkpoint the only one of a folder. Returns the problems of newer ones.

        Args:
            step: download the checkpoint of this step, chosen before.

        Raises:
            CheckpointError: if there are checkpoints and none is intact, or storage fails.
        """
        problems: list[str] = []
        try:
            names = [name for name in self._listed() if step in (None, name.step)]
            for name in names:
                folder = checkpoint_folder(run_dir, name.step)
                data = self._store.get(name.key).data
                problem = download_state(self._store, data, folder / "state.pt", folder / MANIFEST)
                if problem is None:
                    self._forget(run_dir, but=folder)
                    return problems
                problems.append(f"{name.key}: {problem}")
                if step is None:
                    self._store.put(f"checkpoints/damaged-{name.attempt:06d}-step-{name.step}.json", data)
                    self._store.delete(name.key)
            remains = []  # states of checkpoints that are gone
            if not names:
                remains = [*self._store.list("weights/"), *self._store.list("checkpoints/")]
        except OSError as error:
            raise io_error(run_dir, error) from error
        if remains and step is None:
            problems = [f"there is none, although this run has saved {remains[0].name}"]
        if problems or step is not None:
            raise CheckpointError(f"checkpoints/ of the store: no usable checkpoint ({'; '.join(problems)}); restore a "
                                  "checkpoint from a copy, or choose another --name")
        self._forget(run_dir)
        shutil.rmtree(run_dir / "weights", ignore_errors=True)  # weights of saves that the store does not have
        return problems

    def remove_newer(self, newer_than: int) -> None:
        """Remove this attempt's checkpoints newer than a step; see `local.remove_newer`.

        Raises:
            OSError: if storage fails.
        """
        listed = self._listed()
        newer = [name for name in listed if name.attempt == self._attempt and name.step > newer_than]
        if not newer:
            return
        self._remove(listed, newer)
        self._show_weights([name for name in listed if name not in newer], newer_than)

    def _show_weights(self, names: Sequence[_Name], newer_than: int) -> None:
        """Let `weights/` show what the newest of these checkpoints says, where it shows a step newer than this one.

        Without any checkpoint, what it shows is removed: the run has saved none.
        """
        shown: dict[str, int] = {}
        if names:
            shown = parse_manifest(self._store.get(names[0].key).data)["weights"]
        for entry in self._store.list("weights/"):
            key, kind = f"weights/{entry.name}", entry.name.removesuffix(".json")
            if checkpoint.step_shown(self._store.get(key).data) <= newer_than:
                continue
            earlier = _newest_of_step(names, shown[kind]) if kind in shown else None
            if earlier:
                self._store.put(key, self._store.get(earlier.key).data)
            else:
                self._store.delete(key)

    def download_weights(self, run_dir: Path) -> None:
        """Download the newest checkpoint and the current weights/last.pt and best.pt into a folder without them."""
        self.download(run_dir)
        names = list(self._listed())
        for kind, step in checkpoint.steps_of_weights(run_dir).items():
            name = _newest_of_step(names, step)
            if kind in ("last", "best") and name:
                weights = run_dir / "weights" / f"{kind}.pt"
                data = self._store.get(name.key).data
                download_state(self._store, data, weights, weights.with_suffix(".json"))

    def download_all(self, run_dir: Path) -> None:
        """Download every checkpoint, intact or not."""
        for name in reversed(self._listed()):
            folder = checkpoint_folder(run_dir, name.step)
            download_state(self._store, self._store.get(name.key).data, folder / "state.pt", folder / MANIFEST)

    def upload_pending(self, run_dir: Path) -> None:
        """Upload the newest checkpoint of a folder if an earlier attempt could not."""
        local, _ = checkpoint.newest_verified(run_dir)
        listed = self._listed()
        stored = max((name.step for name in listed), default=-1)
        if local and step_of(local) > stored:
            self.put(local, keep=len(listed) + 1)

    @property
    def is_empty(self) -> bool:
        """Whether there is no checkpoint.

        Raises:
            OSError: if storage fails.
        """
        return not self._listed()

    def drop(self) -> None:
        """Remove all of them."""
        for folder in ("weights", "checkpoints", "states"):  # references before what they name
            keys = [f"{folder}/{entry.name}" for entry in self._store.list(f"{folder}/")]
            in_parallel(self._store.delete, keys)

    def _listed(self) -> dict[_Name, str]:
        """The names of all manifests, newest first, each with the tag of its object."""
        tags = {}
        for entry in self._store.list("checkpoints/"):
            match = re.fullmatch(r"([0-9]{6})-step-([0-9]+)\.json", entry.name)
            if match:
                tags[_Name(int(match[1]), int(match[2]))] = entry.tag
        return {name: tags[name] for name in sorted(tags, reverse=True)}

    def _read(self, name: _Name, tag: str) -> dict[str, Any]:
        """A manifest. Each version of an object, by its tag, is read once.

        Raises:
            ValueError: if it is damaged.
        """
        version = name, tag
        if version not in self._manifests:
            self._manifests[version] = parse_manifest(self._store.get(name.key).data)
        return self._manifests[version]

    def _states(self, listed: Mapping[_Name, str], names: Iterable[_Name]) -> set[str]:
        """The keys of the states of some listed names. A damaged manifest has none, because no start can use it."""
        def state(name: _Name) -> str | None:
            with suppress(ValueError):
                return state_key(self._read(name, listed[name]))
            return None

        return {key for key in in_parallel(state, names) if key}

    def _check_attempt(self) -> None:
        lease = read_terms(self._store, LEASE)
        if lease and lease[0].attempt != self._attempt:
            raise TrainingError(f"attempt {lease[0].attempt} of this run has started ({lease[0].owner}): the lease of "
                                f"this one, {self._attempt}, expired, and it stores nothing more")

    def _remove(self, listed: Mapping[_Name, str], removed: Sequence[_Name]) -> None:
        """Remove some of the listed checkpoints.

        A superseded attempt may be here, long after its listing. It therefore removes no other names, and no state that
        a checkpoint of now names: equal trainings save equal states.
        """
        if not removed:
            return
        unused_states = self._states(listed, removed)
        now = self._listed()
        kept = [name for name in now if name not in removed]
        unused_states -= self._states(now, kept)
        self._check_attempt()  # It is checked again, because reading took time.
        # Manifests go before the states that they name, so that no manifest names a missing state.
        in_parallel(self._store.delete, [name.key for name in removed])
        in_parallel(self._store.delete, sorted(unused_states))
        self._manifests = {version: manifest for version, manifest in self._manifests.items() if version[0] in kept}

    def _forget(self, run_dir: Path, but: Path | None = None) -> None:
        for folder in checkpoint.newest_first(run_dir):
            if folder != but:
                shutil.rmtree(folder, ignore_errors=True)


def _newest_of_step(names: Iterable[_Name], step: int) -> _Name | None:
    """The first of the names, newest first, with a step: several attempts may have saved it. None without any."""
    for name in names:
        if name.step == step:
            return name
    return None


def state_key(manifest: dict[str, Any]) -> str:
    """The key of a manifest's state, below the run."""
    return f"states/{manifest['sha256']}.pt"


def download_state(store: Store, data: bytes, state: Path, manifest: Path, key: str = "") -> str | None:
    """Download the state that a stored manifest names, unless it is present. Returns why it is unusable.

    Args:
        data: the stored manifest. The local one, beside the state, gets the same contents.
        key: of an object that is preferred to the run's states if it exists.

    Raises:
        OSError: if storage or the local disk fails, or if the local folder is removed meanwhile.
    """
    try:
        expected = parse_manifest(data)
        of_states = state_key(expected)
        if _is_present(state, manifest, of_states):
            return None
        keys = [key, of_states] if key else [of_states]  # during training, `key` may be only a pointer
        state.parent.mkdir(parents=True, exist_ok=True)
        with replacing(state, durable=False) as temporary:
            fetched = _fetch_first(store, keys, temporary)
            manifest.unlink(missing_ok=True)  # that of the former state: a killed process must not leave it beside ours
        atomic_write(manifest, data)
        return mismatch(expected, fetched.size, fetched.sha256)
    except _MissingStateError:
        return "its state is missing"
    except ValueError as error:
        return f"its manifest is damaged ({error})"


def _is_present(state: Path, manifest: Path, key: str) -> bool:
    """Whether a local state is intact and that of a key."""
    with suppress(OSError, ValueError):  # no local manifest, or a damaged one
        is_of_same_state = state_key(parse_manifest(manifest.read_bytes())) == key
        return is_of_same_state and verify_manifest(state, manifest) is None
    return False


def _fetch_first(store: Store, keys: Sequence[str], path: Path) -> Fetched:
    """Download the first of the objects that exists."""
    for key in keys:
        try:
            return store.fetch(key, path)
        except FileNotFoundError:
            if not path.parent.is_dir():  # the local folder was removed; the object may exist
                raise
    raise _MissingStateError


class _MissingStateError(Exception):
    """None of the objects exists."""
