"""The folders of runs and results: their paths, checks of their storage, new names and locks."""

from __future__ import annotations

import fcntl
import logging
import os
import re
import struct
import tempfile
from collections.abc import Iterable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import IO, Any

from ray_yolo.checkpoints.layout import DRIVER_LOCK
from ray_yolo.config.placement import Placement
from ray_yolo.core.cache_folder import home_folder
from ray_yolo.core.errors import InputError, StorageError
from ray_yolo.core.file_lock import try_lock, wait_for_lock
from ray_yolo.runs.run_record import RECORD_FILE
from ray_yolo.runs.working_copy import create_working_copy, project_address, working_copy_folder
from ray_yolo.storage.lease import store_time
from ray_yolo.storage.store import Store, is_address, open_store

RAYS_COPIES = "/runtime_resources/working_dir_files/"  # Ray unpacks `ray job submit --working-dir` here
_PROBE = ".ray_yolo-"  # how the name of a temporary file begins
_WHOLE_FILE = struct.pack("hhqqi4x", fcntl.F_WRLCK, os.SEEK_SET, 0, 0, 0)
"""C's `struct flock`: an exclusive lock from the first byte of a file to the end."""

_logger = logging.getLogger(__name__)


@contextmanager
def usable_storage() -> Iterator[None]:
    """Context that turns storage errors into messages that state what the user can change."""
    try:
        yield
    except InputError:  # a ValueError, too, but its message already says what to change
        raise
    except (OSError, ValueError) as error:  # ValueError: a NUL in a path
        reason = getattr(error, "strerror", None) or str(error)
        file = str(getattr(error, "filename", None) or "")
        if file:
            place = file.partition(f"/{_PROBE}")[0]  # a probe's place is its folder
            reason = f"{place}: {reason}"
        raise StorageError(f"{reason}; give a --project and --storage-path that runs can be written to") from None


def lasting_folder() -> Path:
    """The current folder; ~/ray-yolo in Ray's copy of a job's files, which is removed with the cluster."""
    here = Path.cwd()
    return home_folder() / "ray-yolo" if RAYS_COPIES in here.as_posix() else here


def storage_folder(placement: Placement) -> Path:
    """The absolute storage folder: --storage-path, else an absolute --project, else `lasting_folder`."""
    project = placement.project if Path(placement.project).is_absolute() else ""
    path = "" if is_address(placement.storage_path) else placement.storage_path
    return lasting_folder() / (path or project)


def project_folder(placement: Placement) -> Path:
    """The absolute folder of a project's runs, or of their working copies if they are stored in a bucket.

    Raises:
        InputError: if the project cannot be a part of the storage path.
    """
    if project_address(placement):
        return working_copy_folder(placement.storage_path) / placement.project
    return storage_folder(placement) / placement.project


@contextmanager
def storage_probe(placement: Placement) -> Iterator[Path | str]:
    """A temporary file on the storage of new runs, or the address of a bucket. It creates no folder.

    Raises:
        InputError: if storage cannot be written to, or its files cannot be locked.
    """
    with ExitStack() as stack:
        with usable_storage():
            project, address = project_folder(placement), project_address(placement)
            if address:
                store_time(open_store(address), "")  # writes a probe object
            place = next(path for path in (project, *project.parents) if path.exists())
            probe = stack.enter_context(tempfile.NamedTemporaryFile(prefix=_PROBE, dir=place))
            lock_file(probe)
        yield address or Path(probe.name)


