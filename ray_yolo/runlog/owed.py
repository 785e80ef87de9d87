"""What a run folder says of MLflow: which run there is its own, and what it still owes a server that was away, until
`python -m ray_yolo.sync` or the next training in the same project has delivered it.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from ray_yolo.core.files import atomic_write
from ray_yolo.errors import InputError
from ray_yolo.redact import MASK, redact
from ray_yolo.runlog.folders import lock_file

RUN_FILE, OWED_FILE = "mlflow.json", "mlflow-owed.json"


def read_run_file(run_dir: str | os.PathLike[str]) -> dict[str, str] | None:
    """`run_id`, `experiment_id` and `uri` (without secrets) of the folder's MLflow run; None if there is none yet."""
    try:
        about: dict[str, str] = json.loads((Path(run_dir) / RUN_FILE).read_text())
    except (FileNotFoundError, ValueError):  # emptied by a power cut: the run is found again by its tag
        return None
    return about


def note_owed(run_dir: Path, uri: str, parent_run_id: str | None, tags: Mapping[str, str]) -> None:
    """Note that a run owes a server, and what ties it to others there."""
    note = {"uri": redact(uri), "parent_run_id": parent_run_id, "tags": dict(tags)}
    atomic_write(run_dir / OWED_FILE, json.dumps(note, indent=1) + "\n", durable=False)


def read_owed(run_dir: Path, uri: str) -> dict[str, Any] | None:
    """The note of a run that owes this server; None if it owes it nothing."""
    try:
        note = json.loads((run_dir / OWED_FILE).read_text())
    except (OSError, ValueError):  # emptied by a power cut: sync delivers all the same
        return None
    return note if note["uri"] == redact(uri) else None


def forget_owed(run_dir: Path, uri: str) -> None:
    """All is delivered to this server."""
    if read_owed(run_dir, uri) is not None:
        (run_dir / OWED_FILE).unlink(missing_ok=True)


def own_uri(run_dir: Path) -> str:
    """The server that a run folder names, else the database that is nearest above it; '' if there is neither.

    Raises:
        InputError: if the server's address has secrets, which are not kept.
    """
    for note in (run_dir / OWED_FILE, run_dir / RUN_FILE):
        uri = ""
        with suppress(OSError, ValueError):  # emptied by a power cut
            uri = json.loads(note.read_text())["uri"]
        if MASK in uri:
            raise InputError(f"{note}: the secrets of {uri} are not kept; give it whole as --mlflow-uri")
        if uri:
            return uri
    databases = (folder / "mlflow.db" for folder in run_dir.absolute().parents)
    return next((f"sqlite:///{path}" for path in databases if path.exists()), "")


def owing_runs(run_dir: Path, uri: str) -> list[Path]:
    """The finished runs beside this one that owe this server; one that is not finished goes on with its own command."""
    notes = sorted(run_dir.parent.glob(f"*/{OWED_FILE}"))
    return [folder for folder in (note.parent for note in notes)
            if folder != run_dir and (folder / "finished").exists() and read_owed(folder, uri) is not None]


@contextmanager
def claimed(run_dir: Path, uri: str) -> Iterator[dict[str, Any] | None]:
    """The note of a run, as long as this lasts for this process alone; None if another one delivers it, or has."""
    try:
        file = (run_dir / OWED_FILE).open("r+")
    except FileNotFoundError:
        yield None
        return
    with file:
        yield read_owed(run_dir, uri) if lock_file(file) else None
