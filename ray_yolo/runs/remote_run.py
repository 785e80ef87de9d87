"""A run in a store: its folder on the driver's disk, a spool, and what is brought from there.

    lease.json                     who trains it, instead of a lock (storage/lease.py)
    log/000002-000000.jsonl        the event log, or a sweep's ledger, in sealed segments. Each attempt begins with all
                                   that was before, and the last attempt's are the log: what an earlier one still
                                   writes is not read
    checkpoints/ states/ weights/  see checkpoints/remote.py
    run.json, results.csv, ...     as in the folder
    trials/trial3/...              of a sweep: runs of their own

The folder is as any run's, so that whatever reads and writes it knows nothing of stores. It may be removed whenever
nobody trains the run: another one, on any machine, is filled from the store.
"""

from __future__ import annotations

import logging
import shutil
import threading
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from ray_yolo.checkpoints.remote import LEASE, RemoteCheckpoints
from ray_yolo.core.errors import InputError, RayYoloError, TrainingError
from ray_yolo.core.files import atomic_write
from ray_yolo.core.redact import reason_of
from ray_yolo.data.index_cache import cache_folder
from ray_yolo.engine.session import DETECTIONS_FILE
from ray_yolo.runs.event_log import EVENTS_FILE
from ray_yolo.runs.record import LEDGER_FILE, RECORD_FILE, log_file
from ray_yolo.runs.recorder import STOP_REQUEST
from ray_yolo.runs.working_copy import (
    FINISHED,
    address_of,
    content,
    create_working_copy,
    holder_id,
    working_copy_folder,
)
from ray_yolo.storage import lease
from ray_yolo.storage.lease import Lease
from ray_yolo.storage.store import Store, open_store

_APART = (EVENTS_FILE, LEDGER_FILE, RECORD_FILE, FINISHED, LEASE)  # brought in ways of their own, as these folders are
APART_FOLDERS = ("checkpoints", "states", "weights", "log", "ray", "trials")
_READERS = 16


def copy_of(address: str, *, whole: bool = True) -> Path:
    """A run of a store as it is now, in a folder of this machine: to be looked at, not continued.

    Args:
        whole: with all its files; else its log and record alone.

    Raises:
        InputError: if there is none, or storage refuses.
    """
    store, folder = open_store(address), working_copy_folder(address) / address.rstrip("/").rpartition("/")[2]
    try:
        log = read_log(store)
        if not log:
            raise InputError(f"{address}: has no log of a run; give the address of one, such as "
                             "s3://bucket/runs/train/exp")
        shutil.rmtree(folder, ignore_errors=True)
        create_working_copy(folder, address)
        keys = [*({RECORD_FILE, FINISHED} & {entry.name for entry in store.list()})]
        if whole:
            weights = [f"weights/{entry.name}" for entry in store.list("weights/")]
            ended = [key for key in weights if f"{key.rpartition('.')[0]}.pt" in weights]  # the others are pointers
            keys += [*stored_keys(store), *ended]
            RemoteCheckpoints(store, 0).download_all(folder)
        for key in keys:
            (folder / key).parent.mkdir(parents=True, exist_ok=True)
            store.fetch(key, folder / key)
        log_file(folder).write_bytes(log)
    except OSError as error:
        raise InputError(f"{address}: {error}") from None
    return folder


def put_results(folder: Path, address: str) -> None:
    """Store what a validation or prediction has left in a folder; '' as the address: it stays there alone.

    Raises:
        RayYoloError: if storage refuses.
    """
    if not address:
        return
    store, keys = open_store(address), [path.relative_to(folder).as_posix() for path in files_of(folder, ("ray",))]
    try:
        with ThreadPoolExecutor(_READERS) as writers:
            list(writers.map(lambda key: store.put(key, folder / key), keys))
    except OSError as error:
        raise RayYoloError(f"{address}: not all results are stored ({error}); they lie in {folder}") from None


