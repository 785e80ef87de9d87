"""One state in one file, with a manifest to verify it by. Nothing is unpickled.

A state is a dict of tensors, dicts of tensors, and text. This module does not interpret it.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import zipfile
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, BinaryIO, cast

import torch

from ray_yolo.checkpoints.layout import manifest_of
from ray_yolo.core.errors import CheckpointError
from ray_yolo.core.files import HashingWriter
from ray_yolo.core.formatting import encodable
from ray_yolo.core.versioned import parse_versioned, with_checksum

_ENTRIES = {"format", "step", "recipe_digest", "size", "sha256", "weights"}  # Every manifest has these entries.
_WEIGHTS = re.compile(r"last|best|epoch[0-9]+")  # the stems of the files in `weights/`
_SHA256 = re.compile(r"[0-9a-f]{64}")
_ARCHIVE = b"PK\x03\x04"  # A zip archive begins so, as torch checks it.
_PICKLE = b"\x80"
_LEGACY = b"\x80\x02\x8a\nl\xfc\x9cF\xf9 j\xa8P\x19."  # torch's pickled magic number before 1.6
_HEAD = 1024  # bytes that identify other file types
_OTHER_KINDS = ((rb"<(!doctype|html|head|\?xml)", "a page of HTML or XML"), (rb"\xff\xd8\xff", "a JPEG picture"),
                (rb"\x89PNG", "a PNG picture"), (rb"RIFF....WEBP", "a WebP picture"), (rb"\x1f\x8b", "a gzip archive"),
                (rb"version https://git-lfs", "a pointer of Git LFS (run `git lfs pull`)"), (rb"%PDF", "a PDF file"))

CONVERT_HINT = ("convert it in the environment that made it: python -c \"import torch; "
                "torch.save(torch.load('best.pt', weights_only=False)['model'].float().state_dict(), 'weights.pt')\" "
                "and give weights.pt")


def write_state(path: Path, state: Mapping[str, Any]) -> dict[str, Any]:
    """Write a state durably without a copy in memory. Returns its size and SHA-256 for the manifest.

    Raises:
        OSError: if storage fails.
    """
    with path.open("wb") as file:
        hashed = HashingWriter(file, "sha256")
        try:
            torch.save(dict(state), cast(BinaryIO, hashed))
        except RuntimeError as error:  # torch ends its archive also after a failed write, and fails once more
            if isinstance(error.__context__, OSError):
                raise error.__context__ from None
            raise
        file.flush()
        os.fsync(file.fileno())
    return {"size": hashed.size, "sha256": hashed.hexdigest("sha256")}


def digest(state: Mapping[str, Any]) -> str:
    """SHA-256 over names, dtypes, shapes and bytes of a state's tensors, equal for equal trainings."""
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


def manifest_text(manifest: Mapping[str, Any]) -> str:
    """The text of a manifest's file, with a checksum."""
    return json.dumps(with_checksum(manifest), indent=1)


def parse_manifest(data: bytes) -> dict[str, Any]:
    """The content of a manifest. What it names is a file of `weights/` or a state: no path leads elsewhere.

    Raises:
        ValueError: if it is damaged.
    """
    manifest = parse_versioned(data)
    missing = _ENTRIES - manifest.keys()
    if missing:
        raise ValueError(f"it has no {', '.join(sorted(missing))}")
    whole = manifest.get("whole", manifest)
    is_right = {"step": _is_count(manifest["step"]), "weights": _are_weights(manifest["weights"]),
                "size": _is_count(manifest["size"]), "sha256": _is_sha256(manifest["sha256"]),
                "whole": isinstance(whole, dict) and _is_count(whole.get("size")) and _is_sha256(whole.get("sha256"))}
    wrong = [name for name, right in is_right.items() if not right]
    if wrong:
        raise ValueError(f"its {wrong[0]} has a value that no save writes")
    return manifest


def _is_count(value: object) -> bool:
    return type(value) is int and value >= 0  # True is no count


def _is_sha256(value: object) -> bool:
    return isinstance(value, str) and _SHA256.fullmatch(value) is not None


def _are_weights(value: object) -> bool:
    """Whether these are steps by the name of a file of `weights/`."""
    return isinstance(value, dict) and all(
        _WEIGHTS.fullmatch(name) and _is_count(step) for name, step in value.items())


def verify_manifest(state: Path, manifest: Path) -> str | None:
    """Why a state file does not match its manifest, or None if it does.

    Raises:
        CheckpointError: if storage fails.
    """
    try:
        expected = parse_manifest(manifest.read_bytes())
        with state.open("rb") as file:
            size, sha256 = os.fstat(file.fileno()).st_size, hashlib.file_digest(file, "sha256").hexdigest()
        return mismatch(expected, size, sha256)
    except (FileNotFoundError, NotADirectoryError) as error:
        return f"{Path(error.filename).name} is missing"
    except OSError as error:
        raise io_error(state, error) from error
    except (ValueError, KeyError, TypeError) as error:
        return f"{manifest.name} is damaged ({error})"


