"""report.html of a run: its result, curves, pictures, recipe and origin on one page, from its folder alone."""

from __future__ import annotations

import math
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

from ray_yolo.config.recipe import Recipe
from ray_yolo.config.settings import leaves
from ray_yolo.core.events import (
    METRICS,
    DatasetEvent,
    EndEvent,
    EpochEvent,
    Event,
    RunEvent,
    ShardEvent,
    StartEvent,
    WorkerEvent,
)
from ray_yolo.core.files import atomic_write
from ray_yolo.core.formatting import format_cell, format_count, format_duration
from ray_yolo.plots.page import Cell, Section, render_page
from ray_yolo.runs.event_log import EVENTS_FILE, best_row, each_event, epoch_rows, last_of, measure_goodput, surviving
from ray_yolo.runs.fork import lineage_line
from ray_yolo.runs.run_record import RunRecord, read_record
from ray_yolo.runs.usage import measure_usage
from ray_yolo.sinks.report import dataset_table

REPORT_FILE = "report.html"
_CURVES = ("PR_curve.png", "F1_curve.png", "P_curve.png", "R_curve.png")
_MATRICES = ("confusion_matrix.png", "confusion_matrix_normalized.png")
_CARDS = {"mAP50-95": "mAP50-95", "mAP50": "mAP50", "precision": "precision", "recall": "recall"}
_NOT_OF_THE_RECIPE = ("data", "model")  # which the summary names


class _Log(NamedTuple):
    """What the page needs of the log besides the events that the record process keeps."""

    best: EpochEvent | None  # with the results of each class
    shards: list[ShardEvent]
    nodes: list[str]
    commands: list[float]  # seconds of each, to its last event
    usage: str


def run_page(folder: Path, events: Sequence[Event]) -> str:
    """The page of a run, from its log, its record and the pictures in its folder.

    Args:
        events: of the log. They may lack steps, workers and the results of each class, which are read from the file.
    """
    rows = epoch_rows(surviving(events))
    best = best_row(rows)
    log = _read_log(folder / EVENTS_FILE, best)
    run, dataset = last_of(events, RunEvent), last_of(events, DatasetEvent)
    record = read_record(folder)
    return render_page(folder.name, [
        Section("", cards=[*_cards(best, rows), *_time_cards(rows, log)]),
        Section("Classes", table=_class_rows(log.best, dataset)),
        Section("Training", pictures=[folder / "results.png"]),
        Section("Labels and detections of validation", pictures=sorted(folder.glob("val_batch*_pred.jpg"))),
        Section("Origin", facts=list(_origin(events, run, dataset, log))),
        Section("Time and where it went", facts=list(_times(events, rows, log))),
        Section("Curves of the best epoch", pictures=[folder / name for name in _CURVES]),
        Section("Confusion of classes", pictures=[folder / name for name in _MATRICES]),
        Section("Recipe: what differs from the defaults",
                table=list(_differences(record)) if isinstance(record, RunRecord) else ()),
        Section("Data", dataset_table(dataset.splits, dataset.names) if dataset else (), [folder / "labels.jpg"]),
        Section("First training batches", pictures=sorted(folder.glob("train_batch*.jpg"))),
    ], _summary(run, events))


def _read_log(path: Path, best: EpochEvent | None) -> _Log:
    """Read the log once, without keeping its steps."""
    whole, shards, nodes, commands = best, list[ShardEvent](), dict[str, None](), list[list[float]]()
    for event in each_event(path):
        match event:
            case EpochEvent() if best and event.seq == best.seq:
                whole = event
            case ShardEvent():
                shards.append(event)
            case WorkerEvent():
                nodes[event.node] = None
            case DatasetEvent():  # it begins a command
                commands.append([event.time])
        if commands:
            commands[-1][1:] = [event.time]
    usage = measure_usage(each_event(path)).line
    return _Log(whole, shards, list(nodes), [end - begin for begin, end in commands], usage)


def _summary(run: RunEvent | None, events: Sequence[Event]) -> str:
    """The model, the data set, and how the training ended, in one line."""
    if run is None:
        return ""
    end = last_of(events, StartEvent, EndEvent)
    state = "interrupted"
    if isinstance(end, EndEvent):
        state = f"{end.status} ({end.reason})" if end.reason else end.status
    return (f"{run.recipe['model']} ({run.num_parameters:,} parameters) on {run.recipe['data']} "
            f"({run.num_images:,} images, {run.num_val_images:,} for validation): {state}")


def _cards(best: EpochEvent | None, rows: Sequence[EpochEvent]) -> Iterator[tuple[str, str]]:
    """The metrics of the best epoch."""
    if best is None:
        return
    for name, title in _CARDS.items():
        yield format_cell((best.metrics or {}).get(name)), title
    yield f"{best.epoch + 1} of {len(rows)}", "best epoch"


def _time_cards(rows: Sequence[EpochEvent], log: _Log) -> Iterator[tuple[str, str]]:
    rates = [row.images_per_second for row in rows if row.images_per_second]
    if rates:
        yield f"{len(rates) / math.fsum(1 / rate for rate in rates):.4g}", "images/s"
    if log.commands:
        yield format_duration(math.fsum(log.commands)), "time"


