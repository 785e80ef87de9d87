"""A sweep through Ray Tune: every trial a distributed training, one ledger that holds true."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from ray_yolo.config import RunConfig
from ray_yolo.engine.events import read_events
from ray_yolo.engine.ledger import verify
from ray_yolo.errors import ConfigError
from ray_yolo.runtime.trainer import fit
from ray_yolo.runtime.tuner import search
from ray_yolo.tune_config import TuneConfig
from ray_yolo.tune_space import overlay
from tests.support.jobs import make_config

SPACE = "lr0: {low: 0.0001, high: 0.01, gain: 3}\nscale: {low: 0.0, high: 0.9}\n"


def make_sweep(folder: Path, space: str = SPACE, **sweep: Any) -> TuneConfig:
    base = make_config(folder, 1, epochs=1)
    (folder / "space.yaml").write_text(space)
    return TuneConfig.model_validate({
        "recipe": base.recipe.model_dump(), "sweep": {"space": str(folder / "space.yaml"), **sweep},
        "placement": {**base.placement.model_dump(), "project": "runs/evolve", "num_workers": 1,
                      "mlflow_uri": f"sqlite:///{folder}/mlflow.db"}})


@pytest.mark.ray
@pytest.mark.usefixtures("ray_session")
def test_trials_are_distributed_side_by_side_recorded_once_and_can_be_repeated(tmp_path: Path) -> None:
    config = make_sweep(tmp_path, trials=3, workers_per_trial=2)
    result = search(config, quiet=True)
    assert [trial.state for trial in result.trials] == ["finished"] * 3
    assert verify(read_events(result.folder / "ledger.jsonl")) == []
    for name in ("evolve.csv", "hyp_evolve.yaml", "evolve.png", "progress.png"):
        assert (result.folder / name).exists()
    for number in range(3):
        events = read_events(result.folder / "trials" / f"trial{number}" / "events.jsonl")
        assert {event["worker"] for event in events if event["type"] == "share" and event["images"]} == {0, 1}
    assert result.best.fitness == max(trial.fitness for trial in result.trials if trial.fitness is not None)
    check_tracking(tmp_path)
    repeat = result.trials[1]
    recipe = overlay(config.recipe, repeat.genes)
    alone = fit(RunConfig(recipe=recipe, placement=make_config(tmp_path, 0).placement), quiet=True)
    assert alone.best_fitness == pytest.approx(repeat.fitness, abs=1e-6)


def check_tracking(folder: Path) -> None:
    """One parent, a child for each trial, the best one marked."""
    from mlflow import MlflowClient

    client = MlflowClient(f"sqlite:///{folder}/mlflow.db")
    runs = client.search_runs([experiment.experiment_id for experiment in client.search_experiments()])
    [parent] = [run for run in runs if "mlflow.parentRunId" not in run.data.tags]
    children = [run for run in runs if run.data.tags.get("mlflow.parentRunId") == parent.info.run_id]
    assert len(children) == 3
    assert all(run.info.status == "FINISHED" for run in runs)
    assert sum("ray_yolo.best" in run.data.tags for run in children) == 1


@pytest.mark.ray
@pytest.mark.usefixtures("ray_session")
def test_a_trial_that_can_never_fit_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="5 workers need 5 CPU"):
        search(make_sweep(tmp_path, trials=1, workers_per_trial=5).model_copy(
            update={"recipe": make_sweep(tmp_path).recipe.model_copy(update={"microbatch": 2})}), quiet=True)


@pytest.mark.parametrize(("space", "message"), [
    ("lr0: {low: 0.1, high: 0.01}", "low 0.1 is above high 0.01"),
    ("num_workers: [1, 4]", "decides where a trial is trained"),
    ("search: {scheduler: pbt}\nlr0: [0.001, 0.1]", "pbt"),
    ("search: {algorithm: tpe}\nlr0: [0.001, 0.1]", "tpe"),
])
def test_a_space_that_cannot_be_searched_is_refused_before_any_cluster_work(
        tmp_path: Path, space: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        search(make_sweep(tmp_path, space), quiet=True)
