"""The MLflow run of a sweep: the parent of its trials' runs, computed from the ledger.

`sweep_run` computes its content from the rows only; `deliver` sends it. If the server is unreachable, a warning is
logged and the search continues.
"""

from __future__ import annotations

import json
import logging
import time
import urllib.parse
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from itertools import accumulate
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from ray_yolo.core.events import METRICS
from ray_yolo.core.redact import redact
from ray_yolo.runs.working_copy import address_of
from ray_yolo.sinks.mlflow_client import RUN_FILE, build_client, read_run_file
from ray_yolo.sinks.mlflow_plan import Point, RunPlan, flat_params, source_tags
from ray_yolo.sinks.mlflow_run import Delivery
from ray_yolo.sinks.registry import log_model
from ray_yolo.storage.store import open_store
from ray_yolo.tune.schedule import Claimed
from ray_yolo.tune.search import TuneConfig
from ray_yolo.tune.trials import Trial, best_trial, best_trials, short_name, short_value

if TYPE_CHECKING:
    from mlflow import MlflowClient

Status = Literal["RUNNING", "FINISHED", "FAILED", "KILLED"]

NOTE_TAG = "mlflow.note.content"  # what MLflow shows as the run's description
LISTED = 20  # best trials in the description: MLflow cuts off tags after 8,000 characters
CURVE = f"metrics/{METRICS[-1]}"
BEST_TAG, BEST_TRIAL_TAG, CLAIM_TAG = "ray_yolo.best", "ray_yolo.best_trial", "ray_yolo.claim"
ARTIFACTS = ("*.csv", "*.yaml", "*.png", "*.jsonl", "weights/best.pt")

_MISSED = {"RUNNING": "MLflow is unreachable; the sweep's run is not up to date",
           "FINISHED": "MLflow did not receive the end of the sweep"}

_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class SweepRun:
    """The content of a sweep's MLflow run, and the states of its trials' runs."""

    params: dict[str, str]
    fitness: dict[int, float]  # by trial; its number is MLflow's step
    best_fitness: dict[int, float]  # of the best trial up to this one
    status: Status
    best: int | None  # the best trial of a finished sweep: its run is marked, and the files are final
    stopped: tuple[int, ...]  # trials whose runs end with the sweep's status; resuming makes them RUNNING
    folders: tuple[str, ...]  # of the trials, by number
    listed: tuple[int, ...]  # the best trials: by rung, then fitness
    table: str  # of them, in Markdown
    claim: str  # of the end; '': none yet
    gain: float | None  # over the default, by the claim
    registered_name: str  # registered model for the best trial's weights; '': none


def sweep_run(config: TuneConfig, trials: Sequence[Trial], status: Status, claim: Claimed | None = None) -> SweepRun:
    """The MLflow run of a sweep with these rows."""
    best = (trials[claim.winner] if claim else best_trial(trials)) if status == "FINISHED" else None
    listed = best_trials(trials, LISTED)
    measured = [trial for trial in trials if trial.fitness is not None]
    leaders = list(accumulate(measured, _better))
    return SweepRun(
        params=flat_params({"sweep": config.sweep.model_dump(), **config.recipe.model_dump()}),
        fitness={trial.number: trial.fitness for trial in trials if trial.fitness is not None},
        best_fitness={trial.number: each.fitness or 0.0 for trial, each in zip(measured, leaders, strict=True)},
        status=status,
        best=best.number if best else None,
        stopped=tuple(trial.number for trial in trials
                      if trial.state in ("running", "paused") and status != "RUNNING"),
        folders=tuple(trial.folder_name for trial in trials),
        listed=tuple(trial.number for trial in listed), table=_table(listed),
        claim=str(claim) if claim else "", gain=claim.claim.gain if claim else None,
        registered_name=config.placement.registered_name)


def _better(one: Trial, other: Trial) -> Trial:
    return best_trial((one, other)) or one


def _table(trials: Sequence[Trial]) -> str:
    """Trials with fitness and genes, in Markdown."""
    names = sorted({name for trial in trials for name in trial.genes})
    rows = [["trial", "epochs", "fitness", *map(short_name, names)], ["---"] * (3 + len(names))]
    rows += [[trial.folder_name, str(trial.epochs), f"{trial.fitness:.5g}",
              *(short_value(trial.genes.get(name, "")) for name in names)]
             for trial in trials]
    return "\n".join(f"| {' | '.join(row)} |" for row in rows)


