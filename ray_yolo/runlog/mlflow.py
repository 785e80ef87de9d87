"""One MLflow run for one training, as a projection of its event log.

What the MLflow run should hold is computed from the log alone (`tracking_plan`); what it does hold is asked of the
server; the difference is posted. So a training that was interrupted, a server that was away and a delivery long after
the end are one case; nothing is posted twice, and only what is durable is posted at all. In a training this happens
in a thread of the driver with short time limits: a server that is down or slow costs one warning and no time.
"""

from __future__ import annotations

import contextlib
import json
import os
import shlex
import shutil
import sqlite3
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ray_yolo.errors import InputError
from ray_yolo.redact import redact
from ray_yolo.runlog.background import Background
from ray_yolo.runlog.events import Event, follow
from ray_yolo.runlog.mlflow_run import RUN_ID_TAG, Plan, plan_run
from ray_yolo.runlog.owed import claimed, forget_owed, note_owed, owing_runs, read_owed
from ray_yolo.runlog.results_files import EVENTS_FILE, RUN_FILE, replace_text

if TYPE_CHECKING:
    from mlflow import MlflowClient
    from mlflow.entities import Run

# Small files first: if time runs out they are there.
ARTIFACTS = ("hyp.yaml", "opt.yaml", "results.csv", "*.png", "*.jpg", EVENTS_FILE, "weights/best.pt", "weights/last.pt")

_SQLITE = b"SQLite format 3\0"
_LONGEST_MAKING_SECONDS = 600.0
_DELIVERED_TAG = "ray_yolo.delivered"
_LABELS_PER_CALL, _METRICS_PER_CALL = 100, 1000  # MLflow's limits
# MLflow's own limits let one call block for minutes. Ours gives up soon, and we repeat it.
_CLIENT_SETTINGS = {
    "MLFLOW_HTTP_REQUEST_TIMEOUT": "10",
    "MLFLOW_HTTP_REQUEST_MAX_RETRIES": "1",
    "MLFLOW_LOGGING_LEVEL": "WARNING",
    "MLFLOW_SUPPRESS_PRINTING_URL_TO_STDOUT": "true",
}


class Tracker:
    """Delivers one run folder to one server, and remembers what the server is known to hold.

    Args:
        run_dir: the run folder.
        uri: the server.
        parent_run_id: the MLflow run of the sweep that this training belongs to; its experiment is used.
        tags: further tags.
    """

    def __init__(self, run_dir: Path, uri: str, parent_run_id: str | None, tags: Mapping[str, str]) -> None:
        self.with_artifacts = False
        """Set once the files of the run folder are final: then they are delivered too."""
        self.last_answer = 0.0
        """`time.monotonic` of the server's last answer."""
        self._run_dir = run_dir
        self._uri = uri
        self._parent_run_id = parent_run_id
        self._tags = {**tags, **({"mlflow.parentRunId": parent_run_id} if parent_run_id else {})}
        self._log = follow(run_dir / EVENTS_FILE)
        self._events: list[Event] = []
        self._remote: _Remote | None = None

    def deliver(self) -> None:
        """Make the MLflow run hold what the log says; asks nothing of the server when that is known to be so.

        Raises:
            Exception: whatever MLflow raises. Call again: what arrived is asked of the server first.
        """
        new = [event for event in next(self._log) if event["type"] not in ("step", "share")]
        self._events += new
        if self._remote is not None and not new and not self.with_artifacts:
            return
        plan = plan_run(self._events)
        if plan is None:
            return
        remote, self._remote = self._remote, None  # unknown, unless all of the following succeeds
        remote = remote or self._open(plan)
        remote.post(plan, self._tags)
        if self.with_artifacts and plan.end_ms is not None:
            # a sweep's own run has the weights of its best trial, and nobody needs the others'
            wanted = [pattern for pattern in ARTIFACTS if not (self._parent_run_id and pattern.startswith("weights/"))]
            remote.post_artifacts(self._run_dir, wanted, plan.version)
        self._remote = remote

    def _open(self, plan: Plan) -> _Remote:
        """Find the MLflow run, or create it, and ask what it holds."""
        client = build_client(self._uri)
        run = self._stored_run(client)
        if run is None:
            parent = self._parent_run_id and client.get_run(self._parent_run_id)
            experiment_id = str(parent.info.experiment_id) if parent else find_experiment(
                client, self._uri, plan.experiment)
            run = _find_run(client, experiment_id, plan.tags[RUN_ID_TAG]) or client.create_run(
                experiment_id, start_time=plan.start_ms, run_name=plan.name, tags=plan.tags | self._tags)
            about = {"run_id": run.info.run_id, "experiment_id": experiment_id, "uri": redact(self._uri)}
            replace_text(self._run_dir / RUN_FILE, json.dumps(about, indent=1) + "\n")
        self._note_answer()
        run_id = run.info.run_id
        posted = {(key, point.step) for key in run.data.metrics for point in client.get_metric_history(run_id, key)}
        return _Remote(client, run_id, self._note_answer, posted, set(run.data.params), dict(run.data.tags),
                       run.info.status)

    def _stored_run(self, client: MlflowClient) -> Run | None:
        """The run that the run folder names, if this server has it."""
        from mlflow.exceptions import MlflowException

        about = read_run_file(self._run_dir)
        if about is None:
            return None
        try:
            return client.get_run(about["run_id"])
        except MlflowException as error:
            if error.error_code == "RESOURCE_DOES_NOT_EXIST":
                return None
            raise

    def _note_answer(self) -> None:
        self.last_answer = time.monotonic()


