"""Delivers what an MLflow run should hold (`mlflow_plan`), and keeps the run of a training up to date.

What the run does hold is asked of the server, and the difference is posted. So a training that was interrupted, a
server that was away and a delivery long after the end are one case; nothing is posted twice, and only what is durable
is posted at all. In a training this happens in a thread of the driver with short time limits: a server that is down or
slow costs one warning and no time.
"""

from __future__ import annotations

import getpass
import importlib.util
import json
import shlex
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ray_yolo.core.errors import InputError
from ray_yolo.core.events import CheckpointEvent, DatasetEvent, EndEvent, EpochEvent, RunEvent, StartEvent, StepEvent
from ray_yolo.core.files import atomic_write
from ray_yolo.core.redact import redact
from ray_yolo.runs.event_log import EVENTS_FILE, read_events
from ray_yolo.sinks.base import Sink
from ray_yolo.sinks.mlflow_client import (
    RUN_FILE,
    build_client,
    build_monitor,
    claimed,
    find_experiment,
    forget_owed,
    note_owed,
    owing_runs,
    read_owed,
    read_run_file,
)
from ray_yolo.sinks.mlflow_plan import RUN_ID_TAG, Data, Point, RunPlan, plan_run

if TYPE_CHECKING:
    from mlflow import MlflowClient
    from mlflow.entities import Run

_DELIVERED_TAG = "ray_yolo.delivered"
_LABELS_PER_CALL, _METRICS_PER_CALL = 100, 1000  # MLflow's limits
_MONITOR_SWITCH = "MLFLOW_ENABLE_SYSTEM_METRICS_LOGGING"


