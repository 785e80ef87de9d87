"""Small sweeps of the tiny model, as a user would configure them."""

from __future__ import annotations

import time
from collections import Counter
from pathlib import Path
from typing import Any

import ray

from ray_yolo.tune.search import TuneConfig
from tests.support.jobs import make_config

SPACE = "lr0: {low: 0.0001, high: 0.01, gain: 3}\nscale: {low: 0.0, high: 0.9}\n"


def make_sweep(folder: Path, space: str = SPACE, *, recipe: dict[str, Any] | None = None, **sweep: Any) -> TuneConfig:
    """A sweep over trainings of one epoch, tracked in `folder`/mlflow.db."""
    base = make_config(folder, 1, **{"epochs": 1, **(recipe or {})})
    (folder / "space.yaml").write_text(space)
    return TuneConfig.model_validate({
        "recipe": base.recipe.model_dump(), "sweep": {"space": str(folder / "space.yaml"), **sweep},
        "placement": {**base.placement.model_dump(), "project": "runs/evolve", "num_workers": 1,
                      "mlflow_uri": f"sqlite:///{folder}/mlflow.db"}})


def assert_cpus_return(patience_seconds: float = 60.0) -> None:
    """All CPUs of the cluster are free again, soon: Ray's cleaner frees what a killed trial held."""
    deadline = time.monotonic() + patience_seconds
    while ray.available_resources().get("CPU") != ray.cluster_resources()["CPU"]:
        assert time.monotonic() < deadline, ray.available_resources()
        time.sleep(0.5)


def tracked_runs(folder: Path) -> list[Any]:
    """All MLflow runs of `make_sweep`'s sweep: its own and its trials'."""
    from mlflow import MlflowClient

    client = MlflowClient(tracking_uri=f"sqlite:///{folder}/mlflow.db")
    return list(client.search_runs([experiment.experiment_id for experiment in client.search_experiments()]))


def tracked_states(folder: Path) -> Counter[str]:
    """How many of them have which status."""
    return Counter(run.info.status for run in tracked_runs(folder))
