"""Work for a standing crew: the driver keeps it, a sweep's trial offers its training, workers train what they get."""

from __future__ import annotations

import contextlib
import gc
import threading
import time
import uuid
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from types import SimpleNamespace
from typing import Any, TypeAlias

import ray
import ray.exceptions
import torch
from ray.actor import ActorHandle

from ray_yolo.config.placement import Placement
from ray_yolo.config.recipe import most_workers
from ray_yolo.core.errors import LostWorkersError, RayYoloError, ResourcesError
from ray_yolo.core.events import Summary
from ray_yolo.core.system import own_process
from ray_yolo.engine.build import TrainSpec
from ray_yolo.engine.membership import Activity
from ray_yolo.runtime import cluster
from ray_yolo.runtime.workers.failures import FailurePolicy, RestartBudget, place_of, summary
from ray_yolo.runtime.workers.job_queue import JobAssignment, JobQueue, JobStatus, PoolWorker
from ray_yolo.runtime.workers.pool import Supervisor, WorkerPool
from ray_yolo.runtime.workers.rendezvous import answer, start_here
from ray_yolo.runtime.workers.worker import note_sigterm, received_sigterm, train_job

_ASK_SECONDS = 0.1  # of an idle worker
_NEWS_SECONDS = 0.5  # of a trial: the next one waits for workers, not for this one's end
_HEARTBEAT_SECONDS = 1.0
_END_SECONDS = 10.0  # in which a crew that has no more work ends by itself

QueueHandle: TypeAlias = "ActorHandle[JobQueue]"


# The driver's side


@contextlib.contextmanager
def standing_pool(placement: Placement, gpus: float, notify: Callable[[str], None], *,
                  grows: bool) -> Iterator[QueueHandle]:
    """Context in which a placement's workers train what is offered to them.

    Args:
        gpus: of each worker.
        tell: takes warnings.
        grows: there are more of them as soon as the cluster has room for more.
    """
    queue, over = start_here(JobQueue), threading.Event()
    keeper = threading.Thread(target=_keep, args=(queue, placement, gpus, notify, grows, over), name="ray_yolo crew",
                              daemon=True)
    keeper.start()
    try:
        yield queue
    finally:
        over.set()
        with contextlib.suppress(ray.exceptions.RayError):
            answer(queue.close.remote("the sweep has ended"))
        keeper.join(_END_SECONDS)


def _keep(queue: QueueHandle, placement: Placement, gpus: float, notify: Callable[[str], None], grows: bool,
          over: threading.Event) -> None:
    """Keep the places of the workers filled, until there is no more work."""
    policy = _JobFailurePolicy(queue, placement.max_failures, notify)
    try:
        with WorkerPool(pool_worker, {"queue": queue}, placement, gpus) as pool:
            keeper, new = Supervisor(pool, queue, placement, gpus, policy), range(len(pool))
            while not over.is_set():
                for number in new:
                    pool.launch(number)
                if keeper.poll():
                    return
                new = pool.grow(cluster.room(placement, gpus) if grows else 0)
    except Exception as error:
        with contextlib.suppress(ray.exceptions.RayError):
            answer(queue.close.remote(f"the sweep's workers could not be kept: {error}"))


class _JobFailurePolicy:
    """Has workers replaced as long as others come up, or get on: whoever has offered a job judges what became of it."""

    def __init__(self, queue: QueueHandle, max_failures: int, notify: Callable[[str], None]) -> None:
        self._queue, self._restarts, self.notify = queue, RestartBudget(max_failures), notify

    def decide(self, failures: Mapping[int, Exception], *, others_go_on: bool) -> None:
        """Put up with workers that have failed together, or raise."""
        if not self._restarts.allow(answer(self._queue.progress.remote())):
            number, error = min(failures.items())
            raise LostWorkersError(f"{place_of(number, [])}: {summary(error)}; given up after {self._restarts.limit} "
                                   "restarts in which nobody came up")


# A trial's side


