"""report.html of a sweep: its best trials, claim and pictures on one page, from its folder alone."""

from __future__ import annotations

from pathlib import Path

from ray_yolo.core.formatting import align_columns
from ray_yolo.plots.page import Section, render_page
from ray_yolo.runs.run_record import LEDGER_FILE
from ray_yolo.tune.ledger import claim_of, read_ledger, read_trials
from ray_yolo.tune.status import result_line, summary_line, table_rows

_PICTURES = ("progress.png", "rungs.png", "importance.png", "parallel.png", "evolve.png", "lineage.png")


def sweep_page(folder: Path) -> str:
    """The page of a sweep, from its ledger and the pictures in its folder."""
    ledger = read_ledger(folder / LEDGER_FILE)
    trials = list(read_trials(ledger).values())
    table = table_rows(trials)
    has_results = len(table) > 1  # below its header
    claim = claim_of(ledger)
    return render_page(folder.name, [
        Section("Sweep", [summary_line(trials)]),
        Section("Claim", [str(claim)] if claim else []),
        Section("Best trials", align_columns(table) if has_results else []),
        Section("Pictures", pictures=[folder / name for name in _PICTURES]),
        Section("Failed trials", [result_line(trial) for trial in trials if trial.state == "failed"]),
    ])
