"""Workers of Ray Train's TorchTrainer, for trainings with a fixed number of workers and for validations.

If possible, Ray replaces only the lost worker; otherwise all workers restart from the newest checkpoint. Importing Ray
Train takes seconds.
"""

from __future__ import annotations

import contextlib
import math
import uuid
from collections.abc import Callable, Mapping
from concurrent.futures import wait
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import ray.exceptions
import ray.train
from ray.train.torch import TorchConfig, TorchTrainer

from ray_yolo.config.placement import Placement
from ray_yolo.core.errors import RayYoloError
from ray_yolo.core.events import Summary
from ray_yolo.core.threads import run_in_thread
from ray_yolo.engine.collectives import BACKENDS, use_interface
from ray_yolo.runs.recorder import STOP_REQUEST
from ray_yolo.runtime.cluster import free, held_by, leave_notice, resources_of, stop_workers, worker_environment
from ray_yolo.runtime.ray_internals import can_replace_in_place, draining_nodes, in_place_backend, nodes_of
from ray_yolo.runtime.workers.client import JobClient
from ray_yolo.runtime.workers.failures import FailurePolicy, decide_lost, run_gracefully
from ray_yolo.runtime.workers.rendezvous import own_address
from ray_yolo.runtime.workers.watchdog import await_departure, drain_nodes
from ray_yolo.runtime.workers.worker import prepare_process

_POLL_SECONDS = 0.5
_END_SECONDS = 0.5  # for Ray to end after training has: everything is saved, and a user waits at the prompt
_COPY_SECONDS = 10.0  # the same for a run in a bucket: workers on other nodes remove their copies of the run


class InPlaceConfig(TorchConfig):
    """Workers form their process groups themselves, so Ray may replace a single worker."""

    @property
    def backend_cls(self) -> Any:
        """Read by Ray."""
        return in_place_backend(prepare_process)


@dataclass
class InterfaceConfig(TorchConfig):
    """Ray forms the process group, over the network interface whose address Ray lists for the node."""

    trains: bool = False  # each worker is prepared to train

    @property
    def backend_cls(self) -> Any:
        """Read by Ray."""
        base: Any = super().backend_cls
        trains = self.trains

        class InterfaceBackend(base):
            """Ray's backend, after the network interface was chosen."""

            def on_start(self, worker_group: Any, config: TorchConfig) -> None:
                worker_group.execute(_use_interface)
                if trains:
                    worker_group.execute(prepare_process)
                super().on_start(worker_group, config)

        return InterfaceBackend


def _use_interface() -> None:
    use_interface(own_address())


def replaces_in_place(placement: Placement) -> bool:
    """Whether Ray Train can replace a lost worker while the others continue: only for a fixed number of workers."""
    return isinstance(placement.num_workers, int) and can_replace_in_place()


class FailureCallback(ray.train.UserCallback):
    """Applies the failure policy in Ray's controller, before it restarts workers.

    Args:
        workers: their number, if Ray replaces one while the others continue; 0: Ray restarts all.
        coordinator: of these workers. The end of a draining worker is no failure, nor is any end after training.
    """

    def __init__(self, policy: FailurePolicy, workers: int = 0, coordinator: JobClient | None = None) -> None:
        self.policy, self._workers, self._coordinator = policy, workers, coordinator

    def after_exception(self, run_context: object, worker_exceptions: Mapping[int, Exception]) -> None:
        """Called by Ray, with these keyword names."""
        others_continue = len(worker_exceptions) < self._workers
        if self._coordinator is None:
            self.policy.decide(worker_exceptions, others_continue=others_continue)
        elif not outcome_of(self._coordinator):
            decide_lost(self._coordinator, worker_exceptions, self.policy, others_continue=others_continue)


