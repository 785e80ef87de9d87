"""Connects Ray Tune, which starts and restarts trainings, to a study: one trial of Tune is one task.

A task that continues a training finds its checkpoint in the run folder, so no trial of Tune pauses. Ray's saving and
restoring of searches is not used: in a test it ran finished trials again, and it unpickles.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from concurrent.futures import Future
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

import ray
import ray.tune
from ray.tune import Callback
from ray.tune.experiment import Trial as TuneTrial
from ray.tune.schedulers import FIFOScheduler
from ray.tune.search import Searcher

from ray_yolo.core import deadline
from ray_yolo.core.errors import ResourcesError, TrainingError
from ray_yolo.runs.folders import is_held
from ray_yolo.runtime.graceful_stop import request_stop, run_in_background
from ray_yolo.runtime.ray_internals import expect_no_result_files, keep_trial_processes, on_node
from ray_yolo.runtime.workers.client import QueueHandle, stop_answer
from ray_yolo.tune.dispatch import Dispatcher
from ray_yolo.tune.schedule import Outcome
from ray_yolo.tune.trainable import wait_until_released

if TYPE_CHECKING:
    from ray.tune.execution.tune_controller import TuneController

_RECORD_SECONDS = 10.0  # stopped trials may complete records for this long; the next start completes the others
_END_SECONDS = 3.0  # Tune may take this long to end after an interruption
_DIED: dict[str, Any] = {"lost": "its process died", "lacking": False}  # stands in for a report that was not made


class Observer(Protocol):
    """What a study shows and does while its tasks train."""

    def say(self, text: str) -> None:
        """Print a line."""

    def started(self, name: str, until: int) -> None:
        """A task trains in a run folder until this epoch."""

    def ended(self, name: str, config: Mapping[str, Any], result: Mapping[str, Any]) -> None:
        """A task has ended; `result` is what `train_task` has reported, empty after a failure."""

    def each_step(self) -> None:
        """Called many times a second."""


def run_tasks(trainable: Any, dispatcher: Dispatcher, observer: Observer, folder: Path, queue: QueueHandle, *,
              max_failures: int, processes: int, on_this_node: bool) -> None:
    """Train the tasks of a study with Ray Tune until it has ended.

    If this command is interrupted, the workers save the step in progress, and Ray Tune ends.

    Args:
        folder: of the study.
        queue: of the pool whose workers train the tasks.
        max_failures: restarts of a task whose recipe did not cause its failure.
        processes: that are kept between tasks, because a new process takes seconds.
        on_this_node: keep the processes of the tasks on this node; their workers may be anywhere.
    """
    node: dict[str, Any] = {}
    if on_this_node:
        node = {"bundle_label_selector": [on_node(ray.get_runtime_context().get_node_id())]}
    # Memory, not CPU: even a hundredth of a CPU would take the slot of a worker
    trainable = ray.tune.with_resources(trainable, ray.tune.PlacementGroupFactory([{"memory": 1e6}], **node))
    searcher = TaskSearcher(dispatcher, folder / "trials")
    callback = TaskCallback(dispatcher, observer)
    tune = ray.tune.Tuner(
        trainable,
        tune_config=ray.tune.TuneConfig(
            search_alg=searcher, num_samples=-1, scheduler=ProcessKeeper(processes), reuse_actors=True,
            trial_name_creator=lambda trial: str(trial.config["trial"]),
            trial_dirname_creator=lambda trial: f"{trial.config['trial']}-{trial.config['until']}"),
        run_config=ray.tune.RunConfig(
            name=f"{folder.name}-{os.getpid()}", storage_path=str(folder / "ray"), verbose=0,
            callbacks=[callback], failure_config=ray.tune.FailureConfig(max_failures=max_failures)))

    def before_end(outcome: Future[Any]) -> None:
        trials = list((folder / "trials").iterdir())
        try:
            request_stop(lambda: stop_answer(queue.stop.remote()), trials, observer.say)
            wait_until_released(trials, deadline.seconds_left(_RECORD_SECONDS))
        finally:  # otherwise Tune would go on in its thread, if this process continues, as a notebook does
            searcher.end()
            callback.end()
        with suppress(TimeoutError):
            outcome.exception(deadline.seconds_left(_END_SECONDS))

    expect_no_result_files()
    run_in_background(tune.fit, before_end)


class ProcessKeeper(FIFOScheduler):
    """Keeps the processes of ended trials for the next ones from the first trial on; by default Tune keeps one.

    Args:
        number: processes to keep.
    """

    def __init__(self, number: int) -> None:
        super().__init__()
        self._number = number

    def on_trial_add(self, tune_controller: TuneController, trial: TuneTrial) -> None:
        """Tell Tune at the first trial, from which it knows the resources of a process."""
        if self._number:
            keep_trial_processes(tune_controller, trial, self._number)
        self._number = 0

    def __getstate__(self) -> dict[str, Any]:
        """Nothing to pickle, because Ray's restore is not used."""
        return {}


