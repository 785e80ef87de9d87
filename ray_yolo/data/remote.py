"""Snapshots of data sets in a store: the files that a description names, in a local folder.

    <cache>/data/<address>/<version>/images/train/a.jpg   at its path below the description
    <cache>/data/<address>/<version>/.manifest.json       size, tag, SHA-256 and time of each file; written last

A version is a digest of the store's listing (keys, sizes, tags). A training keeps its version; a later start downloads
changes. Versions share equal files through hard links; unused versions are removed.

A file is downloaded under a temporary name and renamed once it matches the listing: version, size and, where the tag is
an MD5, content. All files are durable before the manifest is written. Later starts therefore compare only sizes and
times, and the SHA-256 where the time differs. Damaged files are downloaded again. An interrupted download has no
manifest; its files are kept if the listing has their MD5.
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
import uuid
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

from ray_yolo.core.cache_folder import cache_folder
from ray_yolo.core.errors import DatasetError, InputError
from ray_yolo.core.file_lock import try_lock, wait_for_lock
from ray_yolo.core.files import atomic_write
from ray_yolo.core.redact import redact
from ray_yolo.core.structures import AnnotationIndex, DatasetSnapshot, Paths
from ray_yolo.labels import voc
from ray_yolo.labels.files import SUFFIXES, UNREAD_SUFFIXES, suffix
from ray_yolo.labels.other_files import label_folders
from ray_yolo.labels.yolo_txt import label_path
from ray_yolo.storage.store import Store, open_store

MANIFEST, _LOCK, _IN_USE, _PARTIAL = ".manifest.json", ".lock", ".in-use", ".coming"
_UNREAD = ".unread.json"  # It names pictures that are not downloaded, because their formats are not read.
WAIT_SECONDS = 3600.0  # Another process may take so long to download a snapshot.
_REQUESTS, _PART = 32, 8192
"""So many requests are made at once, and so many are queued in memory."""
_LABEL_KINDS = frozenset({".txt", ".xml", ".json"})
_KINDS = SUFFIXES | _LABEL_KINDS
_log = logging.getLogger(__name__)
_used: dict[Path, int] = {}
"""This process uses these versions; each has the descriptor of its locked file."""
_ListedObjects = Mapping[str, tuple[int, str]]
"""Each key has its object's size and tag."""


class _File(NamedTuple):
    """A file's entry in a manifest."""

    size: int
    tag: str
    sha256: str
    time: int
    """It was modified at this time, in ns."""


def address_parts(address: str) -> tuple[str, str]:
    """The address of a description's folder and its file name; data.yaml for a folder's address."""
    folder, _, name = address.rstrip("/").rpartition("/")
    return (folder, name) if suffix(name) in (".yaml", ".yml") else (address.rstrip("/"), "data.yaml")


