"""A sweep's standing pool on Ray: lost workers and trials cost no row, and jobs leave nothing behind."""

from __future__ import annotations

import asyncio
import gc
import pickle
import threading
import weakref
from types import SimpleNamespace
from typing import Any

import pytest
import ray

from ray_yolo.config.placement import Placement
from ray_yolo.config.recipe import Recipe
from ray_yolo.core.errors import TrainingError
from ray_yolo.core.events import Summary
from ray_yolo.core.structures import Orders
from ray_yolo.core.system import own_process
from ray_yolo.runtime.workers import client, job_queue, pool_jobs, worker
from ray_yolo.runtime.workers.client import JobClient
from ray_yolo.runtime.workers.coordinator import Heartbeat, Registration
from ray_yolo.runtime.workers.job_queue import JobAssignment, JobQueue, NextTask, PoolWorker

JOINING = Heartbeat("joining", 0, 0.0, 30.0)


class LocalQueue:
    """A job queue in this process, called like an actor."""

    def __init__(self) -> None:
        self.queue = JobQueue()

    @property
    def coordinator(self) -> Any:
        return SimpleNamespace(remote=self.queue.coordinator)

    @property
    def report(self) -> Any:
        return SimpleNamespace(remote=lambda *given: asyncio.run(self.queue.report(*given)))


def test_each_job_has_a_coordinator_and_its_client_can_be_pickled(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(client, "answer", lambda reply: reply)
    queue: Any = LocalQueue()
    coordinator = JobClient(queue, "one", 1)
    sent = pickle.loads(pickle.dumps(coordinator))
    assert (sent.job, sent.wanted) == ("one", 1)
    sent.register("a", Registration(0, own_process(), ("a", 1), None, JOINING))
    assert sent.quorum("a").size == 1
    assert JobClient(sent.queue, "another", 1).present() == 0


def test_a_heartbeat_of_a_pools_worker_reaches_its_queue_and_its_coordinator(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(client, "answer", lambda reply: reply)
    queue: Any = LocalQueue()
    place = PoolWorker(3, "node", own_process())
    queue.queue.submit("job", "folder", 1, 1, None)
    monkeypatch.setattr(client.ray, "wait", lambda replies, timeout: (replies, []))
    monkeypatch.setattr(client.ray, "get", lambda reply: reply)
    monkeypatch.setattr(job_queue, "HEARTBEAT_SECONDS", 0.01)
    task = queue.queue.next_task("worker", place).task
    assert task
    mine = JobClient(queue, "job", 1).of_worker("worker", place, task)
    mine.register("member", Registration(0, own_process(), ("a", 1), None, JOINING))

    def send(heartbeat: Heartbeat) -> Orders:
        orders = mine.heartbeat("member", heartbeat, None, Orders(), lambda: False)
        assert orders
        return orders

    assert not send(JOINING).abort
    assert queue.queue.progress() == 1  # it came up
    assert not send(JOINING._replace(phase="computing", step=5)).leave
    assert queue.queue.progress() == 2
    assert [(status.phase, status.step) for status in mine.worker_statuses()] == [("computing", 5)]
    queue.queue.drain_nodes({"node"})
    assert send(JOINING).leave


@pytest.mark.parametrize(("given", "most"), [
    ({}, 4), ({"gpus_per_worker": 1}, 4), ({"gpus_per_worker": 0.5}, 1),
    ({"gpus_per_worker": 0.5, "placement_strategy": "STRICT_SPREAD"}, 4)])
def test_idle_workers_help_with_a_job_unless_they_could_be_on_its_gpu(given: dict[str, Any], most: int) -> None:
    recipe = Recipe.model_validate({"data": "x", "batch_size": 16, "microbatch": 4, "optimizer": {"nominal_batch": 16}})
    assert pool_jobs.most_together(Placement(num_workers=1, **given), recipe) == most


@pytest.fixture
def pool_process(monkeypatch: pytest.MonkeyPatch) -> None:
    """This process can be a pool's worker: actors answer at once."""
    monkeypatch.setattr(worker, "answer", lambda reply: reply)
    monkeypatch.setattr(ray, "get_runtime_context", lambda: SimpleNamespace(get_node_id=lambda: "node"))


class Model:
    """What a job holds: in a reference cycle, as DDP is."""

    def __init__(self) -> None:
        self.itself = self
        MODELS.add(self)


MODELS: weakref.WeakSet[Model] = weakref.WeakSet()


@pytest.mark.parametrize(("has_workers", "text", "is_over", "expected"), [
    (False, "waiting for 1 workers", False, ["waiting for 1 workers"]), (False, "", False, []),
    (True, "waiting for 1 workers", False, []), (False, "waiting for 1 workers", True, []),
])
def test_a_start_says_that_it_waits_for_other_jobs(
        monkeypatch: pytest.MonkeyPatch, has_workers: bool, text: str, is_over: bool, expected: list[str]) -> None:
    said, threads = list[str](), list[threading.Thread]()
    monkeypatch.setattr(pool_jobs, "QUIET_SECONDS", 0.01)
    monkeypatch.setattr(pool_jobs.cluster, "describe_wait", lambda *_: text)
    start = threading.Thread.start
    monkeypatch.setattr(threading.Thread, "start", (lambda thread: threads.append(thread)) if is_over else start)
    with pool_jobs.warns_of_wait(lambda: has_workers, Placement(num_workers=(1, 2)), 0.0, said.append):
        waiting = [thread for thread in threading.enumerate() if thread.name == "ray_yolo wait"]
        for thread in waiting:
            thread.join()
    for thread in threads:  # it looks after the end
        start(thread)
        thread.join()
    assert said == expected
    assert len(waiting) + len(threads) == 1


def train_or_diverge(payload: dict[str, Any], number: int, coordinator: JobClient) -> Summary:
    """Every second job fails, with an error that was raised from another one."""
    model = Model()
    try:
        if number % 2:
            raise ValueError(str(model))
    except ValueError as error:
        raise TrainingError("the loss is not finite") from error
    return Summary(step=1, epoch=0, best_epoch=0, best_fitness=0.0, stopped_early=False, stopped=False,
                   last_epoch=None)


@pytest.mark.usefixtures("own_signal_handlers", "pool_process")
def test_a_pool_worker_keeps_no_model_of_its_jobs_failed_or_not(monkeypatch: pytest.MonkeyPatch) -> None:
    def next_task(uid: str, place: PoolWorker) -> NextTask:
        living.append(len(MODELS))
        if len(living) > 10:
            return NextTask(Orders(stop=True))
        return NextTask(task=JobAssignment("job", len(living), [payload]))

    living, results = list[int](), list[Any]()
    payload = {"coordinator": JobClient(LocalQueue(), "job", 1)}
    queue = SimpleNamespace(next_task=SimpleNamespace(remote=next_task),
                            ended=SimpleNamespace(remote=lambda *report: results.append(report[-1])))
    monkeypatch.setattr(worker, "train_job", train_or_diverge)
    assert worker.pool_worker({"queue": queue}, 0)
    gc.unfreeze()
    assert sum(isinstance(result, TrainingError) for result in results) == 5
    assert living == [0] * 11