class TaskSearcher(Searcher):
    """Suggests the task whose result is needed first, and passes outcomes on.

    Args:
        trials: the folder with the run folders. Tune ends when the records of all trainings in them are complete,
            because the processes that make them end with it.
    """

    def __init__(self, dispatcher: Dispatcher, trials: Path) -> None:
        super().__init__(metric="fitness", mode="max")
        self._dispatcher, self._trials = dispatcher, trials
        self._names: dict[str, str] = {}
        """The run folder of each of Tune's trials, by its id."""
        self._is_interrupted = False

    def suggest(self, trial_id: str) -> dict[str, Any] | str | None:
        """The configuration of a task, FINISHED at the end of the study, or None if there is no task to start."""
        task = self._dispatcher.take()
        if task is not None:
            self._names[trial_id] = self._dispatcher.name(task)
            return self._dispatcher.config(task)
        names = {*self._names.values()}
        is_complete = not self._dispatcher.running and not any(is_held(self._trials / name) for name in names)
        if self._is_interrupted or (self._dispatcher.has_ended and is_complete):
            return str(Searcher.FINISHED)
        return None

    def on_trial_complete(self, trial_id: str, result: dict[str, Any] | None = None, error: bool = False) -> None:
        """Pass on the outcome of a task. A failure is the callback's, which knows the reason."""
        if not error and result and "outcome" in result:
            self._dispatcher.finish(self._names[trial_id], Outcome.model_validate_json(result["outcome"]))

    def end(self) -> None:
        """Suggest nothing more: the command is interrupted."""
        self._is_interrupted = True

    def save(self, checkpoint_path: str) -> None:
        """Do nothing: the ledger is on disk."""

    def __getstate__(self) -> dict[str, Any]:
        """Nothing to pickle, because Ray's restore is not used."""
        return {}


class TaskCallback(Callback):
    """Shows tasks, and handles failures that no recipe has caused: Tune starts these tasks again."""

    def __init__(self, dispatcher: Dispatcher, observer: Observer) -> None:
        self._dispatcher, self._observer = dispatcher, observer
        self._is_ended = False
        self._lost: dict[str, dict[str, Any]] = {}
        """By run folder: the last report of a failure that restarts its task."""

    def on_trial_start(self, iteration: int, trials: list[TuneTrial], trial: TuneTrial, **info: Any) -> None:
        """Show a start."""
        self._observer.started(str(trial), trial.config["until"])

    def on_trial_result(self, iteration: int, trials: list[TuneTrial], trial: TuneTrial, result: dict[str, Any],
                        **info: Any) -> None:
        """Note the reason of a failure, and show an end before its outcome is passed on."""
        if "lost" in result:
            self._lost[str(trial)] = result
        if "outcome" in result:
            self._observer.ended(str(trial), trial.config, result)

    def on_trial_recover(self, iteration: int, trials: list[TuneTrial], trial: TuneTrial, **info: Any) -> None:
        """Print why Tune starts a task again: the recipe did not cause the failure."""
        if self._is_ended:  # by this command
            return
        self._observer.say(f"{trial} is queued again: {self._lost.pop(str(trial), _DIED)['lost']}")

    def on_trial_error(self, iteration: int, trials: list[TuneTrial], trial: TuneTrial, **info: Any) -> None:
        """End the study without a claim: a task failed too often, and its recipe did not cause it."""
        report = self._lost.pop(str(trial), _DIED)
        if self._is_ended:  # by this command
            return
        self._observer.ended(str(trial), trial.config, {})
        self._dispatcher.give_up(str(trial), report["lost"], ResourcesError if report["lacking"] else TrainingError)

    def end(self) -> None:
        """Let Tune end at its next step, without its trials."""
        self._is_ended = True

    def on_step_end(self, iteration: int, trials: list[TuneTrial], **info: Any) -> None:
        """Tune calls this many times a second.

        Raises:
            TrainingError: after `end`.
        """
        if self._is_ended:
            raise TrainingError("interrupted")
        self._observer.each_step()

    def __getstate__(self) -> dict[str, Any]:
        """Nothing to pickle, because Ray's restore is not used."""
        return {}
