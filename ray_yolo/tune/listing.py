"""A table of the runs, sweeps and comparisons in a project's folder or bucket. It imports neither torch nor Ray."""

from __future__ import annotations

import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

from ray_yolo.core.errors import InputError
from ray_yolo.core.events import Event, StartEvent
from ray_yolo.core.formatting import format_count
from ray_yolo.core.redact import reason_of
from ray_yolo.runs.event_log import EVENTS_FILE, best_row, each_event, epoch_rows, last_of, read_events
from ray_yolo.runs.location import is_active, local_folder, run_names
from ray_yolo.runs.run_record import LEDGER_FILE
from ray_yolo.runs.status import describe_state
from ray_yolo.tune.ledger import begun_of, pairs_claim_of, read_ledger, read_trials
from ray_yolo.tune.pairs import claim_from, results_of
from ray_yolo.tune.status import study_state
from ray_yolo.tune.study import ComparisonEvent
from ray_yolo.tune.trials import best_trial

_READERS = 16  # runs of a bucket that are read at the same time
_HEADER = ("run", "state", "epochs", "mAP50-95", "started", "changed")


class Listed(NamedTuple):
    """One run, sweep or comparison, in words."""

    name: str
    state: str  # training, finished, interrupted, ...
    epochs: str  # '3 of 100'; of a sweep its trials, of a comparison its pairs
    best: str  # mAP50-95 of the best epoch; of a sweep the fitness of its best trial; of a comparison its claim
    started: float | None  # seconds since 1970; None: not recorded
    changed: float | None


def list_project(project: str) -> list[Listed]:
    """The runs and sweeps of a project's folder or address, the last changed first.

    Raises:
        InputError: if there is none, or storage refuses.
    """
    names = run_names(project)
    if not names:
        raise InputError(f"{project}: has no runs; give the folder or address of a project, such as runs/train")
    with ThreadPoolExecutor(_READERS) as readers:
        rows = list(readers.map(lambda name: _read(f"{project.rstrip('/')}/{name}", name), names))
    return sorted(rows, key=lambda row: (-(row.changed or 0), row.name))


def format_table(rows: Sequence[Listed], now: float) -> list[str]:
    """Lines of aligned columns, with a header."""
    table = [_HEADER]
    for row in rows:
        table.append((row.name, row.state, row.epochs, row.best, _date(row.started, now), _date(row.changed, now)))
    widths = [max(len(line[column]) for line in table) for column in range(len(_HEADER))]
    return ["  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)).rstrip() for line in table]


def _read(address: str, name: str) -> Listed:
    """The row of a run. If it cannot be read for any reason, the row says why, and the other rows are shown."""
    try:
        folder = local_folder(address, whole=False)
        if not (folder / LEDGER_FILE).is_file():
            return _run(folder, name)
        return _study(folder, name)
    except Exception as error:  # of any file in the folder
        return Listed(name, f"unreadable: {reason_of(error)}", "", "", None, None)


def _run(folder: Path, name: str) -> Listed:
    events: list[Event] = []
    with suppress(FileNotFoundError):
        events = list(each_event(folder / EVENTS_FILE))
    if not events:
        return Listed(name, "created", "", "", None, None)
    state = describe_state(folder, events, is_active(folder), None)
    rows = epoch_rows(events)
    start = last_of(events, StartEvent)
    best = best_row(rows)
    precision = (best.metrics or {}).get("mAP50-95") if best else None
    return Listed(
        name=name, state=state.partition(":")[0].partition(" (")[0],
        epochs=f"{len(rows)} of {start.epochs}" if start else "", best="" if precision is None else f"{precision:.4f}",
        started=events[0].time, changed=events[-1].time)


def _study(folder: Path, name: str) -> Listed:
    """The row of a sweep or comparison."""
    lines = read_ledger(folder / LEDGER_FILE)
    times = _event_times(folder)
    if lines and isinstance(begun_of(lines), ComparisonEvent):
        claim = pairs_claim_of(lines) or claim_from(results_of(lines))
        state = f"comparison, {study_state(folder, 'comparing')}"
        count = format_count(claim.pairs, "pair")
        best = f"{claim.better} is better" if claim.better else "no difference"
    else:
        trials = list(read_trials(lines).values())
        winner = best_trial(trials)
        state, count = f"sweep, {study_state(folder, 'searching')}", format_count(len(trials), "trial")
        best = f"{winner.fitness:.4f} (fitness)" if winner else ""
    return Listed(name=name, state=state.partition(":")[0], epochs=count, best=best,
                  started=min(times, default=None), changed=max(times, default=None))


def _event_times(folder: Path) -> list[float]:
    """The times of the events of all trials, in seconds since 1970."""
    return [event.time for log in (folder / "trials").glob(f"*/{EVENTS_FILE}") for event in read_events(log)]


def _date(seconds: float | None, now: float) -> str:
    """Local date and time; the year only if it is another one."""
    if seconds is None:
        return ""
    then = time.localtime(seconds)
    same_year = then.tm_year == time.localtime(now).tm_year
    return time.strftime("%m-%d %H:%M" if same_year else "%Y-%m-%d", then)
