"""Completes the records of a project's earlier runs, in a process: `python -m ray_yolo.sinks.earlier_runs RUN`.

A command starts it beside the process of its own records (`record_process`), and does not wait for it. If it is killed,
as with its container, the next training of the project continues its work.
"""

from __future__ import annotations

import os
import sys
from contextlib import suppress
from pathlib import Path

from ray_yolo.core.errors import RayYoloError
from ray_yolo.core.redact import MASK, redact
from ray_yolo.runs.event_log import EVENTS_FILE
from ray_yolo.runs.folders import is_held
from ray_yolo.runs.run_record import LEDGER_FILE
from ray_yolo.sinks.base import ignore
from ray_yolo.sinks.mlflow_client import OWED_FILE, is_copy, own_uri
from ray_yolo.sinks.records import LOCK_FILE, URI_VARIABLE, complete, holds_whole_log


def incomplete_runs(folder: Path) -> list[Path]:
    """The other runs of the project whose records are not completed: their process was killed, or could not reach a
    server. Runs that are trained now are left out."""
    project, own = folder / "..", folder.resolve().name
    notes = sorted({path.parent for name in (LOCK_FILE, OWED_FILE) for path in project.glob(f"*/{name}")})
    return [run for run in notes if run.name != own and _is_incomplete(run)]


def _is_incomplete(run: Path) -> bool:
    if (run / LEDGER_FILE).exists() or not (run / EVENTS_FILE).exists():
        return False
    with suppress(OSError):
        is_noted = (run / OWED_FILE).exists() or not holds_whole_log(run)
        return is_noted and not is_held(run)
    return False


def complete_earlier_runs(folder: Path, uri: str | None, start: Path) -> None:
    """Complete the records of the other runs of the project, one after the other, without a word on errors.

    If a record fails, the server is probably away for all runs, so the rest is left to a later training.

    Args:
        uri: the MLflow server of the run in `folder`.
        start: the folder in which the command was started.
    """
    for run in incomplete_runs(folder):
        with suppress(OSError, RayYoloError):
            records = complete(run, _server_of(run, uri), start, warn=ignore)
            if records is not None and records.failing:
                return


def _server_of(run: Path, uri: str | None) -> str | None:
    """The MLflow server of another run. Its secrets are not stored: only this run's server may have some."""
    if is_copy(run):
        return None
    try:
        own = own_uri(run)
    except RayYoloError:
        return uri if uri and MASK in redact(uri) else None
    return None if own == "off" else own or uri


if __name__ == "__main__":
    complete_earlier_runs(Path(sys.argv[1]), os.environ.pop(URI_VARIABLE, "") or None, Path.cwd())
