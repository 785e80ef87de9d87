"""A table of the runs, sweeps and comparisons in a project's folder or bucket, and of the results of validations and
predictions in a folder. It imports neither torch nor Ray."""

from __future__ import annotations

import json
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path

from ray_yolo.core.documents import RESULTS_FILE, RunSummary
from ray_yolo.core.errors import InputError
from ray_yolo.core.formatting import format_count
from ray_yolo.core.redact import reason_of
from ray_yolo.runs.event_log import EVENTS_FILE, read_events
from ray_yolo.runs.location import local_folder, run_names
from ray_yolo.runs.run_record import LEDGER_FILE, RECORD_FILE
from ray_yolo.runs.run_state import read_state, status_of
from ray_yolo.storage.store import is_address
from ray_yolo.tune.study_state import SweepState, read_study_state

_READERS = 16  # runs of a bucket that are read at the same time
_HEADER = ("run", "state", "epochs", "mAP50-95", "started", "changed")


def list_project(project: str) -> list[RunSummary]:
    """The runs and sweeps of a project's folder or address, the last changed first. Of a folder of projects, such as
    `runs`, those of each of them.

    Raises:
        InputError: if there is none, or storage refuses.
    """
    names = _names(project)
    if not names and not is_address(project):
        projects = sorted(folder.name for folder in Path(project).glob("*") if folder.is_dir())
        names = [f"{each}/{name}" for each in projects for name in _names(f"{project}/{each}")]
    if not names:
        raise InputError(f"{project}: has no runs; give the folder or address of a project, such as runs/train")
    with ThreadPoolExecutor(_READERS) as readers:
        rows = list(readers.map(lambda name: _read(f"{project.rstrip('/')}/{name}", name), names))
    return sorted(rows, key=lambda row: (-(row.changed or 0), row.name))


def _names(project: str) -> list[str]:
    """The names of a project's runs; in a folder, also of those that hold the results of a validation or prediction."""
    names = run_names(project)
    if is_address(project):
        return names
    results = {path.parent.name for path in Path(project).glob(f"*/{RESULTS_FILE}")}
    return sorted({*names, *results})


def format_table(rows: Sequence[RunSummary], now: float) -> list[str]:
    """Lines of aligned columns, with a header."""
    table = [_HEADER]
    for row in rows:
        state = row.state if row.kind in ("training", "unknown") else f"{row.kind}, {row.state}"
        table.append((row.name, state, _count(row), _best(row), _date(row.started, now), _date(row.changed, now)))
    widths = [max(len(line[column]) for line in table) for column in range(len(_HEADER))]
    return ["  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)).rstrip() for line in table]


def _count(row: RunSummary) -> str:
    if row.done is None:
        return ""
    nouns = {"sweep": "trial", "comparison": "pair", "prediction": "picture"}
    return format_count(row.done, nouns[row.kind]) if row.kind in nouns else f"{row.done} of {row.epochs}"


def _best(row: RunSummary) -> str:
    if row.kind == "comparison":
        return f"{row.better} is better" if row.better else "no difference"
    if row.best is None:
        return ""
    return f"{row.best:.4f} (fitness)" if row.kind == "sweep" else f"{row.best:.4f}"


def _read(address: str, name: str) -> RunSummary:
    """The row of a run. If it cannot be read for any reason, the row says why, and the other rows are shown."""
    try:
        return summarise(local_folder(address, whole=False), name)
    except Exception as error:  # of any file in the folder
        return RunSummary(name=name, kind="unknown", state=f"unreadable: {reason_of(error)}")


def summarise(folder: Path, name: str) -> RunSummary:
    """The summary of a run, sweep or comparison, from its log or ledger.

    Raises:
        InputError: if it cannot be read.
    """
    if (folder / LEDGER_FILE).is_file():
        return _study(folder, name)
    if (folder / RESULTS_FILE).is_file() and not (folder / RECORD_FILE).is_file():
        return _results(folder / RESULTS_FILE, name)
    return _run(folder, name)


def _results(path: Path, name: str) -> RunSummary:
    """The row of a validation, or of a prediction, which has no metrics."""
    found, changed = json.loads(path.read_bytes()), path.stat().st_mtime
    if "metrics" in found:
        return RunSummary(name=name, kind="validation", state="finished", best=found["metrics"]["mAP50-95"],
                          changed=changed)
    return RunSummary(name=name, kind="prediction", state="finished", done=found["pictures"], changed=changed)


def _run(folder: Path, name: str) -> RunSummary:
    """The row of a training."""
    state = read_state(folder)
    return RunSummary(
        name=name, kind="training", state=status_of(folder, state).word,
        done=len(state.rows) if state.start else None, epochs=state.start.epochs if state.start else None,
        best=(state.best.metrics or {}).get("mAP50-95") if state.best else None,
        started=state.began, changed=state.changed)


def _study(folder: Path, name: str) -> RunSummary:
    """The row of a sweep or comparison."""
    state, times = read_study_state(folder), _event_times(folder)
    summary = partial(RunSummary, name=name, state=state.status(folder).word, started=min(times, default=None),
                      changed=max(times, default=None))
    if isinstance(state, SweepState):
        return summary(kind="sweep", done=len(state.trials), best=state.best.fitness if state.best else None)
    return summary(kind="comparison", done=state.claim.pairs, better=state.claim.better)


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