def deliver(folder: Path, uri: str, sweep: SweepRun) -> str | None:
    """Update the MLflow run of a sweep's folder. The first call creates it and records its id in the folder.

    Returns:
        The run's id; None if there is none yet and the server is unreachable, which logs a warning.
    """
    try:
        run_id = Delivery(folder, uri).deliver(_plan(folder, sweep))
        client = build_client(uri)
        _mark_trials(client, folder, run_id, sweep)
        for child in filter(None, (_child(folder, sweep, number) for number in sweep.stopped)):
            client.set_terminated(child, sweep.status)
        if sweep.registered_name and sweep.best is not None and (best := _child(folder, sweep, sweep.best)):
            log_model(folder, uri, best, sweep.registered_name)
    except Exception as error:  # MLflow's exceptions are of many types
        missed = _MISSED.get(sweep.status, "MLflow still shows the sweep as running")
        _log.warning("%s: %s", missed, redact(str(error)))
    return (read_run_file(folder) or {}).get("run_id")


def _plan(folder: Path, sweep: SweepRun) -> RunPlan:
    """The content in the form in which all runs are delivered. The step of `best/fitness` is the best trial's
    number."""
    now = round(time.time() * 1000)
    points = [Point("fitness", value, now, trial) for trial, value in sweep.fitness.items()]
    points += [Point("best_fitness", value, now, trial) for trial, value in sweep.best_fitness.items()]
    if sweep.gain is not None:
        points.append(Point("claim/gain", sweep.gain, now, 0))
    if sweep.best is not None:
        points.append(Point("best/fitness", sweep.fitness[sweep.best], now, sweep.best))
    return RunPlan(folder.name, folder.parent.name, now, sweep.params, source_tags(), points=points,
                   status=sweep.status, end_ms=None if sweep.status == "RUNNING" else now,
                   artifacts=() if sweep.best is None else ARTIFACTS)


def _mark_trials(client: MlflowClient, folder: Path, run_id: str, sweep: SweepRun) -> None:
    """Describe the sweep by its best trials, and mark the best one's run only."""
    run, best = client.get_run(run_id), filter(None, (_child(folder, sweep, number) for number in sweep.listed))
    note = [sweep.claim, comparison(str(run.info.experiment_id), list(best)), sweep.table]
    client.set_tag(run_id, NOTE_TAG, "\n\n".join(filter(None, note)))
    client.set_tag(run_id, CLAIM_TAG, sweep.claim)
    if sweep.best is None:
        return
    client.set_tag(run_id, BEST_TRIAL_TAG, sweep.best)
    for number in {int(run.data.tags.get(BEST_TRIAL_TAG, sweep.best)), sweep.best}:
        if child := _child(folder, sweep, number):
            client.set_tag(child, BEST_TAG, str(number == sweep.best).lower())


def comparison(experiment_id: str, runs: Sequence[str]) -> str:
    """Links to MLflow's pages that compare runs: parameters against metrics, and curves over epochs."""
    which = {"runs": json.dumps(runs), "experiments": json.dumps([experiment_id])}
    curves = {**which, "metric": json.dumps(CURVE), "plot_metric_keys": json.dumps([CURVE]), "x_axis": "step"}
    pages = {"Compare the trials": ("compare-runs", which), "their curves": ("metric", curves)}
    return ", ".join(f"[{text}](#/{page}?{urllib.parse.urlencode(query, quote_via=urllib.parse.quote)})"
                     for text, (page, query) in pages.items())


def _child(folder: Path, sweep: SweepRun, number: int) -> str | None:
    """The id of a trial's MLflow run, if it has one."""
    run = folder / "trials" / sweep.folders[number]
    run_file = read_run_file(run)
    if run_file is None and (address := address_of(run)):  # another machine has trained it
        with suppress(FileNotFoundError):
            run_file = json.loads(open_store(address).get(RUN_FILE).data)
    return (run_file or {}).get("run_id")
