"""Makes the records of a run from its event log, in a process of its own: `python -m ray_yolo.sinks.records RUN`.

    results.csv, TensorBoard's files, pictures, the MLflow run, the registered model, the files in the bucket

Each record is an object with `update(events, ended)`, which compares the record with the log and makes it so. It is
called again after new events, and after a failure until it succeeds. What is pending is therefore what the log has and
the record lacks: a process that was killed, a server that was away, and a call of `ray_yolo.sync` are the same case.

The driver starts the process after the first step (`record_process`). The process runs at idle priority. It ends when
the log has ended and all records hold. It works in the run folder as its current folder: if the folder is moved, the
records follow; if it is removed, the process ends. The file `.records` is locked while a process makes the records of a
run. It says how much of the log they hold once they are complete; the process that makes them empties it first.
"""

from __future__ import annotations

import json
import os
import select
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import IO, Any, NamedTuple, Protocol, TypeVar

import yaml

from ray_yolo.checkpoints.layout import DRIVER_LOCK
from ray_yolo.config.placement import split_names
from ray_yolo.core.errors import InputError, RayYoloError
from ray_yolo.core.events import (
    CheckpointEvent,
    DatasetEvent,
    EndEvent,
    EpochEvent,
    Event,
    RunEvent,
    StartEvent,
    StepEvent,
    WarningEvent,
)
from ray_yolo.core.files import clear_temporary
from ray_yolo.core.garbage import collect_rarely
from ray_yolo.core.redact import reason_of, redact
from ray_yolo.core.system import set_priority
from ray_yolo.runs.event_log import EVENTS_FILE, EventLog, follow
from ray_yolo.runs.folders import is_held, lock_file
from ray_yolo.runs.run_record import RECORD_FILE
from ray_yolo.runs.working_copy import address_of
from ray_yolo.sinks.base import History, Record, Tell, ignore
from ray_yolo.sinks.mlflow_client import OPTIONS_FILE, is_copy, read_run_file
from ray_yolo.sinks.results_csv import ResultsCsv
from ray_yolo.sinks.retry import LONGEST_PAUSE_SECONDS, Retry, Warn
from ray_yolo.sinks.tensorboard import TensorBoard, is_installed
from ray_yolo.sinks.trackers import TrackerRecord

T = TypeVar("T")

LOCK_FILE = ".records"
URI_VARIABLE = "RAY_YOLO_RECORDS_URI"
"""Environment of the process: the MLflow server. It is no argument, because it may contain secrets."""
END = b"end\n"
"""What the driver writes to the process when the log is complete."""
INCOMPLETE = 3
"""Exit status of a process that gives up records which it cannot make."""

_TICK_SECONDS = 1.0
_RETRY_SECONDS = 600.0  # records that fail are tried this long after the end; later by sync or the next training
_LOCK_SECONDS = 120.0  # another process may take this long to complete the records of a run
_CPU_SHARE = 0.04  # records take this share of a core while training runs, but each is made at least once a minute


@dataclass(frozen=True)
class RecordSettings:
    """Which records a run has."""

    uri: str | None  # the MLflow server's; None: no tracking
    plots: bool = True
    registered_name: str = ""
    address: str = ""  # a run in a bucket has one
    trackers: tuple[str, ...] = ()  # the names of their entry points
    data_folders: tuple[Path, ...] = ()  # a relative path of the data set may start there


def read_settings(folder: Path, uri: str | None, start: Path) -> RecordSettings:
    """The settings of the run in a folder, from its opt.yaml.

    Args:
        uri: the MLflow server to use.
        start: the folder in which the command was started, as far as known.

    Raises:
        InputError: if opt.yaml cannot be read. Without the file there are no trackers and no registered model.
    """
    file = folder.resolve() / OPTIONS_FILE
    placement: dict[str, Any] = {}
    try:
        placement = dict(yaml.safe_load(file.read_text())["placement"])
    except FileNotFoundError:  # of an earlier version, or the folder was removed
        pass
    except (OSError, yaml.YAMLError, ValueError, LookupError, TypeError) as error:  # an empty file is None: a TypeError
        raise InputError(f"{file}: does not say which records the run has ({reason_of(error)}); restore it from a "
                         "copy, or remove it to do without trackers and a registered model") from None
    return RecordSettings(
        uri=uri, plots=not placement.get("noplots") and (folder / RECORD_FILE).exists(),
        registered_name="" if uri is None and is_copy(folder) else placement.get("registered_name") or "",
        address=address_of(folder),
        trackers=() if is_copy(folder) else split_names(placement.get("trackers") or ""),
        data_folders=(start, *folder.resolve().parents))


