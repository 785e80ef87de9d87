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

from ray_yolo.checkpoints.remote import LEASE
from ray_yolo.config.placement import Placement
from ray_yolo.core.errors import InputError
from ray_yolo.data.index_cache import cache_folder
from ray_yolo.runs.record import RECORD_FILE
from ray_yolo.storage import lease
from ray_yolo.storage.lease import check_conditions
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
    return "/".join((placement.storage_path.rstrip("/"), *Path(placement.project).parts))


def working_copy_folder(address: str) -> Path:
    """The folder, on this machine, for all below an address."""
    return cache_folder() / "spool" / hashlib.sha256(address.rstrip("/").encode()).hexdigest()[:16]


def working_copy_of_run(address: str, project: str) -> Path:
    """The folder, on this machine, of the run at an address: the one that commands with this project use, if theirs."""
    storage, ours, name = address.rpartition(f"/{Path(project).as_posix()}/")
    if ours and "/" not in name:
        return working_copy_folder(storage) / project / name
    return working_copy_folder(address.rpartition("/")[0]) / address.rpartition("/")[2]


def refresh(project: Path, address: str, is_held: Callable[[Path], bool], only: str = "") -> None:
    """Make the records of a project's spools that nobody holds what the store says of its runs.

    Args:
        only: the name of the run that matters; '': all do.

    Raises:
        InputError: if storage ignores conditional writes.
        OSError: if storage cannot be read or written.
    """
    store = open_store(address)
    check_conditions(store, address)
    names = [only] if only else [entry.name[:-1] for entry in store.list() if entry.name.endswith("/")]
    there = {name: files for name in names if (files := {each.name: each.modified for each in store.list(f"{name}/")})}
    for name, files in there.items():
        folder = project / name
        if RECORD_FILE in files and not is_held(folder):
            record = store.get(f"{name}/{RECORD_FILE}").data
            if folder.exists() and content(folder / RECORD_FILE) != record:
                shutil.rmtree(folder)  # of a run that had this name before
            create_working_copy(folder, f"{address}/{name}")
            (folder / RECORD_FILE).write_bytes(record)
            os.utime(folder / RECORD_FILE, (files[RECORD_FILE], files[RECORD_FILE]))
            if FINISHED in files:
                (folder / FINISHED).touch()
            else:
                (folder / FINISHED).unlink(missing_ok=True)
    for folder in [project / only] if only else list(project.glob("*")):
        if folder.name not in there and (folder / ADDRESS_FILE).exists() and not is_held(folder):
            shutil.rmtree(folder)


def create_working_copy(folder: Path, address: str) -> None:
    """Make a folder the spool of a run."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / ADDRESS_FILE).write_text(address)


def address_of(folder: Path) -> str:
    """Where a run's folder is stored, or that of a trial whose sweep is; '' if it is no spool."""
    if own := content(folder / ADDRESS_FILE).decode():
        return own
    sweep = content(folder.parent.parent / ADDRESS_FILE).decode()
    return sweep and f"{sweep}/{folder.parent.name}/{folder.name}"


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
