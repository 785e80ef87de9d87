"""One trial as a Ray Tune function: a distributed training on the standing pool.

A task of a ladder is trained in the function's thread and reported once, at its end. Tune then pauses the trial, and
its process trains another one. Population based training exchanges trials while they train: there the training runs in
another thread, and each recorded epoch is reported. After an exploit, the configuration is a copy of another trial's,
so the number of a trial is taken from its name, trialN.
"""

from __future__ import annotations

import json
import logging
import os
import tempfile
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, wait
from dataclasses import asdict
from functools import cache, partial
from pathlib import Path
from typing import Any

import ray.exceptions
import ray.tune
from ray.actor import ActorHandle

from ray_yolo.config.placement import RunConfig
from ray_yolo.core.errors import LostWorkersError, ResourcesError, StorageError, TrainingError
from ray_yolo.core.events import CheckpointEvent, EndEvent, EpochEvent, Event
from ray_yolo.core.system import undo_niceness
from ray_yolo.core.threads import run_in_thread
from ray_yolo.runs.event_log import EVENTS_FILE, follow, read_events
from ray_yolo.runs.folders import is_held, project_folder
from ray_yolo.runs.recorder import STOP_REQUEST, Recorder, start_recorder
from ray_yolo.runs.run_dir import download_run
from ray_yolo.runtime.ray_internals import TRIAL_END_VARIABLE
from ray_yolo.runtime.trainer import fit
from ray_yolo.runtime.workers.client import QueueHandle
from ray_yolo.runtime.workers.pool_jobs import PoolShare
from ray_yolo.tune.budget import trained_spans
from ray_yolo.tune.pbt import asked_recipe, newest_origin, open_fork
from ray_yolo.tune.schedule import Outcome
from ray_yolo.tune.task import read_outcome, task_config
from ray_yolo.tune.trials import Origin, overlay, train_command

POINTER_FILE = "origin.json"
_POLL_SECONDS, _PATIENCE_SECONDS = 0.5, 60.0
_RELEASE_SECONDS = 0.05  # between two checks of a lock

_logger = logging.getLogger(__name__)
_earlier: list[Future[Any]] = []  # the last training of this process, whose records may not be complete yet


def train_task(config: Mapping[str, Any], payload: Mapping[str, Any], queue: QueueHandle) -> None:
    """Train the trial of this Tune process until its next pause, and report the outcome. Tune then pauses it.

    If an earlier process has left the outcome in the run folder, it is not trained again.

    Args:
        config: of a task, see `Dispatcher.config`.
        payload: the settings that all trials share, as plain JSON.
        queue: job queue of the sweep's worker pool.
    """
    _prepare_process(payload)
    run_config = task_config(payload, config)
    folder = project_folder(run_config.placement) / run_config.placement.name
    wait_until_released([folder], _PATIENCE_SECONDS)
    download_run(run_config.placement)
    outcome = read_outcome(folder, config["until"])
    trains = outcome is None
    if outcome is None:
        try:
            _train(run_config, PoolShare(queue, config["end"], _recorder()))
        except (KeyboardInterrupt, Exception) as error:
            outcome = Outcome(reason=_failure(error))
        else:
            outcome = read_outcome(folder, config["until"]) or Outcome(reason="it ended without a validation")
    spans = trained_spans(read_events(folder / EVENTS_FILE), run_config.placement.max_workers) if trains else []
    epochs, seconds = spans[-1] if spans else (0, 0.0)
    ray.tune.report({"outcome": outcome.model_dump_json(), "epochs": epochs, "seconds": seconds})


def _prepare_process(payload: Mapping[str, Any]) -> None:
    undo_niceness()  # otherwise the workers take the CPU, and a slot waits for its next task
    os.environ[TRIAL_END_VARIABLE] = str(int(_PATIENCE_SECONDS))  # until this thread has ended
    if payload["cache"]:
        os.environ["RAY_YOLO_CACHE"] = payload["cache"]  # this is the driver's node, where the sweep's folder is


def _train(config: RunConfig, share: PoolShare) -> None:
    """Train until log and weights are complete. A thread completes the other records while the next task starts."""
    trained: Future[Any] = Future()
    work = partial(fit, config, quiet=True, command=train_command(config.recipe), queue=share,
                   trained=partial(trained.set_result, None))
    training: Future[Any] = run_in_thread(work, "training")
    wait([trained, training], return_when=FIRST_COMPLETED)
    if not trained.done():
        training.result()
    for earlier in _earlier:
        if error := earlier.exception():
            _logger.warning("the outcome of the task before is reported, but its records are incomplete: %s", error)
    _earlier[:] = [training]


@cache
def _recorder() -> ActorHandle[Recorder]:
    """The writer of the logs of all trainings of this process. They share it, because starting an actor takes
    seconds."""
    return start_recorder()


