"""Delivers plans (`mlflow_plan`) to an MLflow server: the MLflow run of a training as a record of its log.

A delivery requests the content of the run from the server and posts the difference. Interrupted trainings, failed
servers and late deliveries are therefore the same case: nothing is posted twice, and only durable rows are posted.
"""

from __future__ import annotations

import getpass
import hashlib
import importlib.util
import json
import logging
import os
from collections.abc import Callable, Collection, Hashable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ray_yolo.core.errors import TrackingError
from ray_yolo.core.events import Event
from ray_yolo.core.files import atomic_write
from ray_yolo.core.redact import redact
from ray_yolo.runs.run_record import LEDGER_FILE
from ray_yolo.sinks.mlflow_client import (
    OWED_FILE,
    RUN_FILE,
    build_client,
    build_monitor,
    find_experiment,
    folder_identity,
    read_run_file,
)
from ray_yolo.sinks.mlflow_errors import explained
from ray_yolo.sinks.mlflow_plan import CONTEXT_TAG, OWN_FILES, PARENT_TAG, RUN_ID_TAG, RunPlan, plan_run

if TYPE_CHECKING:
    from mlflow import MlflowClient
    from mlflow.entities import Run

_logger = logging.getLogger(__name__)
_DELIVERED_TAG = "ray_yolo.delivered"
_LABELS_PER_CALL, _METRICS_PER_CALL = 100, 1000  # MLflow's limits
_MONITOR_SWITCH = "MLFLOW_ENABLE_SYSTEM_METRICS_LOGGING"


class Delivery:
    """Delivers the plans of one run folder to one server, and caches the server's content.

    A point is posted unless the server has its value at its step: of several values of a step, MLflow shows the newest.

    Args:
        folder: with the files of the run. The id of the MLflow run is stored there.
        uri: the server.
        fresh: create a new MLflow run whose id is not stored in the folder.
    """

    def __init__(self, folder: Path, uri: str, *, fresh: bool = False) -> None:
        self._folder, self._uri, self._fresh = folder, uri, fresh
        self._client: MlflowClient | None = None  # None: what follows is not known
        self._run_id = self._status = ""
        self._own_files = ""
        """The address of the run's files on the pages of its server."""
        self._tags: dict[str, str] = {}
        self._held: set[Hashable] = set()  # names of parameters, (name, digest) of data
        self._values: set[tuple[str, int, float]] = set()  # key, step and value of each point

    def deliver(self, plan: RunPlan, *, with_files: bool = True) -> str:
        """Post the parts of a plan that the MLflow run lacks, with its final status last. Returns its id.

        Args:
            with_files: also deliver the files, if the run has ended according to the plan.

        Raises:
            Exception: any that MLflow raises. A repeated call requests the server's content again.
        """
        client = self._client or self._open(plan)
        self._client = None  # kept only if all of the following succeeds

        if plan.end_ms is None and self._status != plan.status:
            client.update_run(self._run_id, status=plan.status)
        self._post_params(client, plan)
        self._post_tags(client, plan)
        self._post_data(client, plan)
        self._post_points(client, plan)
        if plan.end_ms is not None and self._status != plan.status:
            client.set_terminated(self._run_id, plan.status, end_time=plan.end_ms)
        self._status = plan.status
        if with_files and plan.end_ms is not None:
            self._post_files(client, plan)

        self._client = client
        return self._run_id

    def _post_params(self, client: MlflowClient, plan: RunPlan) -> None:
        from mlflow.entities import Param  # here, as below: after MLflow's settings

        params = [Param(key, value) for key, value in plan.params.items() if key not in self._held]
        self._post(params, _LABELS_PER_CALL, lambda some: client.log_batch(self._run_id, params=some))
        self._held.update(plan.params)

    def _post_tags(self, client: MlflowClient, plan: RunPlan) -> None:
        from mlflow.entities import RunTag

        wanted = {key: value.replace(f"({OWN_FILES}", f"({self._own_files}") for key, value in plan.tags.items()}
        tags = [RunTag(key, value) for key, value in wanted.items() if self._tags.get(key) != value]
        self._post(tags, _LABELS_PER_CALL, lambda some: client.log_batch(self._run_id, tags=some))
        self._tags.update(wanted)

    def _post_data(self, client: MlflowClient, plan: RunPlan) -> None:
        from mlflow.entities import Dataset, DatasetInput, InputTag

        inputs = []
        for each in plan.data:
            if (each.name, each.digest) in self._held:
                continue
            dataset = Dataset(each.name, each.digest, "local", each.source, profile=each.profile)
            inputs.append(DatasetInput(dataset, [InputTag(CONTEXT_TAG, each.context)]))
        self._post(inputs, _LABELS_PER_CALL, lambda some: client.log_inputs(self._run_id, some))
        self._held.update((each.name, each.digest) for each in plan.data)

    def _post_points(self, client: MlflowClient, plan: RunPlan) -> None:
        from mlflow.entities import Metric

        new = [point for point in plan.points if (point.key, point.epoch, point.value) not in self._values]
        metrics = [Metric(*point) for point in new]
        self._post(metrics, _METRICS_PER_CALL, lambda some: client.log_batch(self._run_id, metrics=some))
        self._values.update((point.key, point.epoch, point.value) for point in new)

    def _post(self, items: Sequence[Any], most: int, send: Callable[[Sequence[Any]], object]) -> None:
        """Send items, at most `most` per call."""
        for start in range(0, len(items), most):
            send(items[start : start + most])

    def _post_files(self, client: MlflowClient, plan: RunPlan) -> None:
        """Post each file that the server lacks or has with another content. A tag of the run has the digests of those
        that it received."""
        paths = []
        for pattern in plan.artifacts:
            for path in sorted(self._folder.glob(pattern)):
                if path.is_file() and not path.name.startswith("."):  # else half written by a process that was killed
                    paths.append(path)
        digests = {path.relative_to(self._folder).as_posix(): _digest(path) for path in paths}
        listed = _listed_files(client, self._run_id, {key.rpartition("/")[0] for key in digests})
        known = _known_digests(self._tags)
        stored = {key: digest for key, digest in known.items() if key in listed and key in digests}
        if stored == known == digests:
            return
        try:
            for path, (key, digest) in zip(paths, digests.items(), strict=True):
                if stored.get(key) != digest:
                    subfolder = key.rpartition("/")[0]
                    client.log_artifact(self._run_id, str(path), subfolder or None)
                    stored[key] = digest
        finally:
            self._tags[_DELIVERED_TAG] = json.dumps(stored)
            client.set_tag(self._run_id, _DELIVERED_TAG, self._tags[_DELIVERED_TAG])

    def _open(self, plan: RunPlan) -> MlflowClient:
        """Find or create the MLflow run, and ask the server for its content."""
        client = build_client(self._uri)
        run = None if self._fresh else self._known_run(client, plan)
        if run is None:
            run = self._create(client, plan)
        self._run_id, self._status, self._tags = run.info.run_id, run.info.status, dict(run.data.tags)
        self._own_files = files_address(run)

        self._values = set()
        for key in run.data.metrics:
            if key.startswith("system/"):  # posted by the monitor
                continue
            for point in client.get_metric_history(self._run_id, key):
                self._values.add((key, point.step, point.value))

        self._held = set(run.data.params)
        for each in run.inputs.dataset_inputs if run.inputs else ():
            self._held.add((each.dataset.name, each.dataset.digest))
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
            about = {"run_id": run.info.run_id, "experiment_id": experiment_id, "uri": redact(self._uri),
                     "folder": folder_identity(self._folder)}
            atomic_write(self._folder / RUN_FILE, json.dumps(about, indent=1) + "\n", durable=False)
        return run


