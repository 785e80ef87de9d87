"""One task as a Ray Tune function: a distributed training on the standing pool of a study."""

from __future__ import annotations

import logging
import os
import time
import uuid
from collections.abc import Collection, Mapping
from concurrent.futures import FIRST_COMPLETED, Future, wait
from functools import cache, partial
from pathlib import Path
from typing import Any

import ray.tune
from ray.actor import ActorHandle

from ray_yolo.config.placement import RunConfig
from ray_yolo.core.errors import ResourcesError, TrainingError
from ray_yolo.core.system import undo_niceness
from ray_yolo.core.threads import run_in_thread
from ray_yolo.runs.event_log import EVENTS_FILE, read_events
from ray_yolo.runs.folders import is_held, project_folder
from ray_yolo.runs.recorder import Recorder, start_recorder
from ray_yolo.runs.run_dir import download_run
from ray_yolo.runtime.ray_internals import TRIAL_END_VARIABLE
from ray_yolo.runtime.trainer import fit
from ray_yolo.runtime.workers.client import QueueHandle
from ray_yolo.runtime.workers.pool_jobs import PoolShare
from ray_yolo.tune.budget import trained_spans
from ray_yolo.tune.task import line_of, task_config, train_to_outcome
from ray_yolo.tune.trials import train_command

_PATIENCE_SECONDS = 60.0
_RELEASE_SECONDS = 0.05  # a lock is checked this often

_logger = logging.getLogger(__name__)
_earlier: list[Future[Any]] = []  # the last training of this process, whose records may not be complete yet


def train_task(config: Mapping[str, Any], payload: Mapping[str, Any], queue: QueueHandle) -> None:
    """Train one task, and report its outcome. Afterwards this Tune process trains another one.

    Args:
        config: of a task, see `Dispatcher.config`.
        payload: the settings that all tasks share, as plain JSON.
        queue: job queue of the study's worker pool.

    Raises:
        TrainingError: after a report of the reason, if the recipe is not the cause of a failure: Tune starts the task
            again.
    """
    undo_niceness()  # otherwise the workers take the CPU, and a slot waits for its next task
    os.environ[TRIAL_END_VARIABLE] = str(int(_PATIENCE_SECONDS))  # until this thread has ended
    if payload["cache"]:
        os.environ["RAY_YOLO_CACHE"] = payload["cache"]  # this is the driver's node, where the study's folder is
    run_config = task_config(payload, config)
    folder = project_folder(run_config.placement) / run_config.placement.name
    wait_until_released([folder], _PATIENCE_SECONDS)
    download_run(run_config.placement)
    share = PoolShare(queue, uuid.uuid4().hex, config["end"], _recorder())
    try:
        outcome, is_new = train_to_outcome(run_config, config["until"], partial(_train, share=share))
    except KeyboardInterrupt:  # the driver is about to end this process: Tune must not start the task again
        wait(_earlier)
        time.sleep(_PATIENCE_SECONDS)
        raise TrainingError("it was stopped") from None
    except Exception as error:
        text = line_of(error)
        ray.tune.report({"lost": text, "lacking": isinstance(error, ResourcesError)})
        raise TrainingError(text) from error
    spans = trained_spans(read_events(folder / EVENTS_FILE), run_config.placement.max_workers) if is_new else []
    epochs, seconds = spans[-1] if spans else (0, 0.0)
    ray.tune.report({"outcome": outcome.model_dump_json(), "epochs": epochs, "seconds": seconds})


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


def wait_until_released(folders: Collection[Path], seconds: float) -> None:
    """Wait until the records of the trainings in these run folders are complete, but at most so many seconds."""
    deadline = time.monotonic() + seconds
    while any(map(is_held, folders)) and time.monotonic() < deadline:
        time.sleep(_RELEASE_SECONDS)
