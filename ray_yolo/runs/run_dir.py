"""Run folders: which run a command continues or creates, and the lock that the process of a run holds.

    <storage>/<project>/<name>/run.json    the requested and the resolved recipe, written at the first start
    <storage>/<project>/<name>/.lock       locked by the driver while it lives (the kernel releases it at its death)
    <storage>/<project>/<name>/finished    exists once the training has ended; its records may be completed later

Without --name, a command continues the newest unfinished, unlocked run of the same recipe; if there is none, it creates
a new expN. With --name, it continues an unfinished run of the same recipe. It refuses a finished run, unless --exist-ok
is given or the caller has more to do for it.

Finding a run (`find_run`) and creating one (`begin_run`) are two steps. All other checks of a start happen between
them, so a refused start leaves no files.
"""

from __future__ import annotations

import logging
import os
import re
import shlex
from collections.abc import Callable, Iterator
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from operator import attrgetter
from pathlib import Path
from typing import IO

from ray_yolo.checkpoints.layout import DRIVER_LOCK
from ray_yolo.checkpoints.local import newest_first
from ray_yolo.checkpoints.writer import moved_run
from ray_yolo.config.placement import Placement
from ray_yolo.config.recipe import Recipe, recipe_digest
from ray_yolo.config.settings import leaves
from ray_yolo.core.errors import InputError
from ray_yolo.core.events import CheckpointEvent
from ray_yolo.core.files import atomic_write, is_in_place
from ray_yolo.runs.event_log import EVENTS_FILE, last_of, read_events
from ray_yolo.runs.folders import (
    exclusive_folder,
    is_held,
    lock_file,
    move_aside,
    project_folder,
    storage_probe,
    usable_storage,
)
from ray_yolo.runs.location import location
from ray_yolo.runs.remote_run import RemoteRun, acquire_run
from ray_yolo.runs.run_record import (
    NO_RUN,
    RECORD_FILE,
    DamagedRecordError,
    FolderRecord,
    RunRecord,
    SweepRecord,
    read_record,
    write_record,
)
from ray_yolo.runs.trained_recipe import contradiction
from ray_yolo.runs.working_copy import (
    FINISHED,
    address_of,
    create_working_copy,
    project_address,
    refresh,
    working_copy_of_run,
)
from ray_yolo.storage.store import is_address, open_store

_TRY_SECONDS = 0.5
"""How long a command tries to lock a run: another one may hold the lock for a moment, to look at the run."""

_logger = logging.getLogger(__name__)


@dataclass
class Run:
    """A run folder that this process holds."""

    folder: Path
    lock: IO[str]
    record: FolderRecord | None  # None before `begin_run`
    remote: RemoteRun | None = None  # None for a run that is stored in this folder

    @property
    def is_sweep(self) -> bool:
        """Whether this is the folder of a sweep, not of a training."""
        return isinstance(self.record, SweepRecord)

    @property
    def kind(self) -> str:
        """What the folder is of, in words."""
        if not isinstance(self.record, SweepRecord):
            return "a training"
        return "a comparison" if self.record.is_comparison else "a sweep"

    @property
    def training(self) -> RunRecord:
        """The record of a training after `begin_run`."""
        assert isinstance(self.record, RunRecord)
        return self.record

    def note_seconds(self, seconds: float, warn: Callable[[str], None]) -> None:
        """Note in the record of a sweep how long it has run. An error is a warning: the next note has the time, too."""
        if not isinstance(self.record, SweepRecord):
            return
        self.record = self.record.model_copy(update={"seconds": seconds})
        try:
            self.check_in_place()
            write_record(self.folder, self.record)
        except OSError as error:
            warn(f"warning: {self.folder / RECORD_FILE} cannot be written ({error.strerror or error}): a continued run "
                 "counts less time")

    @property
    def location(self) -> str:
        """The location of the run as shown to users: its address in a bucket, else its folder."""
        return location(self.folder)

    @property
    def is_in_place(self) -> bool:
        """Whether the folder's path still names this run. Raises OSError if storage fails."""
        return self.lock.closed or is_in_place(self.lock)  # closed: the run was released

    def check_in_place(self) -> None:
        """Check that the folder's path still names this run.

        Raises:
            MovedRunError: if it was moved, removed or replaced.
            OSError: if storage fails.
        """
        if not self.is_in_place:
            raise moved_run(self.folder)

    @property
    def is_lost(self) -> bool:
        """Whether another process has taken over the run, so that this one must stop."""
        return self.remote is not None and self.remote.is_lost

    @property
    def has_checkpoints(self) -> bool:
        """Whether there is a checkpoint to continue from, in the folder or in its bucket."""
        if next(newest_first(self.folder), None) is not None:
            return True
        with suppress(OSError):
            return self.remote is not None and not self.remote.checkpoints.is_empty
        return False

    def lost_checkpoints(self) -> str:
        """A warning that training starts again at step 0, although the log has a checkpoint; '': it does not."""
        saved = last_of(read_events(self.folder / EVENTS_FILE), CheckpointEvent)
        if saved is None or self.has_checkpoints:
            return ""
        return (f"this run has saved step {saved.step}, but none of its checkpoints is there any more: it starts again "
                "at step 0 (press Ctrl-C to restore them from a copy first)")

    def finish(self) -> None:
        """Mark the run as ended. Raises MovedRunError as `check_in_place`."""
        self.check_in_place()
        atomic_write(self.folder / FINISHED, b"")
        if self.remote:
            self.remote.finished = True

    def release(self) -> None:
        """Release the run for other processes."""
        if self.remote:
            self.remote.release()
        if not self.lock.closed:
            with suppress(OSError):
                self.lock.truncate(0)  # it named this process
        self.lock.close()


