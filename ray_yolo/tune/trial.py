"""One trial, as Ray Tune's function: a distributed training in a thread, its epochs reported as they are recorded.

A trial is known by its name, trialN: its configuration is another trial's, mutated, once it has exploited one.
"""

from __future__ import annotations

import json
import os
import tempfile
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, wait
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any

import ray.exceptions
import ray.tune

from ray_yolo.config.placement import RunConfig
from ray_yolo.core.errors import LostWorkersError, ResourcesError, StorageError, TrainingError
from ray_yolo.core.events import CheckpointEvent, EndEvent, EpochEvent, Event
from ray_yolo.runs.event_log import EVENTS_FILE, follow
from ray_yolo.runs.folders import is_held, project_folder
from ray_yolo.runs.record import LEDGER_FILE
from ray_yolo.runs.recorder import STOP_REQUEST
from ray_yolo.runs.run_dir import download_run
from ray_yolo.runtime.ray_internals import TRIAL_END_VARIABLE
from ray_yolo.runtime.trainer import fit
from ray_yolo.runtime.workers.pool_jobs import QueueHandle
from ray_yolo.tune.ledger import read_ledger, read_trials
from ray_yolo.tune.pbt import asked_recipe, newest_origin, run_folder
from ray_yolo.tune.search import Search
from ray_yolo.tune.trials import Origin, overlay, train_command

POINTER_FILE = "origin.json"
_POLL_SECONDS, _PATIENCE_SECONDS = 0.5, 60.0


def train_trial(config: Mapping[str, Any], payload: Mapping[str, Any], queue: QueueHandle) -> None:
    """Train the trial that this Tune process is for, or go on with it, and report every validated epoch.

    Args:
        config: `genes`, and `origin` where an earlier start of the sweep has noted one.
        wire: what is the same for all trials, as plain JSON.
        crew: the sweep's workers.
    """
    os.environ[TRIAL_END_VARIABLE] = str(int(_PATIENCE_SECONDS))  # until this thread has ended
    number = number_of(ray.tune.get_context().get_trial_name())
    if payload["cache"]:
        os.environ["RAY_YOLO_CACHE"] = payload["cache"]  # this is the driver's node, where the sweep's folder is
    run_config = trial_config(payload, number, config["genes"])
    search = Search.model_validate(payload["search"])
    exchanges = search.scheduler.name == "pbt"
    if exchanges:
        checkpoint = ray.tune.get_checkpoint()
        pointer = read_pointer(checkpoint) if checkpoint else None
        trials = Path(payload["placement"]["project"])
        name = run_folder(trials, number, pointer, config.get("origin"), config["genes"])
        recipe = asked_recipe(trials / name) or run_config.recipe
        run_config = _renamed(RunConfig(recipe=recipe, placement=run_config.placement), name)
    folder = project_folder(run_config.placement) / run_config.placement.name
    _wait_until_released(folder)
    download_run(run_config.placement)
    log = follow(folder / EVENTS_FILE)
    lineage = next(log)
    count = len(lineage) if exchanges else _count_judged(lineage, folder, number)
    newest = partial(newest_origin, folder, number, run_config.recipe.epochs)
    reports = _Reports(search, newest, [event for event in lineage[:count] if isinstance(event, EpochEvent)])
    reports.take(lineage[count:])
    outcome, thread = _start(run_config, folder, payload["link"], queue)
    over = False
    try:
        while not over:  # the log is read once more after the end
            over = bool(wait([outcome], _POLL_SECONDS).done)
            reports.take(next(log))
        reports.finish()
    except SystemExit:  # by Tune, at a report: the scheduler has stopped this trial
        _stop(thread, folder)
        raise
    if error := outcome.exception():
        _report_failure(error)


def number_of(name: str) -> int:
    """The number in a trial's name."""
    return int(name.removeprefix("trial"))


def trial_config(payload: Mapping[str, Any], number: int, genes: Mapping[str, Any]) -> RunConfig:
    """The training of a trial: the base recipe with its genes, in a run folder of its own under its own name."""
    config = RunConfig.model_validate({"recipe": payload["recipe"], "placement": payload["placement"]})
    return _renamed(RunConfig(recipe=overlay(config.recipe, genes), placement=config.placement), f"trial{number}")


def read_pointer(checkpoint: ray.tune.Checkpoint) -> Origin:
    """What a Tune checkpoint of ours points to."""
    with checkpoint.as_directory() as folder:
        return Origin(**json.loads((Path(folder) / POINTER_FILE).read_text()))


