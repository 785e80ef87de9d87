"""Event logs of trainings that did not take place."""

from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, TypeVar

from ray_yolo.config.placement import Placement
from ray_yolo.config.recipe import Recipe
from ray_yolo.core.events import (
    ANCHOR_TERMS,
    CheckpointEvent,
    DatasetEvent,
    EndEvent,
    EpochEvent,
    Event,
    RunEvent,
    SplitCounts,
    StartEvent,
    StepEvent,
    WarningEvent,
)
from ray_yolo.runs.event_log import EVENTS_FILE, EventLog, read_events

STEPS_PER_EPOCH = 10
NAMES = ("circle", "square")
Kind = TypeVar("Kind", bound=Event)


def run(**changes: Any) -> RunEvent:
    recipe = Recipe(epochs=3, batch_size=8, microbatch=4, precision="fp32")
    return RunEvent.model_validate({
        "run_id": "train/exp-1", "name": "exp", "recipe": recipe.model_dump(mode="json"),
        "placement": Placement().model_dump(mode="json"), "names": NAMES, "num_images": 80, "num_val_images": 16,
        "num_parameters": 7_000_000, "command": "python -m ray_yolo.train", "provenance": {"git_commit": "abc123"},
    } | changes)


def dataset(**digests: str) -> DatasetEvent:
    """The data set event of splits with these digests."""
    counts = {"images": 80, "boxes": 99, "per_class": (50, 49), "empty_file": 0, "no_file": 0, "images_left_out": 0,
              "rows_left_out": 0, "looked_for": ()}
    return DatasetEvent(names=NAMES, splits={split: SplitCounts(digest=digest, **counts)
                                             for split, digest in digests.items()})


def start(step: int = 0, **changes: Any) -> StartEvent:
    return StartEvent.model_validate({"step": step, "epoch": step // STEPS_PER_EPOCH, "images_in_epoch": 0,
                                      "num_workers": 2, "epochs": 3, "terms": ANCHOR_TERMS} | changes)


def step(number: int, **changes: Any) -> StepEvent:
    return StepEvent.model_validate({
        "step": number, "epoch": (number - 1) // STEPS_PER_EPOCH, "batch": number - 1, "loss": [0.5, 0.25, 0.125],
        "lr": [0.1, 0.01, 0.01], "images": 8, "images_per_second": 100.0, "wait_seconds": 0.01, "seconds": 0.08,
        "gradient_norm": 1.0, "skipped": False} | changes)


def epoch(number: int, **changes: Any) -> EpochEvent:
    metrics = {"precision": 0.5, "recall": 0.25, "mAP50": 0.125 + number, "mAP50-95": 0.0625}
    return EpochEvent.model_validate({
        "epoch": number, "step": (number + 1) * STEPS_PER_EPOCH, "train": {"box": 0.5, "obj": 0.25, "cls": 0.125},
        "val": {"box": 0.4, "obj": 0.2, "cls": 0.1}, "metrics": metrics, "lr": [0.1, 0.01, 0.001],
        "images_per_second": 100.0, "wait_share": 0.02,
        "per_class": [{"name": name, "images": 9, "labels": 7, **metrics} for name in NAMES],
        "seconds": 60.0, "fitness": 0.07, "best": True, "memory_gb": 1.5} | changes)


def checkpoint(step: int) -> CheckpointEvent:
    return CheckpointEvent(step=step, epoch=step // STEPS_PER_EPOCH, path="x", kinds=("last",))


def end(step: int, status: str = "done", **changes: Any) -> EndEvent:
    return EndEvent.model_validate({"status": status, "step": step, "epoch": step // STEPS_PER_EPOCH - 1} | changes)


def trained_epoch(number: int) -> list[Event]:
    """An epoch and its checkpoint."""
    return [epoch(number), checkpoint((number + 1) * STEPS_PER_EPOCH)]


def write(path: Path, events: Sequence[Event]) -> None:
    """Append events to a log."""
    log = EventLog(path)
    for event in events:
        log.append(event)
    log.close()


def numbered(events: Sequence[Event]) -> list[Event]:
    """Events as they are read back from a log."""
    return [event.model_copy(update={"seq": number, "time": 1000.0 + number}) for number, event in enumerate(events)]


def only(kind: type[Kind], events: Iterable[Event]) -> list[Kind]:
    """The events of one kind."""
    return [event for event in events if isinstance(event, kind)]


def events_of(run_dir: Path, kind: type[Kind]) -> list[Kind]:
    """The events of one kind in a run folder's log."""
    return only(kind, read_events(run_dir / EVENTS_FILE))


def messages(run_dir: Path) -> list[str]:
    """The warnings in a run folder's log."""
    return [event.message for event in events_of(run_dir, WarningEvent)]
