"""Verify the decisions of a study, and compare two studies line by line."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import zip_longest
from pathlib import Path
from typing import Any

from ray_yolo.core.errors import InputError
from ray_yolo.runs.event_log import check_log
from ray_yolo.runs.run_record import LEDGER_FILE
from ray_yolo.runs.verification import CheckResult, check_files
from ray_yolo.tune.claim import PairsClaim
from ray_yolo.tune.identity import DATA
from ray_yolo.tune.ledger import read_ledger, verify
from ray_yolo.tune.ledger_events import ClaimedEvent, LedgerEvent
from ray_yolo.tune.study import ComparisonEvent, StudyEvent, SweepEvent


def check_study(folder: Path) -> list[CheckResult]:
    """Verify that each line of a ledger matches its checksum and follows from those before it, and the weights of a
    finished sweep."""
    damage = check_log(folder / LEDGER_FILE)
    problems: list[str | None] = [damage] if damage else [*verify(_read(folder))]
    weights = check_files(folder) if (folder / "weights").is_dir() else []
    return [*(CheckResult(LEDGER_FILE, problem) for problem in problems or [None]), *weights]


def compare_studies(one: Path, other: Path) -> list[CheckResult]:
    """Compare the ledgers of two studies line by line, and the weights by the digests in them."""
    return [CheckResult("ledgers", compare(_read(one), _read(other)))]


def compare(one: Sequence[LedgerEvent], other: Sequence[LedgerEvent]) -> str | None:
    """The first line in which two ledgers differ, or None. Paths of the data set and of model files may differ.

    Of comparisons the results and the last claim count: one that was continued has a claim in between.
    """
    for number, (left, right) in enumerate(zip_longest(_essence(one), _essence(other)), 1):
        if left != right:
            return f"line {number}: {left} in the first, {right} in the second"
    return None


def _essence(lines: Sequence[LedgerEvent]) -> list[Any]:
    last = len(lines) - 1
    essence: list[Any] = []
    for number, line in enumerate(lines):
        if isinstance(line, StudyEvent):
            essence.append(_question(line))
        elif number == last or not (isinstance(line, ClaimedEvent) and isinstance(line.claim, PairsClaim)):
            essence.append(line)
    return essence


def _question(begun: StudyEvent) -> Any:
    """What two studies ask alike, if only paths differ."""
    if isinstance(begun, SweepEvent):
        recipe = begun.recipe.model_dump(exclude={"data"}) | {"model": Path(begun.recipe.model).name}
        return (begun.identity[DATA], begun.space, begun.search, begun.rungs, begun.virtual_slots, recipe)
    assert isinstance(begun, ComparisonEvent)
    return [recipe.model_dump(exclude={"data", "weights"}) | {"model": Path(recipe.model).name}
            for recipe in begun.recipes]


def _read(folder: Path) -> list[LedgerEvent]:
    lines = read_ledger(folder / LEDGER_FILE)
    if not lines:
        raise InputError(f"{folder}: has no {LEDGER_FILE}; give the folder of a sweep or comparison, such as "
                         "runs/evolve/exp")
    return lines
