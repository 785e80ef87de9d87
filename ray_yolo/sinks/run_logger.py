"""Logs a training on the driver: opens the event log, runs the sinks, and closes everything in the right order."""

from __future__ import annotations

import io
import sys
import uuid
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Literal

from ray_yolo.checkpoints.local import steps_of_weights
from ray_yolo.config.placement import Placement
from ray_yolo.core.events import (
    CheckpointEvent,
    DatasetEvent,
    EndEvent,
    EpochEvent,
    RowEvent,
    RunEvent,
    StartEvent,
    WarningEvent,
    changed_pictures,
)
from ray_yolo.core.files import atomic_write
from ray_yolo.core.redact import printable
from ray_yolo.core.structures import AnnotationIndex
from ray_yolo.data.index import survey
from ray_yolo.engine.plan import Plan
from ray_yolo.engine.spec import TrainSpec
from ray_yolo.labels import file_lines
from ray_yolo.runs.event_log import EVENTS_FILE, best_row, epoch_rows, last_of, read_events, surviving
from ray_yolo.runs.folders import lasting_folder, storage_folder
from ray_yolo.runs.fork import lineage_line
from ray_yolo.runs.recorder import LocalRecorder, RecorderClient, open_log
from ray_yolo.runs.remote_run import RemoteRun, acquire_run
from ray_yolo.runs.run_dir import Run
from ray_yolo.sinks.base import Sinks
from ray_yolo.sinks.console import Console
from ray_yolo.sinks.mlflow_client import tracking_uri
from ray_yolo.sinks.mlflow_plan import requested_tracking
from ray_yolo.sinks.record_process import PROMPT_SECONDS, RecordProcess, RecordSink, waiting_limit
from ray_yolo.sinks.report import fine_tuning_line, idle_line, licence_line, placement_line, transfer_line
from ray_yolo.sinks.results_csv import ResultsCsv, edited_options, write_options
from ray_yolo.sinks.upload import LogUpload

if TYPE_CHECKING:
    from ray_yolo.runs.recorder import RecorderHandle


