"""The desired content of an MLflow run, computed from the event log of a training or the results of a validation.

Nothing here contacts a server. The same log always gives the same plan, so a delivery can be repeated. `mlflow_run`
delivers a plan; `mlflow_client` connects to the server.
"""

from __future__ import annotations

import json
import os
import shlex
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from ray_yolo.config.recipe import Recipe, recipe_digest
from ray_yolo.config.settings import leaves
from ray_yolo.core.events import METRICS, DatasetEvent, EndEvent, EpochEvent, Event, RunEvent, StartEvent
from ray_yolo.core.formatting import format_number
from ray_yolo.core.redact import redact
from ray_yolo.runs.event_log import EVENTS_FILE, Goodput, best_row, durable, epoch_rows, last_of, measure_goodput
from ray_yolo.sinks.metric_names import Metric, loss_column, measured_metrics, metrics, terms_of
from ray_yolo.sinks.mlflow_client import read_run_file

RUN_ID_TAG = "ray_yolo.run_id"
PARENT_TAG = "mlflow.parentRunId"  # a sweep's run: the experiment is its experiment
# Small files first: they arrive even if time runs out.
ARTIFACTS = ("hyp.yaml", "opt.yaml", "results.csv", "report.html", "*.png", "*.jpg", EVENTS_FILE, "weights/best.pt",
             "weights/last.pt")
VALIDATION_ARTIFACTS = ("results.json", "detections.json", "*.png", "*.jpg")

_ENVIRONMENT = {"experiment": "MLFLOW_EXPERIMENT_NAME", "experiment_id": "MLFLOW_EXPERIMENT_ID",
                "parent_run_id": "MLFLOW_RUN_ID"}
NOTE_TAG = "mlflow.note.content"  # what MLflow shows as the run's description
OWN_FILES = "artifacts:"
"""How an address in a description begins that is a file of the same run; `Delivery` knows the run."""
PAGE_LINK = f"[report.html]({OWN_FILES}report.html): all of it on one page."
CONTEXT_TAG, VALIDATION = "mlflow.data.context", "validation"
_CONTEXTS = {"train": "training", "val": VALIDATION}
_LONGEST_PARAM = 6000  # characters, MLflow's limit
_STATUS = {"done": "FINISHED", "failed": "FAILED", "stopped": "KILLED"}


class Point(NamedTuple):
    """One value of one metric, in the order of `mlflow.entities.Metric`."""

    key: str
    value: float
    time_ms: int
    epoch: int  # counted from 1; MLflow's step


class Data(NamedTuple):
    """A data split, with the fields of `mlflow.entities.Dataset`."""

    name: str
    digest: str
    source: str  # JSON
    profile: str  # JSON
    context: str


@dataclass(frozen=True)
class RunPlan:
    """The desired content of an MLflow run."""

    name: str
    experiment: str
    start_ms: int
    params: Mapping[str, str]
    tags: Mapping[str, str]
    data: Sequence[Data] = ()
    points: Sequence[Point] = ()
    status: str = "RUNNING"
    end_ms: int | None = None  # None while it is running
    artifacts: Sequence[str] = ()  # glob patterns of files, delivered after the end of the run
    experiment_id: str = ""  # a user may request it by number


def requested_tracking() -> dict[str, str]:
    """The values of MLFLOW_EXPERIMENT_NAME, MLFLOW_EXPERIMENT_ID and MLFLOW_RUN_ID that are set.

    MLflow's own API continues the run of MLFLOW_RUN_ID. Here it becomes the parent, because each training, sweep and
    validation is a run of its own.
    """
    values = {name: os.environ.get(variable, "").strip() for name, variable in _ENVIRONMENT.items()}
    return {name: value for name, value in values.items() if value}


def plan_run(events: Sequence[Event], parent_run_id: str | None = None) -> RunPlan | None:
    """The plan of a training from its log so far; None before its first `run` event.

    Parameters come from the first `run` event, since MLflow cannot change them; the command comes from the last one.

    Args:
        parent_run_id: the MLflow run of the training's sweep. Weights are left out then: the sweep has the best ones.
    """
    run_events = [event for event in events if isinstance(event, RunEvent)]
    if not run_events:
        return None
    run = run_events[0].model_copy(update={"command": run_events[-1].command})
    starts = [event for event in events if isinstance(event, StartEvent)]
    last = last_of(events, StartEvent, EndEvent) or run
    tracking = run.tracking or requested_tracking()
    end = last if isinstance(last, EndEvent) else None
    rows = epoch_rows(durable(events))
    return RunPlan(
        name=run.name,
        experiment=tracking.get("experiment") or Path(run.placement["project"]).name or "ray_yolo",
        start_ms=_milliseconds(run),
        params=flat_params({**run.recipe, "placement": run.placement}),
        tags={**_tags(run, starts, measure_goodput(events), parent_run_id or tracking.get("parent_run_id")),
              **_note(rows, end)},
        data=_data(run, last_of(events, DatasetEvent)),
        points=[*_points(rows, metrics(terms_of(rows))), *_final_points(rows, end)],
        status=_STATUS[end.status] if end else "RUNNING",
        end_ms=_milliseconds(end) if end else None,
        artifacts=[pattern for pattern in ARTIFACTS if not (parent_run_id and pattern.startswith("weights/"))],
        experiment_id=tracking.get("experiment_id", ""),
    )


