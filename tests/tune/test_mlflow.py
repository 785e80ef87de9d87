"""The MLflow run of a sweep, through stops and continuations."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
from mlflow import MlflowClient

from ray_yolo.tune.ledger import Trial, new_trial
from ray_yolo.tune.mlflow import close_parent_run, open_parent_run, stop_runs
from tests.support.sweeps import make_sweep


@pytest.fixture
def client(tmp_path: Path) -> MlflowClient:
    return MlflowClient(tracking_uri=f"sqlite:///{tmp_path}/mlflow.db")


def trained(number: int, fitness: float, folder: Path, client: MlflowClient) -> Trial:
    """A finished trial with an MLflow run."""
    trial = replace(new_trial(number, {}), state="finished", fitness=fitness)
    run = client.create_run("0", run_name=trial.folder_name)
    (folder / "trials" / trial.folder_name).mkdir(parents=True)
    (folder / "trials" / trial.folder_name / "mlflow.json").write_text(json.dumps({"run_id": run.info.run_id}))
    return trial


def open_run(tmp_path: Path) -> str:
    (tmp_path / "exp").mkdir(exist_ok=True)
    parent = open_parent_run(tmp_path / "exp", f"sqlite:///{tmp_path}/mlflow.db", make_sweep(tmp_path, trials=2))
    assert parent
    return parent


def test_closed_twice_it_has_each_trial_once_and_marks_the_best_alone(tmp_path: Path, client: MlflowClient) -> None:
    folder, uri = tmp_path / "exp", f"sqlite:///{tmp_path}/mlflow.db"
    parent = open_run(tmp_path)
    trials = [trained(0, 0.5, folder, client), trained(1, 0.25, folder, client)]
    close_parent_run(folder, uri, parent, trials, trials[0])
    assert open_run(tmp_path) == parent
    assert client.get_run(parent).info.status == "RUNNING"
    trials.append(trained(2, 0.75, folder, client))
    for _ in range(2):
        close_parent_run(folder, uri, parent, trials, trials[2])
    assert client.get_run(parent).info.status == "FINISHED"
    points = client.get_metric_history(parent, "fitness")
    assert sorted((point.step, point.value) for point in points) == [(0, 0.5), (1, 0.25), (2, 0.75)]
    marked = client.search_runs(["0"], filter_string="tags.`ray_yolo.best` = 'true'")
    assert [run.info.run_name for run in marked] == ["trial2"]


def test_the_sweeps_run_has_the_weights_of_the_best_trial(tmp_path: Path, client: MlflowClient) -> None:
    parent, folder = open_run(tmp_path), tmp_path / "exp"
    (folder / "weights").mkdir()
    (folder / "weights" / "best.pt").write_text("x")
    trial = trained(0, 0.5, folder, client)
    close_parent_run(folder, f"sqlite:///{tmp_path}/mlflow.db", parent, [trial], trial)
    assert [file.path for file in client.list_artifacts(parent, "weights")] == ["weights/best.pt"]


def test_a_stop_shows_on_the_sweeps_run_and_on_those_that_were_running(tmp_path: Path, client: MlflowClient) -> None:
    parent = open_run(tmp_path)
    done, running = (trained(number, 0.5, tmp_path / "exp", client) for number in (0, 1))
    stop_runs(tmp_path / "exp", f"sqlite:///{tmp_path}/mlflow.db", parent, [done, replace(running, state="running")],
              "KILLED")
    assert {run.info.run_name: run.info.status for run in client.search_runs(["0"])} == {
        "trial0": "RUNNING", "trial1": "KILLED"}  # how a finished one ended is its own to say
    assert client.get_run(parent).info.status == "KILLED"


def test_a_server_that_is_away_keeps_a_known_run(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    parent = open_run(tmp_path)
    away = "sqlite:////nowhere/mlflow.db"
    assert open_parent_run(tmp_path / "exp", away, make_sweep(tmp_path, trials=2)) == parent
    stop_runs(tmp_path / "exp", away, parent, [], "KILLED")
    assert "still shows the sweep as running" in caplog.text
