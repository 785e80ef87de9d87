"""A run in a bucket: what is stored there, and how the process that holds the run synchronises its working copy.

    lease.json                     the process that trains the run (storage/lease.py); a lock in a folder's place
    log/000002-000000.jsonl        the event log, or a sweep's ledger, in segments ATTEMPT-NUMBER that never change.
                                   Each attempt starts with a copy of all earlier lines. Only the last attempt's
                                   segments count, so that writes of a process that lost its lease are not read
    checkpoints/ states/ weights/  see checkpoints/remote_checkpoints.py
    run.json, results.csv, ...     as in a run folder
    trials/trial3/...              the trials of a sweep, each one a run

A working copy is an ordinary run folder, so its readers and writers do not depend on buckets. It may be removed when no
process trains the run; any machine can download another one.
"""

from __future__ import annotations

import fcntl
import logging
import os
import shutil
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from socket import gethostname
from tempfile import TemporaryDirectory
from typing import Any

from ray_yolo.checkpoints.remote_checkpoints import RemoteCheckpoints
from ray_yolo.core.cache_folder import cache_folder
from ray_yolo.core.errors import InputError, RayYoloError, TrainingError
from ray_yolo.core.file_lock import try_lock
from ray_yolo.core.files import atomic_write
from ray_yolo.core.redact import reason_of
from ray_yolo.engine.evaluate import DETECTIONS_FILE
from ray_yolo.runs.event_log import EVENTS_FILE
from ray_yolo.runs.run_record import LEDGER_FILE, RECORD_FILE, log_file
from ray_yolo.runs.working_copy import (
    FINISHED,
    address_of,
    create_working_copy,
    holder_id,
    read_or_empty,
    working_copy_folder,
)
from ray_yolo.storage import lease
from ray_yolo.storage.lease import LEASE, Lease
from ray_yolo.storage.store import Store, in_parallel, open_store

# Not synchronised by `put_files`.
_SPECIAL_FILES = (EVENTS_FILE, LEDGER_FILE, RECORD_FILE, FINISHED, LEASE)
_SPECIAL_FOLDERS = ("checkpoints", "states", "weights", "log", "ray", "trials")

_logger = logging.getLogger(__name__)


def acquire_run(folder: Path) -> RemoteRun | str | None:
    """Take the lease of the run of a locked working copy, and download what is new there.

    Returns:
        The run; the owner of the lease if another process has it; None if the folder is no working copy.

    Raises:
        OSError: if storage cannot be read or written.
    """
    address = address_of(folder)
    if not address:
        return None
    store = open_store(address)

    def warn(owner: str) -> None:
        _logger.warning("%s: waiting for at most %.0f s to see whether %s still trains it", address, lease.EXPIRES,
                        owner)

    held = lease.acquire(store, LEASE, holder_id(folder), warn)
    if isinstance(held, str):
        return held
    run = RemoteRun(store, folder, address, held)
    try:
        run.download()
    except BaseException:
        held.release()
        raise
    return run


class ChangedFiles:
    """Stores the files of a folder that are new or have changed since it last stored them, each by its path there."""

    def __init__(self, store: Store, folder: Path) -> None:
        self._store, self._folder = store, folder
        self._stored: dict[str, tuple[int, int]] = {}  # (modified, size) of files by key

    def put(self, paths: Iterable[Path]) -> None:
        """Store those of these files.

        Raises:
            OSError: if storage refuses.
        """
        in_parallel(self._put_one, list(paths))

    def _put_one(self, path: Path) -> None:
        key = path.relative_to(self._folder).as_posix()
        with suppress(FileNotFoundError):  # a temporary file
            status = path.stat()
            version = status.st_mtime_ns, status.st_size
            if self._stored.get(key) != version:
                self._store.put(key, path)
                self._stored[key] = version


