"""The MLflow run of a sweep, as a projection of its ledger: the parent that its trials' runs name.

What it should hold is computed from the rows alone (`sweep_run`) and delivered as of any run. A server that is away
costs a warning: the search does not depend on it.
"""

from __future__ import annotations

import json
import logging
import time
import urllib.parse
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from ray_yolo.core.events import METRICS
from ray_yolo.core.redact import redact
from ray_yolo.runs.working_copy import address_of
from ray_yolo.sinks.mlflow_client import RUN_FILE, build_client, read_run_file
from ray_yolo.sinks.mlflow_plan import Point, RunPlan, leaves, source_tags
from ray_yolo.sinks.mlflow_run import Delivery
from ray_yolo.sinks.registry import log_model
from ray_yolo.storage.store import open_store
from ray_yolo.tune.evolution import best_rows
from ray_yolo.tune.search import TuneConfig
from ray_yolo.tune.trials import Trial, best_trial, finished_rows, short_name

if TYPE_CHECKING:
    from mlflow import MlflowClient

Status = Literal["RUNNING", "FINISHED", "FAILED", "KILLED"]

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
    by_number = {trial.number: trial for trial in trials}
    listed = [by_number[row.trial] for row in best_rows(finished_rows(trials), LISTED)]
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
        run_id = Delivery(folder, uri).deliver(_plan(folder, held))
        client = build_client(uri)
        _mark_trials(client, folder, run_id, held)
        for ended in filter(None, (_child(folder, held, number) for number in held.stopped)):
            client.set_terminated(ended, held.status)
        if held.registered_name and held.best is not None and (best := _child(folder, held, held.best)):
            log_model(folder, uri, best, held.registered_name)
    except Exception as error:  # whatever MLflow raises
        missed = _MISSED.get(held.status, "MLflow still shows the sweep as running")
        _log.warning("%s: %s", missed, redact(str(error)))
    return (read_run_file(folder) or {}).get("run_id")


def _plan(folder: Path, held: SweepRun) -> RunPlan:
    """What is delivered as of any run; a sweep that goes on may have another best trial, which is MLflow's step."""
    now = round(time.time() * 1000)
    points = [Point("fitness", value, now, trial) for trial, value in held.fitness.items()]
    if held.best is not None:
        points.append(Point("best/fitness", held.fitness[held.best], now, held.best))
    return RunPlan(folder.name, folder.parent.name, now, held.params, source_tags(), points=points, status=held.status,
                   end_ms=None if held.status == "RUNNING" else now,
                   artifacts=() if held.best is None else ARTIFACTS)


def _mark_trials(client: MlflowClient, folder: Path, run_id: str, held: SweepRun) -> None:
    """Describe the sweep by its best trials, and mark the best one's run alone."""
    run, best = client.get_run(run_id), filter(None, (_child(folder, held, number) for number in held.listed))
    client.set_tag(run_id, NOTE_TAG, f"{comparison(str(run.info.experiment_id), list(best))}\n\n{held.table}")
    if held.best is None:
        return
    client.set_tag(run_id, BEST_TRIAL_TAG, held.best)
    for number in {int(run.data.tags.get(BEST_TRIAL_TAG, held.best)), held.best}:
        if child := _child(folder, held, number):
            client.set_tag(child, BEST_TAG, str(number == held.best).lower())


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
