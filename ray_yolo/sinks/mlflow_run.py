"""Delivers plans (`mlflow_plan`) to an MLflow server, and keeps the MLflow run of a training up to date.

A delivery requests the content of the run from the server and posts the difference. Interrupted trainings, failed
servers and late deliveries are therefore the same case: nothing is posted twice, and only durable rows are posted. A
training delivers in a thread of the driver with short time limits. A slow or failed server causes one warning and no
delay.
"""

from __future__ import annotations

import getpass
import importlib.util
import json
import logging
import math
import os
import time
from collections.abc import Callable, Hashable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ray_yolo.core.errors import InputError, TrackingError
from ray_yolo.core.events import CheckpointEvent, DatasetEvent, EndEvent, EpochEvent, RunEvent, StartEvent, StepEvent
from ray_yolo.core.files import atomic_write
from ray_yolo.core.redact import redact
from ray_yolo.runs.event_log import EVENTS_FILE, read_events
from ray_yolo.runs.folders import lock_file
from ray_yolo.sinks.base import Sink
from ray_yolo.sinks.mlflow_client import (
    OWED_FILE,
    RUN_FILE,
    build_client,
    build_monitor,
    clear_pending,
    find_experiment,
    note_pending,
    pending_runs,
    read_pending,
    read_run_file,
    sync_command,
)
from ray_yolo.sinks.mlflow_plan import PARENT_TAG, RUN_ID_TAG, RunPlan, plan_run

if TYPE_CHECKING:
    from mlflow import MlflowClient
    from mlflow.entities import Run

_logger = logging.getLogger(__name__)
_DELIVERED_TAG = "ray_yolo.delivered"
_LABELS_PER_CALL, _METRICS_PER_CALL = 100, 1000  # MLflow's limits
DELAY_SECONDS = 20.0  # after the first step
_MONITOR_SWITCH = "MLFLOW_ENABLE_SYSTEM_METRICS_LOGGING"


