"""What a study does while its tasks train and at its end, without trainings."""

from __future__ import annotations

import io
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from types import SimpleNamespace

import pytest

from ray_yolo.core.errors import TrainingError
from ray_yolo.core.formatting import format_size
from ray_yolo.runs.folders import is_held, lock_file
from ray_yolo.runs.run_dir import Run, begin_run
from ray_yolo.runs.run_record import SweepRecord
from ray_yolo.tune import runner, tuner
from ray_yolo.tune.ledger import Ledger
from ray_yolo.tune.ledger_events import FinalistsEvent
from ray_yolo.tune.search import TuneConfig
from ray_yolo.tune.tuner import Sweep
from tests.support.schedules import outcome_of, sweep_of
from tests.support.sweeps import make_sweep


class NoRecords:
    """Takes the place of the process that makes records."""

    def __init__(self, *arguments: object, own_session: bool) -> None:
        self.seen = 0

    def keep_running(self) -> None:
        self.seen += 1


@pytest.fixture
def config(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> TuneConfig:
    """A sweep whose trainings and records are made by nothing."""
    monkeypatch.setattr(runner, "RecordProcess", NoRecords)
    monkeypatch.setattr(tuner, "room_for_trials", lambda config, gpus: 2)
    return make_sweep(tmp_path, trials=20, max_concurrent=2)


@pytest.fixture
def run_folder(config: TuneConfig) -> Iterator[Run]:
    run = begin_run(config.placement, SweepRecord(digest="ab", space="", trials=20))
    yield run
    run.release()


def make_study(config: TuneConfig, run: Run) -> Sweep:
    return Sweep(config, Ledger(run.folder / "ledger.jsonl", sweep_of()), run, 2, 0.0, io.StringIO())


def train(sweep: Sweep, tasks: int = -1) -> None:
    """Train so many tasks, or all."""
    while tasks and (task := sweep.dispatcher.take()):
        sweep.dispatcher.finish(sweep.dispatcher.name(task), outcome_of(task))
        sweep.each_step()
        tasks -= 1


@pytest.mark.parametrize("keep", [False, True])
def test_weights_of_trials_that_can_win_stay(
        config: TuneConfig, run_folder: Run, monkeypatch: pytest.MonkeyPatch, keep: bool) -> None:
    dropped: list[str] = []
    monkeypatch.setattr(tuner, "drop_weights", lambda folder: dropped.append(folder.name))
    settings = config.sweep.model_copy(update={"keep_weights": keep})
    sweep = make_study(config.model_copy(update={"sweep": settings}), run_folder)
    train(sweep)
    sweep.close()
    [finalists] = [line.trials for line in sweep.ledger.lines if isinstance(line, FinalistsEvent)]
    ended = {row.number for row in sweep.ledger.trials if row.has_ended}
    assert ended > {0, *finalists}
    assert sorted(dropped) == ([] if keep else sorted(f"trial{number}" for number in ended - {0, *finalists}))
    assert "paused" in {row.state for row in sweep.ledger.trials}


@pytest.mark.parametrize(("settings", "end"), [
    ({}, " of it in weights of {paused} paused trials, from which more --trials or --hours go on; "
         "--drop-paused-weights removes them at the end"),
    ({"drop_paused_weights": True}, ""), ({"keep_weights": True}, "")])
def test_the_end_of_a_sweep_says_how_much_disk_its_trials_hold(
        config: TuneConfig, run_folder: Run, settings: dict[str, bool], end: str) -> None:
    sweep_config = config.sweep.model_copy(update=settings)
    sweep = make_study(config.model_copy(update={"sweep": sweep_config}), run_folder)
    train(sweep)
    sweep.close()
    for trial in sweep.ledger.trials:
        for path in ("checkpoints/step-3/state.pt", "weights/best.pt", "events.jsonl"):
            (sweep.trials / trial.folder_name / path).parent.mkdir(parents=True, exist_ok=True)
            (sweep.trials / trial.folder_name / path).write_bytes(bytes(1000))
    assert sweep.dispatcher.over is not None
    result, lines = sweep.finish(sweep.dispatcher.over)
    paused = {trial.folder_name for trial in result.trials if trial.state == "paused"}
    holding = {path.parent.name for path in sweep.trials.glob("*/weights")}
    everyone = {trial.folder_name for trial in result.trials}
    kept = everyone if settings.get("keep_weights") else {result.best.folder_name} | (set() if settings else paused)
    assert holding == kept
    assert (sweep.folder / "weights" / "best.pt").exists()
    assert {path.parent.name for path in sweep.trials.glob("*/events.jsonl")} == everyone
    size = f"disk: {sweep.trials} holds {format_size(1000 * (len(everyone) + 2 * len(kept)))}"
    more = f", {format_size(2000 * len(paused))}" + end.format(paused=len(paused)) if end else ""
    assert lines[0] == size + more
    said = [line for line in sweep.describe() if line.startswith("paused without weights")]
    assert said == [f"paused without weights: {len(paused)} trials; one that goes on trains again from its first epoch"
                    ] * bool(settings.get("drop_paused_weights"))


def test_weights_stay_while_a_process_holds_their_folder(
        config: TuneConfig, run_folder: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    dropped: list[tuple[str, bool]] = []
    monkeypatch.setattr(tuner, "drop_weights", lambda folder: dropped.append((folder.name, is_held(folder))))
    sweep = make_study(config, run_folder)
    with ExitStack() as stack:
        for number in range(20):
            folder = sweep.trials / f"trial{number}"
            folder.mkdir(parents=True)
            assert lock_file(stack.enter_context((folder / ".lock").open("w")))
        train(sweep, 20)
        failed = {(row.folder_name, False) for row in sweep.ledger.trials if row.state == "failed"}
        assert failed
    train(sweep)
    sweep.close()
    assert failed <= set(dropped)
    assert not any(was_held for _, was_held in dropped)


def test_a_study_that_another_process_has_ends_here(config: TuneConfig, run_folder: Run) -> None:
    sweep = make_study(config, run_folder)
    sweep.run = SimpleNamespace(remote=SimpleNamespace(is_lost=True, address="s3://b/x"))
    with pytest.raises(TrainingError):
        sweep.each_step()


def test_the_time_is_noted_every_few_seconds(
        config: TuneConfig, run_folder: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    sweep = make_study(config, run_folder)
    sweep.each_step()
    assert sweep.record_process.seen == 0
    monkeypatch.setattr(runner, "NOTE_SECONDS", 0.0)
    sweep.each_step()
    assert sweep.record_process.seen == 1