def build_records(folder: Path, settings: RecordSettings, warn: Warn, tell: Tell = ignore) -> list[Record]:
    """The records of a run. Later ones may contain the files of earlier ones.

    Args:
        tell: receives lines for the end of the command, which are no warnings.
    """
    records: list[Record] = [ResultsCsv(folder)]
    if is_installed():
        records.append(TensorBoard(folder))
    if settings.plots:
        from ray_yolo.sinks.pictures import Pictures  # here, as below: these imports take seconds
        from ray_yolo.sinks.run_page import RunPage

        records += [Pictures(folder, settings.data_folders), RunPage(folder)]
    if settings.uri:
        from ray_yolo.sinks.mlflow_run import MlflowRecord

        records.append(MlflowRecord(folder, settings.uri, warn))
    records += [TrackerRecord(name, folder) for name in settings.trackers]
    if settings.registered_name:
        from ray_yolo.sinks.registry import Registry

        records.append(Registry(folder, settings.uri, settings.registered_name, tell))
    if settings.address:
        from ray_yolo.sinks.upload import FileUpload

        records.append(FileUpload(folder, settings.address))
    return records


class Unreadable:
    """In place of the records of a run whose settings cannot be read: it fails, so that they are not complete."""

    name, uses_time = "records", False

    def __init__(self, error: InputError) -> None:
        self._error = error

    def update(self, events: Sequence[Event], ended: bool) -> None:
        """Raises InputError."""
        raise self._error


def records_of(folder: Path, uri: str | None, start: Path, warn: Warn, tell: Tell = ignore) -> list[Record]:
    """The records that the settings of a run ask for; see `read_settings` and `build_records`."""
    try:
        settings = read_settings(folder, uri, start)
    except InputError as error:
        return [Unreadable(error)]
    return build_records(folder, settings, warn, tell)


@dataclass
class _RecordState:
    """A record and how far it is."""

    record: Record
    retry: Retry
    holds: bool = False
    is_final: bool = False  # it holds for the log that has ended, or has failed for it
    rests_until: float = 0.0  # a time of `time.monotonic`: training gets the processor's time first


@dataclass
class RunRecords:
    """The records of one run, made one after the other.

    Args:
        records: in their order.
        warn: receives one text for each record that fails.
    """

    folder: Path
    records: Sequence[Record]
    warn: Warn
    retries: bool = True  # whether `update` is called again after a failure
    states: list[_RecordState] = field(init=False)

    def __post_init__(self) -> None:
        self.states = [_RecordState(each, Retry(each.name, self.warn, is_gone=lambda: self.is_gone))
                       for each in self.records]
        self._new_events = follow(self.folder / EVENTS_FILE)
        self._history = History(RunEvent, DatasetEvent, StartEvent, StepEvent, EpochEvent, CheckpointEvent, EndEvent)
        self.num_bytes = 0
        """Of the log, as far as the records hold it; it may have more already."""

    @property
    def events(self) -> list[Event]:
        """The events so far that records need."""
        return self._history.events

    @property
    def pending(self) -> list[str]:
        """The names of the records that do not hold yet."""
        return [state.record.name for state in self.states if not state.holds]

    @property
    def failing(self) -> list[str]:
        """The pending records whose last update failed."""
        return [state.record.name for state in self.states if not state.holds and state.retry.error]

    @property
    def needs_user(self) -> bool:
        """Whether none of the pending records is tried again: their failures last until the user has done something."""
        return all(state.retry.needs_user for state in self.states if not state.holds)

    def update(self, ended: bool) -> None:
        """Make each record that is due."""
        is_stale = self.read()
        for state in self.states:
            lacks_end = ended and not state.is_final
            if is_stale or lacks_end:
                state.holds = False
            rests = time.monotonic() < state.rests_until and not lacks_end  # at the end training need not be spared
            if state.holds or rests or not state.retry.is_due:
                continue
            self._make(state, ended)
            if state.holds:
                is_stale = True  # the records after it may contain its files

    @property
    def is_final(self) -> bool:
        """Whether all records hold for the log that has ended."""
        return all(state.holds and state.is_final for state in self.states)

    def read(self) -> bool:
        """Read the new events. Returns whether there is more than new steps."""
        is_stale = False
        with suppress(OSError):
            self.num_bytes = (self.folder / EVENTS_FILE).stat().st_size
        for event in next(self._new_events):
            is_stale |= self._history.add(event)
        if is_stale:
            for state in self.states:
                state.retry.note_news()
        return is_stale

    def _make(self, state: _RecordState, ended: bool) -> None:
        start = time.process_time()
        work = partial(state.record.update, self.events, ended)
        state.holds = state.retry.attempt(work, ended=ended, is_last=not self.retries)
        state.is_final = ended
        if state.holds and state.record.uses_time and not ended:
            rest = (time.process_time() - start) / _CPU_SHARE
            state.rests_until = time.monotonic() + min(rest, LONGEST_PAUSE_SECONDS)

    @property
    def is_gone(self) -> bool:
        """Whether the run folder was removed, so that there is nothing to make."""
        return not (self.folder / EVENTS_FILE).exists()


