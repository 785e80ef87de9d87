"""The folders in which runs and results lie: where they are, whether they can be used, and whose a name is."""

from __future__ import annotations

import logging
import os
import re
import tempfile
from collections.abc import Iterable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import IO, Any

from ray_yolo.config.placement import Placement
from ray_yolo.core.errors import InputError, StorageError
from ray_yolo.runs.working_copy import create_working_copy, project_address, working_copy_folder
from ray_yolo.storage.lease import store_time, try_lock
from ray_yolo.storage.store import Store, is_address, open_store

RAYS_COPIES = "/runtime_resources/working_dir_files/"  # where Ray puts what `ray job submit --working-dir` sends
_logger = logging.getLogger(__name__)


@contextmanager
def usable_storage() -> Iterator[None]:
    """Tells what storage refuses as the user's to mend."""
    try:
        yield
    except InputError:
        raise
    except (OSError, ValueError) as error:  # ValueError: a NUL in a path
        place = f"{error.filename}: " if isinstance(error, OSError) and error.filename else ""
        raise StorageError(f"{place}{getattr(error, 'strerror', None) or error}; give a --project and --storage-path "
                           "that runs can be written to") from None


def lasting_folder() -> Path:
    """The current folder; ~/ray-yolo for a job in Ray's copy of its files, which goes when the cluster goes."""
    here = Path.cwd()
    return Path.home() / "ray-yolo" if RAYS_COPIES in here.as_posix() else here


def storage_folder(placement: Placement) -> Path:
    """Absolute folder of all that is stored: --storage-path, else a --project given in full, else what lasts."""
    in_full = placement.project if Path(placement.project).is_absolute() else ""
    path = "" if is_address(placement.storage_path) else placement.storage_path
    return lasting_folder() / (path or in_full)


def project_folder(placement: Placement) -> Path:
    """Absolute folder of runs; of their spools on this machine, where storage is a store.

    Raises:
        InputError: for an address that is none.
    """
    if project_address(placement):
        return working_copy_folder(placement.storage_path) / placement.project
    return storage_folder(placement) / placement.project


@contextmanager
def storage_probe(placement: Placement) -> Iterator[Path | str]:
    """A file, for as long as this lasts, on the storage where a new run would lie; no folder is made for it. Of a store
    its address.

    Raises:
        InputError: if storage cannot be written to, or its files cannot be locked.
    """
    with ExitStack() as stack:
        with usable_storage():
            project = project_folder(placement)
            if address := project_address(placement):
                store_time(open_store(address), "")
            place = next(path for path in (project, *project.parents) if path.exists())
            probe = stack.enter_context(tempfile.NamedTemporaryFile(prefix=".ray_yolo-", dir=place))
            lock_file(probe)
        yield address or Path(probe.name)


@usable_storage()
def output_folder(placement: Placement, sources: Iterable[str | Path] = ()) -> Path:
    """A new folder for the results of a validation or prediction: --name, or its next free number, or expN.

    With `exist_ok` it has that very name; a folder that has it already is moved aside, so that it holds one result.
    Where storage is a store it is a spool, whose name there nobody else gets; `stored_files.put_results` stores it.

    Args:
        sources: absolute paths of what is read, which must not be moved.

    Raises:
        InputError: if storage cannot be written to, or the folder to be moved holds a source or a training, or there is
            that name in the store.
    """
    project, address = project_folder(placement), project_address(placement)
    store = open_store(address) if address else None
    folder = project / placement.name
    if not (placement.name and placement.exist_ok):
        folder = exclusive_folder(project, placement.name or "exp", store)
    elif store and not _claim(store, placement.name):
        raise InputError(f"exist_ok: {address}/{placement.name}: what is in a store is not moved aside; choose another "
                         "--name, or remove it there")
    elif folder.exists() and any(folder.iterdir()):
        held = (path for path in map(str, (*sources, folder / "run.json")) if path.startswith(f"{folder}{os.sep}"))
        if found := next(filter(os.path.exists, held), None):
            raise InputError(f"name: {folder} holds {os.path.relpath(found, folder)}, so it is not moved aside for new "
                             "results; choose another --name or --project")
        _logger.warning("%s: what it held lies in %s now", folder, move_aside(folder))
    folder.mkdir(parents=True, exist_ok=True)
    if address:
        create_working_copy(folder, f"{address}/{folder.name}")
    return folder


def _claim(store: Store, name: str) -> bool:
    """Take a name in a store, unless it is taken."""
    return not store.list(f"{name}/") and store.put_if(f"{name}/.begun", b"") is not None


def exclusive_folder(project: Path, stem: str, store: Store | None = None) -> Path:
    """A folder stem, stem2, stem3, ... made by exclusive create, there too, so that two commands never share one."""
    project.mkdir(parents=True, exist_ok=True)
    names = [entry.name for entry in store.list()] if store else [path.name for path in project.iterdir()]
    matches = (re.fullmatch(rf"{re.escape(stem)}(\d*)/?", name) for name in names)
    number = max((int(match[1] or 1) for match in matches if match), default=0)
    while True:
        number += 1
        folder = project / f"{stem}{number if number > 1 else ''}"
        if store and not _claim(store, folder.name):
            continue
        if store and folder.exists():  # of what is no more in the store
            move_aside(folder)
        try:
            folder.mkdir()
        except FileExistsError:
            continue
        return folder


def move_aside(folder: Path) -> Path:
    """Free the name of a folder. Returns the new one, NAME.oldN."""
    aside = next(p for n in range(1, 10**6) if not (p := folder.with_name(f"{folder.name}.old{n}")).exists())
    return folder.rename(aside)


def lock_file(file: IO[Any]) -> bool:
    """Lock a file until it is closed, or until this process dies. False if another process has locked it.

    Raises:
        InputError: if its file system has no locks.
    """
    try:
        return try_lock(file)
    except OSError as error:
        raise InputError(f"{file.name}: this file system cannot lock files ({error.strerror}), and without locks two "
                         "commands would train the same run; mount it with locks (Lustre: -o flock; NFS: not nolock), "
                         "or give a --storage-path on another one") from None


def is_held(folder: Path) -> bool:
    """Whether a living process holds this run folder."""
    if not (folder / ".lock").exists():
        return False
    with (folder / ".lock").open("a") as lock:
        return not lock_file(lock)
