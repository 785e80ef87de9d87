"""The metrics of an epoch with their names: the only table of metric names.

The model family names the loss terms; all other names are the same for every family.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Literal, NamedTuple

from ray_yolo.core.events import ANCHOR_TERMS, METRICS, EpochEvent, Number


class Metric(NamedTuple):
    """One number of an epoch."""

    name: str
    """In MLflow and TensorBoard, which show the groups before the slash in the order of the alphabet."""
    column: str | None
    """Of results.csv, YOLOv5's name; None: it has none."""
    of: Callable[[EpochEvent], Number]


COLUMNS = {"precision": "metrics/precision", "recall": "metrics/recall", "mAP50": "metrics/mAP_0.5",
           "mAP50-95": "metrics/mAP_0.5:0.95"}
"""YOLOv5's names of the metrics."""
FITNESS = "metrics/fitness"


def loss_column(part: str, term: str) -> str:
    """YOLOv5's name of a loss term of `train` or `val`."""
    return f"{part}/{term}_loss"


def terms_of(rows: Sequence[EpochEvent]) -> tuple[str, ...]:
    """The names of the loss terms, as in epoch events."""
    return tuple(rows[0].train) if rows else ANCHOR_TERMS


def metrics(terms: Sequence[str]) -> list[Metric]:
    """All numbers of an epoch, in the order of YOLOv5's results.csv."""
    return [
        *(_loss("train", term) for term in terms),
        *measured_metrics(),
        *(_loss("val", term) for term in terms),
        *(_rate(group) for group in range(3)),
        Metric("x/images_per_second", None, lambda row: row.images_per_second),
        Metric("x/data_wait_share", None, lambda row: row.wait_share),
        Metric("x/gpu_memory_gb", None, lambda row: row.memory_gb),
    ]


def _loss(part: Literal["train", "val"], term: str) -> Metric:
    name = loss_column(part, term)
    return Metric(name, name, lambda row: (getattr(row, part) or {}).get(term))


def _rate(group: int) -> Metric:
    name = f"x/lr{group}"
    return Metric(name, name, lambda row: row.lr[group])


def measured_metrics() -> list[Metric]:
    """What a validation measures: precision, recall, both mAPs, and the fitness that they give."""
    return [*map(_measured, METRICS), Metric(FITNESS, None, lambda row: row.fitness)]


def _measured(name: str) -> Metric:
    return Metric(f"metrics/{name}", COLUMNS[name], lambda row: (row.metrics or {}).get(name))