@dataclass
class _Remote:
    """An MLflow run, with what the server is known to hold of it."""

    client: MlflowClient
    run_id: str
    note_answer: Callable[[], None]
    posted: set[tuple[str, int]]  # (key, epoch)
    params: set[str]
    tags: dict[str, str]
    status: str

    def post(self, plan: Plan, extra_tags: Mapping[str, str]) -> None:
        """Post what is missing, the final status last."""
        if plan.end_ms is None and self.status != plan.status:
            self.client.update_run(self.run_id, status=plan.status)
        self._post_labels(plan.params, {**plan.tags, **extra_tags})
        self._post_points(plan)
        if plan.end_ms is not None and self.status != plan.status:
            self.client.set_terminated(self.run_id, plan.status, end_time=plan.end_ms)
        self.status = plan.status

    def post_artifacts(self, run_dir: Path, patterns: Iterable[str], version: str) -> None:
        """Post the files, unless those of this version are there."""
        if self.tags.get(_DELIVERED_TAG) == version:
            return
        for path in (path for pattern in patterns for path in sorted(run_dir.glob(pattern))):
            folder = path.parent.relative_to(run_dir).as_posix()
            self.client.log_artifact(self.run_id, str(path), None if folder == "." else folder)
            self.note_answer()
        self.client.set_tag(self.run_id, _DELIVERED_TAG, version)
        self.tags[_DELIVERED_TAG] = version

    def _post_labels(self, params: Mapping[str, str], tags: Mapping[str, str]) -> None:
        from mlflow.entities import Param, RunTag

        new_params = [Param(key, value) for key, value in params.items() if key not in self.params]
        new_tags = [RunTag(key, value) for key, value in tags.items() if self.tags.get(key) != value]
        for some in _chunks(new_params, _LABELS_PER_CALL):
            self.client.log_batch(self.run_id, params=some)
        for some in _chunks(new_tags, _LABELS_PER_CALL):
            self.client.log_batch(self.run_id, tags=some)
        self.params |= params.keys()
        self.tags |= tags

    def _post_points(self, plan: Plan) -> None:
        from mlflow.entities import Metric

        new = [point for point in plan.points if (point.key, point.epoch) not in self.posted]
        for some in _chunks([Metric(*point) for point in new], _METRICS_PER_CALL):
            self.client.log_batch(self.run_id, metrics=some)
            self.note_answer()
        self.posted |= {(point.key, point.epoch) for point in new}