@usable_storage()
def find_run(recipe: Recipe, placement: Placement, extends: Callable[[Path], bool] | None = None,
             labels: Callable[[], str] | None = None, digest: str = "") -> Run | None:
    """The run that this command continues, locked; None if it starts a new one. Creates nothing.

    Args:
        extends: for a sweep, returns whether the finished sweep of this name in a folder has more to do. None for a
        training.
        labels: returns the digest of the training labels. Equal labels identify a data set at a new path.
        digest: that the record of the run has; '': the recipe's.

    Raises:
        InputError: if the named run is in use, finished, or of another recipe or kind, if its run.json contradicts its
        newest checkpoint, or if storage cannot be used.
    """
    run = _found_run(recipe, placement, extends, labels, digest)
    if run and isinstance(run.record, RunRecord):
        problem = contradiction(run.folder, run.record.recipe.model_dump(mode="json"))
        if problem:
            run.release()
            raise InputError(f"{run.folder}: {problem}; restore {RECORD_FILE} from a copy, or start a new run with "
                             f"{_weights_flag(run.folder)}")
    return run


def _found_run(recipe: Recipe, placement: Placement, extends: Callable[[Path], bool] | None,
               labels: Callable[[], str] | None, digest: str) -> Run | None:
    """The result of `find_run` by run.json alone."""
    project, address = project_folder(placement), project_address(placement)
    if address:
        if placement.exist_ok:
            raise InputError("exist_ok: a run in a bucket cannot be moved aside; choose another --name, or remove it "
                             "there")
        refresh(project, address, is_held, "" if placement.resume else placement.name)
    if placement.resume:
        return _resumed(recipe, placement)
    with storage_probe(placement):
        pass
    digest = digest or recipe_digest(recipe)

    def is_same(record: FolderRecord) -> bool:
        return record.digest == digest

    def has_moved(record: FolderRecord) -> bool:
        """Whether a training has this recipe except for the path of its data set, and the same labels."""
        if labels is None or not isinstance(record, RunRecord):
            return False
        recipe_there = recipe.model_copy(update={"data": record.asked.data})
        is_same_otherwise = record.digest == recipe_digest(recipe_there)
        return is_same_otherwise and labels() == record.labels  # the labels come last: reading them takes time

    if placement.name:
        return _named(project / placement.name, lambda record: is_same(record) or has_moved(record),
                      placement.exist_ok, extends)
    same = next(_unfinished(project, is_same, sweeps=extends is not None), None)
    if same or labels is None:
        return same
    return next(_unfinished(project, has_moved, sweeps=False), None)


