"""One trial's process, without Ray: what it reports, and whose fault a failure is."""

from __future__ import annotations

import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import ray.exceptions
import ray.tune
import torch

from ray_yolo.config.placement import RunConfig
from ray_yolo.config.recipe import Recipe
from ray_yolo.core.errors import (
    CheckpointError,
    ConfigError,
    DatasetError,
    DivergedError,
    LostWorkersError,
    MovedRunError,
    ResourcesError,
    StorageError,
    TrainingError,
    WorkerError,
)
from ray_yolo.runs.event_log import EventLog
from ray_yolo.tune import trainable
from ray_yolo.tune.schedule import Outcome
from ray_yolo.tune.search import Search
from ray_yolo.tune.task import read_outcome, task_config
from ray_yolo.tune.trainable import train_task
from tests.support import run_log

EPOCHS = 6
SEARCH = Search.model_validate({"objective": {"recall": 1.0}})
GENES = {"lr0": 0.02}


class Trained:
    """A sweep of one trial, whose trainings are epochs written down."""

    def __init__(self, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.folder = folder / "trials" / "trial0"
        self.recipe = Recipe(epochs=EPOCHS, objective=SEARCH.recipe_objective)
        self.best_epoch = EPOCHS  # the last one that was saved as best.pt
        self.placement: dict[str, Any] = {"project": str(self.folder.parent)}
        self.reports: list[dict[str, Any]] = []
        self.error: Exception | None = None
        self.asked: list[RunConfig] = []
        self.complete_records: Callable[[], object] = lambda: None
        monkeypatch.setattr(ray.tune, "report", self.reports.append)
        monkeypatch.setattr(trainable, "fit", self.fit)
        monkeypatch.setattr(trainable, "_recorder", lambda: None)

    def write(self, *epochs: int) -> None:
        log = EventLog(self.folder / "events.jsonl")
        for epoch in epochs:
            log.append(run_log.epoch(epoch - 1, step=epoch, val={}, metrics={"recall": epoch / 10},
                                     fitness=epoch / 10, best=epoch <= self.best_epoch))
            log.append(run_log.checkpoint(epoch).model_copy(update={"digest": f"digest{epoch}"}))
        log.close()

    def fit(self, config: RunConfig, *, trained: Callable[[], None] = lambda: None, **_: Any) -> None:
        assert threading.current_thread() is not threading.main_thread()
        self.asked.append(config)
        if self.error:
            raise self.error
        self.write(*range(self.begun + 1, (config.placement.stop_after or EPOCHS) + 1))
        trained()
        self.complete_records()

    def train_task(self, until: int, begun: int = 0) -> list[Outcome]:
        """The outcome that a task reports."""
        self.begun = begun
        train_task({"trial": "trial0", "genes": GENES, "seed": 7, "until": until, "end": 3.0}, self.payload, None)
        return [Outcome.model_validate_json(report["outcome"]) for report in self.reports]

    @property
    def payload(self) -> dict[str, Any]:
        return {"recipe": self.recipe.model_dump(mode="json"), "cache": "",
                "placement": self.placement}


@pytest.fixture
def trained(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Trained:
    return Trained(tmp_path, monkeypatch)


class TestTask:
    """The task of a trial."""

    def test_it_trains_to_its_pause_and_reports_the_best_epoch_so_far_once(self, trained: Trained) -> None:
        trained.best_epoch = 2
        assert trained.train_task(4) == [
            Outcome(fitness=0.2, metrics={"recall": 0.2}, losses={}, weights="digest4",
                    classes={"circle": 0.0625, "square": 0.0625})]
        [config] = trained.asked
        assert (config.placement.stop_after, config.placement.name, config.placement.keep_checkpoints) == (
            4, "trial0", 1)
        assert (config.recipe.seed, config.recipe.optimizer.lr0) == (7, 0.02)

    def test_the_last_task_of_a_trial_has_no_pause(self, trained: Trained) -> None:
        config = {"trial": "trial0-seed7", "genes": GENES, "seed": 7, "until": EPOCHS, "end": 3.0}
        assert task_config(trained.payload, config).placement.stop_after == 0

    def test_what_an_earlier_driver_has_trained_and_not_counted_is_found_in_the_log(self, trained: Trained) -> None:
        trained.write(1, 2, 3)
        assert trained.train_task(3) == [
            Outcome(fitness=0.3, metrics={"recall": 0.3}, losses={}, weights="digest3",
                    classes={"circle": 0.0625, "square": 0.0625})]
        assert not trained.asked
        assert (trained.reports[0]["epochs"], trained.reports[0]["seconds"]) == (0, 0.0)

    def test_a_training_whose_patience_is_over_has_its_last_outcome_at_every_later_rung(self, trained: Trained) -> None:
        trained.write(1, 2, 3)
        assert read_outcome(trained.folder, 5) is None
        (trained.folder / "finished").touch()
        assert read_outcome(trained.folder, 5) == Outcome(
            fitness=0.3, metrics={"recall": 0.3}, losses={}, weights="digest3",
                    classes={"circle": 0.0625, "square": 0.0625})

    def test_an_epoch_without_its_checkpoint_is_not_over(self, trained: Trained) -> None:
        log = EventLog(trained.folder / "events.jsonl")
        log.append(run_log.epoch(0, step=1, best=True))
        log.close()
        assert read_outcome(trained.folder, 1) is None

    def test_the_recipes_own_failure_is_an_outcome(self, trained: Trained) -> None:
        trained.error = ConfigError("num_workers: 2 workers, but a step has only 1 part")
        assert trained.train_task(3) == [
            Outcome(reason="ConfigError: num_workers: 2 workers, but a step has only 1 part")]

    @pytest.mark.parametrize("error", [
        WorkerError("worker 0: OutOfMemoryError: CUDA out of memory"),
        torch.OutOfMemoryError("CUDA out of memory")])  # of a training without Ray
    def test_a_failure_of_the_workers_code_is_an_outcome(self, trained: Trained, error: Exception) -> None:
        trained.error = error
        assert [outcome.fitness for outcome in trained.train_task(3)] == [None]

    def test_only_the_type_of_an_error_says_that_a_training_has_diverged(self, trained: Trained) -> None:
        for error, diverged in ((DivergedError("step 3"), True), (ConfigError("not finite, says a gene"), False)):
            trained.error = error
            outcome = trained.train_task(3)[-1]
            assert (outcome.fitness, outcome.diverged) == (None, diverged)

    @pytest.mark.parametrize(("error", "lacking"), [
        (LostWorkersError("gone"), [False]), (ResourcesError("2 workers need 2 CPU"), [True]),
        (ray.exceptions.ActorDiedError(), [False]), (StorageError("SlowDown"), [False]),
        (DatasetError("set: no such file"), [False]), (CheckpointError("a.pt: damaged"), [False]),
        (MovedRunError("trial0 was moved"), [False]), (OSError(5, "Input/output error"), [False]),
        (TrainingError("the checkpoint could not be written"), [False]), (ZeroDivisionError("a defect"), [False]),
        (KeyboardInterrupt(), [])])
    def test_another_failure_ends_the_process_so_that_the_task_starts_again(
            self, trained: Trained, monkeypatch: pytest.MonkeyPatch, error: Exception, lacking: list[bool]) -> None:
        trained.error = error
        monkeypatch.setattr(trainable, "_PATIENCE_SECONDS", 0.1)
        with pytest.raises(TrainingError):
            trained.train_task(3)
        assert [report["lacking"] for report in trained.reports] == lacking  # and no outcome


def test_an_outcome_is_reported_before_the_other_records_are_complete(trained: Trained) -> None:
    """And the process has at most one training whose records are not."""
    complete = threading.Event()
    trained.complete_records = lambda: complete.wait(10)
    assert [outcome.fitness for outcome in trained.train_task(3)] == [0.3]
    assert not trainable._earlier[0].done()
    threading.Timer(0.05, complete.set).start()
    trained.train_task(6, begun=3)
    assert complete.is_set()


def test_records_that_fail_after_the_outcome_was_reported_are_named(
        trained: Trained, caplog: pytest.LogCaptureFixture) -> None:
    def fail() -> None:
        raise StorageError("no space left on device")

    trained.complete_records = fail
    trained.train_task(3)
    assert [outcome.fitness for outcome in trained.train_task(6, begun=3)] == [0.3, 0.6]
    assert "its records are incomplete: no space left on device" in caplog.text