def snapshot(address: str, version: str = "", notify: Callable[[str], None] = _log.warning) -> DatasetSnapshot:
    """A data set's complete local copy, kept until this process ends. One process downloads it; others wait.

    Args:
        address: of a data-set YAML, or of a folder with a data.yaml.
        version: the expected version, used without a request if it is complete on this machine; '': the current one.
        notify: called with a message before a download.

    Raises:
        DatasetError: if there is no such object, storage fails, or the store has another version now.
    """
    shown = redact(address)
    if shown != address:
        raise DatasetError(f"data: {shown}: leave the secret out; credentials are those of the environment")
    folder, name = address_parts(address)
    top = _snapshots() / hashlib.sha256(folder.encode()).hexdigest()[:16]
    store = open_store(folder, "data")
    try:
        top.mkdir(parents=True, exist_ok=True)
        with _locked(top, address):
            shutil.rmtree(top / _PARTIAL, ignore_errors=True)
            (top / _PARTIAL).mkdir()
            listing: dict[str, tuple[int, str]] = {}
            if version:
                listing = {key: (file.size, file.tag) for key, file in _recorded(top / version).items()}
            unread: list[str] | None = None  # pictures; a version without a new listing has them already
            if not listing:
                listing, unread = _list_files(store, name, top / _PARTIAL)
            current = hashlib.sha256(json.dumps(sorted(listing.items())).encode()).hexdigest()[:16]
            if version not in ("", current):
                raise DatasetError(f"data: {address} has changed since this command was started; start it again")
            _complete(store, top / current, listing, lambda message: notify(f"{address}: {message}"))
            if unread is not None:
                atomic_write(top / current / _UNREAD, json.dumps(unread))
            _use(top / current)
            _remove_unused(top)
    except FileNotFoundError as error:
        raise DatasetError(f"data: {address}: there is no such bucket or object ({error}); give the address of a "
                           "data-set YAML, or of a folder with a data.yaml") from None
    except InputError as error:  # The user knows the description by its address.
        raise DatasetError(str(error).replace(str(top / _PARTIAL), folder)) from None
    except OSError as error:
        text = str(error)
        if ";" not in text:  # else the store says what to do
            is_local = bool(error.errno)
            advice = f"{top} can be written to" if is_local else "the environment's credentials may list and read it"
            text = f"{text}; see that {advice}"
        raise DatasetError(f"data: {address}: {text}") from None
    return DatasetSnapshot(address, current, str(top / current))


def localize(index: AnnotationIndex) -> AnnotationIndex:
    """The same index with the paths of this machine's snapshot, downloaded if it is missing.

    Raises:
        DatasetError: as `snapshot` does.
    """
    if index.snapshot is None:
        return index
    address, version, source = index.snapshot
    folder = _snapshots() / Path(source).parent.name / version
    if not _use(folder):
        snapshot(address, version)
    assert isinstance(index.paths, Paths)
    return replace(index, paths=index.paths.moved(source, str(folder)),
                   snapshot=DatasetSnapshot(address, version, str(folder)))


def _snapshots() -> Path:
    """The folder of all snapshots: absolute and without `..`, as the paths of a description."""
    return Path(os.path.abspath(cache_folder()), "data")


@contextmanager
def _locked(top: Path, address: str) -> Iterator[None]:
    """Context that excludes other processes from the snapshots of this data set."""
    with (top / _LOCK).open("a") as lock:
        limit = f"{WAIT_SECONDS / 60:.0f} min"

        def notice() -> None:
            _log.warning("%s: another process downloads it to this machine; waiting for at most %s", address, limit)

        if not wait_for_lock(lock, WAIT_SECONDS, notice=notice):
            raise DatasetError(f"data: {address}: another process of this machine has been downloading it for {limit}; "
                               f"end it (`fuser {top / _LOCK}` lists it)")
        yield


def unread_pictures(snapshot: DatasetSnapshot) -> list[str]:
    """The paths of pictures in formats that are not read, which are in the store but not in its snapshot."""
    try:
        names = json.loads(Path(snapshot.folder, _UNREAD).read_bytes())
    except (OSError, ValueError):
        return []
    return [f"{snapshot.folder}/{name}" for name in names]


def _list_files(store: Store, name: str, folder: Path) -> tuple[dict[str, tuple[int, str]], list[str]]:
    """The description (downloaded to `folder`) with the files of its splits, and pictures that are not read."""
    from ray_yolo.config.yaml import load_text_yaml  # as in dataset_yaml

    fetched = store.fetch(name, folder / name)
    listing = {name: (fetched.size, fetched.tag)}
    root, prefixes, mirrors, common = _prefixes(load_text_yaml(folder / name).data)
    others = [*mirrors, *common]
    with ThreadPoolExecutor(_REQUESTS) as pool:  # at once: most of them are missing, and each costs a request
        entries_of = list(pool.map(lambda prefix: list(store.walk(prefix)), others))
    for prefix, entries in zip(others, entries_of, strict=True):
        for entry in entries:
            is_inside = prefix in mirrors or f"{os.path.dirname(entry.name)}/" == prefix
            if is_inside and suffix(entry.name) in _LABEL_KINDS:
                listing[entry.name] = entry.size, entry.tag
    unread: list[str] = []
    for prefix in prefixes:
        for entry in store.walk(prefix):
            if suffix(entry.name) in _KINDS:
                listing[entry.name] = entry.size, entry.tag
            elif suffix(entry.name) in UNREAD_SUFFIXES:
                unread.append(entry.name)
        if root not in prefixes and any(suffix(key) == ".json" for key in listing):  # COCO's, with images elsewhere
            prefixes.append(root)  # the next one of this loop
    return listing, unread


