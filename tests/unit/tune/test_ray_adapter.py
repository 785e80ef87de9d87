"""What Ray Tune gets and what the ledger records, on a controller without trainings."""

from __future__ import annotations

import io
import random
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from ray.tune.experiment import Trial as RayTrial
from ray.tune.schedulers import TrialScheduler

from ray_yolo.core.errors import ResourcesError, TrainingError
from ray_yolo.runs.folders import is_held, lock_file
from ray_yolo.tune import ray_adapter
from ray_yolo.tune.console import SweepDisplay
from ray_yolo.tune.ledger import read_ledger, verify
from ray_yolo.tune.ledger_events import CountedEvent, FailedEvent
from ray_yolo.tune.ray_adapter import (
    LadderScheduler,
    SweepCallback,
    TaskSearcher,
)
from ray_yolo.tune.schedule import Outcome
from ray_yolo.tune.verification import compare
from tests.support.schedules import dispatcher_of, open_ledger, outcome_of, run_sweep


@dataclass(eq=False)
class TuneTrial:
    """As much of Ray Tune's trial as is asked for."""

    config: dict[str, Any]
    trial_id: str
    status: str = RayTrial.PENDING
    last_result: dict[str, Any] = field(default_factory=dict)

    def __str__(self) -> str:
        return str(self.config["trial"])

    def set_config(self, config: dict[str, Any]) -> None:
        self.config = config


class Tune:
    """The order in which Ray Tune's controller calls its searcher, its scheduler and its callbacks."""

    def __init__(self, path: Path, trials: int, monkeypatch: pytest.MonkeyPatch, *, slots: int = 2, order: int = 0,
                 drops: bool = False) -> None:
        self.kept: list[int] = []
        monkeypatch.setattr(
            ray_adapter, "keep_trial_processes", lambda controller, trial, count: self.kept.append(count))
        self.ledger, self.draw, self.said = open_ledger(path), random.Random(order), io.StringIO()
        self.dispatcher = dispatcher_of(self.ledger, trials, slots)
        self.measured: list[tuple[float, float]] = []
        self.incomplete: set[str] = set()  # run folders
        self.scheduler = LadderScheduler(self.dispatcher, lambda *pair: self.measured.append(pair), lambda genes: 2.0,
                                         slots=5, is_complete=lambda name: name not in self.incomplete)
        self.searcher = TaskSearcher(self.dispatcher, self.scheduler)
        self.callback = SweepCallback(
            self.ledger, SweepDisplay(self.said), drops=drops, stop=self.scheduler.close,
            fail=lambda name, reason: self.dispatcher.finish(name, Outcome(reason=reason)))
        self.trials: list[TuneTrial] = []
        self.pausing: list[TuneTrial] = []
        self.is_finished = False

    def step(self) -> None:
        """Ask for new trials and for a paused one, and start what is pending."""
        for trial in self.pausing:  # a pause takes the controller a moment
            trial.status = RayTrial.PAUSED
        self.pausing = []
        while not self.is_finished and (config := self.searcher.suggest(f"id{len(self.trials)}")) is not None:
            if isinstance(config, str):
                self.is_finished = True
                break
            self.trials.append(TuneTrial(config, f"id{len(self.trials)}"))
            self.scheduler.on_trial_add(self, self.trials[-1])
        if chosen := self.scheduler.choose_trial_to_run(self):
            assert chosen.status == RayTrial.PAUSED
            chosen.status = RayTrial.PENDING
        for trial in self.trials:
            if trial.status == RayTrial.PENDING:
                self.callback.on_trial_start(0, [], trial)
                trial.status = RayTrial.RUNNING
        self.callback.on_step_end(0, [])

    def stop_trial(self, trial: TuneTrial) -> None:
        trial.status = RayTrial.TERMINATED

    def running(self) -> list[TuneTrial]:
        return [trial for trial in self.trials if trial.status == RayTrial.RUNNING and trial not in self.pausing]

    def report(self, trial: TuneTrial, result: dict[str, Any]) -> str:
        decision = self.scheduler.on_trial_result(self, trial, result)
        self.callback.on_trial_result(0, [], trial, result)
        if decision == TrialScheduler.PAUSE:
            self.pausing.append(trial)
        return decision

    def finish(self, trial: TuneTrial) -> str:
        outcome = outcome_of(self.dispatcher.running[str(trial)])
        return self.report(trial, {"outcome": outcome.model_dump_json(), "epochs": 3, "seconds": 6.0})

    def run(self, tasks: int = -1) -> None:
        """Train so many tasks, or all."""
        while tasks and not (self.is_finished and all(trial.status == RayTrial.TERMINATED for trial in self.trials)):
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
    assert len(tune.trials) == len({str(trial) for trial in tune.trials})  # a trial of Tune for each run folder
    assert tune.kept[0] == 5
    assert set(tune.kept[1:]) == {0}