class RunLogger:
    """Context manager of a training: `recorder` and `emit` write its log; the exit logs its end and finishes all sinks.

    Args:
        local: write from a thread of this process instead of from a Ray actor.
        quiet: print nothing.
        unused: lines about given settings without effect.
        writer: an actor of a sweep's trials that writes one log after another; None: start a writer for this log, and a
        process that makes its records.
        in_other_sessions: whether the workers may be in other sessions than this process, as those of a Ray that others
        have started; see `RecordProcess`.
    """

    def __init__(self, run: Run, spec: TrainSpec, placement: Placement, *, local: bool, quiet: bool,
                 unused: Sequence[str] = (),
                 writer: RecorderHandle | None = None, has_own_records: bool = True,
                 in_other_sessions: bool = False) -> None:
        self._run, self._run_dir = run, run.folder
        log = run.folder / EVENTS_FILE
        uri = tracking_uri(placement.mlflow_uri, storage_folder(placement))
        resolved = placement.model_copy(update={"mlflow_uri": uri or "off"})
        edited = edited_options(spec.recipe, run.folder)
        write_options(spec.recipe, resolved, run.folder)  # before the record process reads it
        events = read_events(log)
        past = [event for event in events if isinstance(event, RunEvent)]
        dataset_before = last_of(events, DatasetEvent)
        is_first_start = not past
        splits = {"train": spec.train, "val": spec.val}
        findings = write_findings(splits, run.folder) if is_first_start else ""
        # What may fail on a full disk comes before: from here on there are threads, which `__exit__` ends.
        self.recorder: LocalRecorder | RecorderClient = LocalRecorder(str(log)) if local else open_log(str(log), writer)
        self.emit = self.recorder.emit
        if is_first_start or past[-1].command != run.training.command:  # a forked trial continues its parent's log
            run_id = uuid.uuid4().hex if is_first_start else past[0].run_id
            self.emit(_run_event(run, spec, placement, run_id, (*_start_notes(run, spec, placement), *unused)))
        stream = io.StringIO() if quiet else sys.stdout
        if lasting_folder() != Path.cwd():
            print("the current folder is Ray's copy of the job's files and is removed with the cluster; the run is in "
                  f"{run.folder}", file=stream)
        # A sweep or comparison has one process for the records of all its trainings.
        self._records = RecordProcess("ray_yolo.sinks.records", run.folder, uri, self.warn,
                                      own_session=in_other_sessions) if has_own_records and not writer else None
        self._is_interrupted = False
        self._console = Console(run.folder, stream, notes=self._notes, plots=not placement.noplots, uri=uri)
        self._sinks = Sinks(log, [
            *([RecordSink(self._records, self._waiting_limit)] if self._records else []),
            self._console,
            *([LogUpload(run.remote)] if run.remote else []),
        ], self.warn)
        surveys = {name: survey(index) for name, index in splits.items()}
        self.emit(DatasetEvent(names=spec.names, splits=surveys))  # after the console has started
        if changed := changed_pictures(dataset_before.splits if dataset_before else {}, surveys):
            self.warn(f"pictures of {' and '.join(sorted(changed))} have other sizes or times than when the run was "
                      "started last; if their contents changed, the run continues with other pictures")
        if edited and not is_first_start:
            self.warn(f"hyp.yaml or opt.yaml was edited ({', '.join(edited)}). A run keeps the recipe of its start, so "
                      "both are written again; for another recipe, start a new run with --from")
        if findings:
            self.warn(findings)
        transfer = run.training.transfer
        if is_first_start and transfer and transfer.is_sparse:
            self.warn(transfer_line(transfer, spec.recipe.weights))

    def warn(self, message: str) -> None:
        """Write a warning into the log."""
        self.emit(WarningEvent(message=message))

    def emit_end(self, status: Literal["done", "stopped"], reason: str) -> None:
        """Log the end of a training that was ordered to stop."""
        self.recorder.flush()  # the end repeats the step and epoch of the log
        self.emit(_end_event(self._run_dir / EVENTS_FILE, status, reason))

    def __enter__(self) -> RunLogger:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None) -> None:
        is_interruption = error is not None and not isinstance(error, Exception)  # KeyboardInterrupt, SystemExit
        log = self._run_dir / EVENTS_FILE
        is_in_place = True
        with suppress(OSError):
            is_in_place = self._run.is_in_place
        self._console.closes = is_in_place
        # Where it is not, what the path names is not of this run: nothing is read from it, nor written.
        if is_in_place and is_interruption:
            self.emit(_end_event(log, "stopped", "interrupted"))
        elif is_in_place and error is not None:
            text = str(error).strip() or type(error).__name__
            self.emit(_end_event(log, "failed", text.splitlines()[-1]))
        self._is_interrupted = is_interruption  # before the sinks finish: one of them asks for it
        try:
            self.recorder.flush()
            if error is None:
                with suppress(OSError, ValueError):  # weights that cannot be read are no failure of the training
                    self._warn_of_older_best()
            if is_in_place:
                with suppress(OSError):  # the record process may be at work still, but the caller reads the table
                    ResultsCsv(self._run_dir).update(read_events(log), ended=True)
            self._sinks.finish(self.recorder.flush)
        finally:
            self.recorder.close()

    def _warn_of_older_best(self) -> None:
        best, saved = best_epochs(self._run_dir)
        if best and saved and saved.epoch < best.epoch:
            self.warn(f"weights/best.pt is of epoch {saved.epoch + 1}: the best weights, of epoch {best.epoch + 1}, "
                      "could not be written")

    def _waiting_limit(self) -> float:
        return min(waiting_limit(), PROMPT_SECONDS) if self._is_interrupted else waiting_limit()

    def _notes(self) -> list[str]:
        """What the console prints last."""
        rest = self._records.describe_rest() if self._records else ""
        return [rest] if rest else []


