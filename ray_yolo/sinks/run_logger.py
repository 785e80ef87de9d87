"""The driver's side of a run's records: opens the log before training, and closes everything in the right order."""

from __future__ import annotations

import io
import os
import sys
import uuid
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from types import TracebackType
from typing import Any, Literal

from ray_yolo.checkpoints.local import steps_of_weights
from ray_yolo.config.placement import Placement
from ray_yolo.config.recipe import resolved_batch
from ray_yolo.core.events import (
    CheckpointEvent,
    DatasetEvent,
    EndEvent,
    EpochEvent,
    RowEvent,
    RunEvent,
    StartEvent,
    WarningEvent,
)
from ray_yolo.core.files import atomic_write
from ray_yolo.core.redact import printable
from ray_yolo.core.structures import AnnotationIndex
from ray_yolo.data.index import survey
from ray_yolo.engine.build import TrainSpec
from ray_yolo.runs.event_log import EVENTS_FILE, best_row, epoch_rows, read_events, surviving
from ray_yolo.runs.folders import lasting_folder, storage_folder
from ray_yolo.runs.recorder import LocalRecorder, close_recorder, emitter, flush_recorder, start_recorder
from ray_yolo.runs.remote_run import RemoteRun, hold
from ray_yolo.runs.run_dir import Run
from ray_yolo.sinks.base import Sinks
from ray_yolo.sinks.console import Console
from ray_yolo.sinks.mlflow_client import tracking_uri
from ray_yolo.sinks.mlflow_run import Mlflow, SystemMetrics, is_asked_for
from ray_yolo.sinks.pictures import PlotSink
from ray_yolo.sinks.registry import Registry
from ray_yolo.sinks.results_csv import ResultsCsv, write_options
from ray_yolo.sinks.tensorboard import TensorBoard, is_installed
from ray_yolo.sinks.upload import UploadSink


class RunLogger:
    """Context of a training: `recorder` and `emit` write its log; leaving says how it ended and brings all up to date.

    Args:
        local: write from a thread of this process instead of from a Ray actor.
        quiet: print nothing.
        link: `parent_run_id` and `tags` of the MLflow run.
    """

    def __init__(self, run: Run, spec: TrainSpec, placement: Placement, *, local: bool, quiet: bool,
                 link: Mapping[str, Any]) -> None:
        self._run_dir = run.folder
        log = run.folder / EVENTS_FILE
        self.recorder = (LocalRecorder if local else start_recorder)(str(log))
        self.emit = emitter(self.recorder)
        write_options(spec.recipe, placement, run.folder)
        told = [event for event in read_events(log) if isinstance(event, RunEvent)]
        begins = not told
        if begins or told[-1].command != run.training.command:  # a fork goes on in its trial's log
            self.emit(_run_event(run, spec, placement, run_id=uuid.uuid4().hex if begins else told[0].run_id))
        stream = io.StringIO() if quiet else sys.stdout
        if lasting_folder() != Path.cwd():
            print(f"this folder is Ray's copy of the job's files and goes with the cluster; stored in {run.folder}",
                  file=stream)
        uri = tracking_uri(placement.mlflow_uri, storage_folder(placement), os.environ)
        mlflow = [Mlflow(run.folder, uri, **link)] if uri else []
        system = [SystemMetrics(run.folder, uri, mlflow[0])] if uri and is_asked_for(os.environ) else []
        # MLflow takes the files along, and the console tells what the others warn of
        self._projections = Sinks(log, [
            ResultsCsv(run.folder), *([TensorBoard(run.folder)] if is_installed() else []),
            *([] if placement.noplots else [PlotSink(run.folder, spec, self.warn)]), *system, *mlflow,
            *([Registry(run.folder, uri, placement.registered_name)] if placement.registered_name else []),
            Console(run.folder, stream, notes=lambda: [note for projection in mlflow for note in projection.notes]),
            *([UploadSink(run.stored)] if run.stored else []),
        ], self.warn)
        splits = {"train": spec.train, "val": spec.val}  # told now that the console listens
        self.emit(DatasetEvent(names=spec.names, splits={name: survey(index)
                                                        for name, index in splits.items()}))
        if begins and (message := write_findings(splits, run.folder)):
            self.warn(message)
        if begins and spec.recipe.exact and run.training.asked.microbatch is None:
            batch, micro = resolved_batch(spec.recipe)
            self.warn(f"exact: microbatch {micro} was chosen by the number of workers of this first start; a new run "
                      f"on another number has the same bits only with --batch-size {batch} --microbatch {micro}")

    def warn(self, message: str) -> None:
        """Put a warning into the log."""
        self.emit(WarningEvent(message=message))

    def __enter__(self) -> RunLogger:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None) -> None:
        if error is not None:
            status: Literal["stopped", "failed"] = "stopped"
            reason = "interrupted"
            if isinstance(error, Exception):
                status, reason = "failed", (str(error).strip() or type(error).__name__).splitlines()[-1]
            self.emit(_end_event(self._run_dir / EVENTS_FILE, status, reason))
        flush_recorder(self.recorder)
        best, saved = best_epochs(self._run_dir) if error is None else (None, None)
        if best and saved and saved.epoch < best.epoch:
            self.warn(f"weights/best.pt is of epoch {saved.epoch + 1}: those of epoch {best.epoch + 1}, the best one, "
                      "could not be written")
        self._projections.finish(lambda: flush_recorder(self.recorder))
        close_recorder(self.recorder)


