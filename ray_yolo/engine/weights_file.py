"""Weights by a path, or by the address of an object (s3://bucket/runs/train/exp/weights/best.pt): then each machine has
a copy of its own, which is verified by the manifest beside the object.
"""

from __future__ import annotations

import hashlib
import json
from contextlib import suppress
from pathlib import Path

from ray_yolo.core.files import atomic_write, replacing
from ray_yolo.data.index_cache import cache_folder
from ray_yolo.engine.state_files import damage, mismatch
from ray_yolo.engine.stored import state_key
from ray_yolo.errors import CheckpointError
from ray_yolo.redact import redact
from ray_yolo.storage.store import Store, is_address, open_store


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
    if told and manifest.exists() and manifest.read_bytes() == told and damage(path, manifest) is None:
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
