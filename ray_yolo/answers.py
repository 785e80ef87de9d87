"""What commands answer with `--json`, from their results: the documents of `core.documents`, alone on stdout."""

from __future__ import annotations

import os
import sys
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, redirect_stdout
from typing import TYPE_CHECKING

from ray_yolo.core.documents import (
    CheckedPart,
    ComparedNumber,
    CompareDocument,
    Document,
    PredictDocument,
    TrainDocument,
    ValDocument,
    VerifyDocument,
)
from ray_yolo.runs.location import location

if TYPE_CHECKING:  # a command imports its implementation after its flags are parsed
    from ray_yolo.config.commands import PredictConfig, ValConfig
    from ray_yolo.runs.verification import CheckResult
    from ray_yolo.runtime.predictor import PredictResult
    from ray_yolo.runtime.trainer import TrainResult
    from ray_yolo.runtime.validator import ValResult
    from ray_yolo.tune.compared import ComparedRow
    from ray_yolo.tune.comparer import ComparisonResult

_STDOUT, _STDERR = 1, 2


@contextmanager
def answering(wanted: bool) -> Iterator[Callable[[Document], None]]:
    """Context of a command. Yields a function that takes its answer, which is printed at the end if it is wanted.

    All else that is printed in the context goes to stderr then, also from processes that are started in it.
    """
    if not wanted:
        yield lambda document: None
        return
    documents: list[Document] = []
    sys.stdout.flush()
    stdout = os.dup(_STDOUT)
    os.dup2(_STDERR, _STDOUT)
    try:
        with redirect_stdout(sys.stderr):
            yield documents.append
    finally:
        os.dup2(stdout, _STDOUT)
        os.close(stdout)
    for document in documents:
        print(document.model_dump_json(indent=2))


def of_training(result: TrainResult) -> TrainDocument:
    """The answer of `train`."""
    where = location(result.run_dir)
    return TrainDocument(
        state="paused" if result.paused else "finished", run=str(where), best=f"{where}/weights/{result.best.name}",
        last=f"{where}/weights/{result.last.name}", epochs=result.epochs, best_epoch=result.best_epoch,
        fitness=result.best_fitness, metrics=dict(result.metrics))


def of_validation(config: ValConfig, result: ValResult) -> ValDocument:
    """The answer of `val`."""
    return ValDocument.model_validate({
        "folder": str(location(result.folder)), "weights": config.weights, "data": config.data, "split": config.split,
        "metrics": result.metrics, "losses": result.losses, "per_class": result.per_class, "coco": result.coco,
        "speed": result.speed})


def of_prediction(config: PredictConfig, result: PredictResult) -> PredictDocument:
    """The answer of `predict`."""
    counts: Counter[int] = Counter()
    for prediction in result.predictions:
        counts.update(int(row[5]) for row in prediction.detections)
    return PredictDocument(
        folder=str(location(result.folder)), weights=config.weights, source=config.source,
        pictures=sum(not one.error for one in result.predictions), detections=counts.total(),
        per_class={result.names[kind]: counts[kind] for kind in sorted(counts)},
        left_out={one.image: one.error for one in result.predictions if one.error})


def of_verification(run: str, other: str | None, checks: Sequence[CheckResult], comparisons: Sequence[CheckResult],
                    unclear: str) -> VerifyDocument:
    """The answer of `verify`."""
    is_equal = None if other is None else not any(part.problem for part in comparisons)
    return VerifyDocument(
        run=run, other=other, checks=tuple(CheckedPart(what=part.what, problem=part.problem) for part in checks),
        comparisons=tuple(CheckedPart(what=part.what, problem=part.problem) for part in comparisons),
        equal=None if is_equal and unclear else is_equal, unclear=unclear)


def of_comparison(result: ComparisonResult) -> CompareDocument:
    """The answer of `compare`."""
    claim = result.claim
    return CompareDocument(
        folder=str(location(result.folder)), better=claim.better, claim=str(claim), pairs=claim.pairs,
        difference=claim.difference, margin=claim.margin,
        metrics=tuple(map(_number, result.metrics)), classes=tuple(map(_number, result.classes)))


def _number(row: ComparedRow) -> ComparedNumber:
    return ComparedNumber(name=row.name, a=row.a, b=row.b, difference=row.difference, error=row.error, pairs=row.pairs)