def best_epochs(run_dir: Path) -> tuple[EpochEvent | None, EpochEvent | None]:
    """The best epoch of a run, and the one that weights/best.pt is of: an older one if that could not be written."""
    rows = epoch_rows(surviving(read_events(run_dir / EVENTS_FILE)))
    step = steps_of_weights(run_dir).get("best")
    return best_row(rows), next((row for row in rows if row.step == step), None)


def write_findings(splits: Mapping[str, AnnotationIndex], folder: Path) -> str:
    """Put all that the check of a data set found into findings.txt of a folder; returns a summary, '' for nothing."""
    lines = [printable(f"{split}: {found.where}: {found.what}{' (left out)' if found.dropped else ''}")
             for split, index in splits.items() for found in index.findings]
    if not lines:
        return ""
    atomic_write(folder / "findings.txt", "\n".join(lines) + "\n", durable=False)
    left_out = sum(found.dropped for index in splits.values() for found in index.findings)
    return (f"the check of the data set found {len(lines)} things and left {left_out} out (all in findings.txt; "
            f"training with --strict refuses); the first: {'; '.join(lines[:3])}")


def finalize_abandoned_run(run_dir: Path, mlflow_uri: str | None, link: Mapping[str, Any]) -> None:
    """Bring the projections of a training up to date whose driver was killed for good, as a sweep's scheduler does.

    Nothing is done for one that has ended by itself, or never began.
    """
    log = run_dir / EVENTS_FILE
    events = read_events(log)
    last = next((event for event in reversed(events) if isinstance(event, (StartEvent, EndEvent))), None)
    if not events or isinstance(last, EndEvent):
        return
    recorder = LocalRecorder(str(log))
    recorder.emit(_end_event(log, "stopped", "stopped early"))
    flush_recorder(recorder)
    Sinks(log, [ResultsCsv(run_dir), *([TensorBoard(run_dir)] if is_installed() else []),
                      *([Mlflow(run_dir, mlflow_uri, **link)] if mlflow_uri else [])],
                lambda text: recorder.emit(WarningEvent(message=text))).finish()
    close_recorder(recorder)
    with suppress(OSError):  # then a store lacks its end
        if isinstance(stored := hold(run_dir), RemoteRun):
            stored.release()


def _run_event(run: Run, spec: TrainSpec, placement: Placement, run_id: str) -> RunEvent:
    return RunEvent(
        run_id=run_id, name=run.folder.name, recipe=spec.recipe.model_dump(mode="json"),
        placement=placement.model_dump(mode="json"), names=spec.names, num_images=len(spec.train),
        num_val_images=len(spec.val), num_parameters=run.training.num_parameters, command=run.training.command,
        provenance=run.training.provenance)


def _end_event(log: Path, status: Literal["stopped", "failed"], reason: str) -> EndEvent:
    """The end of a training that could not say itself where it had got to."""
    told = (event for event in read_events(log) if isinstance(event, (RowEvent, StartEvent, CheckpointEvent, EndEvent)))
    step, epoch = max(((event.step, event.epoch) for event in told), default=(0, 0))
    return EndEvent(status=status, reason=reason, step=step, epoch=epoch)