def build_trainer(train_fn: Callable[[dict[str, Any]], Any], payload: dict[str, Any], placement: Placement, gpus: float,
                  folder: Path, callback: ray.train.UserCallback, *, trains: bool, in_place: bool = False
                  ) -> TorchTrainer:
    """A Ray trainer of `train_fn(payload)` on the placement's workers; Ray keeps its own files in `folder`/ray.

    Each trainer has a new Ray run name: under a known name, Ray would continue from Ray's checkpoints, not from ours.

    Args:
        callback: it counts failures, and ends the run by raising.
        trains: the workers train, so each is prepared to save before it has to leave.
        in_place: only the lost worker is replaced; otherwise all restart.
    """
    scaling = ray.train.ScalingConfig(
        num_workers=placement.num_workers, use_gpu=gpus > 0, resources_per_worker=resources_of(placement, gpus),
        placement_strategy=placement.placement_strategy, accelerator_type=placement.accelerator_type or None)
    backend = BACKENDS if gpus else "gloo"
    timeout = math.ceil(placement.timeout_seconds)
    process_group = (InPlaceConfig(backend=backend, timeout_s=timeout) if in_place
                     else InterfaceConfig(backend=backend, timeout_s=timeout, trains=trains))
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
    """Return the result of `train_fn(payload)` on the first of the placement's workers.

    Ray restarts worker groups as the failure policy allows. It restarts neither a dead controller nor a failed set-up
    of a process group, so this function does. Each attempt is a new Ray run, because training continues from our
    checkpoints, not from Ray's.

    Raises:
        RayYoloError: by the failure policy.
        LostWorkersError: by the failure policy, if Ray itself fails.
    """
    coordinator, folder = payload.get("coordinator"), policy.run_dir
    callback = FailureCallback(policy, placement.max_workers if coordinator else 0, coordinator)
    while True:
        try:
            trainer = build_trainer(train_fn, payload, placement, gpus, folder, callback, trains="recorder" in payload,
                                    in_place=bool(coordinator))
            patience = _COPY_SECONDS if payload.get("stored") else _END_SECONDS
            result = run_gracefully(partial(_fit, trainer, coordinator, policy, patience), folder, policy.notify)
            if not getattr(result, "stopped", False) or (folder / STOP_REQUEST).exists():
                return result
            policy.notify("a worker had to leave: all restart from the step that they have saved")
        except (ray.train.TrainingFailedError, ray.exceptions.ActorDiedError) as error:
            decision = getattr(error, "controller_failure", None)
            if isinstance(decision, RayYoloError):
                raise decision from error
            policy.decide_controller(error)
            stop_workers(folder)  # a killed controller has not freed its workers' resources; the next one needs them


def _fit(trainer: TorchTrainer, coordinator: JobClient | None, policy: FailurePolicy,
         patience: float = _END_SECONDS) -> Any:
    """Return the result of the trainer's first worker, or the training's outcome as soon as the coordinator has it.
    Meanwhile workers leave draining nodes; without a coordinator, all workers stop after the current step.

    Ray's controller blocks until the resources of a lost worker are available again; training may end before that. If
    Ray has not ended `patience` seconds after all workers have left, they are killed.
    """
    result = run_in_thread(lambda: trainer.fit().return_value, "fit")
    draining: set[str] = set()
    while not wait([result], _POLL_SECONDS).done:
        if coordinator is None:
            draining = draining or _stop_on_draining_nodes(policy)
            continue
        if outcome := outcome_of(coordinator):
            await_departure(coordinator)
            if not wait([result], patience).done:
                free(held_by(policy.run_dir))
            return outcome
        with contextlib.suppress(ray.exceptions.RayError):
            draining, _ = drain_nodes(coordinator.drain_nodes, draining, policy.notify)
    if draining and coordinator is None:
        (policy.run_dir / STOP_REQUEST).unlink(missing_ok=True)
    return (coordinator and outcome_of(coordinator)) or result.result()


def _stop_on_draining_nodes(policy: FailurePolicy) -> set[str]:
    """Make all workers stop after the current step if some of their nodes are draining. Returns these nodes."""
    if not (nodes := draining_nodes()) or not (groups := held_by(policy.run_dir)):
        return set()
    if nodes := nodes & nodes_of(groups[-1]):
        with contextlib.suppress(OSError):  # of failing storage; the node's end is a failure then
            (policy.run_dir / STOP_REQUEST).touch()
        for node in nodes:
            policy.notify(leave_notice(node))
    return nodes


def outcome_of(coordinator: JobClient) -> Summary | None:
    """How training ended; None: it has not, or the coordinator does not answer."""
    with contextlib.suppress(ray.exceptions.RayError):
        return coordinator.outcome()
    return None
