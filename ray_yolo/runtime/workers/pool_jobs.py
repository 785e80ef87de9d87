"""Jobs on a pool: one driver runs the pool's workers, and each training's driver submits a job and follows it."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import ray
import ray.exceptions
from ray.actor import ActorHandle

from ray_yolo.config.placement import Placement
from ray_yolo.config.recipe import Recipe, most_workers
from ray_yolo.core.errors import RayYoloError, ResourcesError
from ray_yolo.core.events import Emit, Event, Summary, WarningEvent
from ray_yolo.engine.spec import TrainSpec
from ray_yolo.runs.recorder import Recorder
from ray_yolo.runtime import cluster
from ray_yolo.runtime.workers import worker
from ray_yolo.runtime.workers.client import JobClient, QueueHandle, answer
from ray_yolo.runtime.workers.failures import FailurePolicy, decide_departed
from ray_yolo.runtime.workers.job_queue import JobStatus
from ray_yolo.runtime.workers.pool import Supervisor, WorkerPool
from ray_yolo.runtime.workers.watchdog import start_queue

QUIET_SECONDS = 10.0  # after this time without a worker, a warning names the jobs that hold the resources
_STATUS_SECONDS = 0.5  # a trial gets a reply after this time if its job has no news
_END_SECONDS = 30.0  # the pool may take this long to end: then its resources are free


class PoolShare(NamedTuple):
    """A training's access to a standing pool, which assigns its workers to the job of the least priority first."""

    queue: QueueHandle
    job: str  # the name of the training in the queue
    priority: float = 0.0
    recorder: ActorHandle[Recorder] | None = None  # writes the logs of one training after another


@contextlib.contextmanager
def standing_pool(placement: Placement, gpus: float, notify: Callable[[str], None], *,
                  grows: bool) -> Iterator[QueueHandle]:
    """Context in which a placement's workers train the jobs that are submitted to the queue.

    Args:
        gpus: of each worker.
        notify: takes warnings.
        grows: add workers as soon as more fit on the cluster.
    """
    def show(event: Event) -> None:
        if isinstance(event, WarningEvent):
            notify(event.message)

    queue = start_queue()
    policy = FailurePolicy(Path(placement.storage_path), placement.max_failures, show)

    def has_workers() -> bool:
        return bool(answer(queue.present.remote()) > 0)

    with warns_of_wait(has_workers, placement, gpus, notify), pool_of(queue, placement, gpus, policy, grows=grows):
        yield queue


@contextlib.contextmanager
def warns_of_wait(has_workers: Callable[[], bool], placement: Placement, gpus: float, notify: Callable[[str], None]
                  ) -> Iterator[None]:
    """Context that warns once if no worker has started after `QUIET_SECONDS`, because other jobs hold the resources."""
    over = threading.Event()

    def warn() -> None:
        if over.wait(QUIET_SECONDS):
            return
        with contextlib.suppress(ray.exceptions.RayError):
            text = "" if has_workers() else cluster.describe_wait(placement, gpus)
            if text and not over.is_set():
                notify(text)

    threading.Thread(target=warn, name="ray_yolo wait", daemon=True).start()
    try:
        yield
    finally:
        over.set()


@contextlib.contextmanager
def pool_of(queue: QueueHandle, placement: Placement, gpus: float, policy: FailurePolicy, *, grows: bool = False,
            emit: Emit = lambda event: None) -> Iterator[None]:
    """Context in which a placement's workers train the jobs of a queue. At its end the queue is closed.

    Args:
        policy: decides about workers that are lost while they train nothing.
        emit: takes the event of each placement group.
    """
    over = threading.Event()
    supervising = threading.Thread(target=_supervise, args=(queue, placement, gpus, policy, grows, emit, over),
                                   name="ray_yolo pool", daemon=True)
    supervising.start()
    try:
        yield
    finally:
        over.set()
        _close(queue, ResourcesError("the pool has ended"))
        supervising.join(_END_SECONDS)


def _supervise(queue: QueueHandle, placement: Placement, gpus: float, policy: FailurePolicy, grows: bool, emit: Emit,
               over: threading.Event) -> None:
    """Keep the workers running until there is no more work; if that fails, close the queue with the reason."""
    try:
        with WorkerPool(worker.pool_worker, {"queue": queue}, placement, gpus, emit) as pool:
            supervisor, new = Supervisor(pool, queue, placement, gpus, policy), range(len(pool))
            while not over.is_set():
                for number in new:
                    pool.launch(number)
                if supervisor.poll():
                    return
                new = pool.grow(cluster.room(placement, gpus) if grows else 0)
    except RayYoloError as error:
        _close(queue, error)
    except Exception as error:
        _close(queue, ResourcesError(f"the workers could not be kept running: {error}"))


def _close(queue: QueueHandle, reason: RayYoloError) -> None:
    with contextlib.suppress(ray.exceptions.RayError):
        answer(queue.close.remote(reason))


def most_together(placement: Placement, recipe: Recipe) -> int:
    """The most workers of a pool that can train a job together, while some have no other job."""
    if placement.shares_gpus:  # a worker that helped could be on the GPU of another
        return placement.max_workers
    return most_workers(recipe)


def train_on_queue(coordinator: JobClient, payload: dict[str, Any], placement: Placement, spec: TrainSpec,
                   policy: FailurePolicy, priority: float = 0.0) -> Summary:
    """Train a job on the workers of its queue's pool. Returns how training ended.

    Raises:
        RayYoloError: by the failure policy, or if the pool has ended.
        KeyboardInterrupt: if all jobs of the queue were ordered to stop, and no worker trains this one.
    """
    queue, job = coordinator.queue, coordinator.job
    reference = [ray.put(payload)]  # in a list: the queue itself does not load it
    try:
        while True:
            status: JobStatus | RayYoloError | None = answer(queue.wait_for_news.remote(job, _STATUS_SECONDS))
            if isinstance(status, RayYoloError):
                raise status
            if status is None:
                most = most_together(placement, spec.recipe)
                answer(queue.submit.remote(job, str(spec.run_dir), placement.max_workers, most, reference, priority))
            elif status.stopped:
                raise KeyboardInterrupt
            elif status.failures:
                failures = {number: error or ray.exceptions.WorkerCrashedError()
                            for number, error in status.failures}
                decide_departed(coordinator, failures, policy)
            elif status.summary:
                return status.summary
    finally:
        if ray.is_initialized():  # else the command ends; a call to Ray would end it at once, with status 1
            with contextlib.suppress(ray.exceptions.RayError):
                answer(queue.cancel.remote(job))
