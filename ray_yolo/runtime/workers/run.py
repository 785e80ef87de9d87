"""Trains on Ray workers: TorchTrainer for a fixed number, a pool for elastic runs and for the trials of a sweep."""

from __future__ import annotations

import uuid
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, cast

import ray

from ray_yolo.config.placement import Placement
from ray_yolo.core.errors import InputError
from ray_yolo.core.events import Summary, WorkerEvent
from ray_yolo.core.signals import uninterrupted
from ray_yolo.core.system import own_process
from ray_yolo.engine.callbacks import IN_TRAINING, Hooks
from ray_yolo.engine.spec import TrainSpec
from ray_yolo.runs.event_log import EVENTS_FILE, follow
from ray_yolo.runtime.graceful_stop import stops_at
from ray_yolo.runtime.workers import worker
from ray_yolo.runtime.workers.client import JobClient
from ray_yolo.runtime.workers.failures import FailurePolicy, run_gracefully
from ray_yolo.runtime.workers.pool_jobs import PoolShare, pool_of, train_on_queue, warns_of_wait
from ray_yolo.runtime.workers.watchdog import start_queue, watchdog

if TYPE_CHECKING:
    from ray_yolo.runs.run_dir import Run
    from ray_yolo.sinks.run_logger import RunLogger


def train_on_ray(spec: TrainSpec, placement: Placement, gpus: float, run_logger: RunLogger, share: PoolShare | None,
                 run: Run, end: float, is_asked: Callable[[], bool] | None,
                 callbacks: tuple[str, dict[str, bytes]]) -> Summary:
    """Train on Ray workers. Returns how training ended.

    | workers | trained by | a lost worker |
    |---|---|---|
    | of a sweep's pool (`share`) | that pool, as one of its jobs | is replaced by another worker of the pool |
    | a range | a new pool, with this job alone | is replaced in its bundle |
    | a fixed number | Ray's TorchTrainer | is replaced by Ray Train |

    Args:
        end: when training is ordered to stop, by `time.monotonic`.
        is_asked: says when it is ordered to stop before.
        callbacks: of the first worker, as of `worker_callbacks`.

    Raises:
        RayYoloError: by the failure policy.
        ResourcesError: if no worker can be placed.
    """
    on_pool = share is not None or placement.is_elastic
    queue, job = (share.queue, share.job) if share else (start_queue(), uuid.uuid4().hex)
    coordinator = JobClient(queue, job, placement.min_workers)
    if run.remote:
        run.remote.on_loss = coordinator.stop
    payload = {"spec": worker.to_payload(spec), "placement": placement, "driver": own_process(),
               "recorder": run_logger.recorder, "coordinator": coordinator, "on_pool": on_pool, "callbacks": callbacks,
               "stored": run.remote.payload if run.remote else None}
    policy = FailurePolicy(spec.run_dir, placement.max_failures, run_logger.emit)

    def train_on_own_pool() -> Summary:
        with pool_of(coordinator.queue, placement, gpus, policy, emit=policy.emit):
            return train_on_queue(coordinator, payload, placement, spec, policy)

    with watchdog(coordinator, spec.run_dir, run_logger.warn), stops_at(end, coordinator.stop, is_asked):
        if share:
            return train_on_queue(coordinator, payload, placement, spec, policy, share.priority)
        with warns_of_wait(_worker_starts(spec.run_dir), placement, gpus, run_logger.warn):
            if on_pool:
                return run_gracefully(train_on_own_pool, coordinator.stop, spec.run_dir, policy.notify)
            with uninterrupted():
                from ray_yolo.runtime.workers import torch_trainer  # here: Ray Train takes seconds, pools need it not

            return cast(Summary, torch_trainer.run_torch_trainer(worker.train_worker, payload, placement, gpus, policy))


def worker_callbacks(path: str, of_file: Hooks, given: Hooks) -> tuple[str, dict[str, bytes]]:
    """The user's functions that the first worker calls: the path from which each worker loads them, if it has any, and
    those that a caller gave, as Ray sends functions.

    Raises:
        InputError: if a function cannot be sent.
    """
    file, colon, name = path.partition(":")
    if file.endswith(".py"):
        path = f"{Path(file).absolute()}{colon}{name}"
    sent = {}
    for hook in IN_TRAINING:
        if hook in given:
            try:
                sent[hook] = ray.cloudpickle.dumps(given[hook])
            except Exception as error:  # of any object that the function refers to
                raise InputError(f"callbacks: {hook}: cannot be sent to the first worker ({type(error).__name__}: "
                                 f"{error}); give the Python path of a function, or train with num_workers=0") from None
    return path if of_file.keys() & set(IN_TRAINING) else "", sent


def _worker_starts(run_dir: Path) -> Callable[[], bool]:
    """A question that is asked once: whether a worker has started since now, according to the run's log."""
    log = follow(run_dir / EVENTS_FILE)
    next(log)  # of earlier starts
    return lambda: any(isinstance(event, WorkerEvent) for event in next(log))

