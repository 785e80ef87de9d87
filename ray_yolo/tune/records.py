"""Makes the records of a study in a process of its own: `python -m ray_yolo.tune.records STUDY`.

One process follows the ledger and the logs of all trials. It makes the MLflow run of the study first, because those of
the trials are below it, then the records of each trial (`sinks/records`).
"""

from __future__ import annotations

import shlex
import sys
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import IO

import yaml
from pydantic import BaseModel

from ray_yolo.core.events import EndEvent, StartEvent
from ray_yolo.core.files import atomic_write
from ray_yolo.core.redact import redact
from ray_yolo.runs.event_log import EVENTS_FILE, last_of, plain
from ray_yolo.runs.folders import lock_file
from ray_yolo.runs.run_record import LEDGER_FILE, SweepRecord, read_record
from ray_yolo.runs.working_copy import address_of
from ray_yolo.sinks.base import Record, Tell, ignore
from ray_yolo.sinks.mlflow_client import OPTIONS_FILE, read_run_file
from ray_yolo.sinks.records import (
    INCOMPLETE,
    LOCK_FILE,
    ProcessContext,
    RunRecords,
    is_complete,
    locked,
    note_complete,
    records_of,
    run_process,
    wait_for_records,
    work_until_complete,
)
from ray_yolo.sinks.retry import Retry, Warn
from ray_yolo.tune.ledger import begun_of, is_comparison, read_ledger
from ray_yolo.tune.mlflow import Status, StudyMlflow
from ray_yolo.tune.search import TuneConfig


def write_options(folder: Path, config: BaseModel) -> None:
    """Write opt.yaml of a study: its settings and its command, without secrets."""
    options = {**config.model_dump(mode="json"), "command": shlex.join(sys.orig_argv)}
    atomic_write(folder / OPTIONS_FILE, yaml.safe_dump(plain(options), sort_keys=False), durable=False)


def read_options(folder: Path) -> tuple[TuneConfig | None, str]:
    """The settings of a sweep, None for a comparison, and the command of the study.

    If opt.yaml is missing, as in an earlier version, or damaged, what ledger and record contain.
    """
    with suppress(OSError, ValueError, TypeError, LookupError, yaml.YAMLError):  # pydantic's error is a ValueError
        options = dict(yaml.safe_load((folder / OPTIONS_FILE).read_text()))  # an empty file is None: a TypeError
        command = options.pop("command")
        return None if is_comparison(folder) else TuneConfig.model_validate(options), command
    if is_comparison(folder):
        return None, ""
    record = read_record(folder)
    sweep = {"space": record.space, "trials": record.trials} if isinstance(record, SweepRecord) else {}
    recipe = begun_of(read_ledger(folder / LEDGER_FILE)).recipe
    return TuneConfig.model_validate({"recipe": recipe, "sweep": sweep}), ""


@dataclass
class _OpenTrial:
    """The records of a trial that is not complete, with its lock."""

    records: RunRecords
    lock: IO[str]


