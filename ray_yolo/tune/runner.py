"""Runs a study, a sweep or a comparison, from the first task that is missing to its claim.

    <project>/<name>/ledger.jsonl     what is asked, each decision, each result, and the claim
    <project>/<name>/trials/NAME/     the run folder of each training, as of any training
    <project>/<name>/report.html, ... computed from ledger and logs

If the driver is killed, the same command continues: results stay, other trainings resume from their checkpoints, and
the claim is that of an uninterrupted study.
"""

from __future__ import annotations

import contextlib
import time
from abc import ABC, abstractmethod
from collections.abc import Mapping
from typing import Any, Generic, TypeVar

import ray.tune

from ray_yolo.config.placement import RunConfig
from ray_yolo.core.errors import RayYoloError, TrainingError
from ray_yolo.runs.folders import storage_folder
from ray_yolo.runs.run_dir import Run
from ray_yolo.runs.run_record import FolderRecord, SweepRecord
from ray_yolo.runtime import cluster
from ray_yolo.runtime.trainer import fit
from ray_yolo.runtime.workers.pool_jobs import standing_pool
from ray_yolo.sinks.mlflow_client import tracking_uri
from ray_yolo.sinks.record_process import PROMPT_SECONDS, RecordProcess, waiting_limit
from ray_yolo.sinks.run_logger import finalize_abandoned_run
from ray_yolo.tune.compare_settings import CompareConfig
from ray_yolo.tune.dispatch import Dispatcher
from ray_yolo.tune.ledger import Ledger
from ray_yolo.tune.ledger_events import ClaimedEvent
from ray_yolo.tune.pool_log import log_pool
from ray_yolo.tune.ray_adapter import run_tasks
from ray_yolo.tune.records import write_options
from ray_yolo.tune.search import TuneConfig
from ray_yolo.tune.task import line_of, payload_of, task_config, train_to_outcome
from ray_yolo.tune.trainable import train_task
from ray_yolo.tune.trials import train_command

NOTE_SECONDS = 5.0  # the time is noted this often

Result = TypeVar("Result")


def seconds_spent(record: FolderRecord | None) -> float:
    """For which the commands of a study have run, by the record of its folder."""
    return record.seconds if isinstance(record, SweepRecord) else 0.0


