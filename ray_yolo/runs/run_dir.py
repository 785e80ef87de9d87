"""Run folders: which one a command continues, which one it makes, and who holds it.

    <storage>/<project>/<name>/run.json    what was asked for and what was resolved, written at the first start
    <storage>/<project>/<name>/.lock       held by the driver while it lives (the kernel lets go when it dies)
    <storage>/<project>/<name>/finished    exists once the training has ended and all is told (or noted as owed)

Without --name the newest unfinished, unlocked run of the same recipe is continued, else a new expN is made by
exclusive create. With --name: unfinished and the same recipe continues, finished is refused unless --exist-ok, or
unless the caller finds that there is more to do.

Looking for a run (`find_run`) and making one (`begin_run`) are two steps, with all other checks of a start between
them: one that is refused leaves nothing.
"""

from __future__ import annotations

import logging
import os
import shlex
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from operator import attrgetter
from pathlib import Path
from typing import IO

from ray_yolo.config.placement import Placement
from ray_yolo.config.recipe import Recipe, given_settings, recipe_digest
from ray_yolo.core.errors import InputError
from ray_yolo.core.files import atomic_write
from ray_yolo.runs.folders import (
    exclusive_folder,
    is_held,
    lock_file,
    move_aside,
    project_folder,
    storage_probe,
    usable_storage,
)
from ray_yolo.runs.record import RECORD_FILE, Record, RunRecord, SweepRecord, read_record, write_record
from ray_yolo.runs.remote_run import RemoteRun, hold
from ray_yolo.runs.working_copy import address_of, create_working_copy, project_address, refresh, working_copy_of_run
from ray_yolo.storage.store import is_address

_logger = logging.getLogger(__name__)


@dataclass
class Run:
    """A run folder that this process holds."""

    folder: Path
    lock: IO[str]
    record: Record | None  # None until it has begun
    stored: RemoteRun | None = None  # where storage is no folder

    @property
    def is_sweep(self) -> bool:
        """Whether it is a sweep's, not a training's."""
        return isinstance(self.record, SweepRecord)

    @property
    def training(self) -> RunRecord:
        """The record of a training that has begun."""
        assert isinstance(self.record, RunRecord)
        return self.record

    def finish(self) -> None:
        """Mark the run as ended."""
        atomic_write(self.folder / "finished", b"")
        if self.stored:
            self.stored.finish()

    def release(self) -> None:
        """Let other processes have the folder."""
        if self.stored:
            self.stored.release()
        self.lock.close()


@usable_storage()
def find_run(recipe: Recipe, placement: Placement, extends: Callable[[Path], bool] | None = None,
             labels: Callable[[], str] | None = None) -> Run | None:
    """The run that this command continues, locked; None if it shall begin one. Nothing is made.

    Args:
        extends: of a sweep: whether there is more to do for the named one of a folder, although it is finished. None
            for a training.
        labels: returns the digest of the training labels, which tells a data set that has moved from another one.

    Raises:
        InputError: if the named run is in use, finished, or of another recipe or kind, or storage cannot be used.
    """
    project = project_folder(placement)
    if address := project_address(placement):
        if placement.exist_ok:
            raise InputError("exist_ok: a run in a store is not moved aside; choose another --name, or remove it there")
        refresh(project, address, is_held, "" if placement.resume else placement.name)
    if placement.resume:
        return _resumed(recipe, placement)
    with storage_probe(placement):
        pass
    moved = partial(_has_moved, recipe, labels)
    if placement.name:
        return _named(project / placement.name, recipe, moved, placement.exist_ok, extends)
    same = next(_unfinished(project, sweeps=extends is not None,
                            wanted=lambda record: record.digest == recipe_digest(recipe)), None)
    return same if same or labels is None else next(_unfinished(project, sweeps=False, wanted=moved), None)


def _has_moved(recipe: Recipe, labels: Callable[[], str] | None, record: Record) -> bool:
    """Whether a training is of this recipe but for the place of its data set, whose labels are the same."""
    if labels is None or not isinstance(record, RunRecord):
        return False
    return (record.digest == recipe_digest(recipe.model_copy(update={"data": record.asked.data}))
            and labels() == record.labels)


@usable_storage()
def begin_run(placement: Placement, record: Record) -> Run:
    """A new run, locked, with its record: of the name asked for, or expN. With `exist_ok` an old one is moved aside.

    Raises:
        InputError: if the name has come into use, or storage cannot be written to.
    """
    project = project_folder(placement)
    folder = project / placement.name if placement.name else exclusive_folder(project, "exp")
    folder.mkdir(parents=True, exist_ok=True)
    if address := project_address(placement):
        create_working_copy(folder, f"{address}/{folder.name}")
    run = _open(folder) if placement.name else _try_open(folder)
    if run is None or (run.record and not placement.name):  # another machine has just begun one of this number
        if run:
            run.release()
        return begin_run(placement, record)
    if run.record:
        run.release()
        if not placement.exist_ok:
            raise InputError(f"name: another process has begun {folder} just now; choose another --name")
        move_aside(folder)
        return begin_run(placement, record)
    run.record = record
    try:
        write_record(folder, record)
        if run.stored:
            run.stored.put_record()
    except OSError:
        with suppress(OSError):  # it may hold what is somebody's
            (folder / ".lock").unlink()
            folder.rmdir()
        run.release()
        raise
    return run


@usable_storage()
def download_run(placement: Placement) -> None:
    """Bring the run of a name, if it lies in a store and nobody trains it, to this machine: its log and its files."""
    if address := project_address(placement):
        folder = project_folder(placement) / placement.name
        refresh(folder.parent, address, is_held, folder.name)
        if (folder / RECORD_FILE).exists() and (run := _try_open(folder)):
            run.release()


