"""What an MLflow run should hold: of a training by its event log alone, of a validation by its numbers.

Nothing here asks a server: the same log gives the same answer on any day, which is what lets a delivery be repeated.
"""

from __future__ import annotations

import json
import shlex
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from ray_yolo.config.recipe import Recipe, recipe_digest
from ray_yolo.core.events import DatasetEvent, EndEvent, EpochEvent, Event, RunEvent, StartEvent
from ray_yolo.core.redact import redact
from ray_yolo.runs.event_log import EVENTS_FILE, best_row, durable, epoch_rows, measure_goodput
from ray_yolo.sinks.metric_names import Metric, best_metrics, loss_column, metrics, terms_of
from ray_yolo.sinks.mlflow_client import read_run_file

RUN_ID_TAG = "ray_yolo.run_id"
# Small files first: if time runs out they are there.
ARTIFACTS = ("hyp.yaml", "opt.yaml", "results.csv", "*.png", "*.jpg", EVENTS_FILE, "weights/best.pt", "weights/last.pt")
VALIDATION_ARTIFACTS = ("results.json", "detections.json", "*.png", "*.jpg")

_CONTEXTS = {"train": "training", "val": "validation"}
_LONGEST_PARAM = 6000  # characters, MLflow's limit
_STATUS = {"done": "FINISHED", "failed": "FAILED", "stopped": "KILLED"}


class Point(NamedTuple):
    """One value of one metric, in the order of `mlflow.entities.Metric`; MLflow's step is our epoch."""

    key: str
    value: float
    time_ms: int
    epoch: int


class Data(NamedTuple):
    """A data split, as `mlflow.entities.Dataset` has it."""

    name: str
    digest: str
    source: str  # JSON
    profile: str  # JSON
    context: str


@dataclass(frozen=True)
class RunPlan:
    """What an MLflow run should hold."""

    name: str
    experiment: str
    start_ms: int
    params: Mapping[str, str]
    tags: Mapping[str, str]
    data: Sequence[Data] = ()
    points: Sequence[Point] = ()
    status: str = "RUNNING"
    end_ms: int | None = None  # None while it goes on
    parent_run_id: str | None = None  # of the sweep that it belongs to; its experiment is used
    artifacts: Sequence[str] = ()  # patterns of files, which are final at its end
    version: str = ""  # of these files: another one for each end; '': unknown


def plan_run(events: Sequence[Event], parent_run_id: str | None = None, tags: Mapping[str, str] | None = None
             ) -> RunPlan | None:
    """The plan of a training by what its log says so far; None before its `run` event.

    The first one counts, because MLflow's parameters cannot change; only the command is the last one's.

    Args:
        parent_run_id: the MLflow run of the training's sweep, which has the weights of the best trial alone.
        tags: further tags.
    """
    told = [event for event in events if isinstance(event, RunEvent)]
    if not told:
        return None
    run = told[0].model_copy(update={"command": told[-1].command})
    starts = [event for event in events if isinstance(event, StartEvent)]
    last = next((event for event in reversed(events) if isinstance(event, (StartEvent, EndEvent))), run)
    end = last if isinstance(last, EndEvent) else None
    rows = epoch_rows(durable(events))
    best = best_row(rows) if end else None
    return RunPlan(
        name=run.name,
        experiment=Path(run.placement["project"]).name or "ray_yolo",
        start_ms=_milliseconds(run),
        params=dict([*leaves(run.recipe, ""), *leaves(run.placement, "placement.")]),
        tags=_tags(run, starts) | {f"ray_yolo.{name}": f"{value:.6g}" for name, value in
                                   vars(measure_goodput(events)).items()} | dict(tags or {}),
        data=_data(run, next((event for event in reversed(events) if isinstance(event, DatasetEvent)), None)),
        points=[*_points(rows, metrics(terms_of(rows))), *_points([best] if best else [], best_metrics())],
        status=_STATUS[end.status] if end else "RUNNING",
        end_ms=_milliseconds(end) if end else None,
        parent_run_id=parent_run_id,
        artifacts=[pattern for pattern in ARTIFACTS if not (parent_run_id and pattern.startswith("weights/"))],
        version=str(last.seq),
    )