class Study(ABC, Generic[Result]):
    """One command's part of a study. A sweep and a comparison say what they decide and show.

    Args:
        config: the settings; the placement has the workers of each training, 0: train here, without Ray.
        slots: trainings that fit on the cluster at once.
        gpus: of each worker.
    """

    def __init__(self, config: TuneConfig | CompareConfig, ledger: Ledger, run: Run, slots: int, gpus: float) -> None:
        self.config, self.ledger, self.run, self.slots, self.gpus = config, ledger, run, slots, gpus
        self.folder = run.folder
        self.trials = self.folder / "trials"
        self.trials.mkdir(exist_ok=True)  # there may be none to train
        self._spent = seconds_spent(run.record)
        self._begun = self._noted = time.monotonic()
        self._shown = -1
        """Lines of the ledger that `show` has seen."""
        self.uri = tracking_uri(config.placement.mlflow_uri, storage_folder(config.placement))
        self.record_process = RecordProcess(
            "ray_yolo.tune.records", self.folder, self.uri, lambda text: self.say(f"WARNING: {text}"),
            own_session=cluster.is_shared())
        self.dispatcher = self.make_dispatcher()

    # What a sweep and a comparison decide

    @abstractmethod
    def make_dispatcher(self) -> Dispatcher:
        """The dispatcher of the restored schedule."""

    @abstractmethod
    def pool_range(self) -> tuple[int, int]:
        """The workers that the pool keeps if other programs of the cluster wait, and its most."""

    grows = False
    """Whether the pool takes workers beyond its most when the cluster grows."""

    # What they show

    @abstractmethod
    def say(self, text: str) -> None:
        """Print a line. Thread-safe."""

    @abstractmethod
    def describe(self) -> list[str]:
        """What is printed before the first task."""

    @abstractmethod
    def show(self) -> None:
        """Show the new lines of the ledger."""

    @abstractmethod
    def finish(self, claim: ClaimedEvent) -> tuple[Result, list[str]]:
        """Write every file at the end. Returns the result, and what is printed last."""

    def started(self, name: str, until: int) -> None:
        """A task trains in a run folder until this epoch."""

    def ended(self, name: str, config: Mapping[str, Any], result: Mapping[str, Any]) -> None:
        """A task has ended; `result` is what `train_task` has reported."""

    def close(self) -> None:
        """Stop what shows the study while it trains."""

    # What is the same

    @property
    def seconds(self) -> float:
        """For which all commands have run."""
        return self._spent + time.monotonic() - self._begun

    def run_to_end(self) -> Result:
        """Train what is missing, write the files, and mark the study as finished.

        Raises:
            TrainingError: if a training fails for another reason than its recipe, or another process has the study.
            ResourcesError: if the cluster has no room for any training.
        """
        for line in self.describe():
            self.say(line)
        write_options(self.folder, self.config)
        wait_seconds = min(waiting_limit(), PROMPT_SECONDS)
        try:
            with contextlib.closing(self):
                claim = self._train()
            self.ledger.close()
            for path in sorted(self.trials.iterdir()):
                finalize_abandoned_run(path)
            result, lines = self.finish(claim)
            self._note_time()
            self.run.finish()
            for line in lines:
                self.say(line)
            wait_seconds = waiting_limit()
            return result
        except (KeyboardInterrupt, SystemExit):
            self.say("interrupted; the same command continues")
            raise
        finally:
            self.ledger.close()
            self._note_time()
            with contextlib.suppress(KeyboardInterrupt):  # the user does not want to wait
                self.record_process.finish(wait_seconds)
            rest = self.record_process.describe_rest()
            if rest:
                self.say(rest)

    def _train(self) -> ClaimedEvent:
        """Train the tasks of the schedule until its claim."""
        self.dispatcher.advance()
        if not self.dispatcher.has_ended:
            if self.config.placement.num_workers:
                self._train_on_pool()
            else:
                self._train_here()
        self.show()
        if self.dispatcher.error:
            raise self.dispatcher.error
        assert self.dispatcher.over is not None
        return self.dispatcher.over

    def _train_on_pool(self) -> None:
        """Train many tasks at once with Ray Tune, on one worker pool."""
        workers = self.config.placement.model_copy(update={"num_workers": self.pool_range()})
        with standing_pool(workers, self.gpus, self._note_workers, grows=self.grows) as queue:
            trainable = ray.tune.with_parameters(train_task, payload=self.payload(), queue=queue)
            run_tasks(trainable, self.dispatcher, self, self.folder, queue,
                      max_failures=self.config.placement.max_failures, processes=self.most_at_once(self.slots),
                      on_this_node=self.run.remote is not None)  # the folder of the study is on this node

    def _train_here(self) -> None:
        """Train one task after the other in this process, without Ray."""
        payload = self.payload()
        while task := self.dispatcher.take():
            config = self.dispatcher.config(task)
            self.started(config["trial"], task.until)
            try:
                outcome, _ = train_to_outcome(task_config(payload, config), task.until, _fit_here)
            except (RayYoloError, OSError) as error:  # another one is a defect, and keeps its traceback
                self.dispatcher.give_up(config["trial"], line_of(error))
            else:
                self.dispatcher.finish(config["trial"], outcome)
            self.ended(config["trial"], config, {})
            self.each_step()

    def most_at_once(self, slots: int) -> int:
        """The tasks that run on so many slots, those that start up included."""
        return slots

    def payload(self) -> dict[str, Any]:
        """The settings that all tasks share, as plain JSON."""
        recipe = self.ledger.begun.recipe.model_copy(update={"data": self.config.recipe.data})
        return payload_of(self.config.placement, recipe, self.folder, self.uri, is_stored=self.run.remote is not None)

    def each_step(self) -> None:
        """Show new lines at once; every few seconds note the time, and see after the record process.

        Raises:
            TrainingError: if another process has taken over the study.
        """
        remote = self.run.remote
        if remote and remote.is_lost:
            raise TrainingError(f"{remote.address}: another process has taken over this study")
        if len(self.ledger.lines) != self._shown:
            self._shown = len(self.ledger.lines)
            self.show()
        now = time.monotonic()
        if now - self._noted > NOTE_SECONDS:
            self._noted = now
            self._note_time()
            self.record_process.keep_running()

    def _note_time(self) -> None:
        """Note in the record how long the study has run."""
        self.run.note_seconds(self.seconds, self.say)

    def _note_workers(self, text: str) -> None:
        """Print and log what happened to the pool's workers. Called in a thread of the pool."""
        self.say(text)
        log_pool(self.folder, text)


def _fit_here(config: RunConfig) -> None:
    fit(config, quiet=True, command=train_command(config.recipe), has_own_records=False)
