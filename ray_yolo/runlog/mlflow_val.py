"""A validation as an MLflow run of its own, with the names that a training's run has."""

from __future__ import annotations

import shlex
import sys
import time
from collections.abc import Mapping
from pathlib import Path

from ray_yolo.redact import redact
from ray_yolo.runlog.metrics import loss_column
from ray_yolo.runlog.mlflow_client import build_client, find_experiment
from ray_yolo.runlog.owed import read_run_file

FILES = ("results.json", "detections.json", "*.png", "*.jpg")


def post_validation(uri: str, folder: Path, settings: Mapping[str, str],
                    parts: Mapping[str, Mapping[str, float]]) -> str:
    """Post what a validation has found, and the files of its folder; the experiment is the project's name.

    Args:
        settings: parameters; `weights` among them, so that the training's run, if there is one, can be named.
        parts: numbers by name: `metrics`, `losses`, and whatever else.

    Returns:
        The run's id.

    Raises:
        mlflow.exceptions.MlflowException: if the server cannot be reached or refuses.
    """
    client = build_client(uri)
    from mlflow.entities import Metric, Param, RunTag

    tags = {"mlflow.source.type": "LOCAL", "mlflow.source.name": redact(shlex.join(sys.orig_argv))}
    if training := read_run_file(Path(settings["weights"]).absolute().parents[1]):
        tags["ray_yolo.training_run_id"] = training["run_id"]
    now = round(time.time() * 1000)
    run = client.create_run(find_experiment(client, uri, folder.parent.name), run_name=folder.name)
    client.log_batch(
        run.info.run_id, params=[Param(name, redact(value)) for name, value in settings.items()],
        tags=[RunTag(*pair) for pair in tags.items()],
        metrics=[Metric(_name(part, name), value, now, 0) for part, numbers in parts.items()
                 for name, value in numbers.items()])
    for path in sorted(path for pattern in FILES for path in folder.glob(pattern)):
        client.log_artifact(run.info.run_id, str(path))
    client.set_terminated(run.info.run_id)
    return str(run.info.run_id)


def _name(part: str, name: str) -> str:
    return loss_column("val", name) if part == "losses" else f"{part}/{name}"