class RemoteRun:
    """A run in a bucket whose lease this process holds, with its working copy.

    The lease's `attempt`, from 1, is a fencing token in the keys of segments and checkpoints.
    """

    def __init__(self, store: Store, folder: Path, address: str, held: Lease) -> None:
        self.address, self.attempt = address, held.attempt
        self.checkpoints = RemoteCheckpoints(store, held.attempt)  # the run's checkpoints, for this attempt
        self._store, self._folder, self._lease = store, folder, held
        self._flushing = threading.Lock()
        self._offset = 0  # bytes of the log that are stored
        self._segments = 0  # segments of this attempt that are stored
        self._changed = ChangedFiles(store, folder)
        self.finished = False  # the run has ended; `sync_files` stores this
        self.is_lost = False  # another process has the lease: the training must stop
        self.on_loss: Callable[[], object] = lambda: None
        """Called when another process has taken the lease, in a thread: stops the training."""
        held.on_loss = self._lose

    def _lose(self) -> None:
        self.is_lost = True
        self.on_loss()

    @property
    def payload(self) -> dict[str, str | int]:
        """What `worker_copy` needs on a worker."""
        folder = self._folder.relative_to(cache_folder()).as_posix()
        return {"address": self.address, "attempt": self.attempt, "folder": folder}

    def download(self) -> None:
        """Fill the working copy. If no other process has trained the run since, local files stay; `sync_files` stores
        them."""
        log = log_file(self._folder)
        stored, local = read_log(self._store), read_or_empty(log)
        is_newest = bool(local) and local.startswith(stored)  # the local log continues the stored one
        if stored and not is_newest:
            atomic_write(log, stored)
        keys = list(_file_keys(self._store))
        if is_newest:
            keys = [key for key in keys if not (self._folder / key).exists()]
        _fetch_all(self._store, keys, self._folder)
        if is_newest:
            self.checkpoints.upload_pending(self._folder)

    def download_result(self) -> None:
        """Download the files that the saving worker, possibly on another node, has stored."""
        self.checkpoints.download_weights(self._folder)
        with suppress(FileNotFoundError):
            self._store.fetch(DETECTIONS_FILE, self._folder / DETECTIONS_FILE)

    def flush_log(self) -> None:
        """Store the new lines of the log as a segment.

        Raises:
            OSError: if storage refuses.
            TrainingError: if another process has stored a segment of this attempt.
        """
        with self._flushing:
            new = read_or_empty(log_file(self._folder))[self._offset:]
            segment = new[:new.rfind(b"\n") + 1]  # whole lines
            while segment:
                key = f"log/{self.attempt:06d}-{self._segments:06d}.jsonl"
                stored = segment
                if self._store.put_if(key, segment) is None:  # it exists: by a call whose reply was lost
                    stored = self._store.get(key).data  # perhaps of fewer lines than now
                    if not segment.startswith(stored):
                        raise TrainingError(f"{self.address}/{key} was written by another process; this one stores "
                                            "nothing more")
                if self._segments == 0:
                    # It begins with all lines of earlier attempts. Their segments have smaller names than any of this.
                    names = [entry.name for entry in self._store.list("log/")]
                    earlier = [f"log/{name}" for name in names if name < f"{self.attempt:06d}"]
                    in_parallel(self._store.delete, earlier)
                self._offset += len(stored)
                self._segments += 1
                segment = segment[len(stored):]

    def put_files(self) -> None:
        """Store the files that are new or changed; weights/last.pt and best.pt only after the end of training. Before,
        they are pointers to states.

        Raises:
            OSError: if storage refuses.
            TrainingError: if another process has the lease.
        """
        if not self._lease.renew():
            raise TrainingError(f"{self.address}: another process has taken over this run; this one stores nothing "
                                "more")
        paths = list(ordinary_files(self._folder))
        if self.finished:
            for name in ("last.json", "last.pt", "best.json", "best.pt"):  # a manifest describes both states
                path = self._folder / "weights" / name
                if path.exists():
                    paths.append(path)
        self._changed.put(paths)

    def sync_files(self) -> None:
        """Store everything new, or nothing if another process has the lease (`is_lost`).

        If storage fails, a warning is logged; later calls store the rest.
        """
        try:
            self.flush_log()
            self.put_files()
            if self.finished:
                self._store.put(FINISHED, b"")
        except OSError as error:
            _logger.warning("%s: some files of the run are not stored yet (%s); later uploads, or the same command on "
                            "this machine, store them", self.address, reason_of(error))
        except TrainingError as error:
            self._lose()
            _logger.warning("%s", error)

    def release(self) -> None:
        """Store the rest and give the lease back."""
        self.sync_files()
        self._lease.release()


@contextmanager
def worker_copy(payload: Mapping[str, Any]) -> Iterator[tuple[Path, RemoteCheckpoints]]:
    """A run folder on a worker's machine, and the run's checkpoints.

    On the driver's machine the folder is the working copy; elsewhere a temporary one of this worker.
    """
    folder = cache_folder() / payload["folder"]
    with ExitStack() as stack:
        if not address_of(folder):
            folder = stack.enter_context(_temporary_copy(folder))
        yield folder, RemoteCheckpoints(open_store(payload["address"]), payload["attempt"])