def read_log(store: Store) -> bytes:
    """The log of a run."""
    names = [entry.name for entry in store.list("log/")]
    newest = [name for name in names if name[:7] == names[-1][:7]]
    with ThreadPoolExecutor(_READERS) as readers:
        return b"".join(readers.map(lambda name: store.get(f"log/{name}").data, newest))


def stored_keys(store: Store, prefix: str = "") -> Iterator[str]:
    """Of a run's files that are stored as they are."""
    for entry in store.list(prefix):
        if entry.name.endswith("/") and (prefix or entry.name[:-1] not in APART_FOLDERS):
            yield from stored_keys(store, f"{prefix}{entry.name}")
        elif not entry.name.endswith("/") and (prefix or entry.name not in _APART):
            yield f"{prefix}{entry.name}"


def files_of(folder: Path, apart: Sequence[str] = ()) -> Iterator[Path]:
    """The same in a folder, but for what is in some of its own folders."""
    for path in sorted(folder.iterdir()):
        if path.name[0] != "." and path.is_dir() and not path.is_symlink():
            if path.name not in apart:
                yield from files_of(path)
        elif path.name[0] != "." and path.is_file() and path.name not in _APART:
            yield path



_logger = logging.getLogger(__name__)


@contextmanager
def working_copy_of(payload: Mapping[str, Any]) -> Iterator[tuple[Path, RemoteCheckpoints]]:
    """A folder for a run on a worker's machine, and its checkpoints: where that is not the driver's too, a folder of
    this worker's own, which goes when it has done its work.
    """
    folder = cache_folder() / payload["spool"]
    with ExitStack() as stack:
        if not address_of(folder):
            folder.parent.mkdir(parents=True, exist_ok=True)
            folder = Path(stack.enter_context(TemporaryDirectory(
                prefix=f".{folder.name}-", dir=folder.parent, ignore_cleanup_errors=True)))
        yield folder, RemoteCheckpoints(open_store(payload["address"]), payload["attempt"])


def hold(folder: Path) -> RemoteRun | str | None:
    """Take the lease of the run whose spool, locked, this is, and bring it up to date. Who has it, if it is not to be
    had; None if the folder is no spool.

    Raises:
        OSError: if storage cannot be read or written.
    """
    if not (address := address_of(folder)):
        return None
    store = open_store(address)
    found = lease.acquire(store, LEASE, holder_id(folder), lease.EXPIRES, lambda owner: _logger.warning(
        "%s: waiting for at most %.0f s to see whether %s still trains it", address, lease.EXPIRES, owner))
    if isinstance(found, str):
        return found
    run = RemoteRun(store, folder, address, found)
    try:
        run.download()
    except BaseException:
        found.release()
        raise
    return run