@usable_storage()
def output_folder(placement: Placement, sources: Iterable[str | Path] = ()) -> Path:
    """Create a folder for the results of a validation or prediction: --name, or its next free number, or expN.

    With `exist_ok` the name gets no number: an existing folder is moved aside, so that each folder holds one result.
    For a bucket, the folder is a working copy under a name that is reserved there; `location.publish` stores it.

    Args:
        sources: absolute paths of the inputs, which must not be moved.

    Raises:
        InputError: if storage cannot be written to, the folder to be moved holds a source or a training, or the name
        exists in the bucket.
    """
    project, address = project_folder(placement), project_address(placement)
    store = open_store(address) if address else None
    folder = project / placement.name
    if not (placement.name and placement.exist_ok):
        folder = exclusive_folder(project, placement.name or "exp", store)
    elif store and not _claim(store, placement.name):
        raise InputError(f"exist_ok: {address}/{placement.name}: results in a bucket cannot be moved aside; choose "
                         "another --name, or remove them there")
    elif folder.exists() and any(folder.iterdir()):
        for path in (*sources, folder / RECORD_FILE):
            is_inside = str(path).startswith(f"{folder}{os.sep}")
            if is_inside and os.path.exists(path):
                raise InputError(f"name: {folder} holds {os.path.relpath(path, folder)}, so it is not moved aside for "
                                 "new results; choose another --name or --project")
        _logger.warning("%s: its earlier content is in %s now", folder, move_aside(folder))
    folder.mkdir(parents=True, exist_ok=True)
    if address:
        create_working_copy(folder, f"{address}/{folder.name}")
    return folder


def _claim(store: Store, name: str) -> bool:
    """Reserve a name in a bucket. False if it is taken."""
    return not store.list(f"{name}/") and store.put_if(f"{name}/.begun", b"") is not None


def exclusive_folder(project: Path, stem: str, store: Store | None = None) -> Path:
    """Create the next of stem, stem2, stem3, ... exclusively, also in a bucket, so that no two commands share it."""
    project.mkdir(parents=True, exist_ok=True)
    names = [entry.name for entry in store.list()] if store else [path.name for path in project.iterdir()]
    number = 0  # the highest one in use
    for name in names:
        match = re.fullmatch(rf"{re.escape(stem)}(\d*)/?", name)
        if match:
            number = max(number, int(match[1] or 1))  # the first has no number
    while True:
        number += 1
        folder = project / (stem if number == 1 else f"{stem}{number}")
        if store and not _claim(store, folder.name):
            continue
        if store and folder.exists():  # removed from the bucket
            move_aside(folder)
        with suppress(FileExistsError):
            folder.mkdir()
            return folder


def move_aside(folder: Path) -> Path:
    """Rename a folder to NAME.oldN. Returns its new path."""
    number = 1
    while folder.with_name(f"{folder.name}.old{number}").exists():
        number += 1
    return folder.rename(folder.with_name(f"{folder.name}.old{number}"))


def lock_file(file: IO[Any], wait_seconds: float = 0.0) -> bool:
    """Lock a file until it is closed or this process dies. False if another process has locked it.

    `flock` excludes other processes. It cannot be asked whether a file is locked, so a second lock, of the kind that
    can, tells it to readers (`is_held`). Both belong to the open file.

    Args:
        wait_seconds: how long to try again while another process holds the lock.

    Raises:
        InputError: if its file system has no locks.
    """
    try:
        if not wait_for_lock(file, wait_seconds):
            return False
        with suppress(OSError):  # a kernel without this kind
            fcntl.fcntl(file, fcntl.F_OFD_SETLK, _WHOLE_FILE)
        return True
    except OSError as error:
        raise InputError(f"{file.name}: this file system cannot lock files ({error.strerror or error}), and without "
                         "locks two commands would train the same run; mount it with locks (Lustre: -o flock; NFS: not "
                         "nolock), or give a --storage-path on another one") from None


def is_held(folder: Path) -> bool:
    """Whether a living process has locked this run folder. It writes nothing, and takes no lock: a reader never keeps a
    command from its run."""
    with suppress(FileNotFoundError), (folder / DRIVER_LOCK).open("rb") as lock:
        try:
            answer = fcntl.fcntl(lock, fcntl.F_OFD_GETLK, _WHOLE_FILE)
        except OSError:  # a kernel without this kind: a shared lock for an instant needs no write access either
            return not try_lock(lock, fcntl.LOCK_SH)
        kind, *_ = struct.unpack_from("h", answer)
        return bool(kind != fcntl.F_UNLCK)
    return False
