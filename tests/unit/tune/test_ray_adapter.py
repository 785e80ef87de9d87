"""What Ray Tune gets and what the ledger records, on a controller without trainings."""

from __future__ import annotations

import random
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
from ray.tune.experiment import Trial as RayTrial
from ray.tune.search import Searcher

from ray_yolo.core.errors import ResourcesError, TrainingError
from ray_yolo.runs.folders import lock_file
from ray_yolo.tune import ray_adapter
from ray_yolo.tune.ledger import read_ledger, verify
from ray_yolo.tune.ledger_events import FailedEvent
from ray_yolo.tune.ray_adapter import ProcessKeeper, TaskCallback, TaskSearcher
from ray_yolo.tune.verification import compare
from tests.support.schedules import dispatcher_of, open_ledger, outcome_of, run_sweep


@dataclass(eq=False)
class TuneTrial:
    """As much of Ray Tune's trial as is asked for."""

    config: dict[str, Any]
    trial_id: str
    status: str = RayTrial.PENDING

    def __str__(self) -> str:
        return str(self.config["trial"])


@dataclass
class Watch:
    """What a study hears of its tasks."""

    said: list[str] = field(default_factory=list)
    running: list[str] = field(default_factory=list)
    steps: int = 0

    def say(self, text: str) -> None:
        self.said.append(text)

    def started(self, name: str, until: int) -> None:
        self.running.append(f"{name} to {until}")

    def ended(self, name: str, config: Mapping[str, Any], result: Mapping[str, Any]) -> None:
        self.running.remove(f"{name} to {config['until']}")

    def each_step(self) -> None:
        self.steps += 1


class Tune:
    """The order in which Ray Tune's controller calls its searcher, its scheduler and its callback."""

    def __init__(self, path: Path, trials: int, monkeypatch: pytest.MonkeyPatch, *, slots: int = 2, order: int = 0
                 ) -> None:
        self.kept: list[int] = []
        monkeypatch.setattr(
            ray_adapter, "keep_trial_processes", lambda controller, trial, count: self.kept.append(count))
        self.ledger, self.draw, self.watch = open_ledger(path), random.Random(order), Watch()
        self.dispatcher = dispatcher_of(self.ledger, trials, slots)
        self.scheduler = ProcessKeeper(5)
        self.searcher = TaskSearcher(self.dispatcher, path.parent / "trials")
        self.callback = TaskCallback(self.dispatcher, self.watch)
        self.trials: list[TuneTrial] = []
        self.is_finished = False

    def step(self) -> None:
        """Ask for new trials, and start what is pending."""
        while not self.is_finished and (config := self.searcher.suggest(f"id{len(self.trials)}")) is not None:
            if isinstance(config, str):
                assert config == Searcher.FINISHED
                self.is_finished = True
                break
            self.trials.append(TuneTrial(config, f"id{len(self.trials)}"))
            self.scheduler.on_trial_add(self, self.trials[-1])
        for trial in self.trials:
            if trial.status == RayTrial.PENDING:
                self.callback.on_trial_start(0, [], trial)
                trial.status = RayTrial.RUNNING
        self.callback.on_step_end(0, [])

    def running(self) -> list[TuneTrial]:
        return [trial for trial in self.trials if trial.status == RayTrial.RUNNING]

    def finish(self, trial: TuneTrial) -> None:
        """The function of a trial reports its outcome, and ends."""
        outcome = outcome_of(self.dispatcher.running[str(trial)])
        result = {"outcome": outcome.model_dump_json(), "epochs": 3, "seconds": 6.0}
        self.callback.on_trial_result(0, [], trial, result)
        trial.status = RayTrial.TERMINATED
        self.searcher.on_trial_complete(trial.trial_id, result={**result, "done": True})

    def lose(self, trial: TuneTrial, report: dict[str, Any] | None = None) -> None:
        """A trial fails once too often."""
        if report:
            self.callback.on_trial_result(0, [], trial, report)
        trial.status = RayTrial.ERROR
        self.searcher.on_trial_complete(trial.trial_id, error=True)
        self.callback.on_trial_error(0, [], trial)

    def run(self, tasks: int = -1) -> None:
        """Train so many tasks, or all."""
        while tasks and not self.is_finished:
            self.step()
            if running := self.running():
                self.finish(self.draw.choice(running))
                tasks -= 1
        if self.is_finished:
            self.ledger.close()