@usable_storage()
def begin_run(placement: Placement, record: FolderRecord) -> Run:
    """Create a run, locked, with its record, under the requested name or expN. `exist_ok` moves an old run aside.

    Raises:
        InputError: if another process has taken the name since `find_run`, or storage cannot be written to.
    """
    project, address = project_folder(placement), project_address(placement)
    folder = project / placement.name if placement.name else exclusive_folder(project, "exp")
    folder.mkdir(parents=True, exist_ok=True)
    if address:
        create_working_copy(folder, f"{address}/{folder.name}")
    run = _open(folder) if placement.name else _try_open(folder)
    if run and address and run.remote is None:
        run.release()
        raise InputError(f"{folder}: another command has just cleared this copy of {address}/{folder.name} away; run "
                         "the same command again")
    if run is None or (run.record and not placement.name):  # another machine has just created this expN
        if run:
            run.release()
        return begin_run(placement, record)
    if run.record:
        run.release()
        if not placement.exist_ok:
            raise InputError(f"name: another process has just created {folder}; choose another --name")
        move_aside(folder)
        return begin_run(placement, record)
    run.record = record
    try:
        write_record(folder, record)
        if run.remote:  # from now on the run exists there
            open_store(run.remote.address).put(RECORD_FILE, folder / RECORD_FILE)
    except OSError:
        with suppress(OSError):  # the folder may hold a user's files
            (folder / DRIVER_LOCK).unlink()
            folder.rmdir()
        run.release()
        raise
    return run


@usable_storage()
def download_run(placement: Placement) -> None:
    """Download the log and the files of a named run in a bucket to this machine, unless a process trains it.

    Who takes the lease of a run downloads its files; here, it is given back at once.
    """
    address = project_address(placement)
    if not address:
        return
    folder = project_folder(placement) / placement.name
    refresh(folder.parent, address, is_held, folder.name)
    if (folder / RECORD_FILE).exists():
        run = _try_open(folder)
        if run:
            run.release()


def _resumed(recipe: Recipe, placement: Placement) -> Run:
    """The run of `--resume`: a folder, a file in it, an address, or 'auto' for the newest unfinished run."""
    resume = placement.resume
    if resume == "auto":
        project = project_folder(placement)
        newest = next(_unfinished(project, sweeps=False), None)
        if newest is None:
            raise InputError(f"resume: no unfinished run under {project}; name a run folder or a checkpoint")
        return _checked_settings(recipe, newest)
    if is_address(resume):
        address = resume.rstrip("/")
        path = working_copy_of_run(address, placement.project)
        create_working_copy(path, address)
    else:
        path = Path(resume).absolute()
    folder = _run_around(path) or path  # a working copy has no record before it is refreshed
    address = address_of(folder)
    if address:
        project_there = address.rpartition("/")[0]
        refresh(folder.parent, project_there, is_held, folder.name)
    if not (folder / RECORD_FILE).is_file():
        raise InputError(NO_RUN.format(resume))
    if (folder / FINISHED).exists():
        raise InputError(f"resume: {location(folder)} is finished; start a new run with {_weights_flag(folder)}")
    _refuse_older_state(path, folder)
    run = _open(folder)
    if isinstance(run.record, SweepRecord):
        run.release()
        if run.record.is_comparison:
            raise InputError(f"resume: {folder} is a comparison; to continue it, run its python -m ray_yolo.compare "
                             "command again")
        raise InputError(f"resume: {folder} is a sweep; to continue it, run its python -m ray_yolo.tune command again "
                         f"(--space {shlex.quote(run.record.space)})")
    return _checked_settings(recipe, run)


def _refuse_older_state(path: Path, folder: Path) -> None:
    """Refuse a path in a run folder that names an older state than the newest, from which the run continues.

    Raises:
        InputError: for an older checkpoint, or the weights of an epoch.
    """
    names = [each.name for each in newest_first(folder)]
    older = {*names[1:]} & {*path.relative_to(folder).parts}
    if older or re.fullmatch(r"epoch[0-9]+\.pt", path.name):
        newest = names[0] if names else "none"
        raise InputError(f"resume: {path}: a run continues from its newest checkpoint, {newest}; give the run's "
                         "folder, or start another run from these weights with --weights or --from")


def _run_around(path: Path) -> Path | None:
    """The run folder that a path is, or is inside of; None if there is none."""
    for folder in (path, *path.parents):
        if (folder / RECORD_FILE).is_file():
            return folder
    return None


