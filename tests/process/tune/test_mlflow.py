"""The MLflow run of a sweep, through stops and continuations."""

from __future__ import annotations

import json
import re
import urllib.parse
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path

import pytest
from mlflow import MlflowClient

from ray_yolo.sinks.metric_names import metrics
from ray_yolo.sinks.registry import Registered
from ray_yolo.sinks.retry import RecordError
from ray_yolo.tune.claim import Claim
from ray_yolo.tune.ledger_events import ClaimedEvent
from ray_yolo.tune.mlflow import Status, StudyMlflow, SweepRun, table
from ray_yolo.tune.trials import Trial
from tests.support.sweeps import make_sweep


@pytest.fixture
def client(tmp_path: Path) -> MlflowClient:
    return MlflowClient(tracking_uri=f"sqlite:///{tmp_path}/mlflow.db")


def trained(number: int, fitness: float, folder: Path, client: MlflowClient) -> Trial:
    """A finished trial with an MLflow run."""
    trial = replace(Trial(number, {}), state="finished", fitness=fitness)
    run = client.create_run("0", run_name=trial.folder_name)
    (folder / "trials" / trial.folder_name).mkdir(parents=True)
    (folder / "trials" / trial.folder_name / "mlflow.json").write_text(json.dumps({"run_id": run.info.run_id}))
    return trial


def sweep_run_of(tmp_path: Path, status: Status, *trials: Trial) -> SweepRun:
    return SweepRun(make_sweep(tmp_path, trials=2), trials, status)


def values(run: SweepRun, key: str) -> dict[int, float]:
    """The points of a metric by step."""
    return {point.epoch: point.value for point in run.plan(Path("evolve/exp")).points if point.key == key}


def deliver(folder: Path, uri: str, run: SweepRun) -> str:
    """The id of the MLflow run of a sweep's folder, made so by a new process."""
    return StudyMlflow(folder, uri, run.config).update(run)


def track(tmp_path: Path, status: Status = "RUNNING", *trials: Trial) -> str:
    (tmp_path / "exp").mkdir(exist_ok=True)
    return deliver(tmp_path / "exp", f"sqlite:///{tmp_path}/mlflow.db", sweep_run_of(tmp_path, status, *trials))


def test_what_it_should_hold_follows_from_the_rows_alone(tmp_path: Path) -> None:
    rows = [replace(Trial(0, {}), state="finished", fitness=0.5), replace(Trial(1, {}), state="failed"),
            replace(Trial(2, {}), state="running"), replace(Trial(3, {}), state="finished", fitness=0.75)]
    running, stopped, ended = (sweep_run_of(tmp_path, status, *rows) for status in ("RUNNING", "KILLED", "FINISHED"))
    assert [values(held, "fitness") for held in (running, stopped, ended)] == [{0: 0.5, 3: 0.75}] * 3
    assert [held.best for held in (running, stopped, ended)] == [None, None, rows[3]]
    assert [held.stopped for held in (running, stopped)] == [[], [rows[2]]]
    params = running.plan(tmp_path).params
    assert (params["sweep.trials"], params["epochs"]) == ("2", "1")


def test_a_paused_trial_is_listed_below_those_that_were_trained_further(tmp_path: Path) -> None:
    rows = [replace(Trial(number, {}), state="paused", fitness=fitness, epochs=epochs)
            for number, (fitness, epochs) in enumerate([(0.9, 1), (0.5, 3), (0.6, 3), (0.8, 2)])]
    run = sweep_run_of(tmp_path, "RUNNING", *rows)
    assert [trial.number for trial in run.listed] == [2, 1, 3, 0]
    assert values(run, "best_fitness") == {0: 0.9, 1: 0.5, 2: 0.6, 3: 0.6}
    assert [line.split()[1] for line in table(run.listed).splitlines()[2:]] == ["trial2", "trial1", "trial3", "trial0"]


def test_the_winner_is_that_of_the_claim(tmp_path: Path, client: MlflowClient) -> None:
    folder, parent = tmp_path / "exp", track(tmp_path)
    trials = [trained(0, 0.5, folder, client), trained(1, 0.75, folder, client)]
    claim = ClaimedEvent(winner=0, claim=Claim(better=False, gain=0.125, margin=0.5, runs=3, detectable=0.5))
    run = SweepRun(make_sweep(tmp_path, trials=2), trials, "FINISHED", claim)
    assert run.best == trials[0]
    deliver(folder, f"sqlite:///{tmp_path}/mlflow.db", run)
    tags = client.get_run(parent).data.tags
    assert tags["ray_yolo.claim"] == (
        "not better than the default; 3 fresh seeds could have shown 0.5; the default (trial 0) is kept")
    assert tags["mlflow.note.content"].startswith(tags["ray_yolo.claim"])
    assert [point.value for point in client.get_metric_history(parent, "claim/gain")] == [0.125]


def test_closed_twice_it_has_each_trial_once_and_marks_the_best_alone(tmp_path: Path, client: MlflowClient) -> None:
    folder, parent = tmp_path / "exp", track(tmp_path)
    trials = [trained(0, 0.5, folder, client), trained(1, 0.25, folder, client)]
    track(tmp_path, "FINISHED", *trials)
    assert track(tmp_path, "RUNNING", *trials) == parent
    assert client.get_run(parent).info.status == "RUNNING"
    trials.append(trained(2, 0.75, folder, client))
    for _ in range(2):
        track(tmp_path, "FINISHED", *trials)
    assert client.get_run(parent).info.status == "FINISHED"
    points = client.get_metric_history(parent, "fitness")
    assert sorted((point.step, point.value) for point in points) == [(0, 0.5), (1, 0.25), (2, 0.75)]
    best = client.get_metric_history(parent, "best/fitness")
    assert [(point.step, point.value) for point in best] == [(0, 0.5), (2, 0.75)]
    marked = client.search_runs(["0"], filter_string="tags.`ray_yolo.best` = 'true'")
    assert [run.info.run_name for run in marked] == ["trial2"]


