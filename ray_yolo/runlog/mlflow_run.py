"""What the MLflow run of a training should hold, computed from its event log alone.

Nothing here knows of a server: the same log gives the same answer on any day, which is what lets a delivery be
repeated.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from ray_yolo.config.recipe import Recipe, recipe_digest
from ray_yolo.events import DatasetEvent, EndEvent, EpochEvent, Event, RunEvent, StartEvent
from ray_yolo.redact import redact
from ray_yolo.runlog.event_log import best_row, durable, epoch_rows
from ray_yolo.runlog.interruptions import interruptions
from ray_yolo.runlog.metrics import Metric, best_metrics, metrics, terms_of

RUN_ID_TAG = "ray_yolo.run_id"


_CONTEXTS = {"train": "training", "val": "validation"}
_STATUS = {"done": "FINISHED", "failed": "FAILED", "stopped": "KILLED"}
_LONGEST_PARAM = 6000  # characters, MLflow's limit


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
class Plan:
    """What the MLflow run should hold."""

    name: str
    experiment: str
    start_ms: int
    params: dict[str, str]
    tags: dict[str, str]
    data: list[Data]
    points: list[Point]
    status: str
    end_ms: int | None  # None while training goes on
    version: str  # of the run folder's files: another one for each end of training


def plan_run(events: Sequence[Event]) -> Plan | None:
    """The plan by what the log says so far; None before its `run` event.

    The first one counts, because MLflow's parameters cannot change; only the command is the last one's.
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
    return Plan(
        name=run.name,
        experiment=Path(run.placement["project"]).name or "ray_yolo",
        start_ms=_milliseconds(run),
        params={path: text[:_LONGEST_PARAM] for path, text in _params(run).items()},
        tags=_tags(run, starts) | {f"ray_yolo.{name}": f"{value:.6g}" for name, value in
                                   vars(interruptions(events)).items()},
        data=_data(run, next((event for event in reversed(events) if isinstance(event, DatasetEvent)), None)),
        points=[*_points(rows, metrics(terms_of(rows))), *_points([best] if best else [], best_metrics())],
        status=_STATUS[end.status] if end else "RUNNING",
        end_ms=_milliseconds(end) if end else None,
        version=str(last.seq),
    )


def _params(run: RunEvent) -> dict[str, str]:
    """The recipe by dotted path, and the placement under `placement.`, as text."""
    return dict([*leaves(run.recipe, ""), *leaves(run.placement, "placement.")])


def leaves(tree: Mapping[str, Any], prefix: str) -> Iterator[tuple[str, str]]:
    """The values of a nested mapping as text without secrets, by dotted path after the prefix."""
    for key, value in tree.items():
        if isinstance(value, Mapping):
            yield from leaves(value, f"{prefix}{key}.")
        else:
            yield prefix + key, redact(str(value))


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
