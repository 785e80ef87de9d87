"""One MLflow run for one training, as a projection of its event log.

What the MLflow run should hold is computed from the log alone (`tracking_plan`); what it does hold is asked of the
server; the difference is posted. So a training that was interrupted, a server that was away and a delivery long after
the end are one case; nothing is posted twice, and only what is durable is posted at all. In a training this happens
in a thread of the driver with short time limits: a server that is down or slow costs one warning and no time.
"""

from __future__ import annotations

import getpass
import json
import shlex
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ray_yolo.errors import InputError
from ray_yolo.events import (
    CheckpointEvent,
    DatasetEvent,
    EndEvent,
    EpochEvent,
    Event,
    RunEvent,
    StartEvent,
    StepEvent,
)
from ray_yolo.redact import redact
from ray_yolo.runlog.event_log import EVENTS_FILE, read_events
from ray_yolo.runlog.mlflow_client import build_client, find_experiment
from ray_yolo.runlog.mlflow_run import RUN_ID_TAG, Data, Plan, plan_run
from ray_yolo.runlog.owed import RUN_FILE, claimed, forget_owed, note_owed, owing_runs, read_owed, read_run_file
from ray_yolo.runlog.projections import Projection
from ray_yolo.runlog.results_files import replace_text

if TYPE_CHECKING:
    from mlflow import MlflowClient
    from mlflow.entities import Run

# Small files first: if time runs out they are there.
ARTIFACTS = ("hyp.yaml", "opt.yaml", "results.csv", "*.png", "*.jpg", EVENTS_FILE, "weights/best.pt", "weights/last.pt")

_DELIVERED_TAG = "ray_yolo.delivered"
_LABELS_PER_CALL, _METRICS_PER_CALL = 100, 1000  # MLflow's limits


class Tracker:
    """Delivers one run folder to one server, and remembers what the server is known to hold.

    Args:
        run_dir: the run folder.
        uri: the server.
        parent_run_id: the MLflow run of the sweep that this training belongs to; its experiment is used.
        tags: further tags.
    """

    def __init__(self, run_dir: Path, uri: str, parent_run_id: str | None, tags: Mapping[str, str]) -> None:
        self.last_answer = 0.0
        """`time.monotonic` of the server's last answer."""
        self._run_dir = run_dir
        self._uri = uri
        self._parent_run_id = parent_run_id
        self._tags = {**tags, **({"mlflow.parentRunId": parent_run_id} if parent_run_id else {})}
        self._remote: _Remote | None = None

    def deliver(self, events: Sequence[Event], *, with_files: bool) -> None:
        """Make the MLflow run hold what a log says.

        Args:
            with_files: the files of the run folder are final, and are delivered too.

        Raises:
            Exception: whatever MLflow raises. Call again: what arrived is asked of the server first.
        """
        plan = plan_run(events)
        if plan is None:
            return
        remote, self._remote = self._remote, None  # unknown, unless all of the following succeeds
        remote = remote or self._open(plan)
        remote.post(plan, self._tags)
        if with_files and plan.end_ms is not None:
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
                experiment_id, start_time=plan.start_ms, run_name=plan.name, tags=plan.tags | _user() | self._tags)
            about = {"run_id": run.info.run_id, "experiment_id": experiment_id, "uri": redact(self._uri)}
            replace_text(self._run_dir / RUN_FILE, json.dumps(about, indent=1) + "\n")
        self._note_answer()
        run_id = run.info.run_id
        keys = [key for key in run.data.metrics if not key.startswith("system/")]  # those are its monitor's
        posted = {(key, point.step) for key in keys for point in client.get_metric_history(run_id, key)}
        data = {(each.dataset.name, each.dataset.digest) for each in (run.inputs.dataset_inputs if run.inputs else ())}
        return _Remote(client, run_id, self._note_answer, posted, set(run.data.params), dict(run.data.tags), data,
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
    data: set[tuple[str, str]]  # (name, digest)
    status: str

    def post(self, plan: Plan, extra_tags: Mapping[str, str]) -> None:
        """Post what is missing, the final status last."""
        if plan.end_ms is None and self.status != plan.status:
            self.client.update_run(self.run_id, status=plan.status)
        self._post_labels(plan.params, {**plan.tags, **extra_tags})
        self._post_data(plan.data)
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

    def _post_data(self, data: Sequence[Data]) -> None:
        from mlflow.entities import Dataset, DatasetInput, InputTag

        new = [each for each in data if (each.name, each.digest) not in self.data]
        if new:
            self.client.log_inputs(self.run_id, [DatasetInput(
                Dataset(each.name, each.digest, "local", each.source, profile=each.profile),
                [InputTag("mlflow.data.context", each.context)]) for each in new])
        self.data |= {(each.name, each.digest) for each in new}

    def _post_points(self, plan: Plan) -> None:
        from mlflow.entities import Metric

        new = [point for point in plan.points if (point.key, point.epoch) not in self.posted]
        for some in _chunks([Metric(*point) for point in new], _METRICS_PER_CALL):
            self.client.log_batch(self.run_id, metrics=some)
            self.note_answer()
        self.posted |= {(point.key, point.epoch) for point in new}


class Mlflow(Projection):
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
        self._tracker = self._other = Tracker(run_dir, uri, parent_run_id, self._tags)
        self._owing = owing_runs(run_dir, uri)

    def answered_at(self) -> float:
        """`time.monotonic` of the server's last answer."""
        return max(self._tracker.last_answer, self._other.last_answer)

    def update(self, last: bool = False) -> None:
        """Deliver what is new in this run, then what others owe, each tried once. Files are final the last time."""
        if not (self.trains or last):
            return
        if self.is_stale or last:
            self._tracker.deliver(self.history, with_files=last)
            self.is_stale = False
        while self._owing:
            folder = self._owing.pop(0)
            with claimed(folder, self._uri) as owed:
                if owed is not None:
                    self._other = Tracker(folder, self._uri, owed["parent_run_id"], owed["tags"])
                    self._other.deliver(read_events(folder / EVENTS_FILE), with_files=True)
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
    events = read_events(folder / EVENTS_FILE)
    owed = read_owed(folder, uri) or {}
    tracker = Tracker(folder, uri, parent_run_id or owed.get("parent_run_id"), tags or owed.get("tags", {}))
    tracker.deliver(events, with_files=True)
    forget_owed(folder, uri)
    about = read_run_file(run_dir)
    if about is None or not events:  # a sweep's folder names its run too
        raise InputError(f"{run_dir}: no event log of a training ({EVENTS_FILE}) here; give a run, or a sweep's trial")
    return about["run_id"]


def _find_run(client: MlflowClient, experiment_id: str, run_id: str) -> Run | None:
    """The MLflow run that an earlier call created without living to write down its id."""
    runs = client.search_runs([experiment_id], filter_string=f"tags.`{RUN_ID_TAG}` = '{run_id}'", max_results=1)
    return next(iter(runs), None)


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
