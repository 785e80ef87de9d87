"""report.html of a sweep: its best trials, claim and pictures on one page, from its folder alone."""

from __future__ import annotations

from pathlib import Path

from ray_yolo.plots.page import Section, render_page
from ray_yolo.runs.run_record import LEDGER_FILE
from ray_yolo.tune.ledger import claim_of, read_ledger, read_trials
from ray_yolo.tune.status import result_line, summary_line, table_rows

_PICTURES = ("progress.png", "rungs.png", "importance.png", "parallel.png", "evolve.png", "lineage.png")


def sweep_page(folder: Path) -> str:
    """The page of a sweep, from its ledger and the pictures in its folder."""
    ledger = read_ledger(folder / LEDGER_FILE)
    trials = list(read_trials(ledger).values())
    rows = table_rows(trials)
    widths = [max(map(len, cells)) for cells in zip(*rows, strict=True)]
    best = ["  ".join(cell.rjust(width) for cell, width in zip(row, widths, strict=True)) for row in rows]
    claim = claim_of(ledger)
    return render_page(folder.name, [
        Section("Sweep", [summary_line(trials)]),
        Section("Claim", [str(claim)] if claim else []),
        Section("Best trials", best),
        Section("Pictures", pictures=[folder / name for name in _PICTURES]),
        Section("Failed trials", [result_line(trial) for trial in trials if trial.state == "failed"]),
    ])
