"""MLflow's client with short time limits, its database and experiments, and the file that names a folder's MLflow run.

Private names of MLflow are used only in this file. They were checked with MLflow 3.17.
"""

from __future__ import annotations

import functools
import json
import operator
import os
import shutil
import socket
import sqlite3
import tempfile
import time
from collections.abc import Sequence
from contextlib import closing
from importlib.metadata import entry_points
from pathlib import Path
from typing import TYPE_CHECKING, Any

import yaml

from ray_yolo.config.addresses import corrected_tracking_uri
from ray_yolo.core.errors import InputError
from ray_yolo.core.internals import internal
from ray_yolo.core.redact import MASK, redact
from ray_yolo.runs.working_copy import address_of

if TYPE_CHECKING:
    from mlflow import MlflowClient

RUN_FILE = "mlflow.json"
OWED_FILE = "mlflow-owed.json"
"""Written by earlier versions: the server of a run whose delivery is incomplete."""
OPTIONS_FILE = "opt.yaml"

_SCHEMES = ("http", "https", "file", "databricks", "sqlite", "postgresql", "mysql", "mssql")
_PLUGINS = "mlflow.tracking_store"  # MLflow's group of the entry points that add schemes
_LONGEST_CREATION_SECONDS = 600.0
# With MLflow's default limits, one call can block for minutes. With these, a call fails soon and is repeated.
_CLIENT_SETTINGS = {
    "MLFLOW_HTTP_REQUEST_TIMEOUT": "10",
    "MLFLOW_HTTP_REQUEST_MAX_RETRIES": "1",
    "MLFLOW_LOGGING_LEVEL": "WARNING",
    "MLFLOW_SUPPRESS_PRINTING_URL_TO_STDOUT": "true",
    "MLFLOW_ENABLE_ARTIFACTS_PROGRESS_BAR": "false",
}


def tracking_uri(setting: str, storage_dir: str | os.PathLike[str]) -> str | None:
    """The server to use: the setting, else MLFLOW_TRACKING_URI, else sqlite in the storage folder; None for 'off'.

    The path of an sqlite file is absolute: trials of a sweep and later deliveries have other working folders.

    Raises:
        InputError: for an address without its scheme, such as localhost:5000, or with one that neither MLflow nor a
            plugin of it has.
    """
    if setting == "off":
        return None
    for origin, given in (("mlflow_uri", setting), ("MLFLOW_TRACKING_URI", os.environ.get("MLFLOW_TRACKING_URI", ""))):
        if corrected := corrected_tracking_uri(given):
            raise InputError(f"{origin}: {redact(given)} has no scheme; write {redact(corrected)}")
        if given:
            _check_scheme(origin, given)
            break
    uri = setting or os.environ.get("MLFLOW_TRACKING_URI") or f"sqlite:///{Path(storage_dir).resolve()}/mlflow.db"
    scheme, mark, path = uri.partition(":///")
    return f"{scheme}{mark}{Path(path).absolute()}" if scheme == "sqlite" and path else uri


def _check_scheme(origin: str, uri: str) -> None:
    """Refuse an address for which MLflow has no store. Without its import, which takes more than a second."""
    scheme, colon, _ = uri.lower().partition(":")
    is_known = scheme.partition("+")[0] in _SCHEMES and colon  # a database may name its driver after a +
    if not is_known and uri != "databricks" and scheme not in {entry.name for entry in entry_points(group=_PLUGINS)}:
        raise InputError(f"{origin}: {redact(uri)} is no address of an MLflow server; give http://HOST:PORT, "
                         "https://HOST, sqlite:///FILE, another database, file:///FOLDER, databricks, or "
                         "--mlflow-uri off for none")


def build_client(uri: str) -> MlflowClient:
    """A client with short time limits. They apply to the process; the user's own settings take precedence.

    Raises:
        InputError: if the sqlite file is no database, or its creation was interrupted.
    """
    for name, value in _CLIENT_SETTINGS.items():
        os.environ.setdefault(name, value)
    from mlflow import MlflowClient  # here, because it takes more than a second

    scheme, _, path = uri.partition(":///")
    if scheme == "sqlite":
        _ensure_database(Path(path.partition("?")[0]).absolute(), artifact_location(uri))
    return MlflowClient(tracking_uri=uri, registry_uri=uri)