def test_the_process_of_a_trial_ends_after_its_records_are_complete(
        tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tune = Tune(tmp_path / "ledger.jsonl", 3, monkeypatch)
    tune.incomplete = {"trial0"}
    while tune.dispatcher.over is None:
        tune.run(1)
    for _ in range(9):
        tune.step()
    assert [str(trial) for trial in tune.trials if trial.status != RayTrial.TERMINATED] == ["trial0"]
    tune.incomplete.clear()
    tune.step()
    assert all(trial.status == RayTrial.TERMINATED for trial in tune.trials)


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


def test_a_trial_pauses_at_its_rung_and_continues_when_its_next_task_is_issued(
        tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tune = Tune(tmp_path / "ledger.jsonl", 12, monkeypatch, slots=1)
    tune.step()
    (first,) = tune.running()
    assert (str(first), first.config["until"]) == ("trial0", 3)
    assert tune.finish(first) == TrialScheduler.PAUSE
    assert tune.measured == [(6.0, 6.0)]
    while first.config["until"] == 3:
        tune.step()
        for trial in tune.running():
            if trial is not first:
                tune.finish(trial)
    assert (first.status, first.config["until"]) == (RayTrial.RUNNING, 9)


class TestLosses:
    """Failures that are not the recipe's."""

    @pytest.fixture
    def tune(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Tune:
        tune = Tune(tmp_path / "ledger.jsonl", 3, monkeypatch)
        tune.step()
        return tune

    def test_a_lost_trial_starts_again_and_leaves_no_line(self, tune: Tune) -> None:
        trial, before = tune.running()[0], list(tune.ledger.lines)
        assert tune.report(trial, {"lost": "ControllerError: a node has gone", "lacking": False}) == "CONTINUE"
        tune.callback.on_trial_recover(0, [], trial)
        tune.callback.on_trial_recover(0, [], trial)  # this time without a word
        assert "trial0 is queued again: ControllerError: a node has gone" in tune.said.getvalue()
        assert "trial0 is queued again: its process died" in tune.said.getvalue()
        assert tune.ledger.lines == before

    def test_lost_once_too_often_it_has_failed(self, tune: Tune) -> None:
        trial = tune.running()[0]
        tune.callback.on_trial_error(0, [], trial)
        trial.status = RayTrial.ERROR
        while not any(isinstance(line, FailedEvent) for line in tune.ledger.lines):
            tune.step()
            tune.finish(tune.running()[0])
        assert (tune.ledger.trials[0].state, tune.ledger.trials[0].reason) == ("failed", "its process died")

    def test_where_there_is_no_room_for_any_the_sweep_ends_without_a_claim(self, tune: Tune) -> None:
        first, second = tune.running()
        tune.report(first, {"lost": "ResourcesError: 2 workers need 2 CPU", "lacking": True})
        tune.callback.on_trial_error(0, [], first)
        first.status = RayTrial.TERMINATED
        tune.finish(second)
        for _ in range(2):
            tune.step()
        assert tune.is_finished
        assert second.status == RayTrial.TERMINATED
        assert tune.ledger.claim is None
        with pytest.raises(ResourcesError, match="2 workers need 2 CPU; the same command continues"):
            tune.callback.check_room()

    def test_a_sweep_that_another_process_has_ends_here(self, tune: Tune) -> None:
        tune.ledger.stored = SimpleNamespace(is_lost=True, address="s3://b/x", sync_files=lambda: None)
        with pytest.raises(TrainingError, match="another process has taken over this sweep"):
            tune.callback.on_step_end(0, [])


@pytest.mark.parametrize("drops", [True, False])
def test_weights_of_trials_that_can_win_and_of_paused_ones_stay(
        tmp_path: Path, monkeypatch: pytest.MonkeyPatch, drops: bool) -> None:
    dropped: list[str] = []
    monkeypatch.setattr(ray_adapter, "drop_weights", lambda folder: dropped.append(folder.name))
    tune = Tune(tmp_path / "ledger.jsonl", 20, monkeypatch, drops=drops)
    tune.run()
    tune.callback.check_room()
    counted = [line for line in tune.ledger.lines if isinstance(line, CountedEvent)]
    whole = [line for line in counted if (line.epochs, line.seed) == (9, 3)]
    best = {line.trial for line in sorted(whole, key=lambda line: line.fitness)[-3:]}
    ended = {row.number for row in tune.ledger.trials if row.has_ended}
    assert sorted(dropped) == (sorted(f"trial{number}" for number in ended - best - {0}) if drops else [])
    assert "paused" in {row.state for row in tune.ledger.trials}


def test_weights_stay_while_a_process_holds_their_run_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    dropped: list[tuple[str, bool]] = []
    monkeypatch.setattr(ray_adapter, "drop_weights", lambda folder: dropped.append((folder.name, is_held(folder))))
    tune = Tune(tmp_path / "ledger.jsonl", 20, monkeypatch, drops=True)
    with ExitStack() as stack:
        for number in range(20):
            folder = tmp_path / "trials" / f"trial{number}"
            folder.mkdir(parents=True)
            assert lock_file(stack.enter_context((folder / ".lock").open("w")))
        tune.run(20)
        failed = {(row.folder_name, False) for row in tune.ledger.trials if row.state == "failed"}
        assert failed
    tune.run()
    tune.callback.check_room()
    assert failed <= set(dropped)
    assert not any(was_held for _, was_held in dropped)