@contextmanager
def _temporary_copy(folder: Path) -> Iterator[Path]:
    """Context with a new folder next to this one. The folders of killed workers are removed first.

    A living worker holds a lock on its copy. The parent folder is locked until the worker has that lock, so no other
    worker finds the copy unlocked. The names contain the host, because not every shared file system shows other hosts'
    locks. On a file system without locks, nothing is removed.
    """
    prefix = f".copy-{gethostname()}@"  # which no name of a host contains: `gpu` must not match `gpu-2`
    folder.parent.mkdir(parents=True, exist_ok=True)
    with ExitStack() as stack:
        with _opened(folder.parent) as parent:
            with suppress(OSError):
                fcntl.flock(parent, fcntl.LOCK_EX)
                _remove_unlocked(folder.parent.glob(f"{prefix}*"))
            own = Path(stack.enter_context(TemporaryDirectory(
                prefix=f"{prefix}{folder.name}-", dir=folder.parent, ignore_cleanup_errors=True)))
            with suppress(OSError):
                try_lock(stack.enter_context(_opened(own)))  # it is free: no other process knows the folder
        yield own


def _remove_unlocked(folders: Iterable[Path]) -> None:
    """Remove folders that no process has locked, and that this user may open."""
    for folder in folders:
        with suppress(OSError), _opened(folder) as descriptor:
            if try_lock(descriptor):
                shutil.rmtree(folder, ignore_errors=True)


@contextmanager
def _opened(folder: Path) -> Iterator[int]:
    """A descriptor of a folder, for locks."""
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        yield descriptor
    finally:
        os.close(descriptor)


def download_copy(address: str, *, whole: bool = True) -> Path:
    """Download a run as it is now into a folder of this machine, for reading only.

    Args:
        whole: with all files; otherwise the log and the record only.

    Raises:
        InputError: if there is no run at the address, or storage refuses.
    """
    store = open_store(address)
    folder = working_copy_folder(address) / address.rstrip("/").rpartition("/")[2]
    try:
        log = read_log(store)
        if not log:
            raise InputError(f"{address}: has no log of a run; give the address of one, such as "
                             "s3://bucket/runs/train/exp")
        shutil.rmtree(folder, ignore_errors=True)
        create_working_copy(folder, address)
        keys = [entry.name for entry in store.list() if entry.name in (RECORD_FILE, FINISHED)]
        if whole:
            keys += _file_keys(store)
            weights = [f"weights/{entry.name}" for entry in store.list("weights/")]
            for key in weights:
                stem = key.rpartition(".")[0]
                if f"{stem}.pt" in weights:  # else the manifest is a pointer to a state
                    keys.append(key)
            RemoteCheckpoints(store, 0).download_all(folder)
        _fetch_all(store, keys, folder)
        log_file(folder).write_bytes(log)
    except OSError as error:
        raise InputError(f"{address}: {error}") from None
    return folder


def put_results(folder: Path, address: str) -> None:
    """Store the results of a validation or prediction; with '' as the address they stay in the folder.

    Raises:
        RayYoloError: if storage refuses.
    """
    if not address:
        return
    store, paths = open_store(address), ordinary_files(folder)
    try:
        in_parallel(lambda path: store.put(path.relative_to(folder).as_posix(), path), paths)
    except OSError as error:
        raise RayYoloError(f"{address}: some results are not stored ({error}); all of them are in {folder}") from None


def read_log(store: Store) -> bytes:
    """The log of a run: the segments of its last attempt."""
    names = [entry.name for entry in store.list("log/")]  # ATTEMPT-NUMBER, in order
    newest = [name for name in names if name[:7] == names[-1][:7]]
    return b"".join(in_parallel(lambda name: store.get(f"log/{name}").data, newest))


def _fetch_all(store: Store, keys: Iterable[str], folder: Path) -> None:
    """Download objects into a folder, each to the path of its key."""
    def fetch(key: str) -> None:
        (folder / key).parent.mkdir(parents=True, exist_ok=True)
        store.fetch(key, folder / key)

    in_parallel(fetch, keys)


def _file_keys(store: Store, prefix: str = "") -> Iterator[str]:
    """The keys of a run's ordinary files."""
    for entry in store.list(prefix):
        name = entry.name
        is_folder = name.endswith("/")
        is_special = name.removesuffix("/") in (_SPECIAL_FOLDERS if is_folder else _SPECIAL_FILES)
        if is_special and not prefix:  # special at the top only
            continue
        if is_folder:
            yield from _file_keys(store, f"{prefix}{name}")
        else:
            yield f"{prefix}{name}"


def ordinary_files(folder: Path) -> Iterator[Path]:
    """The files of a run folder that are stored as they are: all but log, record, checkpoints, weights and trials."""
    return _files_of(folder, _SPECIAL_FOLDERS)


def _files_of(folder: Path, excluded: Sequence[str] = ()) -> Iterator[Path]:
    """The ordinary files of a folder, without hidden ones and without some of its subfolders."""
    for path in sorted(folder.iterdir()):
        if path.name.startswith("."):
            continue
        if path.is_dir() and not path.is_symlink():
            if path.name not in excluded:
                yield from _files_of(path)
        elif path.is_file() and path.name not in _SPECIAL_FILES:
            yield path