class Delivery:
    """Delivers the plans of one run folder to one server, and caches the server's content.

    Args:
        folder: with the files of the run. The id of the MLflow run is stored there.
        uri: the server.
        fresh: create a new MLflow run whose id is not stored in the folder.
    """

    def __init__(self, folder: Path, uri: str, *, fresh: bool = False) -> None:
        self.last_answer = 0.0
        """`time.monotonic` of the server's last reply."""
        self._folder, self._uri, self._fresh = folder, uri, fresh
        self._client: MlflowClient | None = None  # None: what follows is not known
        self._run_id = self._status = ""
        self._tags: dict[str, str] = {}
        self._held: set[Hashable] = set()  # names of parameters, (name, digest) of data, (key, epoch) of points

    def deliver(self, plan: RunPlan, *, with_files: bool = True) -> str:
        """Post the parts of a plan that the MLflow run lacks, with its final status last. Returns its id.

        Args:
            with_files: also deliver the files, if the run has ended according to the plan.

        Raises:
            Exception: any that MLflow raises. A repeated call requests the server's content again.
        """
        client, self._client = self._client or self._open(plan), None  # kept only if all of the following succeeds
        from mlflow.entities import Dataset, DatasetInput, InputTag, Metric, Param, RunTag  # after its settings

        run_id, held = self._run_id, self._held
        if plan.end_ms is None and self._status != plan.status:
            client.update_run(run_id, status=plan.status)
        self._post([Param(key, value) for key, value in plan.params.items() if key not in held], _LABELS_PER_CALL,
                   lambda params: client.log_batch(run_id, params=params))
        self._post([RunTag(key, value) for key, value in plan.tags.items() if self._tags.get(key) != value],
                   _LABELS_PER_CALL, lambda tags: client.log_batch(run_id, tags=tags))
        self._post([DatasetInput(Dataset(each.name, each.digest, "local", each.source, profile=each.profile),
                                 [InputTag("mlflow.data.context", each.context)])
                    for each in plan.data if each[:2] not in held], _LABELS_PER_CALL,
                   lambda data: client.log_inputs(run_id, data))
        self._post([Metric(*point) for point in plan.points if (point.key, point.epoch) not in held],
                   _METRICS_PER_CALL, lambda metrics: client.log_batch(run_id, metrics=metrics))
        if plan.end_ms is not None and self._status != plan.status:
            client.set_terminated(run_id, plan.status, end_time=plan.end_ms)
        held.update(plan.params, (each[:2] for each in plan.data), ((point.key, point.epoch) for point in plan.points))
        self._tags, self._status = {**self._tags, **plan.tags}, plan.status
        if with_files and plan.end_ms is not None:
            self._post_files(client, plan)
        self._client = client
        return run_id

    def deliver_folder(self) -> str | None:
        """Deliver the training of the folder and register its weights, according to the note on its pending delivery.
        Returns the id of the MLflow run; None without an event log."""
        note = read_pending(self._folder, self._uri) or {}
        plan = plan_run(read_events(self._folder / EVENTS_FILE), note.get("parent_run_id"), note.get("tags"))
        run_id = self.deliver(plan) if plan else None
        if run_id and note.get("registered_name"):
            from ray_yolo.sinks.registry import log_model  # here: it imports torch

            log_model(self._folder, self._uri, run_id, note["registered_name"])
        clear_pending(self._folder, self._uri)
        return run_id

    def _post(self, items: Sequence[Any], most: int, send: Callable[[Sequence[Any]], object]) -> None:
        """Send items, at most `most` per call."""
        for start in range(0, len(items), most):
            send(items[start : start + most])
            self.last_answer = time.monotonic()

    def _post_files(self, client: MlflowClient, plan: RunPlan) -> None:
        """Post the files, unless this version of them was posted."""
        if plan.version and self._tags.get(_DELIVERED_TAG) == plan.version:
            return
        for path in (path for pattern in plan.artifacts for path in sorted(self._folder.glob(pattern))):
            subfolder = path.parent.relative_to(self._folder).as_posix()
            client.log_artifact(self._run_id, str(path), None if subfolder == "." else subfolder)
            self.last_answer = time.monotonic()
        if plan.version:
            client.set_tag(self._run_id, _DELIVERED_TAG, plan.version)
            self._tags[_DELIVERED_TAG] = plan.version

    def _open(self, plan: RunPlan) -> MlflowClient:
        """Find or create the MLflow run, and ask the server for its content."""
        client = build_client(self._uri)
        run = (None if self._fresh else self._known_run(client, plan)) or self._create(client, plan)
        self.last_answer = time.monotonic()
        self._run_id, self._status, self._tags = run.info.run_id, run.info.status, dict(run.data.tags)
        keys = [key for key in run.data.metrics if not key.startswith("system/")]  # posted by the monitor
        points = {(key, point.step) for key in keys for point in client.get_metric_history(self._run_id, key)}
        data = {(each.dataset.name, each.dataset.digest) for each in (run.inputs.dataset_inputs if run.inputs else ())}
        self._held = {*run.data.params, *points, *data}
        return client

    def _known_run(self, client: MlflowClient, plan: RunPlan) -> Run | None:
        """The run that the folder names; None if it names none, or the server lacks a run that can be created again.

        Raises:
            TrackingError: if the run was deleted on the server, where it can be restored.
        """
        from mlflow.exceptions import MlflowException

        about = read_run_file(self._folder)
        if about is None:
            return None
        run_id = about["run_id"]
        try:
            run = client.get_run(run_id)
        except MlflowException as error:
            if error.error_code == "RESOURCE_DOES_NOT_EXIST" and RUN_ID_TAG in plan.tags:
                _logger.warning("MLflow at %s no longer has the run %s of %s: it is created again under a new id",
                                redact(self._uri), run_id, self._folder)
                return None
            raise
        if run.info.lifecycle_stage == "deleted":
            raise TrackingError(f"MLflow at {redact(self._uri)}: the run {run_id} of {self._folder} was deleted there; "
                                f"restore it with `mlflow runs restore --run-id {run_id}`, or remove "
                                f"{self._folder / RUN_FILE} to deliver it as a new run")
        return run

    def _create(self, client: MlflowClient, plan: RunPlan) -> Run:
        """The new run, or the one that an interrupted earlier call has created: it is found by its tag."""
        if parent := plan.tags.get(PARENT_TAG):
            experiment_id = str(client.get_run(parent).info.experiment_id)
        elif plan.experiment_id:
            experiment_id = str(client.get_experiment(plan.experiment_id).experiment_id)
        else:
            experiment_id = find_experiment(client, self._uri, plan.experiment)
        query = f"tags.`{RUN_ID_TAG}` = '{plan.tags.get(RUN_ID_TAG)}'"
        runs = client.search_runs([experiment_id], query, max_results=1) if RUN_ID_TAG in plan.tags else []
        tags = dict(plan.tags)
        with suppress(OSError, KeyError):  # a user without a name in a container
            tags["mlflow.user"] = getpass.getuser()
        run = next(iter(runs), None) or client.create_run(experiment_id, plan.start_ms, tags, run_name=plan.name)
        if not self._fresh:
            about = {"run_id": run.info.run_id, "experiment_id": experiment_id, "uri": redact(self._uri)}
            atomic_write(self._folder / RUN_FILE, json.dumps(about, indent=1) + "\n", durable=False)
        return run