class Delivery:
    """Delivers plans of one folder's run to one server, and remembers what the server is known to hold.

    Args:
        folder: of the run's files; it names the run once there is one.
        uri: the server.
        fresh: make a new run, which the folder does not name.
    """

    def __init__(self, folder: Path, uri: str, *, fresh: bool = False) -> None:
        self.last_answer = 0.0
        """`time.monotonic` of the server's last answer."""
        self._folder, self._uri, self._fresh = folder, uri, fresh
        self._remote: _Remote | None = None

    def deliver(self, plan: RunPlan, *, with_files: bool = True) -> str:
        """Make the MLflow run hold what a plan says. Returns its id.

        Args:
            with_files: deliver the files, too, if the plan says that the run has ended.

        Raises:
            Exception: whatever MLflow raises. Call again: what arrived is asked of the server first.
        """
        remote, self._remote = self._remote, None  # unknown, unless all of the following succeeds
        remote = remote or self._open(plan)
        remote.post(plan)
        if with_files and plan.end_ms is not None:
            remote.post_artifacts(self._folder, plan)
        self._remote = remote
        return remote.run_id

    def _open(self, plan: RunPlan) -> _Remote:
        """Find the MLflow run, or create it, and ask what it holds."""
        client = build_client(self._uri)
        run = (None if self._fresh else self._stored_run(client, plan)) or self._create(client, plan)
        self._note_answer()
        run_id = run.info.run_id
        keys = [key for key in run.data.metrics if not key.startswith("system/")]  # those are its monitor's
        posted = {(key, point.step) for key in keys for point in client.get_metric_history(run_id, key)}
        data = {(each.dataset.name, each.dataset.digest) for each in (run.inputs.dataset_inputs if run.inputs else ())}
        return _Remote(client, run_id, self._note_answer, posted, set(run.data.params), dict(run.data.tags), data,
                       run.info.status)

    def _stored_run(self, client: MlflowClient, plan: RunPlan) -> Run | None:
        """The run that the folder names. None if this server has it not; but one without an id is nowhere else."""
        from mlflow.exceptions import MlflowException

        about = read_run_file(self._folder)
        if about is None:
            return None
        try:
            return client.get_run(about["run_id"])
        except MlflowException as error:
            if error.error_code == "RESOURCE_DOES_NOT_EXIST" and RUN_ID_TAG in plan.tags:
                return None
            raise

    def _create(self, client: MlflowClient, plan: RunPlan) -> Run:
        """The run, created unless an earlier call did that without living to write down its id."""
        parent = plan.parent_run_id and client.get_run(plan.parent_run_id)
        experiment_id = str(parent.info.experiment_id) if parent else find_experiment(
            client, self._uri, plan.experiment)
        known = f"tags.`{RUN_ID_TAG}` = '{plan.tags.get(RUN_ID_TAG)}'"
        found = client.search_runs([experiment_id], known, max_results=1) if RUN_ID_TAG in plan.tags else []
        run = next(iter(found), None) or client.create_run(
            experiment_id, plan.start_ms, {**_user(), **_tags(plan)}, run_name=plan.name)
        if not self._fresh:
            about = {"run_id": run.info.run_id, "experiment_id": experiment_id, "uri": redact(self._uri)}
            atomic_write(self._folder / RUN_FILE, json.dumps(about, indent=1) + "\n", durable=False)
        return run

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
    data: set[tuple[str, str]]  # (name, digest)
    status: str

    def post(self, plan: RunPlan) -> None:
        """Post what is missing, the final status last."""
        if plan.end_ms is None and self.status != plan.status:
            self.client.update_run(self.run_id, status=plan.status)
        self._post_labels(plan.params, _tags(plan))
        self._post_data(plan.data)
        self._post_points(plan.points)
        if plan.end_ms is not None and self.status != plan.status:
            self.client.set_terminated(self.run_id, plan.status, end_time=plan.end_ms)
        self.status = plan.status

    def post_artifacts(self, folder: Path, plan: RunPlan) -> None:
        """Post the files, unless those of this version are there."""
        if plan.version and self.tags.get(_DELIVERED_TAG) == plan.version:
            return
        for path in (path for pattern in plan.artifacts for path in sorted(folder.glob(pattern))):
            place = path.parent.relative_to(folder).as_posix()
            self.client.log_artifact(self.run_id, str(path), None if place == "." else place)
            self.note_answer()
        if plan.version:
            self.client.set_tag(self.run_id, _DELIVERED_TAG, plan.version)
            self.tags[_DELIVERED_TAG] = plan.version

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

    def _post_data(self, data: Sequence[Data]) -> None:
        from mlflow.entities import Dataset, DatasetInput, InputTag

        new = [each for each in data if (each.name, each.digest) not in self.data]
        if new:
            self.client.log_inputs(self.run_id, [DatasetInput(
                Dataset(each.name, each.digest, "local", each.source, profile=each.profile),
                [InputTag("mlflow.data.context", each.context)]) for each in new])
        self.data |= {(each.name, each.digest) for each in new}

    def _post_points(self, points: Sequence[Point]) -> None:
        from mlflow.entities import Metric

        new = [point for point in points if (point.key, point.epoch) not in self.posted]
        for some in _chunks([Metric(*point) for point in new], _METRICS_PER_CALL):
            self.client.log_batch(self.run_id, metrics=some)
            self.note_answer()
        self.posted |= {(point.key, point.epoch) for point in new}


class Mlflow(Sink):
    """The MLflow run of a training; also delivers what finished runs of the project owe.

    Its end is waited for as long as the server answers at least every 10 s; 60 for a database of ours, which is not
    away but may have to be made first.
    """

    name, interval_seconds = "MLflow", 1.0
    needs = (RunEvent, DatasetEvent, StartEvent, StepEvent, EpochEvent, CheckpointEvent, EndEvent)

    def __init__(self, run_dir: Path, uri: str, parent_run_id: str | None = None,
                 tags: Mapping[str, str] | None = None) -> None:
        super().__init__()
        self.notes: list[str] = []
        """What the user has to know at the end: how to deliver the rest."""
        self.patience_seconds = 10.0 if uri.startswith("http") else 60.0
        self._run_dir, self._uri, self._parent_run_id, self._tags = run_dir, uri, parent_run_id, tags or {}
        self._delivery = self._other = Delivery(run_dir, uri)
        self._owing = owing_runs(run_dir, uri)

    def answered_at(self) -> float:
        """`time.monotonic` of the server's last answer."""
        return max(self._delivery.last_answer, self._other.last_answer)

    def update(self, last: bool = False) -> None:
        """Deliver what is new in this run, then what others owe, each tried once. Files are final the last time."""
        if not (self.trains or last):
            return
        if self.is_stale or last:
            if plan := plan_run(self.history, self._parent_run_id, self._tags):
                self._delivery.deliver(plan, with_files=last)
            self.is_stale = False
        while self._owing:
            folder = self._owing.pop(0)
            with claimed(folder, self._uri) as owed:
                if owed is not None:
                    self._other = Delivery(folder, self._uri)
                    if plan := plan_run(read_events(folder / EVENTS_FILE), owed["parent_run_id"], owed["tags"]):
                        self._other.deliver(plan)
                    forget_owed(folder, self._uri)

    def finish(self) -> None:
        """All is delivered."""
        forget_owed(self._run_dir, self._uri)

    def abandon(self) -> str:
        """Leave a note of what is owed."""
        words = ("python", "-m", "ray_yolo.sync", str(self._run_dir), "--mlflow-uri", redact(self._uri))
        self.notes.append(f"MLflow has not got everything yet. To deliver the rest: {shlex.join(words)}")
        note_owed(self._run_dir, self._uri, self._parent_run_id, self._tags)
        return ""