class MlflowRecord:
    """The MLflow run of a training; for a trial below the run of its sweep. Files follow after the end.

    Args:
        warn: receives what is wrong with the metrics of this machine.
    """

    name, uses_time = "MLflow", True

    def __init__(self, folder: Path, uri: str, warn: Callable[[str], None]) -> None:
        self._folder, self._uri, self._warn = folder, uri, warn
        self._delivery = Delivery(folder, uri)
        self._monitor: Any = None
        self._measures = system_metrics_enabled()

    def update(self, events: Sequence[Event], ended: bool) -> None:
        """Post what the server lacks.

        Raises:
            RecordError: if the server cannot be reached or refuses; the next call asks it again what it has.
        """
        plan = plan_run(events, _parent_run(self._folder, self._uri))
        if plan is None:
            return
        if ended:
            self._stop_monitor()  # first: delivery may have to be tried again long after the training
        with explained(self._uri):
            run_id = self._delivery.deliver(plan, with_files=ended)
        if ended:
            (self._folder / OWED_FILE).unlink(missing_ok=True)
        elif self._measures and self._monitor is None:
            self._start_monitor(run_id)

    def _start_monitor(self, run_id: str) -> None:
        """Post system/NODE/cpu_utilization_percentage and similar metrics of this machine, the driver's. MLflow's own
        monitor measures them with its settings (MLFLOW_SYSTEM_METRICS_SAMPLING_INTERVAL, ...)."""
        if importlib.util.find_spec("psutil"):
            self._monitor = build_monitor(self._uri, run_id)
            self._monitor.start()
        else:
            self._measures = False
            self._warn(f"system metrics: {_MONITOR_SWITCH} needs pip install psutil")

    def _stop_monitor(self) -> None:
        if self._monitor is not None:
            self._monitor.finish()
            self._monitor = None
        self._measures = False


def files_address(run: Run) -> str:
    """The address of a run's files on the pages of its server."""
    return f"#/experiments/{run.info.experiment_id}/runs/{run.info.run_id}/artifacts/"


def _digest(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()[:12]


def _listed_files(client: MlflowClient, run_id: str, folders: Collection[str]) -> set[str]:
    """The files that a server has in some folders of a run."""
    return {file.path for folder in folders for file in client.list_artifacts(run_id, folder or None)}


def _known_digests(tags: Mapping[str, str]) -> dict[str, str]:
    """The digests of the files that an MLflow run has; none if an earlier version has delivered them."""
    try:
        known = json.loads(tags.get(_DELIVERED_TAG, ""))
    except ValueError:
        return {}
    return known if isinstance(known, dict) else {}


def _parent_run(folder: Path, uri: str) -> str | None:
    """The MLflow run of the sweep in whose folder this trial is; None for any other training."""
    sweep = folder / ".." / ".."
    about = read_run_file(sweep) if (sweep / LEDGER_FILE).is_file() else None
    return about["run_id"] if about and about["uri"] == redact(uri) else None


def system_metrics_enabled() -> bool:
    """Whether MLflow's switch for the metrics of this machine is on."""
    return os.environ.get(_MONITOR_SWITCH, "").lower() in ("true", "1")