def _renamed(config: RunConfig, name: str) -> RunConfig:
    return config.model_copy(update={"placement": config.placement.model_copy(update={"name": name})})


def _wait_until_released(folder: Path) -> None:
    """Wait for the process that trained this trial before; a paused one takes a moment to end."""
    deadline = time.monotonic() + _PATIENCE_SECONDS
    while is_held(folder) and time.monotonic() < deadline:
        time.sleep(_POLL_SECONDS)


def _count_judged(lineage: Sequence[Event], folder: Path, number: int) -> int:
    """How many of a trial's events the scheduler has had, as the sweep's ledger knows: not to be judged again."""
    judged = read_trials(read_ledger(folder.parent.parent / LEDGER_FILE))[number].judged
    if not judged:
        return 0
    return next((count for count, event in enumerate(lineage, 1)
                 if isinstance(event, EpochEvent) and event.epoch + 1 == judged[-1][0]), 0)


def _stop(thread: threading.Thread, folder: Path) -> None:
    """Have the training stopped after a step: its workers, and this process, go on with other trials."""
    (folder / STOP_REQUEST).touch()
    deadline = time.monotonic() + _PATIENCE_SECONDS
    while thread.is_alive() and time.monotonic() < deadline:
        time.sleep(_POLL_SECONDS / 10)
    (folder / STOP_REQUEST).unlink(missing_ok=True)


def _start(config: RunConfig, folder: Path, link: Mapping[str, Any], queue: QueueHandle
           ) -> tuple[Future[None], threading.Thread]:
    """Train in a thread. Returns what comes of it, and the thread."""
    outcome: Future[None] = Future()

    def run() -> None:
        try:
            fit(config, quiet=True, link=link, command=train_command(config.recipe), queue=queue)
            outcome.set_result(None)
        except KeyboardInterrupt:  # told to stop: nobody waits for the outcome, or the sweep's driver ends this process
            return
        except BaseException as error:
            outcome.set_exception(error)

    thread = threading.Thread(target=run, daemon=True)
    if (folder / "finished").exists():  # it ended, and the driver died before it could note that
        outcome.set_result(None)
    else:
        thread.start()
    return outcome, thread


def _report_failure(error: BaseException) -> None:
    """Report why a training failed, if that is the recipe's own fault.

    Raises:
        TrainingError: if it is not: so Tune starts the trial again.
    """
    text = f"{type(error).__name__}: {error}".splitlines()[0]
    if not is_bad_luck(error):
        ray.tune.report({"failed": text})
        return
    ray.tune.report({"lost": text, "lacking": isinstance(error, ResourcesError)})
    raise TrainingError(text)


def is_bad_luck(error: BaseException) -> bool:
    """Whether a training failed by what its recipe can do nothing for: no room, storage that is away, or a process or
    node that died.
    """
    return isinstance(error, (ResourcesError, StorageError, LostWorkersError, ray.exceptions.RayError))


class _Reports:
    """Reports epochs to Tune once they are checkpointed, which is right after.

    Args:
        newest: gives a pointer to what others may go on from.
        reported: epochs that were reported before; the last one is again, where no other follows, as Tune wants to hear
            of one.
    """

    def __init__(self, search: Search, newest: Callable[[], Origin | None], reported: Sequence[EpochEvent]) -> None:
        self._search, self._newest, self._last = search, newest, reported[-1] if reported else None
        self._held: EpochEvent | None = None  # waits for its checkpoint

    def take(self, events: Sequence[Event]) -> None:
        """What has happened since."""
        for event in events:
            if self._held and isinstance(event, (EpochEvent, CheckpointEvent, EndEvent)):
                self._send(self._held, self._newest())
                self._held = None
            if isinstance(event, EpochEvent):
                self._held, self._last = event, None

    def finish(self) -> None:
        """Nothing follows; under --nosave only the last epoch is checkpointed."""
        if last := self._held or self._last:
            self._send(last, None)

    def _send(self, event: EpochEvent, pointer: Origin | None) -> None:
        fitness = self._search.fitness(event.metrics)
        if fitness is not None:
            _report(event, fitness, pointer)


def _report(event: EpochEvent, fitness: float, pointer: Origin | None) -> None:
    """Report one epoch to Tune."""
    # as text: Tune would flatten what is nested
    row = {"fitness": fitness, "epoch": event.epoch + 1,
           "row": json.dumps({"metrics": event.metrics, "losses": event.val})}
    if pointer is None:
        ray.tune.report(row)
        return
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / POINTER_FILE).write_text(json.dumps(asdict(pointer)))
        ray.tune.report(row, checkpoint=ray.tune.Checkpoint.from_directory(folder))