def mismatch(manifest: Mapping[str, Any], size: int, sha256: str) -> str | None:
    """Why a state file of this size and digest does not match a manifest, or None if it does."""
    if (size, sha256) in [(file["size"], file["sha256"]) for file in (manifest, manifest.get("whole", manifest))]:
        return None
    if size != manifest["size"]:
        return f"{size} bytes instead of {manifest['size']}"
    return "its SHA-256 does not match"


def read_state(path: Path) -> dict[str, Any]:
    """The contents of a checkpoint of ours, verified if it has a manifest.

    Raises:
        CheckpointError: if it is missing, damaged, or needs unpickling.
    """
    check_file(path)
    state = load_plain(path)
    if not isinstance(state, dict):
        raise CheckpointError(f"{path}: holds a {type(state).__name__}, not tensors by name")
    return state


def check_file(path: Path) -> None:
    """Refuse a weights file that is missing, does not match its manifest, or may inflate when read."""
    if not os.path.isfile(path):
        raise CheckpointError(f"{path}: no such weights file; give a .pt file of a run or of plain tensors")
    manifest = manifest_of(path)
    problem = verify_manifest(path, manifest) if manifest.is_file() else None
    if problem:
        raise CheckpointError(f"{path}: {problem} (see {manifest.name}); use an older checkpoint of the run")
    kind = kind_of_file(path)
    if kind:
        raise CheckpointError(f"{path}: {kind}")
    if _inflates(path):
        raise CheckpointError(f"{path}: its contents are compressed, which torch never does, and may inflate beyond "
                              "the memory; save it again with torch.save")


def kind_of_file(path: Path) -> str:
    """Why a file is not a weights file, and what to do; '' if it may be one."""
    head = _head(path).lstrip()
    kind = next((kind for pattern, kind in _OTHER_KINDS if re.match(pattern, head, re.IGNORECASE)), "")
    return kind and f"is {kind}, no weights file; download it again from its release page"


def load_plain(path: Path, *, mapped: bool = False) -> Any:
    """Read a file of `torch.save`, checked before, with torch's weights-only reader.

    Args:
        mapped: read the bytes of a tensor only when they are used, if possible.

    Raises:
        CheckpointError: if it is damaged, or needs unpickling.
    """
    is_utf_8 = encodable(str(path)) == str(path)  # torch maps no file with another name
    try:
        return torch.load(path, map_location="cpu", weights_only=True, mmap=mapped and is_utf_8)
    except Exception as error:
        head = _head(path)
        if not head.startswith((_ARCHIVE, _PICKLE)):
            raise CheckpointError(f"{path}: was not written by torch.save; download it again") from None
        if isinstance(error, (RuntimeError, ValueError, EOFError, OSError, KeyError)):
            reason = (str(error) or "it ends early").splitlines()[0].partition("  (")[0]
            raise CheckpointError(f"{path}: not a readable weights file ({reason}); download it again") from None
        # pickle.UnpicklingError: weights_only refused an object
        why = "torch's format before 1.6, of which only plain tensors are read" if head.startswith(_LEGACY) else (
            type(error).__name__)
        raise CheckpointError(f"{path}: holds pickled objects, which are never loaded ({why}); {CONVERT_HINT}"
                              ) from None


def _head(path: Path) -> bytes:
    """The first bytes of a file. Raises CheckpointError if it cannot be read."""
    try:
        with path.open("rb") as file:
            return file.read(_HEAD)
    except OSError as error:
        raise io_error(path, error) from error


def _inflates(path: Path) -> bool:
    """Whether reading a file would take more memory than its size: torch stores tensors uncompressed, once.

    Raises:
        CheckpointError: for an archive that zipfile cannot read, though torch might.
    """
    try:
        if not _head(path).startswith(_ARCHIVE):
            return False
        with zipfile.ZipFile(path) as archive:
            entries = archive.infolist()
    except OSError:  # the reader reports it
        return False
    except (zipfile.BadZipFile, ValueError, RuntimeError) as error:  # RuntimeError: entries of newer formats
        raise CheckpointError(f"{path}: not a readable weights file ({error}); download it again, or save it again "
                              "with torch.save") from None
    return (any(entry.compress_type != zipfile.ZIP_STORED for entry in entries)
            or sum(entry.file_size for entry in entries) > path.stat().st_size)


def io_error(path: Path, error: OSError) -> CheckpointError:
    """A storage error, which says nothing about the state of a checkpoint."""
    return CheckpointError(f"{error.filename or path}: {error.strerror or error}; repair the storage or its "
                           "permissions and run the same command again (nothing was discarded)")