def plan_validation(folder: Path, settings: Mapping[str, str], parts: Mapping[str, Mapping[str, float]]) -> RunPlan:
    """The plan of a validation, with the metric names of a training; the experiment has the name of the project.

    Args:
        folder: of its files.
        settings: parameters. `weights` among them identifies the MLflow run of their training, if there is one.
        parts: numbers by name, in groups such as `metrics` and `losses`.
    """
    now = round(time.time() * 1000)
    tags, tracking = source_tags(), requested_tracking()
    if training := read_run_file(Path(settings["weights"]).absolute().parent.parent):
        tags["ray_yolo.training_run_id"] = training["run_id"]
    points = []
    for part, numbers in parts.items():
        for name, value in numbers.items():
            key = loss_column("val", name) if part == "losses" else f"{part}/{name}"
            points.append(Point(key, value, now, 0))
    return RunPlan(folder.name, tracking.get("experiment") or folder.parent.name, now, flat_params(settings), tags,
                   points=points, status="FINISHED", end_ms=now, artifacts=VALIDATION_ARTIFACTS,
                   experiment_id=tracking.get("experiment_id", ""))


def source_tags(command: str = "") -> dict[str, str]:
    """A command as MLflow's source tags, and the parent run that MLFLOW_RUN_ID names.

    Args:
        command: '': that of this process.
    """
    tags = {"mlflow.source.type": "LOCAL", "mlflow.source.name": redact(command or shlex.join(sys.orig_argv))}
    parent = requested_tracking().get("parent_run_id")
    return {**tags, PARENT_TAG: parent} if parent else tags


def flat_params(tree: Mapping[str, Any]) -> dict[str, str]:
    """The values of a nested mapping as text by dotted path, without secrets and within MLflow's limit."""
    return {".".join(keys): redact(str(value))[:_LONGEST_PARAM] for keys, value in leaves(tree)}


def _tags(run: RunEvent, starts: Sequence[StartEvent], cost: Goodput, parent_run_id: str | None) -> dict[str, str]:
    """Tags without a value, such as the commit without git, are left out."""
    tags = {
        RUN_ID_TAG: run.run_id,
        "ray_yolo.recipe_digest": recipe_digest(Recipe.model_validate(run.recipe)),
        "ray_yolo.attempts": str(sum(not start.regrouped for start in starts)),
        "ray_yolo.workers": str(starts[-1].num_workers if starts else 0),
        "mlflow.source.type": "LOCAL",
        "mlflow.source.name": run.command,
        "mlflow.source.git.commit": run.provenance.get("git_commit"),
        PARENT_TAG: parent_run_id,
        "ray_yolo.weights_licence": run.weights_licence,
        **_lineage_tags(run),
        **{f"ray_yolo.{key}": str(value) for key, value in run.provenance.items()},
        **{f"ray_yolo.{name}": f"{value:.6g}" for name, value in vars(cost).items()},
    }
    return {key: value for key, value in tags.items() if value}


def _note(rows: Sequence[EpochEvent], end: EndEvent | None) -> dict[str, str]:
    """The description of a training as a tag: what its best epoch measured, and at the end the page of the run."""
    best = best_row(rows)
    if best is None or not best.metrics:
        return {}
    numbers = ", ".join(f"{name} {format_number(best.metrics.get(name))}" for name in METRICS[::-1])
    line = f"Best epoch {best.epoch + 1} of {rows[-1].epoch + 1}: {numbers}."
    return {NOTE_TAG: "\n\n".join([line, PAGE_LINK] if end else [line])}


def _lineage_tags(run: RunEvent) -> dict[str, str]:
    """The run that the initial weights come from, and its epoch, step and digest there."""
    if run.forked_from is None:
        return {}
    origin = run.forked_from
    return {"ray_yolo.forked_from": origin.run_id, "ray_yolo.forked_from.run": redact(origin.run),
            "ray_yolo.forked_from.epoch": "" if origin.epoch is None else str(origin.epoch + 1),
            "ray_yolo.forked_from.step": str(origin.step), "ray_yolo.forked_from.weights": origin.weights}


def _data(run: RunEvent, dataset: DatasetEvent | None) -> list[Data]:
    """The splits of the data set at the last start. A file `data.yaml` is named after its folder.

    Splits with equal digests are merged, because MLflow would keep only the context of the first one.
    """
    if dataset is None:
        return []
    path = Path(run.recipe["data"])
    name = path.stem
    if name == "data" and path.parent.name:
        name = path.parent.name
    source = json.dumps({"uri": redact(run.recipe["data"])})
    profiles: dict[str, str] = {}  # the keys are digests
    contexts: dict[str, list[str]] = {}
    for split, counts in dataset.splits.items():
        if counts.digest:
            profiles[counts.digest] = json.dumps({"images": counts.images, "boxes": counts.boxes})
            contexts.setdefault(counts.digest, []).append(_CONTEXTS[split])
    logged = []
    for digest, profile in profiles.items():
        context = ", ".join(contexts[digest])
        logged.append(Data(name, digest, source, profile, context))
    return logged


def _points(rows: Sequence[EpochEvent], numbers: Sequence[Metric]) -> Iterator[Point]:
    for row in rows:
        for metric in numbers:
            if (number := metric.of(row)) is not None:
                yield Point(metric.name, number, _milliseconds(row), row.epoch + 1)


def _final_points(rows: Sequence[EpochEvent], end: EndEvent | None) -> Iterator[Point]:
    """What the best epoch measured, once more at the end of the last one.

    MLflow's tables show the newest point of a metric. After the training that is the one of weights/best.pt.
    """
    best = best_row(rows)
    if end is None or end.status != "done" or best is None or best is rows[-1]:
        return
    for point in _points([best], measured_metrics()):
        yield point._replace(time_ms=_milliseconds(end), epoch=rows[-1].epoch + 1)


def _milliseconds(event: Event) -> int:
    return int(event.time * 1000)
