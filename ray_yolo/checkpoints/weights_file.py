"""Which file `--weights` means: a path, the folder of a run, or an address, and its copy on this machine."""

from __future__ import annotations

import hashlib
import os
from pathlib import Path

from ray_yolo.checkpoints.remote_checkpoints import download_state
from ray_yolo.core.cache_folder import cache_folder
from ray_yolo.core.errors import CheckpointError
from ray_yolo.core.files import replacing
from ray_yolo.core.redact import redact
from ray_yolo.storage.store import Store, is_address, open_store

WEIGHTS_SUFFIXES = (".pt", ".pth", ".safetensors", ".onnx", ".xml")


def is_weights(name: str) -> bool:
    """Whether a name means trained weights: a weights file, or the folder or address of a run."""
    is_model_file = name.endswith((".yaml", ".yml"))
    return name.endswith(WEIGHTS_SUFFIXES) or os.path.isdir(name) or (is_address(name) and not is_model_file)


def weights_file(weights: str) -> str:
    """The weights file of a path or an address: of a run's folder, its best weights, or its last ones without these.

    Raises:
        CheckpointError: for a folder without weights.
    """
    if is_address(weights):
        return weights if weights.endswith(WEIGHTS_SUFFIXES) else f"{weights.rstrip('/')}/weights/best.pt"
    if not os.path.isdir(weights):
        return weights
    for name in ("best.pt", "last.pt"):
        path = os.path.join(weights, "weights", name)
        if os.path.isfile(path):
            return path
    raise CheckpointError(f"{weights}: is a folder without weights/best.pt; give the folder of a run, or a .pt file")


def absolute_weights(weights: str) -> str:
    """The weights file of a path or an address (see `weights_file`), as an absolute path or an address."""
    file = weights_file(weights)
    return file if is_address(file) else str(Path(file).absolute())


def local_file(weights: str) -> Path:
    """The weights file of a path (see `weights_file`); of an address, its copy on this machine.

    Raises:
        CheckpointError: if there is no such object, it does not match its manifest, or storage fails.
    """
    weights = weights_file(weights)
    if not is_address(weights):
        return Path(weights).absolute()
    folder, _, name = weights.rpartition("/")
    run, _, last = folder.rpartition("/")
    if last == "weights":  # a run's folder: during training, it has pointers to the run's states
        store, key = open_store(run, "weights"), f"weights/{name}"
    else:
        store, key = open_store(folder, "weights"), name
    path = cache_folder() / "weights" / hashlib.sha256(weights.encode()).hexdigest()[:16] / name
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        return _cached(store, key, path)
    except FileNotFoundError:
        raise CheckpointError(f"{redact(weights)}: there is no such object") from None
    except (OSError, CheckpointError) as error:
        raise CheckpointError(f"{redact(weights)}: {error}") from error


def _cached(store: Store, key: str, path: Path) -> Path:
    """The copy of an object, downloaded if it is missing or outdated; without a manifest every time."""
    manifest = path.with_suffix(".json")
    try:
        data = store.get(f"{key.removesuffix(path.suffix)}.json").data
    except FileNotFoundError:
        with replacing(path, durable=False) as temporary:
            store.fetch(key, temporary)
            manifest.unlink(missing_ok=True)
        return path
    problem = download_state(store, data, path, manifest, key)
    if problem:
        raise CheckpointError(f"{problem} (see the .json beside it)")
    return path
