"""The driver's side of a run's records: opens the log before training, and closes everything in the right order."""

from __future__ import annotations

import io
import os
import sys
import uuid
from collections.abc import Mapping
from pathlib import Path
from types import TracebackType
from typing import Any

from ray_yolo.config.placement import Placement
from ray_yolo.config.recipe import resolved_batch
from ray_yolo.data.index import survey
from ray_yolo.engine.build import Job
from ray_yolo.engine.checkpoint import read_record
from ray_yolo.redact import printable, redact
from ray_yolo.runlog.events import Event, best_row, epoch_rows, read_events, surviving
from ray_yolo.runlog.mlflow import read_run_file, tracking_uri
from ray_yolo.runlog.plots import draw_plots
from ray_yolo.runlog.projections import Records
from ray_yolo.runlog.recorder import LocalRecorder, close_recorder, emitter, flush_recorder, start_recorder
from ray_yolo.runlog.registry import log_model
from ray_yolo.runlog.results_files import EVENTS_FILE, replace_text, write_options
from ray_yolo.runlog.run_dir import Run, lasting_folder, storage_folder
from ray_yolo.structures import AnnotationIndex


class Bookkeeping:
    """Context of a training: `recorder` and `emit` write its log; leaving says how it ended and brings all up to date.

    Args:
        local: write from a thread of this process instead of from a Ray actor.
        quiet: print nothing.
        link: `parent_run_id` and `tags` of the MLflow run.
    """

    def __init__(self, run: Run, job: Job, placement: Placement, *, local: bool, quiet: bool,
                 link: Mapping[str, Any]) -> None:
        self._run_dir, self._job, self._placement = run.folder, job, placement
        log = run.folder / EVENTS_FILE
        self.recorder = (LocalRecorder if local else start_recorder)(str(log))
        self.emit = emitter(self.recorder)
        write_options(job.recipe, placement, run.folder)
        told = [event for event in read_events(log) if event["type"] == "run"]
        begins = not told
        if begins or told[-1]["command"] != run.record["command"]:  # a fork goes on in its trial's log
            run_id = uuid.uuid4().hex if begins else told[0]["run_id"]
            self.emit("run", run_id=run_id, **_about(run, job, placement))
        stream = io.StringIO() if quiet else sys.stdout
        if lasting_folder() != Path.cwd():
            print(f"this folder is Ray's copy of the job's files and goes with the cluster; stored in {run.folder}",
                  file=stream)
        self._uri = tracking_uri(placement.mlflow_uri, storage_folder(placement), os.environ)
        self._records = Records(run.folder, self._uri, self.emit, stream, **link)
        splits = {"train": job.train, "val": job.val}  # told now that the display listens
        self.emit("dataset", names=list(job.names), splits={name: survey(index) for name, index in splits.items()})
        if begins and (message := write_findings(splits, run.folder)):
            self.emit("warning", message=message)
        if begins and job.recipe.exact and run.record["asked"].get("microbatch") is None:
            batch, micro = resolved_batch(job.recipe)
            self.emit("warning", message=f"exact: microbatch {micro} was chosen by the number of workers of this "
                                         "first start; a new run on another number has the same bits only with "
                                         f"--batch-size {batch} --microbatch {micro}")

    def __enter__(self) -> Bookkeeping:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None) -> None:
        if error is not None:
            status, reason = "stopped", "interrupted"
            if isinstance(error, Exception):
                status, reason = "failed", (str(error).strip() or type(error).__name__).splitlines()[-1]
            self.emit("end", status=status, reason=reason, **_last_place(self._run_dir / EVENTS_FILE))
        plots = error is None and not self._placement.noplots
        flush_recorder(self.recorder)
        best, saved = best_epochs(self._run_dir) if error is None else (None, None)
        if best and saved and saved["epoch"] < best["epoch"]:
            self.emit("warning", message=f"weights/best.pt is of epoch {saved['epoch'] + 1}: those of epoch "
                                         f"{best['epoch'] + 1}, the best one, could not be written")
        self._records.finish(self._draw if plots else lambda: None, flush=lambda: flush_recorder(self.recorder))
        close_recorder(self.recorder)
        if error is None and self._placement.registered_name:
            self._register()

    def _draw(self) -> None:
        """Draw the pictures; those that cannot be drawn are one warning."""
        if failed := draw_plots(self._run_dir, self._job):
            self.emit("warning", message=f"pictures that could not be drawn: {', '.join(failed)}")

    def _register(self) -> None:
        """Put the best weights into the model registry; a server that refuses is a warning, training is done."""
        about = read_run_file(self._run_dir)
        if self._uri is None or about is None:
            print("--register: there is no MLflow run to register from", file=sys.stderr)
            return
        try:
            log_model(self._run_dir, self._uri, about["run_id"], self._placement.registered_name)
        except Exception as problem:  # whatever MLflow raises: the training itself has succeeded
            print(f"--register {self._placement.registered_name}: {redact(str(problem))}", file=sys.stderr)


def best_epochs(run_dir: Path) -> tuple[Event | None, Event | None]:
    """The best epoch of a run, and the one that weights/best.pt is of: an older one if that could not be written."""
    rows = epoch_rows(surviving(read_events(run_dir / EVENTS_FILE)))
    step = read_record(run_dir).get("best")
    return best_row(rows), next((row for row in rows if row["step"] == step), None)


def write_findings(splits: Mapping[str, AnnotationIndex], folder: Path) -> str:
    """Put all that the check of a data set found into findings.txt of a folder; returns a summary, '' for nothing."""
    lines = [printable(f"{split}: {found.where}: {found.what}{' (left out)' if found.dropped else ''}")
             for split, index in splits.items() for found in index.findings]
    if not lines:
        return ""
    replace_text(folder / "findings.txt", "\n".join(lines) + "\n")
    left_out = sum(found.dropped for index in splits.values() for found in index.findings)
    return (f"the check of the data set found {len(lines)} things and left {left_out} out (all in findings.txt; "
            f"training with --strict refuses); the first: {'; '.join(lines[:3])}")


def settle(run_dir: Path, mlflow_uri: str | None, link: Mapping[str, Any]) -> None:
    """Bring the records of a training up to date whose driver was killed for good, as a sweep's scheduler does.

    Nothing is done for one that has ended by itself, or never began.
    """
    log = run_dir / EVENTS_FILE
    events = read_events(log)
    last = next((event["type"] for event in reversed(events) if event["type"] in ("start", "end")), None)
    if not events or last == "end":
        return
    recorder = LocalRecorder(str(log))
    recorder.emit("end", status="stopped", reason="stopped early", **_last_place(log))
    flush_recorder(recorder)
    Records(run_dir, mlflow_uri, recorder.emit, io.StringIO(), **link).finish(lambda: None)
    close_recorder(recorder)


def _about(run: Run, job: Job, placement: Placement) -> dict[str, Any]:
    """The fields of a run's first event, without its `run_id`."""
    return {"name": run.folder.name, "recipe": job.recipe.model_dump(mode="json"),
            "placement": placement.model_dump(mode="json"), "names": list(job.names), "num_images": len(job.train),
            "num_val_images": len(job.val), "num_parameters": run.record["num_parameters"],
            "command": run.record["command"], "provenance": run.record["provenance"]}


def _last_place(log: Path) -> dict[str, Any]:
    """Where the log has got to, for the end of a training that could not say so itself."""
    places = [(event["step"], event["epoch"]) for event in read_events(log) if "step" in event]
    step, epoch = max(places, default=(0, 0))
    return {"step": step, "epoch": epoch}
