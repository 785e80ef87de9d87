"""Jobs on a standing pool: the sweep's driver runs the pool, trials submit trainings, workers train one job after
another."""

from __future__ import annotations

import contextlib
import gc
import threading
import time
import uuid
from collections.abc import Callable, Iterator
from functools import partial
from types import SimpleNamespace
from typing import Any, NamedTuple, TypeAlias

import ray
import ray.exceptions
import torch
from ray.actor import ActorHandle

from ray_yolo.config.placement import Placement
from ray_yolo.config.recipe import most_workers
from ray_yolo.core.errors import RayYoloError, ResourcesError, release_frames
from ray_yolo.core.events import Summary
from ray_yolo.core.system import own_process
from ray_yolo.engine.build import TrainSpec
from ray_yolo.engine.membership import Activity
from ray_yolo.runs.recorder import Recorder
from ray_yolo.runtime import cluster
from ray_yolo.runtime.workers.failures import FailurePolicy, PoolFailurePolicy
from ray_yolo.runtime.workers.job_queue import JobAssignment, JobQueue, JobStatus, PoolWorker
from ray_yolo.runtime.workers.pool import Supervisor, WorkerPool
from ray_yolo.runtime.workers.rendezvous import answer, start_here
from ray_yolo.runtime.workers.worker import prepare_process, received_sigterm, train_job

_ACQUIRE_SECONDS = 0.1  # between two requests of an idle worker
_STATUS_SECONDS = 0.5  # until a trial gets a reply if its job has no news
_HEARTBEAT_SECONDS = 1.0
_END_SECONDS = 10.0  # for the pool to end by itself once there is no more work

QueueHandle: TypeAlias = "ActorHandle[JobQueue]"


class PoolShare(NamedTuple):
    """A training's access to a standing pool, which assigns its workers to the job of the least priority first."""

    queue: QueueHandle
    priority: float = 0.0
    recorder: ActorHandle[Recorder] | None = None  # writes the logs of one training after another


# The driver's side


@contextlib.contextmanager
def standing_pool(placement: Placement, gpus: float, notify: Callable[[str], None], *,
                  grows: bool) -> Iterator[QueueHandle]:
    """Context in which a placement's workers train the jobs that are submitted to the queue.

    Args:
        gpus: of each worker.
        notify: takes warnings.
        grows: add workers as soon as more fit on the cluster.
    """
    queue, over = start_here(JobQueue), threading.Event()
    supervising = threading.Thread(target=_supervise, args=(queue, placement, gpus, notify, grows, over),
                                   name="ray_yolo pool", daemon=True)
    supervising.start()
    try:
        yield queue
    finally:
        over.set()
        with contextlib.suppress(ray.exceptions.RayError):
            answer(queue.close.remote("the sweep has ended"))
        supervising.join(_END_SECONDS)


def _supervise(queue: QueueHandle, placement: Placement, gpus: float, notify: Callable[[str], None], grows: bool,
               over: threading.Event) -> None:
    """Keep the workers running until there is no more work; if that fails, close the queue with the reason."""
    policy = PoolFailurePolicy(placement.max_failures, lambda: answer(queue.progress.remote()), notify)
    try:
        with WorkerPool(pool_worker, {"queue": queue}, placement, gpus) as pool:
            supervisor, new = Supervisor(pool, queue, placement, gpus, policy), range(len(pool))
            while not over.is_set():
                for number in new:
                    pool.launch(number)
                if supervisor.poll():
                    return
                new = pool.grow(cluster.room(placement, gpus) if grows else 0)
    except Exception as error:
        with contextlib.suppress(ray.exceptions.RayError):
            answer(queue.close.remote(f"the sweep's workers could not be kept running: {error}"))


# A trial's side


class JobCoordinator:
    """A client of a job's coordinator, which is in the queue's actor; its methods are called like an actor's.

    Args:
        wanted: how many workers start together.
    """

    def __init__(self, queue: QueueHandle, wanted: int) -> None:
        self.queue, self.job, self._wanted = queue, uuid.uuid4().hex, wanted

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):  # pickle looks these up before there is a queue
            raise AttributeError(name)
        return SimpleNamespace(remote=partial(self.queue.coordinator.remote, self.job, self._wanted, name))


def train_on_queue(payload: dict[str, Any], placement: Placement, spec: TrainSpec, policy: FailurePolicy,
                   priority: float) -> Summary:
    """Train a job on a standing pool; its `payload` has a `JobCoordinator`. Returns how training ended.

    Raises:
        RayYoloError: by the failure policy.
        ResourcesError: if the pool has ended.
    """
    coordinator, wanted = payload["coordinator"], placement.max_workers
    queue, job = coordinator.queue, coordinator.job
    reference = [ray.put(payload)]  # in a list: the queue itself does not load it
    try:
        while True:
            status: JobStatus | str | None = answer(queue.wait_for_news.remote(job, _STATUS_SECONDS))
            if isinstance(status, str):
                raise ResourcesError(status)
            if status is None:
                answer(queue.submit.remote(job, str(spec.run_dir), wanted, most_workers(spec.recipe), reference,
                                           priority))
            elif status.failures:
                failed = {number: error or ray.exceptions.WorkerCrashedError() for number, error in status.failures}
                answer(coordinator.mark_lost.remote(list(failed)))
                policy.decide(failed, others_continue=len(failed) < wanted)
            elif status.summary:
                return status.summary
    finally:
        with contextlib.suppress(ray.exceptions.RayError):
            answer(queue.cancel.remote(job))


# A worker's side


def pool_worker(config: dict[str, Any], number: int) -> bool:
    """A worker's task: train one job after another. Returns whether there is no more work for any worker.

    Raises:
        Exception: an error of a job that this process may have caused; a new process replaces this one.
    """
    prepare_process()
    queue, uid = config["queue"], uuid.uuid4().hex
    worker = PoolWorker(number, ray.get_runtime_context().get_node_id(), own_process())
    while not (received_sigterm() or isinstance(reply := answer(queue.acquire.remote(uid, worker)), str)):
        if reply is None:
            time.sleep(_ACQUIRE_SECONDS)
            continue
        result: Summary | Exception | None
        try:
            result = _train_assignment(queue, uid, worker, reply)
        except Exception as error:
            release_frames(error)
            result = error
        gc.collect()  # loaders, their processes and DDP are in reference cycles
        torch.cuda.empty_cache()  # the next job may measure what is free; without a GPU this does nothing
        answer(queue.ended.remote(uid, worker, reply[:2], result))
        if isinstance(result, Exception) and not isinstance(result, (RayYoloError, ray.exceptions.RayError)):
            raise result
    return not received_sigterm() and reply == "over"


def _train_assignment(queue: QueueHandle, uid: str, worker: PoolWorker, assignment: JobAssignment) -> Summary | None:
    """Train a job to its end, or until this worker has to leave it."""
    payload = answer(assignment.config[0])
    activity, over, must_leave = Activity(payload["placement"].stall_seconds), threading.Event(), threading.Event()

    def heartbeat() -> None:
        step = 0
        while not over.wait(_HEARTBEAT_SECONDS):
            moved, step = activity.step > step, activity.step
            with contextlib.suppress(ray.exceptions.RayError):
                if answer(queue.heartbeat.remote(uid, worker, assignment[:2], moved, received_sigterm())):
                    must_leave.set()

    threading.Thread(target=heartbeat, name="ray_yolo job heartbeat", daemon=True).start()
    try:
        return train_job(payload, assignment.number, activity, must_leave.is_set)
    finally:
        over.set()
