"""A comparison in words, from its ledger and the logs of its trainings. It imports neither torch nor Ray."""

from __future__ import annotations

from contextlib import suppress
from pathlib import Path

from ray_yolo.core.errors import InputError
from ray_yolo.core.formatting import align_columns, format_cell, format_count
from ray_yolo.runs.event_log import EVENTS_FILE
from ray_yolo.runs.location import is_active, location
from ray_yolo.runs.run_record import LEDGER_FILE
from ray_yolo.runs.status import describe_run
from ray_yolo.tune.claim import PairsClaim
from ray_yolo.tune.compare_ledger import (
    PairResults,
    TrainedEvent,
    begun_of,
    claim_of,
    read_comparison,
    results_of,
)
from ray_yolo.tune.pairs import ComparedRow, claim_from, compared_classes, compared_metrics, training_folder

_REASON_LENGTH = 160


def comparison_state(folder: Path) -> str:
    """The state of a comparison in words; what is before a colon names it."""
    if is_active(folder):
        return "comparing"
    return "finished" if (folder / "finished").exists() else "interrupted: the same command continues it"


def result_text(result: TrainedEvent) -> str:
    """The result of one training on one line."""
    name = f"pair {result.pair}, {result.side}"
    if result.fitness is None:
        return f"{name}: diverged, counted with a fitness of 0: {' '.join(result.reason.split())[:_REASON_LENGTH]}"
    return f"{name}: fitness {result.fitness:.4f} (seed {result.seed})"


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


def describe_comparison(folder: Path) -> list[str]:
    """The status of a comparison, line by line; its running trainings are described as by `describe_run`."""
    lines = read_comparison(folder / LEDGER_FILE)
    results = results_of(lines)
    claim = claim_of(lines) or claim_from(results)
    begun = begun_of(lines)
    described = [f"{location(folder)}: {comparison_state(folder)}", str(claim),
                 *begun.recipes.differences, *comparison_table(results, claim)]
    described += [result_text(result) for _, result in sorted(results.items())]
    for training in sorted((folder / "trials").glob("*")):
        is_open = not any(training_folder(pair, side) == training.name for pair, side in results)
        if is_open and (training / EVENTS_FILE).is_file():
            with suppress(InputError):  # it has not started
                described += [f"  {line}" for line in describe_run(training)]
    return described


def check_claim(folder: Path) -> str | None:
    """What is wrong with the recorded claim of a comparison, given its results; None: nothing, or there is no claim."""
    lines = read_comparison(folder / LEDGER_FILE)
    recorded = claim_of(lines)
    if recorded is None:
        return None
    follows = claim_from(results_of(lines), recorded.pairs)
    return None if follows == recorded else f"claims '{recorded}', but '{follows}' follows from its results"


def compare_comparisons(one: Path, other: Path) -> str | None:
    """The first training whose result differs between two comparisons, or their claims; None: all are equal.

    Results are compared in the order of the pairs: the order in which trainings have ended may differ.
    """
    lines, others = (read_comparison(folder / LEDGER_FILE) for folder in (one, other))
    for folder, read in ((one, lines), (other, others)):
        if not read:
            raise InputError(f"{folder}: has no {LEDGER_FILE}; give the folder of a comparison")
    results, other_results = results_of(lines), results_of(others)
    for key in sorted(results.keys() | other_results.keys()):
        if results.get(key) != other_results.get(key):
            name = training_folder(*key)
            return f"{name}: {results.get(key)!r} in the first, {other_results.get(key)!r} in the second"
    claim, other_claim = claim_of(lines), claim_of(others)
    return None if claim == other_claim else f"claim: {claim} in the first, {other_claim} in the second"


def _cells(row: ComparedRow) -> tuple[str, ...]:
    difference = round(row.difference, 4) + 0.0  # without the sign of -0
    return row.name, format_cell(row.a), format_cell(row.b), f"{difference:+.4f}", format_cell(row.error)
