"""The MLflow run of a sweep, as a projection of its ledger: the parent that its trials' runs name.

What it should hold is computed from the rows alone (`sweep_run`); what it does hold is asked of the server, and the
difference is posted. A server that is away costs a warning: the search does not depend on it.
"""

from __future__ import annotations

import json
import logging
import shlex
import sys
import time
import urllib.parse
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from ray_yolo.core.files import atomic_write
from ray_yolo.events import METRICS
from ray_yolo.redact import redact
from ray_yolo.runlog.mlflow_client import build_client, find_experiment
from ray_yolo.runlog.mlflow_run import leaves
from ray_yolo.runlog.owed import RUN_FILE, read_run_file
from ray_yolo.runlog.registry import log_model
from ray_yolo.runlog.spool import address_of
from ray_yolo.storage.store import open_store
from ray_yolo.tune.search import TuneConfig
from ray_yolo.tune.trials import Trial, best_trial, short_name

if TYPE_CHECKING:
    from mlflow import MlflowClient

Status = Literal["RUNNING", "FINISHED", "FAILED", "KILLED"]

METRICS_PER_CALL = 1000  # MLflow's limit
NOTE_TAG = "mlflow.note.content"  # what MLflow shows as the run's description
LISTED = 20  # trials, the best ones: of 8,000 characters in a tag MLflow cuts off the rest
CURVE = f"metrics/{METRICS[-1]}"
BEST_TAG, BEST_TRIAL_TAG = "ray_yolo.best", "ray_yolo.best_trial"
ARTIFACTS = ("*.csv", "*.yaml", "*.png", "*.jsonl", "weights/best.pt")

_MISSED = {"RUNNING": "MLflow cannot be reached, the sweep's run is not up to date",
           "FINISHED": "MLflow has not got the end of the sweep"}

_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class SweepRun:
    """What the MLflow run of a sweep should hold, and what the runs of its trials should say."""

    params: dict[str, str]
    fitness: dict[int, float]  # by trial, whose number is MLflow's step
    status: Status
    best: int | None  # once the sweep has finished: its trial's run is marked, and the files are final
    stopped: tuple[int, ...]  # trials whose runs end as the sweep's does; going on makes them RUNNING
    folders: tuple[str, ...]  # of the trials, by number
    listed: tuple[int, ...]  # the best trials, best first
    table: str  # of them, in Markdown
    registered_name: str  # that the best trial's weights get; '': none


def sweep_run(config: TuneConfig, trials: Sequence[Trial], status: Status) -> SweepRun:
    """The MLflow run of a sweep that has come so far."""
    best = best_trial(trials) if status == "FINISHED" else None
    listed = [trial for *_, trial in sorted(
        (-trial.fitness, trial.number, trial) for trial in trials if trial.fitness is not None)][:LISTED]
    return SweepRun(
        params=dict([*leaves(config.sweep.model_dump(), "sweep."), *leaves(config.recipe.model_dump(), "")]),
        fitness={trial.number: trial.fitness for trial in trials if trial.fitness is not None},
        status=status,
        best=best.number if best else None,
        stopped=tuple(trial.number for trial in trials if trial.state == "running" and status != "RUNNING"),
        folders=tuple(trial.folder_name for trial in trials),
        listed=tuple(trial.number for trial in listed), table=_table(listed),
        registered_name=config.placement.registered_name)


def _table(trials: Sequence[Trial]) -> str:
    """Trials and what they were given."""
    names = sorted({name for trial in trials for name in trial.genes})
    rows = [["trial", "fitness", *map(short_name, names)], ["---"] * (2 + len(names))]
    rows += [[trial.folder_name, f"{trial.fitness:.5g}", *(_cell(trial.genes.get(name, "")) for name in names)]
             for trial in trials]
    return "\n".join(f"| {' | '.join(row)} |" for row in rows)


def _cell(value: object) -> str:
    return f"{value:.4g}" if isinstance(value, float) else str(value)


