"""Workers that Ray Train starts: a fixed number of them, and those of a validation.

A lost worker is replaced alone where Ray can do that; else all are started again from the newest checkpoint. Importing
Ray Train takes seconds.
"""

from __future__ import annotations

import contextlib
import math
import threading
import uuid
from collections.abc import Callable, Mapping
from concurrent.futures import Future, wait
from functools import partial
from pathlib import Path
from typing import Any, cast

import ray.exceptions
import ray.train
from ray.actor import ActorHandle
from ray.train.torch import TorchConfig, TorchTrainer

from ray_yolo.config.placement import Placement
from ray_yolo.core.errors import LostWorkersError, RayYoloError
from ray_yolo.core.events import Summary
from ray_yolo.engine.collectives import BACKENDS, use_interface
from ray_yolo.runs.event_log import EVENTS_FILE, read_events
from ray_yolo.runs.recorder import Recorder
from ray_yolo.runtime.cluster import leave_notice, resources_of, stop_workers, worker_environment
from ray_yolo.runtime.ray_internals import can_replace_in_place, draining_nodes, in_place_backend
from ray_yolo.runtime.workers.coordinator import Coordinator
from ray_yolo.runtime.workers.failures import FailurePolicy, RestartBudget, in_order, saved_step, summary
from ray_yolo.runtime.workers.rendezvous import answer, own_address
from ray_yolo.runtime.workers.worker import note_sigterm

_POLL_SECONDS = 1.0
_END_SECONDS = 15.0  # for Ray to end when training has


class InPlaceConfig(TorchConfig):
    """Asks Ray for workers that form their process groups themselves."""

    @property
    def backend_cls(self) -> Any:
        """FailureCallback for by Ray."""
        return in_place_backend(note_sigterm)


class InterfaceConfig(TorchConfig):
    """Workers whose group Ray forms: over the network interface that Ray knows their node by."""

    @property
    def backend_cls(self) -> Any:
        """FailureCallback for by Ray."""
        rays = super().backend_cls

        def on_start(backend: Any, worker_group: Any, config: TorchConfig) -> None:
            worker_group.execute(_use_interface)
            rays.on_start(backend, worker_group, config)

        return type(rays.__name__, (rays,), {"on_start": on_start})


def _use_interface() -> None:
    use_interface(own_address())


def replaces_in_place(placement: Placement) -> bool:
    """Whether Ray Train replaces a lost worker while the others go on: a fixed number of them, where it can at all."""
    return isinstance(placement.num_workers, int) and can_replace_in_place()


class FailureCallback(ray.train.UserCallback):
    """Ray's controller asks it about workers that have failed, before it starts them again.

    Args:
        workers: of which Ray replaces one while the others go on; 0: it starts all again.
        roster: of these workers. What ends one that was to leave is no failure, nor is what ends them after training.
    """

    def __init__(
        self, policy: FailurePolicy, workers: int = 0, coordinator: ActorHandle[Coordinator] | None = None
    ) -> None:
        self.policy, self._workers, self._coordinator = policy, workers, coordinator

    def after_exception(self, run_context: object, worker_exceptions: Mapping[int, Exception]) -> None:
        """Called by Ray, which knows it by these names."""
        failed = list(worker_exceptions)
        if self._coordinator:
            with contextlib.suppress(ray.exceptions.RayError):
                failed = answer(self._coordinator.mark_lost.remote(failed))
        if failed and (self._coordinator is None or not outcome_of(self._coordinator)):
            self.policy.decide({worker: worker_exceptions[worker] for worker in failed},
                              others_go_on=len(worker_exceptions) < self._workers)


def scaling_config(placement: Placement, gpus: float) -> ray.train.ScalingConfig:
    """What Ray Train is asked for, with so many GPUs for each worker."""
    return ray.train.ScalingConfig(
        num_workers=placement.num_workers, use_gpu=gpus > 0, resources_per_worker=resources_of(placement, gpus),
        placement_strategy=placement.placement_strategy, accelerator_type=placement.accelerator_type or None)


