"""Workers of Ray Train's TorchTrainer, for trainings with a fixed number of workers.

Workers form their process groups themselves, by the job's coordinator, and Ray replaces a lost worker alone. If all are
lost, they restart from the newest checkpoint. Importing Ray Train takes seconds.
"""

from __future__ import annotations

import contextlib
import math
import uuid
from collections.abc import Callable, Mapping
from concurrent.futures import wait
from functools import partial
from pathlib import Path
from typing import Any

from ray_yolo.core.garbage import uncollected

with uncollected():  # Ray's processes import torch, Ray Train and most of this package with this module.
    import ray.exceptions
    import ray.train
    from ray.train.torch import TorchConfig, TorchTrainer

    from ray_yolo.config.placement import Placement
    from ray_yolo.core.errors import RayYoloError
    from ray_yolo.core.events import Summary
    from ray_yolo.core.threads import run_in_thread
    from ray_yolo.engine.collectives import BACKENDS
    from ray_yolo.runtime.cluster import free, held_by, resources_of, stop_workers, worker_environment
    from ray_yolo.runtime.ray_internals import in_place_backend
    from ray_yolo.runtime.workers.client import JobClient
    from ray_yolo.runtime.workers.failures import FailurePolicy, decide_departed, run_gracefully
    from ray_yolo.runtime.workers.watchdog import await_departure, drain_nodes
    from ray_yolo.runtime.workers.worker import prepare_process

_POLL_SECONDS = 0.5
_END_SECONDS = 0.5  # Ray may end this long after training: everything is saved, and a user waits at the prompt
_COPY_SECONDS = 10.0  # the same for a run in a bucket: workers on other nodes remove their copies of the run


class InPlaceConfig(TorchConfig):
    """Workers form their process groups themselves, so Ray may replace a single worker."""

    @property
    def backend_cls(self) -> Any:
        """Read by Ray."""
        return in_place_backend(prepare_process)


class TrainingEndedError(Exception):
    """Ends Ray's controller after training has: it would start workers again, which have nothing to train, for ever."""


class FailureCallback(ray.train.UserCallback):
    """Applies the failure policy in Ray's controller, before it replaces workers.

    Args:
        workers: their number. If fewer fail, Ray replaces them while the others continue.
        coordinator: of these workers. The end of a draining worker is no failure. An end after training ends the
            controller, as soon as the other workers have sent their last events.
    """

    def __init__(self, policy: FailurePolicy, workers: int, coordinator: JobClient) -> None:
        self.policy, self._workers, self._coordinator = policy, workers, coordinator

    def after_exception(self, run_context: object, worker_exceptions: Mapping[int, Exception]) -> None:
        """Decide what failed workers mean: training has ended, they may be replaced, or it fails.

        Ray calls it, with these keyword names.
        """
        if outcome_of(self._coordinator):
            await_departure(self._coordinator)
            raise TrainingEndedError
        decide_departed(self._coordinator, worker_exceptions, self.policy,
                        others_continue=len(worker_exceptions) < self._workers)


def build_trainer(train_fn: Callable[[dict[str, Any]], Any], payload: dict[str, Any], placement: Placement, gpus: float,
                  folder: Path, callback: ray.train.UserCallback) -> TorchTrainer:
    """A Ray trainer of `train_fn(payload)` on the placement's workers; Ray keeps its own files in `folder`/ray.

    Each trainer has a new Ray run name: under a known name, Ray would continue from Ray's checkpoints, not from ours.

    Args:
        callback: it counts failures, and ends the run by raising.
    """
    scaling = ray.train.ScalingConfig(
        num_workers=placement.num_workers, use_gpu=gpus > 0, resources_per_worker=resources_of(placement, gpus),
        placement_strategy=placement.placement_strategy, accelerator_type=placement.accelerator_type or None)
    process_group = InPlaceConfig(backend=BACKENDS if gpus else "gloo", timeout_s=math.ceil(placement.timeout_seconds))
    run = ray.train.RunConfig(
        name=f"{folder.name}-{uuid.uuid4().hex[:8]}",
        storage_path=str(folder / "ray"),
        failure_config=ray.train.FailureConfig(max_failures=-1),  # no limit of Ray's: the callback has the limit
        callbacks=[callback],
        worker_runtime_env={"env_vars": worker_environment(placement)},
        logging_config=ray.train.LoggingConfig(log_level="ERROR"))
    return TorchTrainer(train_fn, train_loop_config=payload, torch_config=process_group, scaling_config=scaling,
                        run_config=run)


def run_torch_trainer(train_fn: Callable[[dict[str, Any]], Any], payload: dict[str, Any], placement: Placement,
                      gpus: float, policy: FailurePolicy) -> Any:
    """Return how a training on the placement's workers ended, each of which calls `train_fn(payload)`.

    Ray replaces workers as the failure policy allows. It does not restart a dead controller, so this function does.
    Each attempt is a new Ray run, because training continues from our checkpoints, not from Ray's.

    Raises:
        RayYoloError: by the failure policy.
        LostWorkersError: by the failure policy, if Ray itself fails.
    """
    coordinator, folder = payload["coordinator"], policy.run_dir
    callback = FailureCallback(policy, placement.max_workers, coordinator)
    patience = _COPY_SECONDS if payload["stored"] else _END_SECONDS
    while True:
        try:
            trainer = build_trainer(train_fn, payload, placement, gpus, folder, callback)
            return run_gracefully(partial(_fit, trainer, coordinator, policy, patience), coordinator.stop, folder,
                                  policy.notify)
        except (ray.train.TrainingFailedError, ray.exceptions.ActorDiedError) as error:
            decision = getattr(error, "controller_failure", None)
            if isinstance(decision, RayYoloError):
                raise decision from error
            policy.decide_controller(error)
            stop_workers(folder)  # a killed controller has not freed its workers' resources; the next one needs them


def _fit(trainer: TorchTrainer, coordinator: JobClient, policy: FailurePolicy, patience: float) -> Any:
    """Return the training's outcome as soon as the coordinator has it. Meanwhile workers leave draining nodes.

    It is None if this process has shut Ray down, as an interrupted command does at its end.

    Ray's controller blocks until the resources of a lost worker are available again; training may end before that. If
    Ray has not ended `patience` seconds after all workers have left, they are killed.
    """
    result = run_in_thread(lambda: trainer.fit().return_value, "fit")
    draining: set[str] = set()
    while not wait([result], _POLL_SECONDS).done:
        if not ray.is_initialized():  # The command ends; a call to Ray would end it at once, with status 1.
            return None
        if outcome := outcome_of(coordinator):
            await_departure(coordinator)
            if not wait([result], patience).done:
                free(held_by(policy.run_dir))
            return outcome
        with contextlib.suppress(ray.exceptions.RayError):
            draining, _ = drain_nodes(coordinator.drain_nodes, draining, policy.notify)
    return outcome_of(coordinator) or result.result()


def outcome_of(coordinator: JobClient) -> Summary | None:
    """How training ended; None: it has not, or the coordinator does not answer."""
    with contextlib.suppress(ray.exceptions.RayError):
        return coordinator.outcome()
    return None