def _prefixes(content: Mapping[str, Any]) -> tuple[str, list[str], list[str], list[str]]:
    """The prefix of a description's `path`, those of its splits' images and labels, and those of labels in other
    folders than the layout's, as `label_folders` has them. List files, patterns and COCO files need all of `path`,
    because their images may be anywhere below."""
    root = _prefix(str(content.get("path") or ""))
    prefixes, mirrors, common = set[str](), set[str](), set[str]()
    for entry in _entries(content):
        if not isinstance(entry, str) or glob.has_magic(entry) or suffix(entry) in (".txt", ".json"):
            prefixes.add(root)
            continue
        without_dots = re.sub(r"^(\.\./)+", "", entry)  # Roboflow's `../train/images`
        for text in (entry, without_dots):
            image = f"/{_prefix(root + text)}any.jpg"
            texts, xmls = os.path.dirname(label_path(image)), voc.folders(image, lambda _: True)
            prefixes |= {_prefix(folder) for folder in (texts, *xmls)}
            own, shared = label_folders(os.path.dirname(image))
            mirrors |= {_prefix(folder) for folder in own}
            common |= {_prefix(folder) for folder in shared}
    outer = _outermost(prefixes)
    mirrors_outside = [prefix for prefix in sorted(mirrors) if not prefix.startswith(tuple(outer))]
    common_outside = [prefix for prefix in sorted(common - mirrors) if not prefix.startswith(tuple(outer))]
    return root, outer, mirrors_outside, common_outside


def _entries(content: Mapping[str, Any]) -> list[Any]:
    """The entries of all splits of a description."""
    entries: list[Any] = []
    for split in ("train", "val", "test"):
        value = content.get(split) or []
        entries += value if isinstance(value, list) else [value]
    return entries


def _outermost(prefixes: set[str]) -> list[str]:
    """The prefixes that are not below another one: walking them lists each object once."""
    outer = []
    for prefix in prefixes:
        others = prefixes - {prefix}
        if not prefix.startswith(tuple(others)):
            outer.append(prefix)
    return outer


def _prefix(path: str) -> str:
    """The prefix of a path, confined to the description's folder."""
    plain = os.path.normpath(f"/{path}").strip("/")
    return f"{plain}/" if plain else ""


def _complete(store: Store, folder: Path, listing: _ListedObjects, notify: Callable[[str], None]) -> None:
    """Download the missing files of a version."""
    trusts_tags = True  # false once an MD5-like tag is none (SSE-KMS): two downloads are equal, but mismatch

    def fetch(key: str) -> _File:
        nonlocal trusts_tags
        size, tag = listing[key]
        path = folder / key
        partial = folder.parent / _PARTIAL / uuid.uuid4().hex
        previous = ""  # SHA-256 of the download before
        for _ in range(3):
            fetched = store.fetch(key, partial)
            if fetched.tag != tag:
                break
            trusts_tags &= fetched.sha256 != previous
            is_md5 = trusts_tags and re.fullmatch("[0-9a-f]{32}", tag)
            if fetched.size == size and (fetched.md5 == tag or not is_md5):
                path.parent.mkdir(parents=True, exist_ok=True)
                partial.replace(path)
                return _File(size, tag, fetched.sha256, path.stat().st_mtime_ns)
            previous = fetched.sha256
        raise OSError(f"{key}: the download does not match the listing ({size} bytes, tag {tag}); start again")

    files = _reused(folder, listing)
    missing = [key for key in listing if key not in files]
    if missing:
        needed = sum(listing[key][0] for key in missing)  # bytes
        free = shutil.disk_usage(folder.parent).free
        if needed > free:
            raise DatasetError(f"data: {len(missing)} files of {needed / 1e9:.3g} GB do not fit in {folder.parent}, "
                               f"where {free / 1e9:.3g} GB are free; free some, or set RAY_YOLO_CACHE to a folder of a "
                               "larger disk, on every node")
        notify(f"downloading {len(missing)} files ({needed / 1e6:.1f} MB) into {folder}")
        with ThreadPoolExecutor(_REQUESTS) as pool:
            for first in range(0, len(missing), _PART):
                part = missing[first:first + _PART]
                files.update(zip(part, pool.map(fetch, part), strict=True))
        os.sync()  # once: syncing each of 100,000 files would take longer than their download
    if files != _recorded(folder):
        atomic_write(folder / MANIFEST, json.dumps(files))


