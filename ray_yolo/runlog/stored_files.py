"""The files of a run in a store, and those that come there from a folder or go from there into one.

A run's log is in segments, of which the last attempt's count; see `stored_run`.
"""

from __future__ import annotations

import shutil
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from ray_yolo.engine.stored import LEASE, StoredCheckpoints
from ray_yolo.errors import InputError, RayYoloError
from ray_yolo.runlog.event_log import EVENTS_FILE
from ray_yolo.runlog.record import LEDGER_FILE, RECORD_FILE, log_file
from ray_yolo.runlog.spool import FINISHED, begin_spool, spool_folder
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
    store, folder = open_store(address), spool_folder(address) / address.rstrip("/").rpartition("/")[2]
    try:
        log = read_log(store)
        if not log:
            raise InputError(f"{address}: has no log of a run; give the address of one, such as "
                             "s3://bucket/runs/train/exp")
        shutil.rmtree(folder, ignore_errors=True)
        begin_spool(folder, address)
        keys = [*({RECORD_FILE, FINISHED} & {entry.name for entry in store.list()})]
        if whole:
            weights = [f"weights/{entry.name}" for entry in store.list("weights/")]
            ended = [key for key in weights if f"{key.rpartition('.')[0]}.pt" in weights]  # the others are pointers
            keys += [*stored_keys(store), *ended]
            StoredCheckpoints(store, 0).bring_all(folder)
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
