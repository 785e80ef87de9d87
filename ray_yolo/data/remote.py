"""Data sets in a store: what a description names, in a folder of this machine that everybody reads as any folder.

    <cache>/data/<address>/<version>/images/train/a.jpg   as it lies below the description
    <cache>/data/<address>/<version>/.manifest.json       size, tag, SHA-256 and time of each file; written last

A version is what the store lists (keys, sizes, tags), so that a training keeps the files that it began with while a
later start gets what has changed. Versions share equal files (hard links); those that no process uses any more go.

A file is fetched under another name, and renamed once it is what was listed: of that version and size and, where the
tag is an MD5, of those bytes. All are on the disk before the manifest is: later starts compare sizes and times alone,
and the SHA-256 where the time is another one. What is damaged is fetched again. A download that was killed has no
manifest: of its files those stay whose MD5 the store tells.
"""

from __future__ import annotations

import fcntl
import glob
import hashlib
import json
import logging
import os
import re
import shutil
import time
import uuid
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

from ray_yolo.core.errors import DatasetError, InputError
from ray_yolo.core.files import atomic_write
from ray_yolo.core.redact import redact
from ray_yolo.core.structures import AnnotationIndex, DatasetSnapshot
from ray_yolo.data import voc
from ray_yolo.data.images import SUFFIXES
from ray_yolo.data.index_cache import cache_folder
from ray_yolo.data.sources import suffix
from ray_yolo.data.yolo_txt import label_path
from ray_yolo.storage.lease import try_lock
from ray_yolo.storage.store import Store, open_store

MANIFEST, _LOCK, _IN_USE, _COMING = ".manifest.json", ".lock", ".in-use", ".coming"
WAIT_SECONDS = 3600.0  # for another process, or another node, to make a mirror
_REQUESTS, _PART = 32, 8192  # at once; that wait in memory
_KINDS = SUFFIXES | {".txt", ".xml", ".json"}
_log = logging.getLogger(__name__)
_used: dict[Path, int] = {}  # versions that this process keeps, with the locked file
_Wanted = Mapping[str, tuple[int, str]]  # key -> size, tag


class _File(NamedTuple):
    """What a manifest says of a file."""

    size: int
    tag: str
    sha256: str
    time: int  # of its last change, ns


def address_parts(address: str) -> tuple[str, str]:
    """The address of a description's folder, and the description's name in it: data.yaml for a folder's address."""
    folder, _, name = address.rstrip("/").rpartition("/")
    return (folder, name) if suffix(name) in (".yaml", ".yml") else (address.rstrip("/"), "data.yaml")


def snapshot(address: str, version: str = "", notify: Callable[[str], None] = _log.warning) -> DatasetSnapshot:
    """A data set's mirror on this machine, whole, and there until this process ends. One process makes it; others wait.

    Args:
        address: of a data-set YAML, or of a folder with a data.yaml.
        version: the one that is meant, of which the store is not asked where it is whole here; '': the present one.
        tell: takes what is fetched, if anything is.

    Raises:
        DatasetError: if there is no such object, storage refuses, or has another version by now.
    """
    if (shown := redact(address)) != address:
        raise DatasetError(f"data: {shown}: leave the secret out; credentials are those of the environment")
    folder, name = address_parts(address)
    top = cache_folder() / "data" / hashlib.sha256(folder.encode()).hexdigest()[:16]
    store = open_store(folder, "data")
    try:
        top.mkdir(parents=True, exist_ok=True)
        with _alone(top, address):
            shutil.rmtree(top / _COMING, ignore_errors=True)
            (top / _COMING).mkdir()
            wanted = {key: file[:2] for key, file in _recorded(top / version).items()} if version else {}
            wanted = wanted or _listed(store, name, top / _COMING)
            found = hashlib.sha256(json.dumps(sorted(wanted.items())).encode()).hexdigest()[:16]
            if version not in ("", found):
                raise DatasetError(f"data: {address} has changed since this command was started; start it again")
            _fill(store, top / found, wanted, lambda what: notify(f"{address}: {what}"))
            _use(top / found)
            _remove_unused(top)
    except FileNotFoundError as error:
        raise DatasetError(f"data: {address}: there is no such bucket or object ({error}); give the address of a "
                           "data-set YAML, or of a folder with a data.yaml") from None
    except InputError as error:  # of the description, which nobody knows by that name
        raise DatasetError(str(error).replace(str(top / _COMING), folder)) from None
    except OSError as error:
        advice = f"{top} can be written to" if error.errno else "the environment's credentials may list and read it"
        raise DatasetError(f"data: {address}: {error}; see that {advice}") from None
    return DatasetSnapshot(address, found, str(top / found))