def _reused(folder: Path, listing: _ListedObjects) -> dict[str, _File]:
    """The files that a version already has, or can link from other versions."""
    reused: dict[str, _File] = {}
    versions = sorted(folder.parent.iterdir(), key=lambda version: version != folder)  # itself first
    for version in versions:
        for key, file in _recorded(version).items():
            if key in reused or listing.get(key) != (file.size, file.tag):
                continue
            intact = _checked(f"{version}/{key}", file)
            if intact is None:
                continue
            with suppress(OSError):  # a file system without hard links: the file is downloaded
                if version != folder:
                    os.makedirs(os.path.dirname(f"{folder}/{key}"), exist_ok=True)
                    (folder / key).unlink(missing_ok=True)
                    os.link(f"{version}/{key}", f"{folder}/{key}")
                reused[key] = intact
    for key, (size, tag) in listing.items():  # files of an interrupted download, which has no manifest
        if key in reused:
            continue
        path = folder / key
        if path.is_file() and _digest(path, "md5") == tag:
            reused[key] = _File(size, tag, _digest(path, "sha256"), path.stat().st_mtime_ns)
    return reused


def _checked(path: str, file: _File) -> _File | None:
    """The entry of a file if it is unchanged since its download."""
    with suppress(OSError):
        status = os.stat(path)  # a Path takes twice as long
        if status.st_size != file.size:
            return None
        if status.st_mtime_ns == file.time or _digest(path, "sha256") == file.sha256:
            return file._replace(time=status.st_mtime_ns)
    return None


def _digest(path: str | Path, algorithm: str) -> str:
    with open(path, "rb") as file:
        return hashlib.file_digest(file, lambda: hashlib.new(algorithm, usedforsecurity=False)).hexdigest()


def _recorded(folder: Path) -> dict[str, _File]:
    """The manifest of a version; empty if it is missing or unreadable."""
    with suppress(OSError, ValueError, TypeError, AttributeError):
        manifest = json.loads((folder / MANIFEST).read_bytes())
        return {key: _File(*row) for key, row in manifest.items()}
    return {}


def _use(folder: Path) -> bool:
    """Keep a version until this process ends. Returns whether it is complete."""
    if folder not in _used and folder.is_dir():
        _used[folder] = os.open(folder / _IN_USE, os.O_RDWR | os.O_CREAT, 0o666)
        fcntl.flock(_used[folder], fcntl.LOCK_SH)
    complete = (folder / MANIFEST).exists()
    if folder in _used and not complete:  # it was removed
        os.close(_used.pop(folder))
    return complete


def _remove_unused(top: Path) -> None:
    """Remove the versions that no process uses."""
    for folder in [each for each in top.iterdir() if each.is_dir() and each.name != _PARTIAL]:
        with (folder / _IN_USE).open("a") as file:
            if try_lock(file.fileno()):
                (folder / MANIFEST).unlink(missing_ok=True)  # first: a process may wait in `_use`
                shutil.rmtree(folder, ignore_errors=True)