def deliver(folder: Path, uri: str, held: SweepRun) -> str | None:
    """Make the MLflow run of a sweep's folder hold this; it is created at the first start, and named in the folder.

    Returns:
        The run's id; None if the server is away, which is a warning, and there was none before.
    """
    try:
        client = build_client(uri)
        run_id = (read_run_file(folder) or _create(client, folder, uri))["run_id"]
        _post(client, folder, run_id, held)
        if held.status == "RUNNING":
            client.update_run(run_id, status=held.status)
        else:
            for ended in filter(None, [run_id, *(_child(folder, held, number) for number in held.stopped)]):
                client.set_terminated(ended, held.status)
        if held.registered_name and held.best is not None and (best := _child(folder, held, held.best)):
            log_model(folder, uri, best, held.registered_name)
    except Exception as error:  # whatever MLflow raises
        missed = _MISSED.get(held.status, "MLflow still shows the sweep as running")
        _log.warning("%s: %s", missed, redact(str(error)))
    return (read_run_file(folder) or {}).get("run_id")


def _create(client: MlflowClient, folder: Path, uri: str) -> dict[str, str]:
    source = {"mlflow.source.type": "LOCAL", "mlflow.source.name": shlex.join(sys.orig_argv)}
    experiment = find_experiment(client, uri, folder.parent.name)
    run = client.create_run(experiment, run_name=folder.name, tags=source)
    about = {"run_id": str(run.info.run_id), "experiment_id": experiment, "uri": redact(uri)}
    atomic_write(folder / RUN_FILE, json.dumps(about, indent=1) + "\n", durable=False)
    return about


def _post(client: MlflowClient, folder: Path, run_id: str, held: SweepRun) -> None:
    """Post what is missing, and mark the best trial's run alone: a sweep that went on may have had another."""
    from mlflow.entities import Metric, Param  # after the client, which quietens MLflow

    run, now = client.get_run(run_id), round(time.time() * 1000)
    data, best = run.data, filter(None, (_child(folder, held, number) for number in held.listed))
    client.set_tag(run_id, NOTE_TAG, f"{comparison(str(run.info.experiment_id), list(best))}\n\n{held.table}")
    client.log_batch(run_id, params=[Param(*pair) for pair in held.params.items() if pair[0] not in data.params])
    posted = {point.step for point in client.get_metric_history(run_id, "fitness")}
    points = [Metric("fitness", value, now, trial) for trial, value in held.fitness.items() if trial not in posted]
    for first in range(0, len(points), METRICS_PER_CALL):
        client.log_batch(run_id, metrics=points[first : first + METRICS_PER_CALL])
    if held.best is None:
        return
    client.log_metric(run_id, "best/fitness", held.fitness[held.best])
    client.set_tag(run_id, BEST_TRIAL_TAG, held.best)
    for number in {int(data.tags.get(BEST_TRIAL_TAG, held.best)), held.best}:
        if child := _child(folder, held, number):
            client.set_tag(child, BEST_TAG, str(number == held.best).lower())
    for path in sorted(path for pattern in ARTIFACTS for path in folder.glob(pattern)):
        client.log_artifact(run_id, str(path), None if path.parent == folder else path.parent.name)


def comparison(experiment_id: str, runs: Sequence[str]) -> str:
    """Links to MLflow's own pages that compare runs: parameters against metrics, and curves over epochs."""
    which = {"runs": json.dumps(runs), "experiments": json.dumps([experiment_id])}
    curves = {**which, "metric": json.dumps(CURVE), "plot_metric_keys": json.dumps([CURVE]), "x_axis": "step"}
    pages = {"Compare the trials": ("compare-runs", which), "their curves": ("metric", curves)}
    return ", ".join(f"[{text}](#/{page}?{urllib.parse.urlencode(query, quote_via=urllib.parse.quote)})"
                     for text, (page, query) in pages.items())


def _child(folder: Path, held: SweepRun, number: int) -> str | None:
    """The id of a trial's MLflow run, if it has one."""
    run = folder / "trials" / held.folders[number]
    about = read_run_file(run)
    if about is None and (address := address_of(run)):  # another machine has trained it
        with suppress(FileNotFoundError):
            about = json.loads(open_store(address).get(RUN_FILE).data)
    return (about or {}).get("run_id")