@pytest.mark.parametrize(("slots", "order"), [(1, 0), (2, 1), (3, 2)])
def test_tune_writes_the_ledger_of_the_schedule(
        tmp_path: Path, monkeypatch: pytest.MonkeyPatch, slots: int, order: int) -> None:
    alone = run_sweep(tmp_path / "alone" / "ledger.jsonl", 12)
    tune = Tune(tmp_path / "tune" / "ledger.jsonl", 12, monkeypatch, slots=slots, order=order)
    tune.run()
    assert compare(read_ledger(alone.path), read_ledger(tune.ledger.path)) is None
    tasks = [(str(trial), trial.config["until"]) for trial in tune.trials]
    assert len(tasks) == len(set(tasks))  # a trial of Tune for each task
    assert tune.watch.running == []
    assert tune.kept == [5]


def test_tune_ends_after_the_records_of_all_trainings(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tune = Tune(tmp_path / "ledger.jsonl", 3, monkeypatch)
    (tmp_path / "trials" / "trial0").mkdir(parents=True)
    with (tmp_path / "trials" / "trial0" / ".lock").open("w") as lock:
        assert lock_file(lock)
        while tune.dispatcher.over is None:
            tune.run(1)
        for _ in range(9):
            tune.step()
        assert not tune.is_finished
    tune.step()
    assert tune.is_finished


def test_an_interrupted_command_does_not_wait_for_records(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tune = Tune(tmp_path / "ledger.jsonl", 3, monkeypatch)
    tune.step()
    tune.searcher.end()  # a signal: no more tasks
    tune.step()
    assert tune.is_finished  # though a task runs, and records are not complete
    tune.callback.end()  # the same signal ends Tune's loop
    with pytest.raises(TrainingError):
        tune.callback.on_step_end(0, [])


@pytest.mark.parametrize("tasks", range(1, 20, 4))
def test_a_killed_driver_continues_with_other_trials_of_tune(
        tmp_path: Path, monkeypatch: pytest.MonkeyPatch, tasks: int) -> None:
    alone = run_sweep(tmp_path / "alone" / "ledger.jsonl", 12)
    for count in (tasks, -1):
        tune = Tune(tmp_path / "tune" / "ledger.jsonl", 12, monkeypatch, order=tasks)
        tune.run(count)
    lines = read_ledger(tune.ledger.path)
    assert compare(read_ledger(alone.path), lines) is None
    assert verify(lines) == []


class TestLosses:
    """Failures that are not the recipe's."""

    @pytest.fixture
    def tune(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Tune:
        tune = Tune(tmp_path / "ledger.jsonl", 3, monkeypatch)
        tune.step()
        return tune

    def test_a_lost_task_starts_again_and_leaves_no_line(self, tune: Tune) -> None:
        trial, before = tune.running()[0], list(tune.ledger.lines)
        tune.callback.on_trial_result(0, [], trial, {"lost": "ControllerError: a node has gone", "lacking": False})
        tune.callback.on_trial_recover(0, [], trial)
        tune.callback.on_trial_recover(0, [], trial)  # this time without a word
        assert tune.watch.said == ["trial0 is queued again: ControllerError: a node has gone",
                                   "trial0 is queued again: its process died"]
        assert tune.ledger.lines == before

    @pytest.mark.parametrize(("report", "kind", "reason"), [
        (None, TrainingError, "its process died"),
        ({"lost": "DatasetError: set: no such file", "lacking": False}, TrainingError,
         "DatasetError: set: no such file"),
        ({"lost": "ResourcesError: 2 workers need 2 CPU", "lacking": True}, ResourcesError,
         "ResourcesError: 2 workers need 2 CPU")])
    def test_lost_once_too_often_it_stays_and_the_study_ends_without_a_claim(
            self, tune: Tune, report: dict[str, Any] | None, kind: type[Exception], reason: str) -> None:
        first, second = tune.running()
        tune.lose(first, report)
        tune.step()
        assert not tune.is_finished  # the other one trains
        tune.finish(second)
        tune.step()
        assert tune.is_finished
        assert len(tune.trials) == 2
        assert tune.ledger.claim is None
        assert not any(isinstance(line, FailedEvent) for line in tune.ledger.lines)
        assert type(tune.dispatcher.error) is kind
        assert str(tune.dispatcher.error) == f"trial0: {reason}; the same command continues"