class SystemMetrics(Sink):
    """system/NODE/cpu_utilization_percentage and their like of the driver's machine, in the MLflow run of a training.

    By MLflow's own monitor, which has settings of its own: MLFLOW_SYSTEM_METRICS_SAMPLING_INTERVAL, ... Ray's metrics
    have all machines (cluster/grafana.json).

    Args:
        mlflow: which makes the run.
    """

    name = "system metrics"

    def __init__(self, run_dir: Path, uri: str, mlflow: Mlflow) -> None:
        super().__init__()
        self._run_dir, self._uri, self._mlflow = run_dir, uri, mlflow
        self._monitor: Any = None

    def update(self, last: bool = False) -> None:
        """Begin once the run is there."""
        about = read_run_file(self._run_dir)
        if last or self._monitor or not self._mlflow.answered_at() or not about or about["uri"] != redact(self._uri):
            return
        if not importlib.util.find_spec("psutil"):
            raise InputError(f"{_MONITOR_SWITCH} needs pip install psutil")
        self._monitor = build_monitor(self._uri, about["run_id"])
        self._monitor.start()

    def finish(self) -> None:
        """Post what is left."""
        if self._monitor:
            self._monitor.finish()


def is_asked_for(environment: Mapping[str, str]) -> bool:
    """Whether MLflow's switch for `SystemMetrics` is on."""
    return environment.get(_MONITOR_SWITCH, "").lower() in ("true", "1")


def synchronise(run_dir: str | Path, uri: str, *, parent_run_id: str | None = None,
                tags: Mapping[str, str] | None = None) -> str:
    """Deliver a run folder to a server, whole; what is there already is left alone.

    Returns:
        The id of the MLflow run.

    Raises:
        InputError: if the folder has no event log of a training.
        mlflow.exceptions.MlflowException: if the server cannot be reached or refuses; call again.
    """
    folder = Path(run_dir)
    owed = read_owed(folder, uri) or {}
    plan = plan_run(read_events(folder / EVENTS_FILE), parent_run_id or owed.get("parent_run_id"),
                    tags or owed.get("tags", {}))
    if plan is None:  # a sweep's folder names its run too
        raise InputError(f"{run_dir}: no event log of a training ({EVENTS_FILE}) here; give a run, or a sweep's trial")
    run_id = Delivery(folder, uri).deliver(plan)
    forget_owed(folder, uri)
    return run_id


def _tags(plan: RunPlan) -> dict[str, str]:
    return {**plan.tags, **({"mlflow.parentRunId": plan.parent_run_id} if plan.parent_run_id else {})}


def _user() -> dict[str, str]:
    """Who has begun the run, in MLflow's terms."""
    try:
        return {"mlflow.user": getpass.getuser()}
    except (OSError, KeyError):  # a container's user without a name
        return {}


def _chunks(items: Sequence[Any], size: int) -> Iterator[list[Any]]:
    rest = iter(items)
    while chunk := list(islice(rest, size)):
        yield chunk