def _resumed(recipe: Recipe, placement: Placement) -> Run:
    """The run of `--resume`: its folder, a file in it, its address, or the newest unfinished one for 'auto'."""
    resume = placement.resume
    if resume == "auto":
        project = project_folder(placement)
        if run := next(_unfinished(project, sweeps=False), None):
            return _of_these_settings(recipe, run)
        raise InputError(f"resume: no unfinished run under {project}; name a run folder or a checkpoint")
    path = Path(resume).absolute()
    if is_address(resume):
        create_working_copy(path := working_copy_of_run(resume.rstrip("/"), placement.project), resume.rstrip("/"))
    holder = next((p for p in (path, *path.parents) if (p / RECORD_FILE).is_file()), path)
    if address := address_of(holder):
        refresh(holder.parent, address.rpartition("/")[0], is_held, holder.name)
    if not (holder / RECORD_FILE).is_file():
        raise InputError(f"resume: {resume} is no run folder and lies in none (a run folder holds run.json)")
    if (holder / "finished").exists():
        raise InputError(f"resume: {_shown(holder)} is finished; start a new run with {_go_on_from(holder)}")
    run = _open(holder)
    if isinstance(run.record, SweepRecord):
        run.release()
        raise InputError(f"resume: {holder} is a sweep; run the python -m ray_yolo.tune command again that began it "
                         f"(--space {shlex.quote(run.record.space)}), and it continues")
    return _of_these_settings(recipe, run)


def _of_these_settings(recipe: Recipe, run: Run) -> Run:
    """The run, unless the user has given a setting of which it was begun with another value: that is refused. Its data
    set may have moved."""
    if not isinstance(run.record, RunRecord):
        return run
    asked, decided = run.record.asked, run.record.recipe
    other = [f"{path}={attrgetter(path)(asked)} (not {value})" for path, value in given_settings(recipe).items()
             if path != "data" and value not in (attrgetter(path)(asked), attrgetter(path)(decided))]
    if other:
        run.release()
        raise InputError(f"resume: {_shown(run.folder)} was begun with {', '.join(other)}, and a run keeps its recipe; "
                         f"leave that out, or start a new run with {_go_on_from(run.folder)}")
    return run


def _named(folder: Path, recipe: Recipe, moved: Callable[[Record], bool], exist_ok: bool,
           extends: Callable[[Path], bool] | None) -> Run | None:
    """The run of a name if it can go on; None if it has not begun, or may be moved aside."""
    if not (folder / "run.json").exists():
        return None
    run = _open(folder)
    other = run.is_sweep != (extends is not None)
    finished = not other and (folder / "finished").exists() and not (extends and extends(folder))
    try:
        if (run.record and not finished and not other
                and (run.record.digest == recipe_digest(recipe) or moved(run.record))):
            return run
    except InputError:
        run.release()
        raise
    run.release()
    if exist_ok:
        return None
    kind = "a sweep" if run.is_sweep else "a training"
    state = kind if other else "finished" if finished else "a run of another recipe or data set"
    over = "" if address_of(folder) else "add --exist-ok to start over (the old run is moved aside), "  # see `find_run`
    raise InputError(f"name: {_shown(folder)} is {state}; choose another --name, {over}or continue from its weights "
                     f"with {_go_on_from(folder)}")


def _shown(folder: Path) -> str:
    """A run's folder as its user knows it: of one in a store its address."""
    return address_of(folder) or str(folder)


def _go_on_from(folder: Path) -> str:
    """The flag that starts from a run's weights, as a shell takes it."""
    return f"--weights {shlex.quote(f'{_shown(folder)}/weights/last.pt')}"


def _unfinished(project: Path, *, sweeps: bool, wanted: Callable[[Record], bool] = lambda record: True
                ) -> Iterator[Run]:
    """Sweeps, or trainings, that are wanted, have begun, not ended, and that nobody holds, newest first by their
    records' order. Each is locked. One that is in use, or cannot be opened, is passed over with a warning.
    """
    begun = [p.parent for p in project.glob("*/run.json") if not (p.parent / "finished").exists()]
    for folder in sorted(begun, key=lambda p: (p / "run.json").stat().st_mtime_ns, reverse=True):
        try:
            record = read_record(folder)
            if record is None or isinstance(record, SweepRecord) != sweeps or not wanted(record):
                continue
            run = _try_open(folder)
        except (InputError, PermissionError) as error:
            _logger.warning("%s (until then this run is passed over)", error)
            continue
        if run is not None:
            yield run
        else:
            _logger.warning("%s of the same settings is in use by another process; this command does not wait for it, "
                            "and takes another run (--name chooses which)", folder)


def _try_open(folder: Path) -> Run | None:
    """The run, or None if another process holds it."""
    lock = (folder / ".lock").open("a+")
    try:
        if not lock_file(lock):
            lock.close()
            return None
        stored = hold(folder)
        lock.seek(0)
        lock.truncate()
        lock.write(stored if isinstance(stored, str) else f"{os.uname().nodename} {os.getpid()}\n")
        lock.flush()
        if isinstance(stored, str):
            lock.close()
            return None
        return Run(folder, lock, read_record(folder), stored)
    except BaseException:
        lock.close()
        raise


def _open(folder: Path) -> Run:
    run = _try_open(folder)
    if run is None:
        holder = (folder / ".lock").read_text().strip()
        raise InputError(f"{folder} is being trained by another process ({holder}); wait for it, or choose another "
                         "--name")
    return run
