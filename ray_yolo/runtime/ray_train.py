"""Workers that Ray Train starts: those with GPUs, and those of a validation.

It takes seconds to import and starts five processes more before any worker; a training on CPUs needs none of it.
"""

from __future__ import annotations

import math
import uuid
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import ray.exceptions
import ray.train
from ray.actor import ActorHandle
from ray.train.torch import TorchConfig, TorchTrainer

from ray_yolo.config.placement import Placement
from ray_yolo.errors import LostWorkersError, RayYoloError
from ray_yolo.runlog.event_log import EVENTS_FILE, read_events
from ray_yolo.runlog.recorder import Recorder
from ray_yolo.runtime.cluster import resources_of, worker_environment
from ray_yolo.runtime.restarts import Judge, Restarts, in_order, saved_step, summary


class Asked(ray.train.UserCallback):
    """Ray's controller asks it about workers that have failed, before it starts all of them again."""

    def __init__(self, judge: Judge) -> None:
        self.judge = judge

    def after_exception(self, run_context: object, worker_exceptions: Mapping[int, Exception]) -> None:
        """Called by Ray, which knows it by these names."""
        self.judge.decide(worker_exceptions, others_go_on=False)


def scaling_config(placement: Placement, gpus: float | None = None) -> ray.train.ScalingConfig:
    """What Ray is asked for. Without `gpus`, an `auto` is shown as none."""
    if gpus is None:
        gpus = 0.0 if placement.gpus_per_worker == "auto" else placement.gpus_per_worker
    return ray.train.ScalingConfig(
        num_workers=placement.num_workers, use_gpu=gpus > 0, resources_per_worker=resources_of(placement, gpus),
        placement_strategy=placement.placement_strategy, accelerator_type=placement.accelerator_type or None)


def build_trainer(function: Callable[[dict[str, Any]], Any], config: dict[str, Any], placement: Placement, gpus: float,
                  folder: Path, asked: ray.train.UserCallback) -> TorchTrainer:
    """A Ray trainer of `function(config)` on the placement's workers, with Ray's own bookkeeping in `folder`/ray.

    Its Ray run name was never used before: under a name that Ray knows it continues its own checkpoints, not ours.
    What is `asked` decides, by raising, which failures end the run.
    """
    return TorchTrainer(
        function, train_loop_config=config, scaling_config=scaling_config(placement, gpus),
        torch_config=TorchConfig(timeout_s=math.ceil(placement.timeout_seconds)),
        run_config=ray.train.RunConfig(
            name=f"{folder.name}-{uuid.uuid4().hex[:8]}", storage_path=str(folder / "ray"),
            failure_config=ray.train.FailureConfig(max_failures=-1), callbacks=[asked],
            worker_runtime_env={"env_vars": worker_environment(placement)},
            logging_config=ray.train.LoggingConfig(log_level="ERROR")))


def run_workers(function: Callable[[dict[str, Any]], Any], config: dict[str, Any], placement: Placement, gpus: float,
                folder: Path, work: str, recorder: ActorHandle[Recorder] | None = None) -> Any:
    """What `function(config)` returns on the first of the placement's workers; `work` is the word for what they do.

    Ray restarts worker groups, as long as the `Judge` lets it; a dead controller or a failed process-group setup it
    does not. Each attempt is a Ray run of its own, because our checkpoints, not Ray's, say where to continue.

    Raises:
        RayYoloError: as the `Judge` says of workers that have failed.
        LostWorkersError: if Ray itself fails more often than is put up with.
    """
    restarts, judge = Restarts(placement.max_failures), Judge(folder, placement.max_failures, recorder)
    while True:
        try:
            trainer = build_trainer(function, config, placement, gpus, folder, Asked(judge))
            return in_order(trainer.fit, folder, judge.tell).return_value
        except (ray.train.TrainingFailedError, ray.exceptions.ActorDiedError) as error:
            judgement = getattr(error, "controller_failure", None)
            if isinstance(judgement, RayYoloError):
                raise judgement from error
            if not restarts.allow(saved_step(read_events(folder / EVENTS_FILE))):
                raise LostWorkersError(f"Ray could not run the {work}: {error}") from error
            judge.tell(f"Ray's controller failed and is started again: {summary(error)}")