@contextmanager
def locked(folder: Path) -> Iterator[IO[str] | None]:
    """Context in which no other process makes the records of a run; None if one does. It begins without what a killed
    process has left half written.

    Raises:
        FileNotFoundError: if the folder does not exist.
    """
    with (folder / LOCK_FILE).open("a+") as lock:
        is_ours = lock_file(lock)
        if is_ours:
            clear_temporary(folder)
        yield lock if is_ours else None


def note_incomplete(folder: Path) -> None:
    """Note that a run has records to be made: by the process that starts now, or a later one if it is killed.

    A file that is there stays as it is: the process of an earlier command may hold it, and note in it what it has made.
    """
    with suppress(OSError):
        (folder / LOCK_FILE).touch()


def note_complete(lock: IO[str], records: RunRecords, uri: str | None) -> None:
    """Note in the locked file how much of the log all records hold."""
    lock.truncate(0)
    json.dump({"bytes": records.num_bytes, "uri": redact(uri or "")}, lock)
    lock.flush()


def is_complete(folder: Path, uri: str | None) -> bool:
    """Whether it is noted that all records hold the whole log of a run, with an MLflow server."""
    return holds_whole_log(folder) and _read_note(folder)["uri"] == redact(uri or "")


def holds_whole_log(folder: Path) -> bool:
    """Whether it is noted that all records hold the whole log of a run, with whatever MLflow server."""
    with suppress(OSError):
        return bool(_read_note(folder)["bytes"] == (folder / EVENTS_FILE).stat().st_size)
    return False


def _read_note(folder: Path) -> dict[str, Any]:
    """What `note_complete` has noted; before that, without values."""
    nothing = {"bytes": None, "uri": None}
    try:
        return {**nothing, **json.loads((folder / LOCK_FILE).read_text())}
    except (OSError, ValueError, TypeError):  # the file is empty while the records are made
        return nothing


def complete(folder: Path, uri: str | None, start: Path, warn: Warn, tell: Tell = ignore) -> RunRecords | None:
    """Make the records of a run once, now. Returns how far they are; None if another process makes them."""
    with locked(folder) as lock:
        if lock is None:
            return None
        records = RunRecords(folder, records_of(folder, uri, start, warn, tell), warn, retries=False)
        records.update(ended=True)
        if not records.pending:
            note_complete(lock, records, uri)
        return records


def synchronise(folder: Path, uri: str | None) -> int:
    """Complete the records of a run in this process, and print what they are. Returns an exit code: 3 if some cannot be
    completed.

    Raises:
        InputError: if the folder has no log of a training.
        RayYoloError: if the user must change something first.
    """
    if not (folder / EVENTS_FILE).is_file():
        raise InputError(f"{folder}: no event log of a training ({EVENTS_FILE}) here; give a run or a sweep")
    records = wait_for_records(folder, lambda: complete(folder, uri, Path.cwd(), _print_warning, print))
    if records is None:
        return INCOMPLETE
    for state in records.states:
        if isinstance(state.retry.error, RayYoloError):
            raise state.retry.error
    about = read_run_file(folder)
    if uri and about and "MLflow" not in records.pending:
        print(f"run {about['run_id']} at {redact(uri)}")
    if records.pending:
        return INCOMPLETE
    print(f"complete: {', '.join(state.record.name for state in records.states)}")
    return 0


def wait_for_records(folder: Path, complete_once: Callable[[], T | None]) -> T | None:
    """The result of a function that is None while another process makes the records, after waiting for that process.
    None, and a line for the user, if it takes too long."""
    deadline = time.monotonic() + _LOCK_SECONDS
    has_printed = False
    while True:
        result = complete_once()
        if result is not None:
            return result
        if is_held(folder):
            print(f"{folder}: is trained now; the process that makes its records is at work", file=sys.stderr)
            return None
        if time.monotonic() > deadline:
            print(f"{folder}: another process is still at work on its records; try again later", file=sys.stderr)
            return None
        if not has_printed:
            has_printed = True
            print(f"{folder}: waiting for the process that makes its records", file=sys.stderr)
        time.sleep(_TICK_SECONDS)


def _print_warning(text: str) -> None:
    print(f"WARNING: {text}", file=sys.stderr)


