"""MLflow's client as a training needs it: short time limits, a database that is whole or not there, experiments.

A folder names its MLflow run in `mlflow.json`. What a server that was away has not got yet is noted in
`mlflow-owed.json`, until `python -m ray_yolo.sync` or the next training in the same project has delivered it. MLflow's
private names stand here and are seen with MLflow 3.17.
"""

from __future__ import annotations

import json
import os
import shutil
import socket
import sqlite3
import tempfile
import time
from collections.abc import Iterator, Mapping
from contextlib import closing, contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ray_yolo.core.errors import InputError
from ray_yolo.core.files import atomic_write
from ray_yolo.core.internals import internal
from ray_yolo.core.redact import MASK, redact
from ray_yolo.runs.folders import lock_file

if TYPE_CHECKING:
    from mlflow import MlflowClient

RUN_FILE, OWED_FILE = "mlflow.json", "mlflow-owed.json"

_SQLITE = b"SQLite format 3\0"
_LONGEST_MAKING_SECONDS = 600.0
# MLflow's own limits let one call block for minutes. Ours gives up soon, and we repeat it.
_CLIENT_SETTINGS = {
    "MLFLOW_HTTP_REQUEST_TIMEOUT": "10",
    "MLFLOW_HTTP_REQUEST_MAX_RETRIES": "1",
    "MLFLOW_LOGGING_LEVEL": "WARNING",
    "MLFLOW_SUPPRESS_PRINTING_URL_TO_STDOUT": "true",
}


def tracking_uri(setting: str, storage_dir: str | os.PathLike[str], environment: Mapping[str, str]) -> str | None:
    """The server to use: the setting, else MLFLOW_TRACKING_URI, else sqlite in the storage folder; None for 'off'.

    A file of sqlite is named by its whole path: trials of a sweep, and who delivers later, have other working folders.
    """
    if setting == "off":
        return None
    uri = setting or environment.get("MLFLOW_TRACKING_URI") or f"sqlite:///{Path(storage_dir).resolve()}/mlflow.db"
    scheme, mark, path = uri.partition(":///")
    return f"{scheme}{mark}{Path(path).absolute()}" if scheme == "sqlite" and path else uri


def build_client(uri: str) -> MlflowClient:
    """A client with short time limits. They hold for the process, and the user's own go first.

    Raises:
        InputError: if the sqlite file that is named is something else.
    """
    for name, value in _CLIENT_SETTINGS.items():
        os.environ.setdefault(name, value)
    from mlflow import MlflowClient  # here, because it takes more than a second

    scheme, _, path = uri.partition(":///")
    if scheme == "sqlite":
        _ensure_database(Path(path.partition("?")[0]).absolute(), artifact_location(uri))
    return MlflowClient(tracking_uri=uri)


def _ensure_database(path: Path, artifacts: str | None) -> None:
    """Have MLflow make the file if there is none: beside its place, because one that is half made cannot be opened.

    MLflow itself tries to open a file that is no database for two minutes.
    """
    if path.exists():
        if not path.is_file() or _begin_of(path) not in (b"", _SQLITE):
            raise InputError(f"{path}: is no SQLite database; move it away, or name another one with --mlflow-uri")
        if _is_half_made(path):
            raise InputError(f"{path}: was left half made; move it away, and ray_yolo.sync of a run makes a new one")
        return
    path.parent.mkdir(parents=True, exist_ok=True)
    for left in path.parent.glob(f".{path.name}-*"):  # by a process that was killed
        if time.time() - left.stat().st_mtime > _LONGEST_MAKING_SECONDS:
            shutil.rmtree(left, ignore_errors=True)
    with tempfile.TemporaryDirectory(prefix=f".{path.name}-", dir=path.parent) as folder:
        made = Path(folder) / path.name
        make = internal("mlflow.store.tracking.sqlalchemy_store", "SqlAlchemyStore")
        make(f"sqlite:///{made}", artifacts).engine.dispose()
        try:
            os.link(made, path)
        except OSError:  # another command was faster, or the file system has no hard links
            if not path.exists():
                made.rename(path)


def _begin_of(path: Path) -> bytes:
    with path.open("rb") as file:
        return file.read(len(_SQLITE))


def _is_half_made(path: Path) -> bool:
    """Whether MLflow was stopped while it made this database, which it cannot go on with and tries for a minute."""
    with closing(sqlite3.connect(path)) as database:
        return database.execute("SELECT 1 FROM sqlite_master WHERE name GLOB '_alembic_tmp_*'").fetchone() is not None


def find_experiment(client: MlflowClient, uri: str, name: str) -> str:
    """The id of the experiment of this name, created if need be, of the kind that MLflow shows as model training.

    Raises:
        mlflow.exceptions.MlflowException: if the server cannot be reached or refuses.
    """
    from mlflow.exceptions import MlflowException

    if (found := client.get_experiment_by_name(name)) is not None:
        return str(found.experiment_id)
    try:
        return str(client.create_experiment(name, artifact_location=artifact_location(uri),
                                            tags={"mlflow.experimentKind": "custom_model_development"}))
    except MlflowException:
        if (found := client.get_experiment_by_name(name)) is None:
            raise
        return str(found.experiment_id)  # another training was faster


def artifact_location(uri: str) -> str | None:
    """Beside an sqlite file (MLflow's default would be the current folder); a server decides for itself."""
    scheme, _, path = uri.partition(":///")
    return (Path(path).resolve().parent / "mlartifacts").as_uri() if scheme == "sqlite" else None


def build_monitor(uri: str, run_id: str) -> Any:
    """MLflow's monitor of this machine, which goes on from what an earlier one has posted into the run."""
    kind = internal("mlflow.system_metrics.system_metrics_monitor", "SystemMetricsMonitor")
    return kind(run_id, resume_logging=True, node_id=socket.gethostname(), tracking_uri=uri)


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