def at_hand(index: AnnotationIndex) -> AnnotationIndex:
    """The same index with this machine's paths: of a data set in a store those of its mirror here.

    Raises:
        DatasetError: as `mirror` does.
    """
    if index.snapshot is None:
        return index
    address, version, there = index.snapshot
    here = cache_folder() / "data" / Path(there).parent.name / version
    if not _use(here):
        snapshot(address, version)
    return replace(index, paths=tuple(f"{here}{path.removeprefix(there)}" for path in index.paths),
                   snapshot=DatasetSnapshot(address, version, str(here)))


@contextmanager
def _alone(top: Path, address: str) -> Iterator[None]:
    """No other process works at the mirrors of this data set meanwhile."""
    with (top / _LOCK).open("a") as lock:
        began, told, limit = time.monotonic(), False, f"{WAIT_SECONDS / 60:.0f} min"
        while not try_lock(lock.fileno()):
            waited = time.monotonic() - began
            if waited > WAIT_SECONDS:
                raise DatasetError(f"data: {address}: another process of this machine has been fetching it for "
                                   f"{limit}; end it (`fuser {top / _LOCK}` names it)")
            if waited > 1 and not told:
                _log.warning("%s: another process fetches it to this machine; waiting for at most %s", address, limit)
                told = True
            time.sleep(0.1)
        yield


def _listed(store: Store, name: str, coming: Path) -> dict[str, tuple[int, str]]:
    """The description and all that belongs to what it names."""
    from ray_yolo.config.yaml import load_text_yaml  # as in dataset_yaml

    fetched = store.fetch(name, coming / name)
    found = {name: (fetched.size, fetched.tag)}
    root, prefixes = _prefixes(load_text_yaml(coming / name).data)
    for prefix in prefixes:
        found |= {entry.name: (entry.size, entry.tag) for entry in store.walk(prefix)
                  if suffix(entry.name) in _KINDS}
        if root not in prefixes and any(suffix(key) == ".json" for key in found):  # COCO's, with pictures elsewhere
            prefixes.append(root)
    return found


def _prefixes(content: Mapping[str, Any]) -> tuple[str, list[str]]:
    """The prefix of a description's `path`, and those of the images and labels that its splits name: of `path` itself
    for list files, patterns and COCO files, whose images may be anywhere below."""
    root, found = _prefix(str(content.get("path") or "")), set[str]()
    entries = (content.get(split) or [] for split in ("train", "val", "test"))
    for entry in (entry for each in entries for entry in (each if isinstance(each, list) else [each])):
        if not isinstance(entry, str) or glob.has_magic(entry) or suffix(entry) in (".txt", ".json"):
            found.add(root)
            continue
        for text in (entry, re.sub(r"^(\.\./)+", "", entry)):
            image = f"/{_prefix(root + text)}any.jpg"
            labels = os.path.dirname(label_path(image))
            found |= {_prefix(place) for place in (labels, *voc.folders(image, lambda _: True))}
    return root, [each for each in found if not any(each != other and each.startswith(other) for other in found)]


def _prefix(path: str) -> str:
    """Of what is below a path, which leads out of the description's folder as little as out of the root of a disk."""
    plain = os.path.normpath(f"/{path}").strip("/")
    return f"{plain}/" if plain else ""


def _fill(store: Store, folder: Path, wanted: _Wanted, notify: Callable[[str], None]) -> None:
    """Make a version whole."""
    files = _kept(folder, wanted)
    if missing := [key for key in wanted if key not in files]:
        notify(
            f"{len(missing)} files ({sum(wanted[key][0] for key in missing) / 1e6:.1f} MB) are fetched into {folder}"
        )
        fetch = _Fetch(store, folder)
        with ThreadPoolExecutor(_REQUESTS) as pool:
            for first in range(0, len(missing), _PART):
                part = missing[first:first + _PART]
                files.update(zip(part, pool.map(lambda key: fetch(key, *wanted[key]), part), strict=True))
        os.sync()  # once: to wait for each of a hundred thousand files would take longer than to fetch them
    if files != _recorded(folder):
        atomic_write(folder / MANIFEST, json.dumps(files))


