"""Working copies: folders on this machine for runs whose storage is a bucket.

    .stored-at   the address of the run
    .holder      the part of this machine's lease holder id that belongs to the folder

The bucket decides which runs exist (`refresh`); `remote_run` synchronises the other files of a working copy.
"""

from __future__ import annotations

import hashlib
import logging
import os
import shutil
import tempfile
import time
import uuid
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

from ray_yolo.config.placement import Placement
from ray_yolo.core.cache_folder import cache_folder
from ray_yolo.core.errors import InputError
from ray_yolo.runs.run_record import RECORD_FILE
from ray_yolo.storage import lease
from ray_yolo.storage.lease import LEASE, check_conditions
from ray_yolo.storage.store import Store, in_parallel, is_address, open_store

ADDRESS_FILE, HOLDER_FILE, FINISHED = ".stored-at", ".holder", "finished"

_logger = logging.getLogger(__name__)


def project_address(placement: Placement) -> str:
    """The address of a project's runs; '' if they are stored in a folder.

    Raises:
        InputError: if the project cannot be a part of the storage path.
    """
    if is_address(placement.project):
        raise InputError(f"project: {placement.project} is an address; give it as --storage-path")
    if not is_address(placement.storage_path):
        return ""
    if Path(placement.project).is_absolute() or ".." in Path(placement.project).parts:
        raise InputError(f"project: {placement.project} leads out of --storage-path; give a relative one")
    return "/".join((placement.storage_path.rstrip("/"), *Path(placement.project).parts))


def working_copy_folder(address: str) -> Path:
    """The folder on this machine for everything below an address."""
    return cache_folder() / "spool" / hashlib.sha256(address.rstrip("/").encode()).hexdigest()[:16]


def working_copy_of_run(address: str, project: str) -> Path:
    """The folder on this machine of the run at an address; for a run of `project`, the folder its commands use."""
    storage, separator, name = address.rpartition(f"/{Path(project).as_posix()}/")
    if separator and "/" not in name:
        return working_copy_folder(storage) / project / name
    return working_copy_folder(address.rpartition("/")[0]) / address.rpartition("/")[2]


def refresh(project: Path, address: str, is_held: Callable[[Path], bool], only: str = "") -> None:
    """Update the records of a project's working copies from the bucket; copies in use stay as they are.

    Args:
        only: name of the one run to update; '': all runs.

    Raises:
        InputError: if storage ignores conditional writes.
        OSError: if storage cannot be read or written.
    """
    store = open_store(address)
    check_conditions(store, address)
    runs = _list_runs(store, only)
    recorded = [name for name, files in runs.items() if RECORD_FILE in files and not is_held(project / name)]
    records = in_parallel(lambda name: store.get(f"{name}/{RECORD_FILE}").data, recorded)
    for name, record in zip(recorded, records, strict=True):
        folder, files = project / name, runs[name]
        if is_held(folder):  # since the first look
            continue
        if folder.exists() and read_or_empty(folder / RECORD_FILE) != record:
            _clear_away(folder)  # an earlier run with this name
        create_working_copy(folder, f"{address}/{name}")
        (folder / RECORD_FILE).write_bytes(record)
        modified = files[RECORD_FILE]
        os.utime(folder / RECORD_FILE, (modified, modified))  # the newest run is found by this time
        if FINISHED in files:
            (folder / FINISHED).touch()
        else:
            (folder / FINISHED).unlink(missing_ok=True)
    copies = [project / only] if only else list(project.glob("*"))
    for folder in copies:
        is_gone = folder.name not in runs and (folder / ADDRESS_FILE).exists()
        if is_gone and not is_held(folder):
            _clear_away(folder)


def _clear_away(folder: Path) -> None:
    """Remove a copy of a run that the bucket does not have; one with checkpoints is moved aside, out of the project.

    Such a run may be in a folder that is not mounted now, and its checkpoints nowhere else.
    """
    address = address_of(folder)
    if not any(folder.rglob("checkpoints/step-*")):
        shutil.rmtree(folder)
        return
    removed = folder.parent.with_name(f"{folder.parent.name}.removed")
    removed.mkdir(exist_ok=True)
    aside = Path(tempfile.mkdtemp(prefix=f"{folder.name}-", dir=removed))
    folder.rename(aside)
    (aside / ADDRESS_FILE).unlink(missing_ok=True)  # it is a run of its own now
    _logger.warning("%s: the storage does not have this run any more; the working copy with its checkpoints is in %s "
                    "now. If the storage was not mounted, stop, mount it and run the same command again", address,
                    aside)


def _list_runs(store: Store, only: str) -> dict[str, dict[str, float]]:
    """Name of each folder of a project -> its files with the times of their last change, in Unix seconds."""
    names = [only]
    if not only:
        names = [entry.name.removesuffix("/") for entry in store.list() if entry.name.endswith("/")]
    listings = in_parallel(lambda name: store.list(f"{name}/"), names)
    runs = {}
    for name, listing in zip(names, listings, strict=True):
        if listing:
            runs[name] = {entry.name: entry.modified for entry in listing}
    return runs


def create_working_copy(folder: Path, address: str) -> None:
    """Make a folder the working copy of the run at an address."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / ADDRESS_FILE).write_text(address)


def address_of(folder: Path) -> str:
    """The address of a working copy, or of a trial in the working copy of its sweep; '' for any other folder."""
    own = read_or_empty(folder / ADDRESS_FILE).decode()
    if own:
        return own
    sweep = read_or_empty(folder.parent.parent / ADDRESS_FILE).decode()
    return f"{sweep}/{folder.parent.name}/{folder.name}" if sweep else ""


def is_leased(folder: Path) -> bool:
    """Whether a process on any machine trains the run of this working copy; False for any other folder."""
    address = address_of(folder)
    if not address:
        return False
    entry = lease.read_terms(open_store(address), LEASE)
    if entry is None:
        return False
    terms, stored = entry
    is_released = not terms.holder
    return not is_released and time.time() - stored.modified < lease.EXPIRES


def holder_id(folder: Path) -> str:
    """A lease holder id that at most one living process has: the working copy is locked, and a reboot changes it."""
    with suppress(FileExistsError), (folder / HOLDER_FILE).open("x") as file:
        file.write(uuid.uuid4().hex)
    boot = read_or_empty(Path("/proc/sys/kernel/random/boot_id")).decode().strip()
    return f"{os.uname().nodename} {boot} {(folder / HOLDER_FILE).read_text()}"


def read_or_empty(path: Path) -> bytes:
    """The content of a file; empty if the file does not exist."""
    try:
        return path.read_bytes()
    except (FileNotFoundError, NotADirectoryError):
        return b""