def _checked_settings(recipe: Recipe, run: Run) -> Run:
    """Return the run. Refuses a setting that differs from its start; only the path of the data set may change."""
    if not isinstance(run.record, RunRecord):
        return run
    given = recipe.model_dump(exclude={"data"}, exclude_unset=True)
    other = []
    for path in sorted(".".join(keys) for keys, _ in leaves(given)):
        value_of = attrgetter(path)
        new, asked, resolved = value_of(recipe), value_of(run.record.asked), value_of(run.record.recipe)
        if new not in (asked, resolved):  # what was decided at the start may be given explicitly now
            other.append(f"{path}={asked} (not {new})")
    if other:
        run.release()
        raise InputError(f"resume: {run.location} was started with {', '.join(other)}, and a run keeps its recipe; "
                         f"leave that out, or start a new run with {_weights_flag(run.folder)}")
    return run


def _named(folder: Path, matches: Callable[[FolderRecord], bool], exist_ok: bool,
           extends: Callable[[Path], bool] | None) -> Run | None:
    """The run with a name if it can continue; None if it does not exist yet, or may be moved aside."""
    if not (folder / RECORD_FILE).exists():
        return None
    run = _open(folder)
    try:
        reason = _reason_against(run, matches, extends)
    except InputError:
        run.release()
        raise
    if not reason:
        return run
    run.release()
    if exist_ok:
        return None
    restart = "" if run.remote else "add --exist-ok to start over (the old run is moved aside), "  # see `find_run`
    raise InputError(f"name: {location(folder)} is {reason}; choose another --name, {restart}or continue from its "
                     f"weights with {_weights_flag(folder)}")


def _reason_against(run: Run, matches: Callable[[FolderRecord], bool], extends: Callable[[Path], bool] | None) -> str:
    """Why the command does not continue the run, as what the run is ("finished"); '' if it continues it."""
    is_for_sweep = extends is not None  # the command
    if run.is_sweep != is_for_sweep:
        return run.kind
    if (run.folder / FINISHED).exists():
        has_more_to_do = extends is not None and extends(run.folder)
        if not has_more_to_do:
            return "finished"
    if run.record is None or not matches(run.record):
        return "a run of another recipe or data set"
    return ""


def _weights_flag(folder: Path) -> str:
    """The flag that starts from a run's weights, quoted for a shell."""
    return f"--weights {shlex.quote(f'{location(folder)}/weights/last.pt')}"


def _unfinished(project: Path, matches: Callable[[FolderRecord], bool] = lambda record: True, *, sweeps: bool
                ) -> Iterator[Run]:
    """The matching unfinished sweeps or trainings, each locked, by the time of their records, newest first.

    A run that is in use or cannot be opened is skipped with a warning.
    """
    folders = [record.parent for record in project.glob(f"*/{RECORD_FILE}")]
    unfinished = [folder for folder in folders if not (folder / FINISHED).exists()]
    for folder in sorted(unfinished, key=lambda folder: (folder / RECORD_FILE).stat().st_mtime_ns, reverse=True):
        try:
            record = read_record(folder)
            if record is None or isinstance(record, SweepRecord) != sweeps or not matches(record):
                continue
            run = _try_open(folder)
        except (InputError, PermissionError) as error:
            _logger.warning("%s (until then this run is skipped)", error)
            continue
        if run:
            yield run
        else:
            _logger.warning("%s has the same settings but another process trains it; this command takes another run "
                            "(--name chooses which)", folder)


def _try_open(folder: Path) -> Run | None:
    """The run, locked; None if another process trains it."""
    with ExitStack() as closing:
        lock = closing.enter_context((folder / DRIVER_LOCK).open("a+"))
        if not lock_file(lock, _TRY_SECONDS):
            return None
        remote = acquire_run(folder)  # for a run in a bucket; a text names the other process that holds it
        holder = remote if isinstance(remote, str) else f"{os.uname().nodename} {os.getpid()}\n"
        lock.truncate(0)
        # The holder is for the messages of others. A full disk refuses the run's record as well, and that error counts.
        with suppress(OSError):
            os.write(lock.fileno(), holder.encode())
        if isinstance(remote, str):
            return None
        try:
            record = read_record(folder)
        except DamagedRecordError as error:
            problem = contradiction(folder, error.recipe)
            raise InputError(f"{error}; {problem}") if problem else error from None
        run = Run(folder, lock, record, remote)
        closing.pop_all()  # the run keeps the lock
    return run


def _open(folder: Path) -> Run:
    run = _try_open(folder)
    if run is None:
        holder = (folder / DRIVER_LOCK).read_text().strip()
        raise InputError(f"{folder} is being trained by another process ({holder}); wait for it, or choose another "
                         "--name")
    return run