class JobCoordinator:
    """A job's roster, which the crew keeps; its methods are called as an actor's are.

    Args:
        wanted: how many workers begin together.
    """

    def __init__(self, queue: QueueHandle, wanted: int) -> None:
        self.queue, self.job, self._wanted = queue, uuid.uuid4().hex, wanted

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):  # what pickle asks for, before there is a crew
            raise AttributeError(name)
        return SimpleNamespace(remote=partial(self.queue.coordinator.remote, self.job, self._wanted, name))


def train(config: dict[str, Any], placement: Placement, job: TrainSpec) -> Summary:
    """Have a crew train a job, as `config`, with its `JobCoordinator`, tells its workers. Returns how it ended.

    Raises:
        RayYoloError: as the `FailurePolicy` says of workers that have failed.
        ResourcesError: if there is no crew any more.
    """
    coordinator, wanted = config["coordinator"], placement.max_workers
    queue, name = coordinator.queue, coordinator.job
    reference = [ray.put(config)]  # in a list: the crew itself has no need to open it
    policy = FailurePolicy(job.run_dir, placement.max_failures, config["recorder"])
    try:
        while True:
            news: JobStatus | str | None = answer(queue.poll.remote(name))
            if isinstance(news, str):
                raise ResourcesError(news)
            if news is None:
                answer(queue.submit.remote(name, str(job.run_dir), wanted, most_workers(job.recipe), reference))
            elif news.failures:
                lost = {number: error or ray.exceptions.WorkerCrashedError() for number, error in news.failures}
                answer(coordinator.mark_lost.remote(list(lost)))
                policy.decide(lost, others_go_on=len(lost) < wanted)
            elif news.summary:
                return news.summary
            time.sleep(_NEWS_SECONDS)
    finally:
        with contextlib.suppress(ray.exceptions.RayError):
            answer(queue.cancel.remote(name))


# A worker's side


def pool_worker(config: dict[str, Any], number: int) -> bool:
    """What a worker does in a place of its own: trains job after job. Returns whether there are no more anywhere.

    Raises:
        Exception: what a job has ended by, if that may lie in this process: another one takes its place.
    """
    note_sigterm()
    queue, uid = config["queue"], uuid.uuid4().hex
    place = PoolWorker(number, ray.get_runtime_context().get_node_id(), own_process())
    while not (received_sigterm() or isinstance(lease := answer(queue.acquire.remote(uid, place)), str)):
        if lease is None:
            time.sleep(_ASK_SECONDS)
            continue
        outcome: Summary | Exception | None
        try:
            outcome = _work(queue, uid, place, lease)
        except Exception as error:
            outcome = error
        gc.collect()  # loaders, their processes and DDP are parts of circles
        torch.cuda.empty_cache()  # the next job may measure what is free; without a GPU it does nothing
        answer(queue.ended.remote(uid, place, lease[:2], outcome))
        if isinstance(outcome, Exception) and not isinstance(outcome, (RayYoloError, ray.exceptions.RayError)):
            raise outcome
    return not received_sigterm() and lease == "over"


def _work(queue: QueueHandle, uid: str, place: PoolWorker, lease: JobAssignment) -> Summary | None:
    """Train a job to its end, or until this worker is told to leave it."""
    config = answer(lease.config[0])
    placement, over = Placement.model_validate(config["placement"]), threading.Event()
    activity, member = Activity(placement.stall_seconds), uuid.uuid4().hex  # another one each time, who may come back

    def heartbeat() -> None:
        step = 0
        while not over.wait(_HEARTBEAT_SECONDS):
            moved, step = activity.step > step, activity.step
            with contextlib.suppress(ray.exceptions.RayError):
                if received_sigterm():
                    queue.drain.remote(uid)
                if answer(queue.heartbeat.remote(uid, place, lease[:2], moved)):
                    config["coordinator"].drain.remote(member)

    threading.Thread(target=heartbeat, name="ray_yolo lease", daemon=True).start()
    try:
        return train_job(config, placement, lease.number, activity, member)
    finally:
        over.set()
