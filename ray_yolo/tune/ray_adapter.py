"""Connects Ray Tune, which starts, pauses and stops trials, to the schedule of a sweep or comparison.

Ray's saving and restoring of searches is not used: in a test it ran finished trials again, and it unpickles.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

import ray
import ray.tune
from ray.tune import Callback
from ray.tune.experiment import Trial as TuneTrial
from ray.tune.schedulers import FIFOScheduler, TrialScheduler
from ray.tune.search import Searcher

from ray_yolo.core import deadline
from ray_yolo.core.errors import ResourcesError, TrainingError
from ray_yolo.runs.folders import is_held
from ray_yolo.runtime.graceful_stop import request_stop, run_in_background
from ray_yolo.runtime.ray_internals import expect_no_result_files, keep_trial_processes, on_node
from ray_yolo.tune.console import SweepDisplay
from ray_yolo.tune.dispatch import Dispatcher
from ray_yolo.tune.evolution import Genes
from ray_yolo.tune.files import drop_weights, write_sweep_files
from ray_yolo.tune.ledger import Ledger
from ray_yolo.tune.schedule import Outcome
from ray_yolo.tune.trainable import wait_until_released
from ray_yolo.tune.trials import Trial, best_trials

if TYPE_CHECKING:
    from ray.tune.execution.tune_controller import TuneController

_RECORD_SECONDS = 10.0  # for stopped trials to complete their records; the next start completes the others
_END_SECONDS = 3.0  # for Tune to end after an interruption
FINALISTS = 3  # fully trained trials that may still win, besides the default
_DIED: dict[str, Any] = {"lost": "its process died", "lacking": False}  # stands in for a report that was not made


def _no_state(self: object) -> dict[str, Any]:
    """Nothing to pickle, because Ray's restore is not used."""
    return {}


def run_trials(trainable: Any, callback: TrialCallback, folder: Path, max_failures: int, *,
               on_this_node: bool = False, **settings: Any) -> None:
    """Run trials with Ray Tune until its scheduler or searcher ends.

    If this command is interrupted, the workers of the trials save the step in progress, and Ray Tune ends.

    Args:
        folder: of the sweep or comparison.
        max_failures: restarts of a trial whose recipe did not cause its failure.
        on_this_node: keep the processes of the trials on this node; their workers may be anywhere.
        settings: of Tune's `TuneConfig`.
    """
    node: dict[str, Any] = {}
    if on_this_node:
        node = {"bundle_label_selector": [on_node(ray.get_runtime_context().get_node_id())]}
    # Memory, not CPU: even a hundredth of a CPU would take the slot of a worker
    trainable = ray.tune.with_resources(trainable, ray.tune.PlacementGroupFactory([{"memory": 1e6}], **node))
    tune = ray.tune.Tuner(
        trainable,
        tune_config=ray.tune.TuneConfig(reuse_actors=True, trial_name_creator=_trial_name,
                                        trial_dirname_creator=_trial_name, **settings),
        run_config=ray.tune.RunConfig(
            name=f"{folder.name}-{os.getpid()}", storage_path=str(folder / "ray"), verbose=0,
            callbacks=[callback], failure_config=ray.tune.FailureConfig(max_failures=max_failures)))

    def before_end(outcome: Future[Any]) -> None:
        trials = list((folder / "trials").iterdir())
        try:
            request_stop(trials, callback.say)
            wait_until_released(trials, deadline.seconds_left(_RECORD_SECONDS))
        finally:  # otherwise Tune would go on in its thread, if this process continues, as a notebook does
            callback.end()
        with suppress(TimeoutError):
            outcome.exception(deadline.seconds_left(_END_SECONDS))

    expect_no_result_files()
    run_in_background(tune.fit, before_end)
    callback.check_room()


def _trial_name(trial: Any) -> str:
    return str(trial.config["trial"])