class Mlflow(Sink):
    """The MLflow run of a training. It also makes the pending deliveries of the project's finished runs.

    At the end it has no time limit as long as the server replies at least every 10 s. For an sqlite database, which may
    have to be created first, this is 60 s. At a prompt it takes at most 2 s, or none if it has not started, and the
    rest is pending.

    Without Ray, this thread shares Python's lock with training: MLflow's import and its database extended a first epoch
    from one second to eleven. The thread therefore starts some seconds after the first step; a shorter training
    delivers after its end.

    Args:
        is_drawing: whether the plot process still draws at the end. Then it delivers the files afterwards.
        delay_seconds: from the first step until it starts.
    """

    name, interval_seconds = "MLflow", 1.0
    needs = (RunEvent, DatasetEvent, StartEvent, StepEvent, EpochEvent, CheckpointEvent, EndEvent)

    def __init__(self, run_dir: Path, uri: str, parent_run_id: str | None = None,
                 tags: Mapping[str, str] | None = None,
                 is_drawing: Callable[[], bool] = lambda: False, delay_seconds: float = DELAY_SECONDS) -> None:
        super().__init__()
        self.prompt_seconds, self._delay = 0.0, delay_seconds
        self.notes: list[str] = []
        """For the user at the end: how to deliver the rest."""
        self.patience_seconds = 10.0 if uri.startswith("http") else 60.0
        self._run_dir, self._uri, self._parent_run_id, self._tags = run_dir, uri, parent_run_id, tags or {}
        self._is_drawing = is_drawing
        self._delivery = self._other = Delivery(run_dir, uri)
        self._pending = pending_runs(run_dir, uri)
        self._began = math.inf  # `time.monotonic` of the first step

    def answered_at(self) -> float:
        """`time.monotonic` of the server's last reply."""
        return max(self._delivery.last_answer, self._other.last_answer)

    def update(self, last: bool = False) -> None:
        """Deliver the new rows of this run, then each pending run once. The last call also delivers the files."""
        now = time.monotonic()
        if self.is_training:
            self._began = min(self._began, now)
        if now - self._began < self._delay and not last:
            return
        self.prompt_seconds = 2.0
        if self.is_stale or last:
            if plan := plan_run(self.history, self._parent_run_id, self._tags):
                self._delivery.deliver(plan, with_files=last and not self._is_drawing())
            self.is_stale = False
        while self._pending:
            folder = self._pending.pop(0)
            self._other = Delivery(folder, self._uri)
            deliver_pending(folder, self._uri, self._other)

    def finish(self) -> None:
        """Clear the note of an earlier start, or leave a note about the files that are delivered after the pictures."""
        if self._is_drawing():
            self._note_rest("MLflow gets the files in the background, after the last pictures. If it does not")
        else:
            clear_pending(self._run_dir, self._uri)

    def abandon(self) -> str:
        """Leave a note on the pending delivery."""
        self._note_rest("MLflow gets the rest in the background. If it does not")
        return ""

    def _note_rest(self, message: str) -> None:
        self.notes.append(f"{message}: {sync_command(self._run_dir, self._uri)}")
        note_pending(self._run_dir, self._uri, parent_run_id=self._parent_run_id, tags=dict(self._tags))


class SystemMetrics(Sink):
    """system/NODE/cpu_utilization_percentage and similar metrics of the driver's machine, in a training's MLflow run.

    MLflow's own monitor measures them; its settings apply (MLFLOW_SYSTEM_METRICS_SAMPLING_INTERVAL, ...). Ray's metrics
    cover all machines (cluster/grafana.json).

    Args:
        mlflow: creates the run.
    """

    name, prompt_seconds = "system metrics", 0.5

    def __init__(self, run_dir: Path, uri: str, mlflow: Mlflow) -> None:
        super().__init__()
        self._run_dir, self._uri, self._mlflow = run_dir, uri, mlflow
        self._monitor: Any = None

    def update(self, last: bool = False) -> None:
        """Start once the MLflow run exists."""
        about = read_run_file(self._run_dir)
        if last or self._monitor or not self._mlflow.answered_at() or not about or about["uri"] != redact(self._uri):
            return
        if not importlib.util.find_spec("psutil"):
            raise InputError(f"{_MONITOR_SWITCH} needs pip install psutil")
        self._monitor = build_monitor(self._uri, about["run_id"])
        self._monitor.start()

    def finish(self) -> None:
        """Post the rest."""
        if self._monitor:
            self._monitor.finish()


def system_metrics_enabled() -> bool:
    """Whether MLflow's switch for `SystemMetrics` is on."""
    return os.environ.get(_MONITOR_SWITCH, "").lower() in ("true", "1")


def deliver_pending(folder: Path, uri: str, delivery: Delivery | None = None) -> None:
    """Make the pending delivery of a run folder to a server, unless there is none or another process is making it.

    Raises:
        Exception: any that MLflow raises; the delivery is still pending then.
    """
    try:
        file = (folder / OWED_FILE).open("r+")
    except FileNotFoundError:
        return
    with file:
        if lock_file(file) and read_pending(folder, uri) is not None:
            (delivery or Delivery(folder, uri)).deliver_folder()


def synchronise(folder: Path, uri: str) -> str:
    """Deliver a whole run folder to a server, which keeps its existing content. Returns the id of the MLflow run.

    Raises:
        InputError: if the folder has no event log of a training.
        mlflow.exceptions.MlflowException: if the server cannot be reached or refuses; call again.
    """
    run_id = Delivery(folder, uri).deliver_folder()
    if run_id is None:  # the folder of a sweep has an MLflow run, too, but no event log
        raise InputError(f"{folder}: no event log of a training ({EVENTS_FILE}) here; give a run, or a sweep's trial")
    return run_id