def _kept(folder: Path, wanted: _Wanted) -> dict[str, _File]:
    """What a version has already, and what it can have of others."""
    kept: dict[str, _File] = {}
    for other in sorted(folder.parent.iterdir(), key=lambda other: other != folder):  # itself first
        for key, file in _recorded(other).items():
            if key not in kept and wanted.get(key) == file[:2] and (sound := _checked(f"{other}/{key}", file)):
                with suppress(OSError):  # a file system without hard links
                    if other != folder:
                        os.makedirs(os.path.dirname(f"{folder}/{key}"), exist_ok=True)
                        (folder / key).unlink(missing_ok=True)
                        os.link(f"{other}/{key}", f"{folder}/{key}")
                    kept[key] = sound
    for key, (size, tag) in wanted.items():
        if key not in kept and (folder / key).is_file():
            sha256, md5 = _digests(folder / key)
            if md5 == tag:
                kept[key] = _File(size, tag, sha256, (folder / key).stat().st_mtime_ns)
    return kept


def _checked(path: str, file: _File) -> _File | None:
    """The entry of a file if it is as it was fetched."""
    with suppress(OSError):
        found = os.stat(path)  # without a Path, which takes twice as long
        if found.st_size == file.size and (found.st_mtime_ns == file.time or _digests(Path(path))[0] == file.sha256):
            return file._replace(time=found.st_mtime_ns)
    return None


@dataclass
class _Fetch:
    """Brings single files of a version."""

    store: Store
    folder: Path
    trusts_tags: bool = True  # that look like an MD5, and are none under SSE-KMS: then the same comes twice

    def __call__(self, key: str, size: int, tag: str) -> _File:
        coming, path, before = self.folder.parent / _COMING / uuid.uuid4().hex, self.folder / key, ""
        for _ in range(3):
            fetched = self.store.fetch(key, coming)
            if fetched.tag != tag:
                break
            self.trusts_tags &= fetched.sha256 != before
            is_md5 = self.trusts_tags and re.fullmatch("[0-9a-f]{32}", tag)
            if fetched.size == size and (fetched.md5 == tag or not is_md5):
                path.parent.mkdir(parents=True, exist_ok=True)
                coming.replace(path)
                return _File(size, tag, fetched.sha256, path.stat().st_mtime_ns)
            before = fetched.sha256
        raise OSError(f"{key} does not come as it was listed, with {size} bytes and the tag {tag}; start again")


def _digests(path: Path) -> tuple[str, str]:
    """SHA-256 and MD5 of a file."""
    with path.open("rb") as file:
        sha256 = hashlib.file_digest(file, "sha256")
        file.seek(0)
        return sha256.hexdigest(), hashlib.file_digest(file, lambda: hashlib.md5(usedforsecurity=False)).hexdigest()


def _recorded(folder: Path) -> dict[str, _File]:
    """The manifest of a version; nothing without one that can be read."""
    with suppress(OSError, ValueError, TypeError, AttributeError):
        return {key: _File(*row) for key, row in json.loads((folder / MANIFEST).read_bytes()).items()}
    return {}


def _use(folder: Path) -> bool:
    """Keep a version until this process ends. Whether it is whole."""
    if folder not in _used and folder.is_dir():
        _used[folder] = os.open(folder / _IN_USE, os.O_RDWR | os.O_CREAT, 0o666)
        fcntl.flock(_used[folder], fcntl.LOCK_SH)
    whole = (folder / MANIFEST).exists()
    if folder in _used and not whole:  # it was removed
        os.close(_used.pop(folder))
    return whole


def _remove_unused(top: Path) -> None:
    for folder in [each for each in top.iterdir() if each.is_dir() and each.name != _COMING]:
        with (folder / _IN_USE).open("a") as file:
            if try_lock(file.fileno()):
                (folder / MANIFEST).unlink(missing_ok=True)  # first: for who waits in `_use`
                shutil.rmtree(folder, ignore_errors=True)