def train_trial(config: Mapping[str, Any], payload: Mapping[str, Any], queue: QueueHandle) -> None:
    """Train or continue a trial of a population, and report every validated epoch.

    Args:
        config: `genes`, and `origin` if the ledger has one from an earlier start of the sweep.
        payload: the settings that all trials share, as plain JSON.
        queue: job queue of the sweep's worker pool.
    """
    _prepare_process(payload)
    number = number_of(ray.tune.get_context().get_trial_name())
    run_config = _population_config(payload, number, config)
    folder = project_folder(run_config.placement) / run_config.placement.name
    wait_until_released([folder], _PATIENCE_SECONDS)
    log = follow(folder / EVENTS_FILE)
    past = next(log)
    newest = partial(newest_origin, folder, number, run_config.recipe.epochs)
    reporter = _Reporter(newest, past, keeps_best=not run_config.placement.nosave)
    training: Future[Any] = Future()
    if (folder / "finished").exists():  # it completed, and the driver died before it recorded that
        training.set_result(None)
    else:
        training = run_in_thread(partial(
            fit, run_config, quiet=True, command=train_command(run_config.recipe),
            queue=PoolShare(queue, recorder=_recorder())), "training")
    over = False
    try:
        while not over:  # reads the log once more after the end
            over = bool(wait([training], _POLL_SECONDS).done)
            reporter.take(next(log))
        if not isinstance(training.exception(), KeyboardInterrupt):
            reporter.finish()
    except SystemExit:  # Tune raises it in a report: the scheduler has stopped this trial
        (folder / STOP_REQUEST).touch()  # its workers and this process continue with other trials
        wait([training], _PATIENCE_SECONDS)
        (folder / STOP_REQUEST).unlink(missing_ok=True)
        raise
    if error := training.exception():
        ray.tune.report({"failed": _failure(error)})


def number_of(name: str) -> int:
    """The number in a trial's name."""
    return int(name.removeprefix("trial"))


def read_pointer(checkpoint: ray.tune.Checkpoint) -> Origin:
    """The checkpoint that a Tune checkpoint of this module points to."""
    with checkpoint.as_directory() as folder:
        return Origin(**json.loads((Path(folder) / POINTER_FILE).read_text()))


def is_external_failure(error: BaseException) -> bool:
    """Whether a failure has another cause than the recipe: no capacity, no storage, or a lost process or node."""
    return isinstance(error, (ResourcesError, StorageError, LostWorkersError, ray.exceptions.RayError))


def wait_until_released(folders: Collection[Path], seconds: float) -> None:
    """Wait until the records of the trainings in these run folders are complete, but at most so many seconds."""
    deadline = time.monotonic() + seconds
    while any(map(is_held, folders)) and time.monotonic() < deadline:
        time.sleep(_RELEASE_SECONDS)


def _population_config(payload: Mapping[str, Any], number: int, config: Mapping[str, Any]) -> RunConfig:
    """The training of a trial under population based training: in the run folder of its last exploit."""
    base = RunConfig.model_validate({"recipe": payload["recipe"], "placement": payload["placement"]})
    checkpoint, noted, trials = ray.tune.get_checkpoint(), config.get("origin"), Path(base.placement.project)
    origin = read_pointer(checkpoint) if checkpoint else Origin(**noted) if noted else None
    name = open_fork(trials, number, origin, config["genes"])
    recipe = asked_recipe(trials / name) or overlay(base.recipe, config["genes"])
    return RunConfig(recipe=recipe, placement=base.placement.model_copy(update={"name": name}))


def _failure(error: BaseException) -> str:
    """Why a training failed, if the recipe is the cause.

    Raises:
        TrainingError: if the recipe is not the cause, after a report, so that Tune starts the trial again.
    """
    if isinstance(error, KeyboardInterrupt):  # the driver is about to end this process: Tune must not start it again
        wait(_earlier)
        time.sleep(_PATIENCE_SECONDS)
        raise TrainingError("it was stopped") from None
    text = f"{type(error).__name__}: {error}".splitlines()[0]
    if not is_external_failure(error):
        return text
    ray.tune.report({"lost": text, "lacking": isinstance(error, ResourcesError)})
    raise TrainingError(text) from error


class _Reporter:
    """Reports validated epochs to Tune, each as soon as the event of its checkpoint has followed.

    Args:
        newest: returns a pointer to the newest checkpoint from which other trials may continue.
        past: events that were reported before. If no epoch follows, the last one is reported again for Tune.
        keeps_best: whether each best epoch is saved as best.pt, which holds except under --nosave.
    """

    def __init__(self, newest: Callable[[], Origin | None], past: Sequence[Event], *, keeps_best: bool) -> None:
        self._newest, self._keeps_best = newest, keeps_best
        self._last: EpochEvent | None = None  # to be reported
        self._is_new = False  # it is reported as soon as its checkpoint follows, a past one if nothing follows
        self._best: EpochEvent | None = None  # the epoch of best.pt
        for event in past:
            if isinstance(event, EpochEvent):
                self._note(event)

    def take(self, events: Sequence[Event]) -> None:
        """Process the next events of the log."""
        for event in events:
            if self._last and self._is_new and isinstance(event, (EpochEvent, CheckpointEvent, EndEvent)):
                self._send(self._last, self._newest())
                self._last = None
            if isinstance(event, EpochEvent):
                self._note(event)
                self._is_new = True

    def finish(self) -> None:
        """Report the epoch that no checkpoint followed: under --nosave, only the last epoch has a checkpoint."""
        if self._last:
            self._send(self._last, None)

    def _note(self, event: EpochEvent) -> None:
        self._last = event
        if event.metrics is not None and (event.best or self._best is None or not self._keeps_best):
            self._best = event

    def _send(self, event: EpochEvent, pointer: Origin | None) -> None:
        """Report an epoch: its fitness for the scheduler, and `row`, the numbers of the epoch of best.pt."""
        best = self._best or event
        if event.fitness is None:
            return
        row = {"fitness": best.fitness, "metrics": best.metrics, "losses": best.val}
        # The row is JSON, because Tune would flatten a mapping.
        report = {"fitness": event.fitness, "epoch": event.epoch + 1, "row": json.dumps(row)}
        if pointer is None:
            ray.tune.report(report)
            return
        with tempfile.TemporaryDirectory() as folder:
            (Path(folder) / POINTER_FILE).write_text(json.dumps(asdict(pointer)))
            ray.tune.report(report, checkpoint=ray.tune.Checkpoint.from_directory(folder))
