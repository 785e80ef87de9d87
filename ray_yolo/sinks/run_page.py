"""report.html of a run: its result, curves, pictures, recipe and origin on one page, from its folder alone."""

from __future__ import annotations

import math
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

from ray_yolo.config.recipe import Recipe
from ray_yolo.config.settings import leaves
from ray_yolo.core.events import METRICS, DatasetEvent, EndEvent, EpochEvent, Event, RunEvent, ShardEvent
from ray_yolo.core.files import atomic_write
from ray_yolo.core.formatting import format_cell, format_count, format_duration
from ray_yolo.plots.page import Cell, Section, render_page
from ray_yolo.runs.fork import lineage_line
from ray_yolo.runs.run_record import RunRecord, read_record
from ray_yolo.runs.run_state import RunState, read_state
from ray_yolo.sinks.report import dataset_table

REPORT_FILE = "report.html"
_CURVES = ("PR_curve.png", "F1_curve.png", "P_curve.png", "R_curve.png")
_MATRICES = ("confusion_matrix.png", "confusion_matrix_normalized.png")
_CARDS = {"mAP50-95": "mAP50-95", "mAP50": "mAP50", "precision": "precision", "recall": "recall"}
_NOT_OF_THE_RECIPE = ("data", "model")  # the summary names them


def run_page(folder: Path, state: RunState) -> str:
    """The page of a run, from the state of its log, its record and the pictures in its folder."""
    record, dataset = read_record(folder), state.dataset
    return render_page(folder.name, [
        Section("", cards=[*_cards(state), *_time_cards(state)]),
        Section("Classes", table=_class_rows(state.best, dataset)),
        Section("Training", pictures=[folder / "results.png"]),
        Section("Labels and detections of validation", pictures=sorted(folder.glob("val_batch*_pred.jpg"))),
        Section("Origin", facts=list(_origin(state))),
        Section("Time and where it went", facts=list(_times(state))),
        Section("Curves of the best epoch", pictures=[folder / name for name in _CURVES]),
        Section("Confusion of classes", pictures=[folder / name for name in _MATRICES]),
        Section("Recipe: what differs from the defaults",
                table=list(_differences(record)) if isinstance(record, RunRecord) else ()),
        Section("Data", dataset_table(dataset.splits, dataset.names) if dataset else (), [folder / "labels.jpg"]),
        Section("First training batches", pictures=sorted(folder.glob("train_batch*.jpg"))),
    ], _summary(state.run, state.end))


def _summary(run: RunEvent | None, end: EndEvent | None) -> str:
    """The model, the data set, and how the training ended, in one line."""
    if run is None:
        return ""
    ended = "interrupted"
    if end:
        ended = f"{end.status} ({end.reason})" if end.reason else end.status
    return (f"{run.recipe['model']} ({run.num_parameters:,} parameters) on {run.recipe['data']} "
            f"({run.num_images:,} images, {run.num_val_images:,} for validation): {ended}")


def _cards(state: RunState) -> Iterator[tuple[str, str]]:
    """The metrics of the best epoch."""
    best = state.best
    if best is None:
        return
    for name, title in _CARDS.items():
        yield format_cell((best.metrics or {}).get(name)), title
    yield f"{best.epoch + 1} of {len(state.rows)}", "best epoch"


def _time_cards(state: RunState) -> Iterator[tuple[str, str]]:
    rates = [row.images_per_second for row in state.rows if row.images_per_second]
    if rates:
        yield f"{len(rates) / math.fsum(1 / rate for rate in rates):.4g}", "images/s"
    if state.commands:
        yield format_duration(math.fsum(state.commands)), "time"


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


def _origin(state: RunState) -> Iterator[tuple[str, str]]:
    """What one needs to train the same again: command, commit, versions, data, machine."""
    run, start = state.run, state.start
    if run is None:
        return
    versions = {name: str(version) for name, version in run.provenance.items() if name != "git_commit"}
    yield "command", run.command
    yield "commit", str(run.provenance.get("git_commit", ""))
    yield "versions", ", ".join(f"{name} {version}" for name, version in versions.items())
    for name, split in (state.dataset.splits if state.dataset else {}).items():
        yield f"labels of {name}", f"digest {split.digest}" if split.digest else ""
    yield "licence of the initial weights", run.weights_licence
    if run.forked_from:
        yield "initial weights", lineage_line(run.forked_from)
    if start:
        threads = f"{format_count(start.threads, 'thread')} each" if start.threads else ""  # an older log has none
        yield "machine", ", ".join(filter(None, [start.device, format_count(start.num_workers, "worker"), threads]))
    yield "nodes", ", ".join(state.nodes)
    yield "run", run.run_id


def _times(state: RunState) -> Iterator[tuple[str, str]]:
    """The begin and end of a training, and the parts of its time."""
    if state.began is None or state.changed is None:
        return
    yield "from", _date(state.began)
    yield "to", _date(state.changed)
    total = math.fsum(state.commands)
    waits, steps = _shard_seconds(state.shards, {row.epoch for row in state.rows})
    epochs = math.fsum(row.seconds for row in state.rows)
    parts = {"steps": steps - waits, "waiting for images": waits, "validation and saves": epochs - steps,
             "start, end and interruptions": total - epochs}
    if total > 0 and steps > 0:
        for name, seconds in parts.items():
            seconds = max(seconds, 0.0)
            yield name, f"{format_duration(seconds)} ({100 * seconds / total:.0f} %)"
    yield "interruptions", state.goodput.line
    yield "hours", state.usage.line


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
        folder = self._folder.resolve()  # the record process calls it "."
        page = run_page(folder, read_state(folder))
        if not path.is_file() or path.read_text() != page:
            atomic_write(path, page, durable=False)