def build_trainer(function: Callable[[dict[str, Any]], Any], config: dict[str, Any], placement: Placement, gpus: float,
                  folder: Path, asked: ray.train.UserCallback, *, in_place: bool = False) -> TorchTrainer:
    """A Ray trainer of `function(config)` on the placement's workers, with Ray's own bookkeeping in `folder`/ray.

    Its Ray run name was never used before: under a name that Ray knows it continues its own checkpoints, not ours.
    What is `asked` decides, by raising, which failures end the run. A worker is replaced `in_place`, or all with it.
    """
    kind = InPlaceConfig if in_place else InterfaceConfig
    return TorchTrainer(  # its group is of our backends, too, where Ray forms it
        function, train_loop_config=config, scaling_config=scaling_config(placement, gpus),
        torch_config=kind(backend=BACKENDS if gpus else "gloo", timeout_s=math.ceil(placement.timeout_seconds)),
        run_config=ray.train.RunConfig(
            name=f"{folder.name}-{uuid.uuid4().hex[:8]}", storage_path=str(folder / "ray"),
            failure_config=ray.train.FailureConfig(max_failures=-1), callbacks=[asked],
            worker_runtime_env={"env_vars": worker_environment(placement)},
            logging_config=ray.train.LoggingConfig(log_level="ERROR")))


def run_workers(function: Callable[[dict[str, Any]], Any], config: dict[str, Any], placement: Placement, gpus: float,
                folder: Path, work: str, recorder: ActorHandle[Recorder] | None = None) -> Any:
    """What `function(config)` returns on the first of the placement's workers; `work` is the word for what they do.

    Ray restarts worker groups, as long as the `FailurePolicy` lets it; a dead controller or a failed process-group
    setup it
    does not. Each attempt is a Ray run of its own, because our checkpoints, not Ray's, say where to continue.

    Raises:
        RayYoloError: as the `FailurePolicy` says of workers that have failed.
        LostWorkersError: if Ray itself fails more often than is put up with.
    """
    coordinator = config.get("coordinator")
    restarts, policy = RestartBudget(placement.max_failures), FailurePolicy(folder, placement.max_failures, recorder)
    asked = FailureCallback(policy, placement.max_workers if coordinator else 0, coordinator)
    while True:
        try:
            trainer = build_trainer(function, config, placement, gpus, folder, asked, in_place=bool(coordinator))
            return in_order(partial(_until_the_end, trainer, coordinator, folder, policy.notify), folder, policy.notify)
        except (ray.train.TrainingFailedError, ray.exceptions.ActorDiedError) as error:
            judgement = getattr(error, "controller_failure", None)
            if isinstance(judgement, RayYoloError):
                raise judgement from error
            if not restarts.allow(saved_step(read_events(folder / EVENTS_FILE))):
                raise LostWorkersError(f"Ray could not run the {work}: {error}") from error
            policy.notify(f"Ray's controller failed and is started again: {summary(error)}")
            stop_workers(folder)  # one that was killed has not given back its workers' room, and the next one needs it


def _until_the_end(trainer: TorchTrainer, coordinator: ActorHandle[Coordinator] | None, folder: Path,
                   notify: Callable[[str], None]) -> Any:
    """What the trainer's first worker returns; or, once the roster knows it, how training ended. Meanwhile workers
    leave the nodes that are drained.

    Ray's controller stands still as long as the place of a lost worker is not there again: then nobody waits for it.
    """
    fitted: Future[Any] = Future()

    def fit() -> None:
        try:
            fitted.set_result(trainer.fit().return_value)
        except BaseException as error:
            fitted.set_exception(error)

    threading.Thread(target=fit, name="ray_yolo fit", daemon=True).start()
    drained: set[str] = set()
    while coordinator and not wait([fitted], _POLL_SECONDS).done:
        if found := outcome_of(coordinator):
            if not wait([fitted], _END_SECONDS).done:
                stop_workers(folder)
            return found
        drained = _leave_nodes(coordinator, drained, notify)
    return (coordinator and outcome_of(coordinator)) or fitted.result()


def _leave_nodes(coordinator: ActorHandle[Coordinator], before: set[str], notify: Callable[[str], None]) -> set[str]:
    """Have workers leave the nodes that are drained, after the step in hand. Returns these nodes."""
    nodes = draining_nodes()
    with contextlib.suppress(ray.exceptions.RayError):
        if nodes:
            answer(coordinator.drain_nodes.remote(nodes))
        for node in nodes - before:
            notify(leave_notice(node))
    return nodes


def outcome_of(coordinator: ActorHandle[Coordinator]) -> Summary | None:
    """How training has ended, as far as its roster knows, and answers."""
    with contextlib.suppress(ray.exceptions.RayError):
        return cast("Summary | None", answer(coordinator.outcome.remote()))
    return None
