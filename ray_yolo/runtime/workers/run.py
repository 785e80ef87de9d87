"""Trains on Ray workers: TorchTrainer for a fixed number, a pool for elastic runs and for the trials of a sweep."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from ray_yolo.config.placement import Placement
from ray_yolo.core.events import Summary, WorkerEvent
from ray_yolo.core.system import own_process
from ray_yolo.engine.build import TrainSpec
from ray_yolo.runs.event_log import EVENTS_FILE, follow
from ray_yolo.runtime import cluster
from ray_yolo.runtime.workers import worker
from ray_yolo.runtime.workers.coordinator import Coordinator
from ray_yolo.runtime.workers.failures import FailurePolicy, run_gracefully
from ray_yolo.runtime.workers.pool import train_on_pool, uses_pool
from ray_yolo.runtime.workers.pool_jobs import JobCoordinator, PoolShare, train_on_queue
from ray_yolo.runtime.workers.rendezvous import start_here, watchdog

if TYPE_CHECKING:
    from ray_yolo.runs.run_dir import Run
    from ray_yolo.sinks.run_logger import RunLogger

_QUIET_SECONDS = 10.0  # before a warning that resources are reserved by other jobs


def train_on_ray(spec: TrainSpec, placement: Placement, gpus: float, run_logger: RunLogger, queue: PoolShare | None,
                 run: Run) -> Summary:
    """Train on Ray workers. Returns how training ended.

    | workers | trained by | a lost worker |
    |---|---|---|
    | of a `queue` | the sweep's standing pool | is replaced by another worker of the pool |
    | a range | a new pool | is replaced in its bundle |
    | a fixed number | Ray's TorchTrainer | is replaced if Ray can; otherwise all restart |

    Raises:
        RayYoloError: by the failure policy.
        ResourcesError: if no worker can be placed.
    """
    on_pool = queue is not None or uses_pool(placement)
    if not on_pool:
        from ray_yolo.runtime.workers import torch_trainer  # here: Ray Train takes seconds, the pool does not need it
    coordinator: Any = None
    if queue:
        coordinator = JobCoordinator(queue.queue, placement.min_workers)
    elif on_pool or torch_trainer.replaces_in_place(placement):
        coordinator = start_here(Coordinator, placement.min_workers)
    payload = {"spec": worker.to_payload(spec), "placement": placement, "driver": own_process(),
               "recorder": run_logger.recorder, "coordinator": coordinator, "on_pool": on_pool,
               "stored": run.remote.payload if run.remote else None}
    policy = FailurePolicy(spec.run_dir, placement.max_failures, run_logger.emit)
    with watchdog(coordinator, spec.run_dir, run_logger.warn):
        if queue:
            return train_on_queue(payload, placement, spec, policy, queue.priority)
        threading.Thread(target=_warn_of_wait, args=(placement, gpus, spec.run_dir, run_logger.warn),
                         name="ray_yolo wait", daemon=True).start()
        if on_pool:
            return run_gracefully(
                lambda: train_on_pool(worker.train_on_pool_worker, payload, placement, gpus, policy),
                spec.run_dir, policy.notify)
        return cast(Summary, torch_trainer.run_torch_trainer(worker.train_worker, payload, placement, gpus, policy))


def _warn_of_wait(placement: Placement, gpus: float, run_dir: Path, notify: Callable[[str], None]) -> None:
    """Warn once if no worker has started because other jobs hold the resources."""
    log = follow(run_dir / EVENTS_FILE)
    next(log)
    time.sleep(_QUIET_SECONDS)
    if not any(isinstance(event, WorkerEvent) for event in next(log)) and (
            text := cluster.describe_wait(placement, gpus)):
        notify(text)
