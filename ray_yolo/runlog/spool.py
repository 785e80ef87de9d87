"""Spools: folders on this machine in which runs that lie in a store are worked on.

    .stored-at   the run's address
    .holder      half of the id by which its lease knows this machine

Which runs there are is for the store to say (`refresh`); whatever else a spool holds is `stored_run`'s.
"""

from __future__ import annotations

import hashlib
import os
import shutil
import time
import uuid
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

from ray_yolo.config.placement import Placement
from ray_yolo.data.index_cache import cache_folder
from ray_yolo.engine.stored import LEASE
from ray_yolo.errors import InputError
from ray_yolo.runlog.record import RECORD_FILE
from ray_yolo.storage import lease
from ray_yolo.storage.lease import store_time
from ray_yolo.storage.store import is_address, open_store

ADDRESS_FILE, HOLDER_FILE, FINISHED = ".stored-at", ".holder", "finished"


def project_address(placement: Placement) -> str:
    """Where runs are stored; '' for a folder.

    Raises:
        InputError: if there cannot be runs.
    """
    if is_address(placement.project):
        raise InputError(f"project: {placement.project} is an address; give it as --storage-path")
    if not is_address(placement.storage_path):
        return ""
    if Path(placement.project).is_absolute() or ".." in Path(placement.project).parts:
        raise InputError(f"project: {placement.project} leads out of --storage-path; give a relative one")
    return f"{placement.storage_path.rstrip('/')}/{Path(placement.project).as_posix()}"


def spool_folder(address: str) -> Path:
    """The folder, on this machine, for all below an address."""
    return cache_folder() / "spool" / hashlib.sha256(address.rstrip("/").encode()).hexdigest()[:16]


def refresh(project: Path, address: str, is_held: Callable[[Path], bool]) -> None:
    """Make the records of a project's spools that nobody holds what the store says of its runs.

    Raises:
        OSError: if storage cannot be read or written.
    """
    store = open_store(address)
    store_time(store, "")
    there = [entry.name for entry in store.list() if entry.name.endswith("/")]
    for name in there:
        files = {entry.name: entry.modified for entry in store.list(name)}
        if RECORD_FILE in files and not is_held(project / name):
            folder, record = project / name, store.get(f"{name}{RECORD_FILE}").data
            if folder.exists() and content(folder / RECORD_FILE) != record:
                shutil.rmtree(folder)  # of a run that had this name before
            begin_spool(folder, f"{address}/{name.rstrip('/')}")
            (folder / RECORD_FILE).write_bytes(record)
            os.utime(folder / RECORD_FILE, (files[RECORD_FILE], files[RECORD_FILE]))
            if FINISHED in files:
                (folder / FINISHED).touch()
            else:
                (folder / FINISHED).unlink(missing_ok=True)
    for marker in project.glob(f"*/{ADDRESS_FILE}"):
        if f"{marker.parent.name}/" not in there and not is_held(marker.parent):
            shutil.rmtree(marker.parent)


def begin_spool(folder: Path, address: str) -> None:
    """Make a folder the spool of a run."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / ADDRESS_FILE).write_text(address)


def address_of(folder: Path) -> str:
    """Where a run's folder is stored; '' if it is no spool."""
    return content(folder / ADDRESS_FILE).decode()


def is_leased(folder: Path) -> bool:
    """Whether somebody, somewhere, trains the run that this folder is a spool or copy of."""
    address = address_of(folder)
    told = lease.read_terms(open_store(address), LEASE) if address else None
    return told is not None and bool(told[0].holder) and time.time() - told[1].modified < lease.EXPIRES


def holder_id(folder: Path) -> str:
    """An id of whom only one can live: the spool's, since it is locked, until the machine starts anew."""
    with suppress(FileExistsError), (folder / HOLDER_FILE).open("x") as file:
        file.write(uuid.uuid4().hex)
    boot = content(Path("/proc/sys/kernel/random/boot_id")).decode().strip()
    return f"{os.uname().nodename} {boot} {(folder / HOLDER_FILE).read_text()}"


def content(path: Path) -> bytes:
    """Of a file; nothing if there is none."""
    try:
        return path.read_bytes()
    except (FileNotFoundError, NotADirectoryError):
        return b""