class RemoteRun:
    """The driver's side of a run in a store, which it holds."""

    def __init__(self, store: Store, folder: Path, address: str, held: Lease) -> None:
        self.address = address
        self._store, self._folder, self._lease = store, folder, held
        self._sealing = threading.Lock()
        self._offset = self._segments = 0
        self._sealed = b""  # a segment that may be there already: an answer may have been lost
        self._brought: dict[str, tuple[int, int]] = {}
        self._finished = False
        self.is_lost = False  # another process has it: the training is to stop
        held.on_loss = self._lose

    def _lose(self) -> None:
        (self._folder / STOP_REQUEST).touch()  # for workers on Ray
        self.is_lost = True

    @property
    def attempt(self) -> int:
        """Its number."""
        return self._lease.attempt

    @property
    def checkpoints(self) -> RemoteCheckpoints:
        """Those of the run, for this attempt."""
        return RemoteCheckpoints(self._store, self.attempt)

    def download(self) -> None:
        """Fill the folder; what it owes the store, since nobody has gone on in between, stays and is stored."""
        stored, log = read_log(self._store), log_file(self._folder)
        mine = content(log)
        ours = bool(mine) and mine.startswith(stored)
        if not ours and stored:
            atomic_write(log, stored)
        for key in stored_keys(self._store):
            path = self._folder / key
            if not (ours and path.exists()):
                path.parent.mkdir(parents=True, exist_ok=True)
                self._store.fetch(key, path)
        if ours:
            self.checkpoints.upload_pending(self._folder)

    def download_result(self) -> None:
        """What the recording worker has stored, which may sit elsewhere."""
        self.checkpoints.download_weights(self._folder)
        with suppress(FileNotFoundError):
            self._store.fetch(DETECTIONS_FILE, self._folder / DETECTIONS_FILE)

    def put_record(self) -> None:
        """Store what makes it a run."""
        self._store.put(RECORD_FILE, self._folder / RECORD_FILE)

    @property
    def payload(self) -> dict[str, str | int]:
        """What workers on other machines make a folder and `checkpoints` of."""
        spool = self._folder.relative_to(cache_folder()).as_posix()
        return {"address": self.address, "attempt": self.attempt, "spool": spool}

    def flush_log(self) -> None:
        """Store what is new in the log as a segment.

        Raises:
            OSError: if storage refuses.
            TrainingError: if it is not this attempt's any more.
        """
        with self._sealing:
            while self._find_new():  # after one whose answer was lost there may be more
                key = f"log/{self.attempt:06d}-{self._segments:06d}.jsonl"
                if self._store.put_if(key, self._sealed) is None and self._store.get(key).data != self._sealed:
                    raise TrainingError(f"{self.address}/{key} is another process's; this one stores nothing any more")
                if not self._segments:
                    for entry in self._store.list("log/"):
                        if entry.name < f"{self.attempt:06d}":
                            self._store.delete(f"log/{entry.name}")
                self._offset, self._segments, self._sealed = self._offset + len(self._sealed), self._segments + 1, b""

    def _find_new(self) -> bytes:
        """The next segment."""
        if not self._sealed:
            new = content(log_file(self._folder))[self._offset:]
            self._sealed = new[:new.rfind(b"\n") + 1]
        return self._sealed

    def put_files(self, *, weights: bool = False) -> None:
        """Store the files that are new, or others than before.

        Args:
            weights: also weights/last.pt and best.pt, which are their own now.

        Raises:
            OSError: if storage refuses.
            TrainingError: if another process has the run.
        """
        if not self._lease.renew():
            raise TrainingError(f"{self.address}: another process has taken this run over, and this one stores "
                                "nothing any more")
        paths = list(files_of(self._folder, APART_FOLDERS))
        if weights:
            paths += [path for kind in ("last", "best") for end in ("json", "pt")  # the first knows both states
                      if (path := self._folder / "weights" / f"{kind}.{end}").exists()]
        for path in paths:
            key = path.relative_to(self._folder).as_posix()
            with suppress(FileNotFoundError):  # a temporary one
                found = path.stat()
                if self._brought.get(key) != (found.st_mtime_ns, found.st_size):
                    self._store.put(key, path)
                    self._brought[key] = found.st_mtime_ns, found.st_size

    def finish(self) -> None:
        """The run has ended: `release` will say so."""
        self._finished = True

    def sync_files(self) -> None:
        """Store what is new, and of a run that another process has (`is_lost`) nothing. Storage that is away costs a
        warning: the rest is stored with what follows.
        """
        try:
            self.flush_log()
            self.put_files(weights=self._finished)
            if self._finished:
                self._store.put(FINISHED, b"")
        except OSError as error:
            _logger.warning("%s: not all of the run is stored (%s); what follows, or the same command on this machine, "
                            "stores the rest", self.address, reason_of(error))
        except TrainingError as error:
            self.is_lost = True
            _logger.warning("%s", error)

    def release(self) -> None:
        """Store the rest, and let others have the run."""
        self.sync_files()
        self._lease.release()