def test_the_sweeps_run_has_the_weights_of_the_best_trial(tmp_path: Path, client: MlflowClient) -> None:
    parent, folder = track(tmp_path), tmp_path / "exp"
    (folder / "weights").mkdir()
    (folder / "weights" / "best.pt").write_text("x")
    trial = trained(0, 0.5, folder, client)
    track(tmp_path, "FINISHED", trial)
    assert [file.path for file in client.list_artifacts(parent, "weights")] == ["weights/best.pt"]


def test_a_stop_shows_on_the_sweeps_run_and_on_those_that_were_running(tmp_path: Path, client: MlflowClient) -> None:
    parent = track(tmp_path)
    done, running = (trained(number, 0.5, tmp_path / "exp", client) for number in (0, 1))
    track(tmp_path, "KILLED", done, replace(running, state="running"))
    assert {run.info.run_name: run.info.status for run in client.search_runs(["0"])} == {
        "trial0": "RUNNING", "trial1": "KILLED"}  # how a finished one ended is its own to say
    assert client.get_run(parent).info.status == "KILLED"


def test_a_trial_that_is_trained_further_is_corrected(tmp_path: Path, client: MlflowClient) -> None:
    """The step of a point is the trial's number: what the first rung gave must not stay."""
    folder, uri = tmp_path / "exp", f"sqlite:///{tmp_path}/mlflow.db"
    parent = track(tmp_path)
    paused = [replace(trained(number, fitness, folder, client), state="paused", epochs=1)
              for number, fitness in enumerate((0.25, 0.125))]
    further = [replace(paused[0], fitness=0.7, epochs=3), paused[1]]
    record = StudyMlflow(folder, uri, make_sweep(tmp_path, trials=2))
    for rows in (paused, further, further):
        record.update(sweep_run_of(tmp_path, "RUNNING", *rows))
    deliver(folder, uri, sweep_run_of(tmp_path, "RUNNING", *further))  # another process posts nothing twice
    for key, expected in (("fitness", [(0, 0.25), (0, 0.7), (1, 0.125)]),
                          ("best_fitness", [(0, 0.25), (0, 0.7), (1, 0.25), (1, 0.7)])):
        points = client.get_metric_history(parent, key)
        assert sorted((point.step, point.value) for point in points) == expected
    assert client.get_run(parent).data.metrics["best_fitness"] == 0.7


@pytest.mark.parametrize("fault", [None, OSError("the registry is full")])
def test_the_best_trials_weights_get_the_name_once_the_sweep_has_finished(
        tmp_path: Path, client: MlflowClient, monkeypatch: pytest.MonkeyPatch, fault: Exception | None) -> None:
    asked: list[tuple[object, ...]] = []

    def log_model(*given: object) -> Registered:
        asked.append(given)
        if fault:
            raise fault
        return Registered("models:/m-1", "")

    monkeypatch.setattr("ray_yolo.tune.mlflow.log_model", log_model)
    parent, folder = track(tmp_path), tmp_path / "exp"
    trials, config = [trained(n, n / 4, folder, client) for n in range(2)], make_sweep(tmp_path, trials=2)
    named = config.model_copy(update={"placement": config.placement.model_copy(update={"registered_name": "birds"})})
    uri = f"sqlite:///{tmp_path}/mlflow.db"
    for status in ("RUNNING", "KILLED"):
        assert deliver(folder, uri, SweepRun(named, trials, status)) == parent
    with pytest.raises(RecordError, match="registry is full") if fault else nullcontext():  # tried again by the process
        deliver(folder, uri, SweepRun(named, trials, "FINISHED"))
    best = json.loads((folder / "trials" / "trial1" / "mlflow.json").read_text())["run_id"]
    assert asked == [(folder, f"sqlite:///{tmp_path}/mlflow.db", best, "birds")]
    assert client.get_run(parent).info.status == "FINISHED"


def test_its_description_lists_the_trials_and_leads_to_the_page_that_compares_them(
        tmp_path: Path, client: MlflowClient) -> None:
    track(tmp_path)
    trials = [replace(trained(number, fitness, tmp_path / "exp", client),
                      genes={"lr0": 0.01 * (number + 1), "optimizer": "SGD"})
              for number, fitness in enumerate((0.25, 0.5))]
    parent = track(tmp_path, "RUNNING", *trials)
    links, _, *rows = client.get_run(parent).data.tags["mlflow.note.content"].splitlines()
    assert rows == ["| trial | epochs | fitness | lr0 | optimizer |", "| --- | --- | --- | --- | --- |",
                    "| trial1 | 0 | 0.5 | 0.02 | SGD |", "| trial0 | 0 | 0.25 | 0.01 | SGD |"]
    runs = {run.info.run_name: run.info.run_id for run in client.search_runs(["0"])}
    experiment = client.get_run(parent).info.experiment_id
    pages = [urllib.parse.urlsplit(page) for page in re.findall(r"\(#(\S+)\)", links)]
    assert [page.path for page in pages] == ["/compare-runs", "/metric"]
    for page in pages:
        query = {name: json.loads(value) for name, value in urllib.parse.parse_qsl(page.query) if name != "x_axis"}
        assert query["runs"] == [runs["trial1"], runs["trial0"]]
        assert query["experiments"] == [experiment]
    assert query["metric"] == "metrics/mAP50-95"
    assert set(query["plot_metric_keys"]) <= {metric.name for metric in metrics(())}