def best_epochs(run_dir: Path) -> tuple[EpochEvent | None, EpochEvent | None]:
    """(best epoch of a run, epoch of weights/best.pt); the latter is older if the best weights could not be written."""
    rows = epoch_rows(surviving(read_events(run_dir / EVENTS_FILE)))
    step = steps_of_weights(run_dir).get("best")
    return best_row(rows), next((row for row in rows if row.step == step), None)


def write_findings(splits: Mapping[str, AnnotationIndex], folder: Path) -> str:
    """Write all findings of the data set check, and all files of its notes, to findings.txt in a folder. Returns a
    summary of the findings, '' without any."""
    lines: list[str] = []
    others: list[str] = []
    left_out = 0
    for split, index in splits.items():
        for finding in index.findings:
            suffix = " (left out)" if finding.dropped else ""
            lines.append(printable(f"{split}: {finding.where}: {finding.what}{suffix}"))
            left_out += finding.dropped
        others += [printable(f"{split}: {line}") for line in file_lines(index)]
    if lines or others:
        atomic_write(folder / "findings.txt", "\n".join([*lines, *others]) + "\n", durable=False)
    if not lines:
        return ""
    return (f"the check of the data set found {len(lines)} things and left {left_out} out (all in findings.txt; "
            f"training with --strict refuses); the first: {'; '.join(lines[:3])}")


def finalize_abandoned_run(run_dir: Path) -> None:
    """Log the end of a training whose driver was killed and does not continue, as by a sweep's scheduler.

    A training that has ended, or that never started, stays as it is.
    """
    log = run_dir / EVENTS_FILE
    events = read_events(log)
    if not events or isinstance(last_of(events, StartEvent, EndEvent), EndEvent):
        return
    recorder = LocalRecorder(str(log))
    recorder.emit(_end_event(log, "stopped", "stopped early"))
    recorder.close()
    with suppress(OSError):  # then the bucket lacks the end of the log
        if isinstance(remote := acquire_run(run_dir), RemoteRun):
            remote.release()


def _run_event(run: Run, spec: TrainSpec, placement: Placement, run_id: str, notes: tuple[str, ...]) -> RunEvent:
    return RunEvent(
        run_id=run_id, name=run.folder.name, recipe=spec.recipe.model_dump(mode="json"),
        placement=placement.model_dump(mode="json"), names=spec.names, num_images=len(spec.train),
        num_val_images=len(spec.val), num_parameters=run.training.num_parameters, command=run.training.command,
        provenance=run.training.provenance, notes=notes,
        tracking=requested_tracking(), forked_from=run.training.forked_from,
        weights_licence=run.training.weights_licence)


def _start_notes(run: Run, spec: TrainSpec, placement: Placement) -> tuple[str, ...]:
    """What the user must know of a start: settings that follow the placement, workers without work, and initial
    weights."""
    record = run.training
    notes = [placement_line(record.asked, record.recipe), fine_tuning_line(record.asked, record.recipe)]
    if not run.has_checkpoints:  # The workers that wait are those of the first epochs.
        notes.append(idle_line(Plan(spec.recipe, len(spec.train)), placement.max_workers))
    if record.forked_from:
        notes.append(lineage_line(record.forked_from))
    if record.transfer:
        notes.append(record.transfer.note)
        if not record.transfer.is_sparse:  # else it is a warning
            notes.append(transfer_line(record.transfer, record.recipe.weights))
    notes.append(licence_line(record.weights_licence, record.recipe.weights))
    return tuple(note for note in notes if note)


def _end_event(log: Path, status: Literal["done", "stopped", "failed"], reason: str) -> EndEvent:
    """The end of a training that did not log it: with the last step and epoch of its log."""
    types = (RowEvent, StartEvent, CheckpointEvent, EndEvent)
    steps = ((event.step, event.epoch) for event in read_events(log) if isinstance(event, types))
    step, epoch = max(steps, default=(0, 0))
    return EndEvent(status=status, reason=reason, step=step, epoch=epoch)