class LadderScheduler(FIFOScheduler):
    """Pauses a trial after each task, and continues it when the schedule has issued its next one.

    Args:
        measure: receives the work of a task, and the seconds of its slot.
        cost: returns the work of one epoch with some genes.
        slots: trial processes to keep while their trials pause.
        is_complete: whether the records of a trial are complete, so that its process may end.
    """

    def __init__(self, dispatcher: Dispatcher, measure: Callable[[float, float], None], cost: Callable[[Genes], float],
                 slots: int, is_complete: Callable[[str], bool] = lambda name: True) -> None:
        super().__init__()
        self._is_complete = is_complete
        self._dispatcher, self._measure, self._cost, self._slots = dispatcher, measure, cost, slots
        self.paused: dict[str, TuneTrial] = {}
        self.closed = False

    def close(self) -> None:
        """Start no more tasks."""
        self.closed = True

    def on_trial_add(self, tune_controller: TuneController, trial: TuneTrial) -> None:
        """Keep the processes of paused trials from the first trial on, because a new process takes seconds."""
        keep_trial_processes(tune_controller, trial, self._slots)
        self._slots = 0

    def on_trial_result(self, tune_controller: TuneController, trial: TuneTrial, result: dict[str, Any]) -> str:
        """Pass on the outcome of a task. Any trial may be continued, so it pauses."""
        if "outcome" not in result:  # it is lost, and starts again
            return str(TrialScheduler.CONTINUE)
        self.paused[str(trial)] = trial
        if result["epochs"]:
            self._measure(result["epochs"] * self._cost(trial.config["genes"]), result["seconds"])
        self._dispatcher.finish(str(trial), Outcome.model_validate_json(result["outcome"]))
        return str(TrialScheduler.PAUSE)

    def choose_trial_to_run(self, tune_controller: TuneController) -> TuneTrial | None:
        """The paused trial whose next task is needed first. At the end of the sweep all of them are stopped."""
        if self.closed or self._dispatcher.over:
            for name, trial in list(self.paused.items()):
                if trial.status == TuneTrial.PAUSED and self._is_complete(name):
                    tune_controller.stop_trial(self.paused.pop(name))
            return None
        task = self._dispatcher.take(
            lambda name: name in self.paused and self.paused[name].status == TuneTrial.PAUSED)
        if task is None:
            return None
        trial = self.paused.pop(self._dispatcher.name(task))
        trial.set_config({**trial.config, **self._dispatcher.config(task)})
        return trial

    __getstate__ = _no_state


class TaskSearcher(Searcher):
    """Suggests the tasks of trials that are new to this Tune run, the one whose result is needed first."""

    def __init__(self, dispatcher: Dispatcher, scheduler: LadderScheduler) -> None:
        super().__init__(metric="fitness", mode="max")
        self._dispatcher, self._scheduler = dispatcher, scheduler

    def suggest(self, trial_id: str) -> dict[str, Any] | str | None:
        """The configuration of a task, FINISHED at the end of the sweep, or None if there is no task to start."""
        task = None
        if not self._scheduler.closed:
            task = self._dispatcher.take(lambda name: name not in self._scheduler.paused)
        if self._scheduler.closed or self._dispatcher.over:
            return str(Searcher.FINISHED)
        return self._dispatcher.config(task) if task else None

    def on_trial_complete(self, trial_id: str, result: dict[str, Any] | None = None, error: bool = False) -> None:
        """Do nothing: the scheduler passes results on."""

    def save(self, checkpoint_path: str) -> None:
        """Do nothing: the ledger is on disk."""

    __getstate__ = _no_state


class TrialCallback(Callback):
    """Handles failures that no recipe has caused: Tune starts these trials again.

    Args:
        say: prints a line.
        fail: records that the task in a run folder has failed too often, with a reason.
        stop: called if the cluster has no capacity for any trial; running trials continue.
        each_step: called many times a second.
    """

    def __init__(self, say: Callable[[str], None], fail: Callable[[str, str], None],
                 stop: Callable[[], None] = lambda: None, each_step: Callable[[], None] = lambda: None) -> None:
        self.say, self._fail, self._stop, self._each_step = say, fail, stop, each_step
        self._is_ended = False
        self._lacking = ""  # why the cluster has no capacity for any trial
        self._lost: dict[str, dict[str, Any]] = {}  # by trial: the last report of a failure that restarts it

    def on_trial_result(self, iteration: int, trials: list[TuneTrial], trial: TuneTrial, result: dict[str, Any],
                        **info: Any) -> None:
        """Note the reason of a failure."""
        if "lost" in result:
            self._lost[str(trial)] = result

    def on_trial_recover(self, iteration: int, trials: list[TuneTrial], trial: TuneTrial, **info: Any) -> None:
        """Print why Tune starts a trial again: the recipe did not cause the failure."""
        if self._is_ended:  # by this command
            return
        self.say(f"{trial} is queued again: {self._lost.pop(str(trial), _DIED)['lost']}")

    def on_trial_error(self, iteration: int, trials: list[TuneTrial], trial: TuneTrial, **info: Any) -> None:
        """Record a trial that failed too often. If the cluster has no capacity, trials end and it stays queued."""
        report = self._lost.pop(str(trial), _DIED)
        if self._is_ended:  # by this command
            return
        if report["lacking"]:
            self._lacking = report["lost"]
            self._stop()
        else:
            self._fail(str(trial), report["lost"])

    def end(self) -> None:
        """Let Tune end at its next step, without its trials."""
        self._is_ended = True

    def on_step_end(self, iteration: int, trials: list[TuneTrial], **info: Any) -> None:
        """Call `each_step`; Tune calls this many times a second.

        Raises:
            TrainingError: after `end`.
        """
        if self._is_ended:
            raise TrainingError("interrupted")
        self._each_step()

    def check_room(self) -> None:
        """Check, after the last trial, that the cluster had capacity for all of them.

        Raises:
            ResourcesError: if trials are left without capacity.
        """
        if self._lacking:
            raise ResourcesError(f"{self._lacking}; the same command continues")

    __getstate__ = _no_state


