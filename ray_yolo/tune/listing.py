"""A table of a project's runs, sweeps and comparisons, and of the results of validations and predictions, in a folder
or a bucket. It imports neither torch nor Ray."""

from __future__ import annotations

import json
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

from ray_yolo.core.documents import RESULTS_FILE, RunSummary
from ray_yolo.core.errors import InputError
from ray_yolo.core.formatting import format_count
from ray_yolo.core.redact import reason_of
from ray_yolo.runs.event_log import EVENTS_FILE, read_events
from ray_yolo.runs.location import local_folder, run_names
from ray_yolo.runs.run_record import LEDGER_FILE, RECORD_FILE
from ray_yolo.runs.run_state import read_state, status_of
from ray_yolo.storage.store import StoredObject, in_parallel, is_address, open_store
from ray_yolo.tune.study_state import SweepState, read_study_state

_READERS = 16  # runs of a bucket that are read at the same time
_OF_RESULTS = {"log/", RECORD_FILE, LEDGER_FILE, RESULTS_FILE}
"""What a stored folder has at least one of, unless it is a folder of projects."""
_HEADER = ("run", "state", "epochs", "mAP50-95", "started", "changed")


def list_project(project: str) -> list[RunSummary]:
    """The runs and sweeps of a project's folder or address, the last changed first. Of a folder of projects, such as
    `runs`, those of each of them.

    Raises:
        InputError: if there is none, or storage refuses.
    """
    project = project.rstrip("/")
    names = _names(project)
    if not names:
        names = [f"{each}/{name}" for each in _folders(project) for name in _names(f"{project}/{each}")]
    if not names:
        raise InputError(f"{project}: has no runs; give the folder or address of a project, such as runs/train")
    with ThreadPoolExecutor(_READERS) as readers:
        rows = list(readers.map(lambda name: _read(f"{project}/{name}", name), names))
    return sorted(rows, key=lambda row: (-(row.changed or 0), row.name))


def _names(project: str) -> list[str]:
    """The names of a project's runs, and of its folders with the results of a validation or prediction."""
    if is_address(project):
        store, names = open_store(project), run_names(project)
        try:
            entries = in_parallel(lambda name: {entry.name for entry in store.list(f"{name}/")}, names)
        except OSError as error:
            raise InputError(f"{project}: {error}") from None
        return [name for name, found in zip(names, entries, strict=True) if not _OF_RESULTS.isdisjoint(found)]
    results = {path.parent.name for path in Path(project).glob(f"*/{RESULTS_FILE}")}
    return sorted({*run_names(project), *results})


def _folders(project: str) -> list[str]:
    """The names of all folders of a folder or address."""
    if is_address(project):
        return run_names(project)
    return sorted(folder.name for folder in Path(project).glob("*") if folder.is_dir())


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
        if is_address(address) and (results := _stored_results(address)):
            return _results(json.loads(results.data), results.modified, name)
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
        path = folder / RESULTS_FILE
        return _results(json.loads(path.read_bytes()), path.stat().st_mtime, name)
    return _run(folder, name)


def _stored_results(address: str) -> StoredObject | None:
    """The results of a validation or prediction at an address; None: it has none, or it is a run."""
    store = open_store(address)
    entries = {entry.name for entry in store.list()}
    return store.get(RESULTS_FILE) if RESULTS_FILE in entries and RECORD_FILE not in entries else None


def _results(found: dict[str, Any], changed: float, name: str) -> RunSummary:
    """The row of a validation, or of a prediction, which has no metrics."""
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
