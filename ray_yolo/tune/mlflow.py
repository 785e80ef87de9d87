"""The MLflow run of a sweep: the parent that its trials' runs name, made once and kept in the sweep's folder."""

from __future__ import annotations

import json
import logging
import shlex
import sys
import time
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from ray_yolo.redact import redact
from ray_yolo.runlog.mlflow_client import build_client, find_experiment
from ray_yolo.runlog.mlflow_run import leaves
from ray_yolo.runlog.owed import RUN_FILE, read_run_file
from ray_yolo.runlog.results_files import replace_text
from ray_yolo.tune.config import TuneConfig
from ray_yolo.tune.ledger import Trial

if TYPE_CHECKING:
    from mlflow import MlflowClient

METRICS_PER_CALL = 1000  # MLflow's limit
BEST_TAG, BEST_TRIAL_TAG = "ray_yolo.best", "ray_yolo.best_trial"

_log = logging.getLogger(__name__)


def open_parent_run(folder: Path, uri: str, config: TuneConfig) -> str | None:
    """The id of the sweep's MLflow run, created at the first start; None (and a warning) if the server is away."""
    about = read_run_file(folder)
    try:
        client = build_client(uri)
        if about is not None:
            client.update_run(about["run_id"], status="RUNNING")
            return about["run_id"]
        from mlflow.entities import Param  # after the client, which quietens MLflow

        source = {"mlflow.source.type": "LOCAL", "mlflow.source.name": shlex.join(sys.orig_argv)}
        run_id = str(client.create_run(find_experiment(client, uri, folder.parent.name), run_name=folder.name,
                                       tags=source).info.run_id)
        asked = [*leaves(config.sweep.model_dump(), "sweep."), *leaves(config.recipe.model_dump(), "")]
        client.log_batch(run_id, params=[Param(key, value) for key, value in asked])
    except Exception as error:  # whatever MLflow raises: the search does not depend on it
        _log.warning("MLflow cannot be reached, the sweep's run is not up to date: %s", redact(str(error)))
        return about["run_id"] if about else None
    replace_text(folder / RUN_FILE, json.dumps({"run_id": run_id, "uri": redact(uri)}, indent=1) + "\n")
    return run_id


def stop_runs(folder: Path, uri: str, parent: str, trials: Iterable[Trial], status: str) -> None:
    """Show the sweep's MLflow run, and those of trials that were running, as ended so; going on makes them RUNNING."""
    children = (read_run_file(folder / "trials" / trial.folder_name) for trial in trials if trial.state == "running")
    try:
        client = build_client(uri)
        for run_id in (parent, *(child["run_id"] for child in children if child)):
            client.set_terminated(run_id, status)
    except Exception as error:  # whatever MLflow raises: the search does not depend on it
        _log.warning("MLflow still shows the sweep as running: %s", redact(str(error)))


def close_parent_run(folder: Path, uri: str, parent: str, trials: Sequence[Trial], best: Trial) -> None:
    """End the sweep's MLflow run: fitness by trial, the best one, files, and the mark on the best trial's run."""
    try:
        client, now = build_client(uri), round(time.time() * 1000)
        from mlflow.entities import Metric

        posted = {point.step for point in client.get_metric_history(parent, "fitness")}
        points = [Metric("fitness", trial.fitness, now, trial.number) for trial in trials
                  if trial.fitness is not None and trial.number not in posted]
        for first in range(0, len(points), METRICS_PER_CALL):
            client.log_batch(parent, metrics=points[first : first + METRICS_PER_CALL])
        client.log_metric(parent, "best/fitness", best.fitness)
        _mark_best(client, folder, parent, best, trials)
        for path in sorted(folder.iterdir()):
            if path.suffix in (".csv", ".yaml", ".png", ".jsonl"):
                client.log_artifact(parent, str(path))
        if (weights := folder / "weights" / "best.pt").exists():
            client.log_artifact(parent, str(weights), "weights")
        client.set_terminated(parent, "FINISHED")
    except Exception as error:  # as above
        _log.warning("MLflow has not got the end of the sweep: %s", redact(str(error)))


def _mark_best(client: MlflowClient, folder: Path, parent: str, best: Trial, trials: Sequence[Trial]) -> None:
    """Tag the best trial's run, and it alone: a sweep that went on for more trials may have had another."""
    before = int(client.get_run(parent).data.tags.get(BEST_TRIAL_TAG, best.number))
    client.set_tag(parent, BEST_TRIAL_TAG, best.number)
    for number in {before, best.number}:
        child = read_run_file(folder / "trials" / trials[number].folder_name)
        if child is not None:
            client.set_tag(child["run_id"], BEST_TAG, str(number == best.number).lower())
