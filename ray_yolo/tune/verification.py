"""Verify the decisions of a sweep, and compare two sweeps line by line."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import zip_longest
from pathlib import Path
from typing import Any

from ray_yolo.core.errors import InputError
from ray_yolo.runs.event_log import check_log
from ray_yolo.runs.run_record import LEDGER_FILE
from ray_yolo.runs.verification import CheckResult, check_files
from ray_yolo.tune.compare_ledger import is_comparison
from ray_yolo.tune.compare_status import check_claim, compare_comparisons
from ray_yolo.tune.identity import DATA
from ray_yolo.tune.ledger import SweepEvent, read_ledger, verify
from ray_yolo.tune.ledger_events import LedgerEvent


def check_sweep(folder: Path) -> list[CheckResult]:
    """Verify that each line of a sweep's ledger matches its checksum and follows from those before it, and the weights
    of a finished one. Of a comparison, verify that its claim follows from its results.
    """
    damage = check_log(folder / LEDGER_FILE)
    if is_comparison(folder):
        return [CheckResult(LEDGER_FILE, damage or check_claim(folder))]
    problems: list[str | None] = [damage] if damage else [*verify(_read(folder))]
    weights = check_files(folder) if (folder / "weights").is_dir() else []
    return [*(CheckResult(LEDGER_FILE, problem) for problem in problems or [None]), *weights]


def compare_sweeps(one: Path, other: Path) -> list[CheckResult]:
    """Compare the ledgers of two sweeps or comparisons line by line, and the weights by the digests in them."""
    if is_comparison(one) or is_comparison(other):
        return [CheckResult("ledgers", compare_comparisons(one, other))]
    return [CheckResult("ledgers", compare(_read(one), _read(other)))]


def compare(one: Sequence[LedgerEvent], other: Sequence[LedgerEvent]) -> str | None:
    """The first line in which two ledgers differ, or None. Paths of the data set and of model files may differ."""
    for number, (left, right) in enumerate(zip_longest(map(_essence, one), map(_essence, other)), 1):
        if left != right:
            return f"line {number}: {left!r} in the first, {right!r} in the second"
    return None


def _essence(line: LedgerEvent) -> Any:
    if not isinstance(line, SweepEvent):
        return line
    recipe = line.recipe.model_dump(exclude={"data"}) | {"model": Path(line.recipe.model).name}
    return (line.identity[DATA], line.space, line.search, line.rungs, line.virtual_slots, recipe)


def _read(folder: Path) -> list[LedgerEvent]:
    lines = read_ledger(folder / LEDGER_FILE)
    if not lines:
        raise InputError(f"{folder}: has no {LEDGER_FILE}; give the folder of a sweep, such as runs/evolve/exp")
    return lines
