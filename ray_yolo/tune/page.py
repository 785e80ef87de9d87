"""report.html of a study, from its folder alone: claim, tables and pictures on one page."""

from __future__ import annotations

from pathlib import Path

from ray_yolo.core.files import atomic_write
from ray_yolo.plots.page import Section, render_page
from ray_yolo.tune.compared import comparison_table, result_text
from ray_yolo.tune.status import result_line, summary_line, table_rows
from ray_yolo.tune.study_state import ComparisonState, SweepState, read_study_state

_PICTURES = ("progress.png", "rungs.png", "parallel.png", "evolve.png", "lineage.png")
_CURVES, _PAIRS = "curves.png", "pairs.png"


def write_page(folder: Path) -> None:
    """Write the page of a study, from its ledger and the pictures in its folder."""
    state = read_study_state(folder)
    sections = _sweep(folder, state) if isinstance(state, SweepState) else _comparison(folder, state)
    atomic_write(folder / "report.html", render_page(folder.name, sections), durable=False)


def _sweep(folder: Path, sweep: SweepState) -> list[Section]:
    return [
        Section("Sweep", text=[summary_line(sweep.trials)]),
        Section("Claim", text=[str(sweep.claim)] if sweep.claim else []),
        Section("Best trials", table=table_rows(sweep.trials) if sweep.best else []),
        Section("Pictures", pictures=[folder / name for name in _PICTURES]),
        Section("Failed trials", [result_line(trial) for trial in sweep.failed]),
    ]


def _comparison(folder: Path, comparison: ComparisonState) -> list[Section]:
    return [
        Section("Claim", text=[str(comparison.claim)]),
        Section("Differences of the sides", text=comparison.recipes.differences),
        Section("Means", comparison_table(comparison.results, comparison.claim)),
        Section("Curves", pictures=[folder / _CURVES]),
        Section("Pairs", pictures=[folder / _PAIRS]),
        Section("Trainings", [result_text(line) for line in comparison.trainings]),
    ]
