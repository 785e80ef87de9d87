"""The numbers of both sides of a comparison, in tables and words. It imports neither torch nor Ray."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

import numpy as np

from ray_yolo.core.events import METRICS
from ray_yolo.core.formatting import align_columns, format_cell, format_count
from ray_yolo.tune.claim import SIDES, PairsClaim, Side, difference_error
from ray_yolo.tune.ledger_events import CountedEvent, FailedEvent
from ray_yolo.tune.pairs import PairResults, pair_of

_REASON_LENGTH = 160


def result_text(line: CountedEvent | FailedEvent) -> str:
    """The result of one training on one line."""
    pair, side = pair_of(line.trial)
    if isinstance(line, FailedEvent):
        reason = " ".join(line.reason.split())[:_REASON_LENGTH]
        return f"pair {pair}, {side}: diverged, counted with a fitness of 0: {reason}"
    return f"pair {pair}, {side}: fitness {line.fitness:.4f} (seed {line.seed})"


def comparison_table(results: PairResults, claim: PairsClaim) -> list[str]:
    """The means of both sides and their difference: fitness, metrics, and the AP of each class; a line each.

    The standard error of a difference is beside it. Only the claim about fitness holds at every look.
    """
    if not claim.pairs:
        return []
    rows: list[tuple[str, ...]] = [("mean of " + format_count(claim.pairs, "pair"), "A", "B", "B - A", "std. error")]
    rows += [_cells(row) for row in compared_metrics(results, claim.pairs)]
    classes = compared_classes(results, claim.pairs)
    if classes:
        rows += [("mAP50-95 by class", "", "", "", "")] + [_cells(row) for row in classes]
    return align_columns(rows)


class ComparedRow(NamedTuple):
    """A number of both sides in the table: fitness, a metric, or the AP of a class."""

    name: str
    a: float  # mean of A
    b: float
    error: float | None  # standard error of the difference; None with a single pair
    pairs: int  # both sides have a value in this many

    @property
    def difference(self) -> float:
        """B less A."""
        return self.b - self.a


def compared_metrics(results: PairResults, pairs: int) -> list[ComparedRow]:
    """The mean fitness and metrics of both sides over the first pairs. A training that diverged counts with 0."""
    rows = [_row("fitness", {key: result.fitness for key, result in results.items()}, results, pairs)]
    for name in METRICS:
        rows.append(_row(name, {key: result.metrics.get(name) for key, result in results.items()}, results, pairs))
    return [row for row in rows if row]


def compared_classes(results: PairResults, pairs: int) -> list[ComparedRow]:
    """The mean AP (mAP50-95) of each class over the first pairs, in the order of the data set.

    A class without labels in the validation set has no AP and no row.
    """
    names: dict[str, None] = {}  # a set that keeps the order
    for (pair, _), result in sorted(results.items()):
        if pair <= pairs:
            names.update(dict.fromkeys(result.classes))
    rows = []
    for name in names:
        values = {key: result.classes.get(name) for key, result in results.items()}
        row = _row(name, values, results, pairs)
        if row:
            rows.append(row)
    return rows


def _row(name: str, values: Mapping[tuple[int, Side], float | None], results: PairResults, pairs: int
         ) -> ComparedRow | None:
    """The row of one number, from its value in each training; None if no pair has it on both sides."""
    a, b = list[float](), list[float]()
    for pair in range(1, pairs + 1):
        first, second = (0.0 if results[pair, side].fitness is None else values[pair, side] for side in SIDES)
        if first is not None and second is not None:
            a.append(first)
            b.append(second)
    if not a:
        return None
    return ComparedRow(name, float(np.mean(a)), float(np.mean(b)), difference_error(a, b), len(a))


def _cells(row: ComparedRow) -> tuple[str, ...]:
    difference = round(row.difference, 4) + 0.0  # without the sign of -0
    return row.name, format_cell(row.a), format_cell(row.b), f"{difference:+.4f}", format_cell(row.error)
