"""report.html of a study, from its folder alone: claim, tables and pictures on one page."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from ray_yolo.core.files import atomic_write
from ray_yolo.plots.page import Section, render_page
from ray_yolo.runs.run_record import LEDGER_FILE
from ray_yolo.tune.compared import comparison_table, result_text
from ray_yolo.tune.ledger import begun_of, claim_of, pairs_claim_of, read_ledger, read_trials
from ray_yolo.tune.ledger_events import CountedEvent, FailedEvent, LedgerEvent
from ray_yolo.tune.pairs import claim_from, results_of
from ray_yolo.tune.status import result_line, summary_line, table_rows
from ray_yolo.tune.study import ComparisonEvent

_PICTURES = ("progress.png", "rungs.png", "parallel.png", "evolve.png", "lineage.png")
_CURVES, _PAIRS = "curves.png", "pairs.png"


def write_page(folder: Path) -> None:
    """Write the page of a study, from its ledger and the pictures in its folder."""
    lines = read_ledger(folder / LEDGER_FILE)
    sections = _comparison if isinstance(begun_of(lines), ComparisonEvent) else _sweep
    atomic_write(folder / "report.html", render_page(folder.name, sections(folder, lines)), durable=False)


def _sweep(folder: Path, lines: Sequence[LedgerEvent]) -> list[Section]:
    trials = list(read_trials(lines).values())
    table = table_rows(trials)
    has_results = len(table) > 1  # below its header
    claim = claim_of(lines)
    return [
        Section("Sweep", text=[summary_line(trials)]),
        Section("Claim", text=[str(claim)] if claim else []),
        Section("Best trials", table=table if has_results else []),
        Section("Pictures", pictures=[folder / name for name in _PICTURES]),
        Section("Failed trials", [result_line(trial) for trial in trials if trial.state == "failed"]),
    ]


def _comparison(folder: Path, lines: Sequence[LedgerEvent]) -> list[Section]:
    results = results_of(lines)
    claim = pairs_claim_of(lines) or claim_from(results)
    return [
        Section("Claim", text=[str(claim)]),
        Section("Differences of the sides", text=begun_of(lines).recipes.differences),
        Section("Means", comparison_table(results, claim)),
        Section("Curves", pictures=[folder / _CURVES]),
        Section("Pairs", pictures=[folder / _PAIRS]),
        Section("Trainings", [result_text(line) for line in lines if isinstance(line, (CountedEvent, FailedEvent))]),
    ]