class StudyRecords:
    """The records of a study, and of its trainings.

    Args:
        uri: the MLflow server; None: no tracking.
        start: the folder in which the command was started.
        warn: receives a text for each record that fails, once.
        tell: receives lines for the end of the command.
    """

    def __init__(self, folder: Path, uri: str | None, start: Path, warn: Warn, tell: Tell = ignore) -> None:
        self._folder, self._uri, self._start, self._warn, self._tell = folder, uri, start, warn, tell
        self._open: dict[str, _OpenTrial] = {}
        self._elsewhere: set[str] = set()  # trials whose records another process makes, such as ray_yolo.sync
        self._parent = StudyMlflow(folder, uri, *read_options(folder), tell) if uri else None
        self._own: list[Record] = []
        if address := address_of(folder):
            from ray_yolo.sinks.upload import FileUpload  # here: it imports torch

            self._own.append(FileUpload(folder, address))
        names = [*(["MLflow"] if self._parent else ()), *(record.name for record in self._own)]
        self._retries = {name: Retry(name, warn, is_gone=lambda: self.is_gone) for name in names}
        self._ledger_size = 0
        self._shown: tuple[int, Status] | None = None
        """Bytes of the ledger and the status that MLflow shows."""

    @property
    def pending(self) -> list[str]:
        """The names of the records that do not hold, in any trial or of the sweep."""
        names = [name for trial in self._open.values() for name in trial.records.pending]
        own = [name for name, retry in self._retries.items() if retry.error]
        return sorted({*names, *own, *self._elsewhere})

    @property
    def failing(self) -> list[str]:
        """Those whose last update failed everywhere."""
        waiting = set(self._elsewhere)
        for trial in self._open.values():
            waiting.update({*trial.records.pending} - {*trial.records.failing})
        return sorted({*self.pending} - waiting)

    @property
    def needs_user(self) -> bool:
        """Whether none of the pending records is tried again."""
        is_tried_again = self._elsewhere or any(
            retry.error and not retry.needs_user for retry in self._retries.values())
        return not is_tried_again and all(trial.records.needs_user for trial in self._open.values())

    @property
    def is_gone(self) -> bool:
        """Whether the folder was removed."""
        return not (self._folder / LEDGER_FILE).exists()

    def update(self, ended: bool) -> None:
        """Make each record that is due."""
        self._update_study("RUNNING")
        self._elsewhere.clear()
        self._forget_removed_trials()
        for folder in sorted((self._folder / "trials").glob("*")):
            try:
                self._update_trial(folder, ended)
            except OSError:
                if folder.exists():  # else someone has removed the trial meanwhile
                    raise
        if ended and self._parent and set(self.pending) <= set(self.failing):  # their runs have their own ends now
            self._update_study(self._parent.last_status())
        for record in self._own:
            retry = self._retries[record.name]
            if retry.is_due:
                retry.attempt(partial(record.update, (), ended), ended=ended)

    def _forget_removed_trials(self) -> None:
        """Forget the trials whose folders someone has removed: nothing about them is pending any more."""
        for name, trial in tuple(self._open.items()):
            if not (self._folder / "trials" / name).exists():
                trial.lock.close()
                del self._open[name]

    def _update_trial(self, folder: Path, ended: bool) -> None:
        name = folder.name
        trial = self._open.get(name)
        if trial is None:
            if not (folder / EVENTS_FILE).exists() or is_complete(folder, self._uri):
                return
            trial = self._open_trial(folder)
            if trial is None:
                self._elsewhere.add(name)
                return
        records = trial.records
        has_ended = ended or _has_ended(records)
        records.update(has_ended)
        if has_ended and records.is_final and (ended or _has_ended(records)):  # it may have been continued meanwhile
            note_complete(trial.lock, records, self._uri)
            trial.lock.close()
            del self._open[name]

    def _open_trial(self, folder: Path) -> _OpenTrial | None:
        """Lock a trial's records; None if another process makes them, such as ray_yolo.sync."""
        with ExitStack() as unless_open:
            lock = unless_open.enter_context((folder / LOCK_FILE).open("a+"))
            if not lock_file(lock):
                return None
            lock.truncate(0)
            made = records_of(folder, self._uri, self._start, self._warn, self._tell)
            records = RunRecords(folder, made, self._warn)
            records.read()
            unless_open.pop_all()  # the lock stays
        trial = self._open[folder.name] = _OpenTrial(records, lock)
        return trial

    def _update_study(self, status: Status) -> None:
        ledger = self._folder / LEDGER_FILE
        size = ledger.stat().st_size if ledger.exists() else 0
        if size != self._ledger_size:
            self._ledger_size = size
            for retry in self._retries.values():
                retry.note_news()
        if self._parent is None or not size or (size, status) == self._shown:
            return
        retry = self._retries["MLflow"]
        if retry.is_due and retry.attempt(partial(self._parent.show, status), ended=status != "RUNNING"):
            self._shown = size, status


def _has_ended(records: RunRecords) -> bool:
    """Whether a trial has ended or pauses, according to the events read so far."""
    return isinstance(last_of(records.events, StartEvent, EndEvent), EndEvent)


def synchronise_study(folder: Path, uri: str | None) -> int:
    """Complete the records of a study and its trainings in this process. Returns an exit code: 3 if some cannot be."""
    def complete_once() -> StudyRecords | None:
        with locked(folder) as lock:
            if lock is None:
                return None
            records = StudyRecords(folder, uri, Path.cwd(), lambda text: print(f"WARNING: {text}", file=sys.stderr),
                                   print)
            records.update(ended=True)
            return records

    records = wait_for_records(folder, complete_once)
    if records is None:
        return INCOMPLETE
    about = read_run_file(folder)
    if uri and about and "MLflow" not in records.pending:
        print(f"run {about['run_id']} at {redact(uri)}")
    if records.pending:
        print(f"not complete: {', '.join(records.pending)}")
        return INCOMPLETE
    print("complete")
    return 0


def _make_records(context: ProcessContext) -> bool:
    """Make the records of a study while its driver runs it."""
    work = StudyRecords(context.folder, context.uri, context.start, context.driver.warn, context.driver.tell)
    return work_until_complete(work, context.driver)


if __name__ == "__main__":
    sys.exit(run_process(_make_records))