def _class_rows(best: EpochEvent | None, dataset: DatasetEvent | None) -> list[list[Cell]]:
    """A header, a row for all classes, and one for each class of the best epoch."""
    if best is None or best.metrics is None:
        return []
    images = dataset.splits["val"].images if dataset and "val" in dataset.splits else None
    total: list[Cell] = ["all", images, sum(row.labels for row in best.per_class)]
    rows: list[list[Cell]] = [["class", "images", "labels", "P", "R", "mAP50", "mAP50-95"]]
    rows.append([*total, *(best.metrics.get(name) for name in METRICS)])
    for row in best.per_class:
        rows.append([row.name, row.images, row.labels, row.precision, row.recall, row.map50, row.map50_95])
    return rows


def _differences(record: RunRecord) -> Iterator[list[Cell]]:
    """A header, and a row for each setting whose value is no default, with its origin."""
    defaults = dict(leaves(Recipe().model_dump(mode="json")))
    asked = dict(leaves(record.asked.model_dump(mode="json")))
    yield ["setting", "value", "default", "origin"]
    for keys, value in leaves(record.recipe.model_dump(mode="json")):
        path = ".".join(keys)
        if value == defaults.get(keys) or path in _NOT_OF_THE_RECIPE:
            continue
        given = "" if asked.get(keys) == defaults.get(keys) else record.origins.get(path, "given")
        decided = "" if value == asked.get(keys) else "decided at the start"
        yield [path, _word(value), _word(defaults.get(keys)), "; ".join(filter(None, (given, decided)))]


def _word(value: object) -> str:
    """A setting as a user writes it; an open one is 'open'."""
    return "open" if value is None else str(value).lower() if isinstance(value, bool) else f"{value}"


def _origin(events: Sequence[Event], run: RunEvent | None, dataset: DatasetEvent | None, log: _Log
            ) -> Iterator[tuple[str, str]]:
    """What one needs to train the same again: command, commit, versions, data, machine."""
    if run is None:
        return
    versions = {name: str(version) for name, version in run.provenance.items() if name != "git_commit"}
    yield "command", run.command
    yield "commit", str(run.provenance.get("git_commit", ""))
    yield "versions", ", ".join(f"{name} {version}" for name, version in versions.items())
    for name, split in (dataset.splits if dataset else {}).items():
        yield f"labels of {name}", f"digest {split.digest}" if split.digest else ""
    yield "licence of the initial weights", run.weights_licence
    if run.forked_from:
        yield "initial weights", lineage_line(run.forked_from)
    start = last_of(events, StartEvent)
    if start:
        threads = f"{format_count(start.threads, 'thread')} each" if start.threads else ""  # an older log has none
        yield "machine", ", ".join(filter(None, [start.device, format_count(start.num_workers, "worker"), threads]))
    yield "nodes", ", ".join(log.nodes)
    yield "run", run.run_id


def _times(events: Sequence[Event], rows: Sequence[EpochEvent], log: _Log) -> Iterator[tuple[str, str]]:
    """The begin and end of a training, and the parts of its time."""
    if not events:
        return
    yield "from", _date(events[0].time)
    yield "to", _date(events[-1].time)
    total = math.fsum(log.commands)
    waits, steps = _shard_seconds(log.shards, {row.epoch for row in rows})
    epochs = math.fsum(row.seconds for row in rows)
    parts = {"steps": steps - waits, "waiting for images": waits, "validation and saves": epochs - steps,
             "start, end and interruptions": total - epochs}
    if total > 0 and steps > 0:
        for name, seconds in parts.items():
            seconds = max(seconds, 0.0)
            yield name, f"{format_duration(seconds)} ({100 * seconds / total:.0f} %)"
    cost = measure_goodput(events)
    yield "interruptions", cost.line if cost.restarts or cost.regroupings else ""
    yield "hours", log.usage


def _shard_seconds(shards: Sequence[ShardEvent], epochs: set[int]) -> tuple[float, float]:
    """(mean seconds in which workers waited for images, seconds of the steps) over some epochs."""
    waits = steps = 0.0
    for epoch in epochs:
        own = {shard.worker: shard for shard in shards if shard.epoch == epoch}.values()
        if own:
            waits += math.fsum(shard.wait_seconds for shard in own) / len(own)
            steps += max(shard.seconds for shard in own)
    return waits, steps


def _date(seconds: float) -> str:
    return time.strftime("%Y-%m-%d %H:%M:%S %Z", time.localtime(seconds))


class RunPage:
    """The record of a run that writes its page when the log has ended. It comes after the pictures that it shows."""

    name, uses_time = "report", True

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def update(self, events: Sequence[Event], ended: bool) -> None:
        """Write the page of an ended log, and again if a picture has been added since."""
        if not ended:
            return
        path = self._folder / REPORT_FILE
        page = run_page(self._folder.resolve(), events)  # the record process calls it "."
        if not path.is_file() or path.read_text() != page:
            atomic_write(path, page, durable=False)