class Tracking:
    """The MLflow thread of a driver; also delivers what finished runs of the project owe.

    `warn` is told once if the server does not answer.
    """

    def __init__(self, run_dir: str | os.PathLike[str], uri: str, warn: Callable[[str], None], *,
                 parent_run_id: str | None = None, tags: Mapping[str, str] | None = None) -> None:
        self._run_dir = Path(run_dir)
        self._uri = uri
        self._parent_run_id, self._tags = parent_run_id, tags or {}
        self._tracker = self._other = Tracker(self._run_dir, uri, parent_run_id, self._tags)
        self._owing = owing_runs(self._run_dir, uri)
        self._thread = Background("MLflow", self._deliver, interval_seconds=1.0, warn=warn)

    def finish(self, patience_seconds: float | None = None) -> str | None:
        """Deliver the rest, files included: call it when they are final.

        Waits for as long as the server answers at least every `patience_seconds`: 10 for a server, 60 for a database
        of ours, which is not away but may have to be made first.

        Returns:
            None when all is delivered, else a line for the user: how to deliver the rest later. The run folder then
            has a note of it.
        """
        self._tracker.with_artifacts = True
        if patience_seconds is None:
            patience_seconds = 10.0 if self._uri.startswith("http") else 60.0
        if self._thread.finish(patience_seconds, lambda: max(self._tracker.last_answer, self._other.last_answer)):
            forget_owed(self._run_dir, self._uri)
            return None
        note_owed(self._run_dir, self._uri, self._parent_run_id, self._tags)
        words = ("python", "-m", "ray_yolo.sync", str(self._run_dir), "--mlflow-uri", redact(self._uri))
        return f"MLflow has not got everything yet. To deliver the rest: {shlex.join(words)}"

    def _deliver(self) -> None:
        """What is new in this run, then what others owe, each tried once."""
        self._tracker.deliver()
        while self._owing:
            folder = self._owing.pop(0)
            with claimed(folder, self._uri) as owed:
                if owed is not None:
                    self._other = _whole(folder, self._uri, owed["parent_run_id"], owed["tags"])
                    self._other.deliver()
                    forget_owed(folder, self._uri)


def synchronise(run_dir: str | os.PathLike[str], uri: str, *, parent_run_id: str | None = None,
                tags: Mapping[str, str] | None = None) -> str:
    """Deliver a run folder to a server, whole; what is there already is left alone.

    Returns:
        The id of the MLflow run.

    Raises:
        InputError: if the folder has no event log of a training.
        mlflow.exceptions.MlflowException: if the server cannot be reached or refuses; call again.
    """
    owed = read_owed(Path(run_dir), uri) or {}
    _whole(Path(run_dir), uri, parent_run_id or owed.get("parent_run_id"), tags or owed.get("tags", {})).deliver()
    forget_owed(Path(run_dir), uri)
    about = read_run_file(run_dir)
    if about is None:
        raise InputError(f"{run_dir}: no event log of a training ({EVENTS_FILE}) here; give the folder of a run")
    return about["run_id"]


def _whole(run_dir: Path, uri: str, parent_run_id: str | None, tags: Mapping[str, str]) -> Tracker:
    """The tracker of a run that has ended, whose files are final."""
    tracker = Tracker(run_dir, uri, parent_run_id, tags)
    tracker.with_artifacts = True
    return tracker


def tracking_uri(setting: str, storage_dir: str | os.PathLike[str], environment: Mapping[str, str]) -> str | None:
    """The server to use: the setting, else MLFLOW_TRACKING_URI, else sqlite in the storage folder; None for 'off'."""
    if setting == "off":
        return None
    return setting or environment.get("MLFLOW_TRACKING_URI") or f"sqlite:///{Path(storage_dir).resolve()}/mlflow.db"


def read_run_file(run_dir: str | os.PathLike[str]) -> dict[str, str] | None:
    """`run_id`, `experiment_id` and `uri` (without secrets) of the folder's MLflow run; None if there is none yet."""
    try:
        about: dict[str, str] = json.loads((Path(run_dir) / RUN_FILE).read_text())
    except (FileNotFoundError, ValueError):  # emptied by a power cut: the run is found again by its tag
        return None
    return about


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
    from mlflow.store.tracking.sqlalchemy_store import SqlAlchemyStore

    path.parent.mkdir(parents=True, exist_ok=True)
    for left in path.parent.glob(f".{path.name}-*"):  # by a process that was killed
        if time.time() - left.stat().st_mtime > _LONGEST_MAKING_SECONDS:
            shutil.rmtree(left, ignore_errors=True)
    with tempfile.TemporaryDirectory(prefix=f".{path.name}-", dir=path.parent) as folder:
        made = Path(folder) / path.name
        SqlAlchemyStore(f"sqlite:///{made}", artifacts).engine.dispose()
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
    with contextlib.closing(sqlite3.connect(path)) as database:
        return database.execute("SELECT 1 FROM sqlite_master WHERE name GLOB '_alembic_tmp_*'").fetchone() is not None


def _find_run(client: MlflowClient, experiment_id: str, run_id: str) -> Run | None:
    """The MLflow run that an earlier call created without living to write down its id."""
    runs = client.search_runs([experiment_id], filter_string=f"tags.`{RUN_ID_TAG}` = '{run_id}'", max_results=1)
    return next(iter(runs), None)


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


def _chunks(items: Sequence[Any], size: int) -> Iterator[list[Any]]:
    rest = iter(items)
    while chunk := list(islice(rest, size)):
        yield chunk