class Driver:
    """The command whose records this process makes, on the other ends of stdin and stdout.

    Args:
        folder: of the run; warnings go into its log if the command has ended.
    """

    def __init__(self, folder: Path) -> None:
        self._folder, self._parent = folder, os.getppid()
        self._reported: dict[str, Any] = {}
        self._warned: set[str] = set()
        self.has_ended = False
        """Whether the log is complete, or the command is gone."""

    def wait(self, seconds: float) -> bool:
        """Wait for the end, for at most so many seconds. Returns `has_ended`."""
        if self.has_ended:
            time.sleep(seconds)
        elif select.select([sys.stdin], [], [], seconds)[0]:
            self.has_ended = True  # by its message, or because it closed the pipe
        elif os.getppid() != self._parent:
            self.has_ended = True  # a child of the killed command may hold the pipe
        return self.has_ended

    def warn(self, text: str) -> None:
        """Bring a warning to the user: through the command, else through the log."""
        if text not in self._warned:
            self._warned.add(text)
            if not self._send({"warning": text}):
                self._append(text)

    def tell(self, text: str) -> None:
        """Bring a line to the user, who reads it at the end of the command; after the end it is lost."""
        self._send({"note": text})

    def report(self, pending: Sequence[str], failing: Sequence[str]) -> None:
        """Tell the command which records do not hold yet."""
        report = {"pending": list(pending), "failing": list(failing)}
        if report != self._reported:
            self._reported = report
            self._send(report)

    def _send(self, message: dict[str, Any]) -> bool:
        try:
            os.write(sys.stdout.fileno(), json.dumps(message).encode() + b"\n")
        except OSError:  # the command has closed its end
            return False
        return True

    def _append(self, text: str) -> None:
        """Write a warning into the log, whose only writer has ended, unless another command trains the run."""
        log = self._folder / EVENTS_FILE
        with suppress(OSError), (self._folder / DRIVER_LOCK).open("a") as lock:
            if lock_file(lock) and log.exists():
                writer = EventLog(log)
                writer.append(WarningEvent(message=text))
                writer.close()


class Work(Protocol):
    """The records that a process makes."""

    @property
    def pending(self) -> list[str]:
        """Names of the records that do not hold yet."""

    @property
    def failing(self) -> list[str]:
        """Those whose last update failed."""

    @property
    def needs_user(self) -> bool:
        """Whether none of the pending records is tried again."""

    @property
    def is_gone(self) -> bool:
        """Whether the folder was removed."""

    def update(self, ended: bool) -> None:
        """Make each record that is due."""


def work_until_complete(work: Work, driver: Driver) -> bool:
    """Follow a log until it has ended, and all its records hold or need the user. Returns whether they hold."""
    while not (driver.has_ended or work.is_gone):
        work.update(ended=False)
        driver.report(work.pending, work.failing)
        driver.wait(_TICK_SECONDS)
    set_priority(os.getpid(), "SCHED_OTHER", 0)
    deadline = time.monotonic() + _RETRY_SECONDS
    while not work.is_gone:
        work.update(ended=True)
        driver.report(work.pending, work.failing)
        if work.needs_user or time.monotonic() > deadline:  # also if none is pending
            return not work.pending
        driver.wait(_TICK_SECONDS)
    return True


class ProcessContext(NamedTuple):
    """What a process that makes records is given."""

    folder: Path  # the run's or the sweep's; it is the current folder
    uri: str | None  # the MLflow server's
    start: Path  # the folder in which the command was started
    driver: Driver
    lock: IO[str]  # held


def run_process(make_records: Callable[[ProcessContext], bool]) -> int:
    """Make the records in the folder that the command line names, once no other process does. Returns the exit status.

    Args:
        make_records: follows the log to its end; returns whether all records hold.
    """
    collect_rarely()  # before pictures and MLflow are imported
    start, uri = Path.cwd(), os.environ.pop(URI_VARIABLE, "") or None
    try:
        os.chdir(sys.argv[1])
        folder = Path()
        driver = Driver(folder)
        while True:
            with locked(folder) as lock:
                if lock is not None:
                    lock.truncate(0)
                    holds = make_records(ProcessContext(folder, uri, start, driver, lock))
                    return 0 if holds else INCOMPLETE
            driver.wait(_TICK_SECONDS)  # the process of an earlier start is not done yet
    except FileNotFoundError:  # the folder was removed before this process could begin
        return 0


def _make_records(context: ProcessContext) -> bool:
    """Make the records of a run while its driver trains it."""
    folder, uri, start, driver = context.folder, context.uri, context.start, context.driver
    work = RunRecords(folder, records_of(folder, uri, start, driver.warn, driver.tell), driver.warn)
    holds = work_until_complete(work, driver)
    if holds and not work.is_gone:
        note_complete(context.lock, work, uri)
    return holds


if __name__ == "__main__":
    sys.exit(run_process(_make_records))