def plan_validation(folder: Path, settings: Mapping[str, str], parts: Mapping[str, Mapping[str, float]]) -> RunPlan:
    """The plan of a validation, with the names that a training's run has; the experiment is the project's name.

    Args:
        folder: of its files.
        settings: parameters; `weights` among them, so that the training's run, if there is one, can be named.
        parts: numbers by name: `metrics`, `losses`, and whatever else.
    """
    now, tags = round(time.time() * 1000), source_tags()
    if training := read_run_file(Path(settings["weights"]).absolute().parents[1]):
        tags["ray_yolo.training_run_id"] = training["run_id"]
    points = [Point(loss_column("val", name) if part == "losses" else f"{part}/{name}", value, now, 0)
              for part, numbers in parts.items() for name, value in numbers.items()]
    params = {name: redact(value) for name, value in settings.items()}
    return RunPlan(folder.name, folder.parent.name, now, params, tags, points=points, status="FINISHED",
                   end_ms=now, artifacts=VALIDATION_ARTIFACTS)


def source_tags() -> dict[str, str]:
    """This process's command, in MLflow's terms."""
    return {"mlflow.source.type": "LOCAL", "mlflow.source.name": redact(shlex.join(sys.orig_argv))}


def leaves(tree: Mapping[str, Any], prefix: str) -> Iterator[tuple[str, str]]:
    """The values of a nested mapping by dotted path after the prefix: text without secrets, as long as MLflow takes."""
    for key, value in tree.items():
        if isinstance(value, Mapping):
            yield from leaves(value, f"{prefix}{key}.")
        else:
            yield prefix + key, redact(str(value))[:_LONGEST_PARAM]


def _tags(run: RunEvent, starts: Sequence[StartEvent]) -> dict[str, str]:
    tags = {
        RUN_ID_TAG: run.run_id,
        "ray_yolo.recipe_digest": recipe_digest(Recipe.model_validate(run.recipe)),
        "ray_yolo.attempts": str(sum(not start.regrouped for start in starts)),
        "ray_yolo.workers": str(starts[-1].num_workers if starts else 0),
        "mlflow.source.type": "LOCAL",
        "mlflow.source.name": run.command,
    } | {f"ray_yolo.{key}": str(value) for key, value in run.provenance.items()}
    if commit := run.provenance.get("git_commit"):
        tags["mlflow.source.git.commit"] = str(commit)
    return tags


def _data(run: RunEvent, found: DatasetEvent | None) -> list[Data]:
    """The splits, as the data set was at the last start; a description `data.yaml` has its folder's name.

    Of two with one digest, as where a set is its own validation, MLflow would keep the first one's context alone.
    """
    path = Path(run.recipe["data"])
    name = path.parent.name if path.stem == "data" and path.parent.name else path.stem
    splits = found.splits if found else {}
    profiles = {counts.digest: json.dumps({"images": counts.images, "boxes": counts.boxes})
                for counts in splits.values() if counts.digest}
    return [Data(name, digest, json.dumps({"uri": redact(run.recipe["data"])}), profile,
                 ", ".join(_CONTEXTS[split] for split, counts in splits.items() if counts.digest == digest))
            for digest, profile in profiles.items()]


def _points(rows: Sequence[EpochEvent], numbers: Sequence[Metric]) -> Iterator[Point]:
    for row in rows:
        for metric in numbers:
            if (number := metric.of(row)) is not None:
                yield Point(metric.mlflow, number, _milliseconds(row), row.epoch)


def _milliseconds(event: Event) -> int:
    return int(event.time * 1000)