class SweepCallback(TrialCallback):
    """Handles the events of a sweep's trials: display, files, weights, and failures that no recipe has caused.

    Args:
        drops: whether the weights of trials that cannot win are removed.
        fail: see `TrialCallback`.
        stop: see `TrialCallback`.
        each_step: see `TrialCallback`.
    """

    def __init__(self, ledger: Ledger, display: SweepDisplay, *, drops: bool = False,
                 fail: Callable[[str, str], None], stop: Callable[[], None] = lambda: None,
                 each_step: Callable[[], None] = lambda: None) -> None:
        super().__init__(display.say, fail, stop, each_step)
        self._ledger, self._display, self._drops = ledger, display, drops
        self._dropped: set[int] = set()
        self._remover = ThreadPoolExecutor(1)
        self._seen = -1  # lines of the ledger that the files show

    def on_trial_start(self, iteration: int, trials: list[TuneTrial], trial: TuneTrial, **info: Any) -> None:
        """Show a start."""
        self._display.started(str(trial), trial.config["until"])

    def on_trial_result(self, iteration: int, trials: list[TuneTrial], trial: TuneTrial, result: dict[str, Any],
                        **info: Any) -> None:
        """Note the reason of a failure, and show results."""
        super().on_trial_result(iteration, trials, trial, result, **info)
        if "outcome" in result:
            self._display.ended(str(trial))

    def on_trial_error(self, iteration: int, trials: list[TuneTrial], trial: TuneTrial, **info: Any) -> None:
        """Record a trial that failed too often, and show that it has ended."""
        super().on_trial_error(iteration, trials, trial, **info)
        self._display.ended(str(trial))

    def on_step_end(self, iteration: int, trials: list[TuneTrial], **info: Any) -> None:
        """Write files if the ledger has new lines; Tune calls this many times a second.

        Raises:
            TrainingError: if another process has taken over the sweep.
        """
        if self._ledger.stored and self._ledger.stored.is_lost:
            raise TrainingError(f"{self._ledger.stored.address}: another process has taken over this sweep")
        super().on_step_end(iteration, trials, **info)
        if len(self._ledger.lines) != self._seen:
            self._seen = len(self._ledger.lines)
            rows = self._ledger.trials
            try:
                write_sweep_files(self._ledger.path.parent, self._ledger.recipe, rows, self._ledger.claim)
            except OSError as error:  # the end of the sweep writes them again
                self.say(f"warning: {self._ledger.path.parent}: its tables cannot be written: {error}")
            self._display.update(rows)
            if self._drops:
                self._drop(rows)

    def check_room(self) -> None:
        """Check, after the last trial, that the cluster had capacity for all of them.

        Raises:
            ResourcesError: if trials are left without capacity.
        """
        self._remover.shutdown()
        super().check_room()

    def _drop(self, rows: tuple[Trial, ...]) -> None:
        """Remove the weights of trials that have ended and cannot win."""
        whole = [row for row in rows if row.state == "finished"]
        kept = {0, *(row.number for row in best_trials(whole, FINALISTS))}
        for row in rows:
            folder = self._ledger.path.parent / "trials" / row.folder_name
            if row.has_ended and row.number not in kept | self._dropped and not is_held(folder):
                self._dropped.add(row.number)
                self._remover.submit(drop_weights, folder)

    __getstate__ = _no_state
