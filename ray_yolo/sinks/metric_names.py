"""The metrics of an epoch with their names in each sink: the only table of metric names.

The model family names the loss terms; all other names are the same for every family.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Literal, NamedTuple

from ray_yolo.core.events import ANCHOR_TERMS, METRICS, EpochEvent, Number


class Metric(NamedTuple):
    """One number of an epoch."""

    results: str | None
    """Column of results.csv and TensorBoard tag, as in YOLOv5; None: only in MLflow."""
    mlflow: str
    of: Callable[[EpochEvent], Number]


COLUMNS = {"precision": "metrics/precision", "recall": "metrics/recall", "mAP50": "metrics/mAP_0.5",
           "mAP50-95": "metrics/mAP_0.5:0.95"}
"""YOLOv5's names of the metrics."""


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
        *(Metric(COLUMNS[name], f"metrics/{name}", measured(name)) for name in METRICS),
        *(_loss("val", term) for term in terms),
        *(_rate(group) for group in range(3)),
        Metric(None, "perf/img_per_s", lambda row: row.images_per_second),
        Metric(None, "perf/data_wait_frac", lambda row: row.wait_share),
        Metric(None, "sys/gpu_mem_gb", lambda row: row.memory_gb),
    ]


def _loss(part: Literal["train", "val"], term: str) -> Metric:
    name = loss_column(part, term)
    return Metric(name, name, lambda row: (getattr(row, part) or {}).get(term))


def _rate(group: int) -> Metric:
    return Metric(f"x/lr{group}", f"lr/pg{group}", lambda row: row.lr[group])


def best_metrics() -> list[Metric]:
    """The metrics of the best epoch, for the end of training."""
    return [*(Metric(None, f"best/{name}", measured(name)) for name in METRICS),
            Metric(None, "best/fitness", lambda row: row.fitness), Metric(None, "best/epoch", lambda row: row.epoch)]


def measured(name: str) -> Callable[[EpochEvent], Number]:
    """A function that returns a metric of an epoch; None for an epoch without validation."""
    return lambda row: (row.metrics or {}).get(name)