def _ensure_database(path: Path, artifacts: str | None) -> None:
    """Create the database if it does not exist, under a temporary name, because MLflow cannot open an incomplete one.

    MLflow itself tries for two minutes to open a file that is not a database.
    """
    if path.exists():
        try:
            with closing(sqlite3.connect(path)) as database:
                rest = database.execute("SELECT 1 FROM sqlite_master WHERE name GLOB '_alembic_tmp_*'").fetchone()
        except sqlite3.DatabaseError as error:
            if path.is_file() and error.sqlite_errorname != "SQLITE_NOTADB":
                raise
            raise InputError(f"{path}: is no SQLite database; move it away, or name another one with --mlflow-uri"
                             ) from None
        if rest:  # MLflow cannot continue, and tries for a minute
            raise InputError(f"{path}: its creation was interrupted; move it away, and ray_yolo.sync of a run creates "
                             "a new one")
        return
    path.parent.mkdir(parents=True, exist_ok=True)
    for leftover in path.parent.glob(f".{path.name}-*"):  # of a process that was killed
        if time.time() - leftover.stat().st_mtime > _LONGEST_CREATION_SECONDS:
            shutil.rmtree(leftover, ignore_errors=True)
    with tempfile.TemporaryDirectory(prefix=f".{path.name}-", dir=path.parent) as folder:
        new = Path(folder) / path.name
        build_store = internal("mlflow.store.tracking.sqlalchemy_store", "SqlAlchemyStore")
        build_store(f"sqlite:///{new}", artifacts).engine.dispose()
        try:
            os.link(new, path)
        except OSError:  # another command was faster, or the file system has no hard links
            if not path.exists():
                new.rename(path)


def find_experiment(client: MlflowClient, uri: str, name: str) -> str:
    """The id of the experiment with this name. If it does not exist, it is created with MLflow's kind "model training".

    Raises:
        mlflow.exceptions.MlflowException: if the server cannot be reached or refuses.
    """
    from mlflow.exceptions import MlflowException

    if (experiment := client.get_experiment_by_name(name)) is None:
        try:
            return str(client.create_experiment(name, artifact_location=artifact_location(uri),
                                                tags={"mlflow.experimentKind": "custom_model_development"}))
        except MlflowException:
            if (experiment := client.get_experiment_by_name(name)) is None:  # else another training was faster
                raise
    return str(experiment.experiment_id)


def artifact_location(uri: str) -> str | None:
    """The folder `mlartifacts` beside an sqlite file (MLflow's default: the current folder); None for a server."""
    scheme, _, path = uri.partition(":///")
    return (Path(path).resolve().parent / "mlartifacts").as_uri() if scheme == "sqlite" else None


def build_monitor(uri: str, run_id: str) -> Any:
    """MLflow's monitor of this machine; it continues the series of an earlier one in the run."""
    monitor = internal("mlflow.system_metrics.system_metrics_monitor", "SystemMetricsMonitor")
    return monitor(run_id, resume_logging=True, node_id=socket.gethostname(), tracking_uri=uri)


def read_run_file(run_dir: str | os.PathLike[str]) -> dict[str, str] | None:
    """`run_id`, `experiment_id` and `uri` (without secrets) of the folder's MLflow run, and `folder`, the identity of
    the folder; None if there is none yet."""
    try:
        about: dict[str, str] = json.loads((Path(run_dir) / RUN_FILE).read_text())
    except (FileNotFoundError, ValueError):  # emptied by a power cut: the run is found again by its tag
        return None
    return about


def folder_identity(run_dir: Path) -> str:
    """What a folder keeps when it is renamed, and a copy of it does not have: the number of its inode."""
    return str(run_dir.stat().st_ino)


def is_copy(run_dir: Path) -> bool:
    """Whether the folder is a copy of the one whose MLflow run it names. The folder of a run in a bucket is a copy on
    each machine, and is none here."""
    known = (read_run_file(run_dir) or {}).get("folder")  # earlier versions have not noted it
    return known is not None and known != folder_identity(run_dir) and not address_of(run_dir)


def own_uri(run_dir: Path) -> str:
    """The server that a run folder names (its MLflow run, else its settings), else the nearest database above it; '' if
    there is none of these.

    Raises:
        InputError: if the address of the server contains secrets, which are not stored.
    """
    for file, path in ((OWED_FILE, ("uri",)), (RUN_FILE, ("uri",)), (OPTIONS_FILE, ("placement", "mlflow_uri"))):
        uri = _read_setting(run_dir / file, path)
        if MASK in uri:
            raise InputError(f"{run_dir / file}: the secrets of {uri} are not stored; give the complete address as "
                             "--mlflow-uri")
        if uri:
            return uri
    databases = (folder / "mlflow.db" for folder in run_dir.resolve().parents)
    return next((f"sqlite:///{path}" for path in databases if path.exists()), "")


def _read_setting(file: Path, path: Sequence[str]) -> str:
    """One text in a JSON or YAML file; '' if there is none, or if a power cut has emptied the file."""
    try:
        tree = yaml.safe_load(file.read_text())
        return str(functools.reduce(operator.getitem, path, tree))
    except (OSError, ValueError, yaml.YAMLError, LookupError, TypeError):
        return ""
