"""Whatever happens to the workers and jobs of a pool: each failure is reported once, and in the end all jobs end.

`hypothesis` draws jobs, and workers that come, die, freeze and leave. Workers and trials follow the protocol of
`runtime/workers/worker.py` and `pool_jobs.py` on a simulated clock.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from ray_yolo.core.events import Summary
from ray_yolo.core.system import Process
from ray_yolo.runtime.workers.coordinator import Heartbeat
from ray_yolo.runtime.workers.job_queue import (
    LEAST_WAIT,
    MOST_WAIT,
    JobAssignment,
    JobQueue,
    JobStatus,
    PoolWorker,
)

BUNDLES = range(5)
TICK = 0.5  # seconds
JOB_SECONDS = 40.0  # of training with any number of workers
CALM = 100.0  # seconds without disturbance after which all jobs have ended, if none had to be trained
DIED = RuntimeError("out of memory")
STOPPED = Summary(step=7, epoch=1, best_epoch=1, best_fitness=0.5, stopped_early=False, stopped=True, last_epoch=None)
ENDED = Summary(step=8, epoch=1, best_epoch=1, best_fitness=0.5, stopped_early=False, stopped=False, last_epoch=None)


@dataclass
class Worker:
    """A process of the pool."""

    uid: str
    place: PoolWorker
    assignment: JobAssignment | None = None
    asks_at: float = 0.0
    frozen_until: float = 0.0


@dataclass
class Job:
    """A job, and what its trial knows."""

    wanted: int
    most: int
    trained: float = 0.0  # seconds
    polled: bool = True  # its trial is alive
    failures: int = 0  # that its trial has heard of
    expected: int = 0  # failures that have happened to it and must be reported
    stopped: bool = False  # a worker has saved its last step, because of a stop


class Pool(RuleBasedStateMachine):
    """A queue, its workers and its trials."""

    def __init__(self) -> None:
        super().__init__()
        self.now = 0.0
        self.queue = JobQueue(lambda: self.now)
        self.workers: list[Worker] = []
        self.jobs: dict[str, Job] = {}  # those that have not ended
        self.born = self.submitted = 0
        self.draining: set[str] = set()
        self.given: set[int] = set()
        self.is_stopped = False

    @initialize(bundles=st.integers(2, len(BUNDLES)), wanted=st.integers(1, 3))
    def begin(self, bundles: int, wanted: int) -> None:
        """A sweep has started."""
        for bundle in range(bundles):
            self.start(bundle)
        for more in (0, 1):
            self.submit(wanted, more, 0)

    # What happens

    @rule(wanted=st.integers(1, 3), more=st.integers(0, 2), urgency=st.integers(0, 1))
    def submit(self, wanted: int, more: int, urgency: int) -> None:
        self.submitted += 1
        name = f"job{self.submitted}"
        self.jobs[name] = Job(wanted, wanted + more)
        self.queue.submit(name, f"trial{self.submitted}", wanted, wanted + more, {"of": name}, float(urgency))

    @rule(bundle=st.sampled_from(BUNDLES))
    def start(self, bundle: int) -> None:
        """A worker starts in a bundle that has none."""
        if any(worker.place.bundle == bundle for worker in self.workers):
            return
        self.born += 1
        place = PoolWorker(bundle, f"node{bundle % 2}", Process("elsewhere", "there", self.born, 0))
        self.workers.append(Worker(f"w{self.born}", place))

    @rule(seconds=st.sampled_from([TICK, 2.0, 25.0]))
    def run(self, seconds: float) -> None:
        end = self.now + seconds
        while self.now < end:
            self.tick()

    @precondition(lambda self: self.workers)
    @rule(data=st.data())
    def kill(self, data: st.DataObject) -> None:
        """A process ends, and the driver reports it."""
        worker = data.draw(st.sampled_from(self.workers))
        leaves = self.leaves_pool(worker)
        self.workers.remove(worker)
        without_job = self.queue.mark_departed({worker.place.bundle: DIED})
        if worker.assignment is None:
            return
        is_forgotten = bool(without_job)  # the queue has reported its silence before
        assert not is_forgotten or worker.frozen_until > self.now
        if worker.assignment.job in self.jobs and not leaves and not is_forgotten:
            self.jobs[worker.assignment.job].expected += 1

    @precondition(lambda self: self.workers)
    @rule(data=st.data(), seconds=st.sampled_from([2.0, 15.0, 60.0]))
    def freeze(self, data: st.DataObject, seconds: float) -> None:
        data.draw(st.sampled_from(self.workers)).frozen_until = self.now + seconds

    @precondition(lambda self: any(worker.assignment for worker in self.workers))
    @rule(data=st.data())
    def fail(self, data: st.DataObject) -> None:
        """A worker's part in its job raises an error."""
        worker = data.draw(st.sampled_from([worker for worker in self.workers if worker.assignment]))
        if worker.frozen_until > self.now:
            return
        assert worker.assignment
        if worker.assignment.job in self.jobs:
            self.jobs[worker.assignment.job].expected += 1
        self.end(worker, DIED)

    @rule(nodes=st.sets(st.sampled_from(["node0", "node1"])), given=st.sets(st.sampled_from(BUNDLES), max_size=2))
    def take_away(self, nodes: set[str], given: set[int]) -> None:
        """Nodes drain, and bundles are given to other programs of the cluster."""
        self.draining, self.given = nodes, given
        self.queue.drain_nodes(nodes)
        self.queue.give_bundles(given)

    @precondition(lambda self: self.jobs)
    @rule(data=st.data())
    def cancel(self, data: st.DataObject) -> None:
        name = data.draw(st.sampled_from(sorted(self.jobs)))
        self.queue.cancel(name)
        del self.jobs[name]

    @precondition(lambda self: self.jobs)
    @rule(data=st.data())
    def hold(self, data: st.DataObject) -> None:
        """A job's trial does not answer for some time; or answers again."""
        job = self.jobs[data.draw(st.sampled_from(sorted(self.jobs)))]
        job.polled = not job.polled

    @rule()
    @precondition(lambda self: self.born > len(BUNDLES) + 2)
    def stop(self) -> None:
        """The user interrupts the sweep."""
        self.queue.stop()
        self.is_stopped = True

    # Workers and trials, one tick each

    def tick(self) -> None:
        self.now += TICK
        for worker in list(self.workers):
            if worker.frozen_until > self.now:
                continue
            if worker.assignment is None:
                self.ask(worker)
            else:
                self.work(worker, worker.assignment)
        for name, job in list(self.jobs.items()):
            if job.polled:
                self.poll(name, job)

    def ask(self, worker: Worker) -> None:
        if worker.asks_at > self.now:
            return
        orders, task, ask_again = self.queue.next_task(worker.uid, worker.place)
        assert orders.leave is self.leaves_pool(worker)
        if orders.leave:
            self.workers.remove(worker)
        elif task:
            assert task.job in self.jobs, "a job that has ended, or was cancelled"
            assert not self.is_stopped, "a queue whose jobs were stopped assigns none"
            assert task.config == {"of": task.job}
            worker.assignment = task
        else:
            assert LEAST_WAIT <= ask_again <= MOST_WAIT
            worker.asks_at = self.now + ask_again

    def work(self, worker: Worker, assignment: JobAssignment) -> None:
        """A step of the job. The worker that finishes the job ends it; the others find that it has ended."""
        heartbeat = Heartbeat("computing", int(self.now / TICK), 0.0, 30.0, heartbeat_limit=10.0)
        orders = self.queue.heartbeat(worker.uid, worker.place, assignment[:2], 1, worker.uid, heartbeat)
        if self.leaves_pool(worker):
            assert orders.leave
        job = self.jobs.get(assignment.job)
        assert orders.stop is (self.is_stopped or job is None), "a cancelled job has no driver that waits"
        if orders.leave or job is None:
            self.end(worker, None)
            return
        if orders.stop:
            job.stopped = True
            self.end(worker, STOPPED)
            return
        job.trained += TICK
        if job.trained >= JOB_SECONDS:
            self.end(worker, ENDED)

    def end(self, worker: Worker, result: Summary | Exception | None) -> None:
        assert worker.assignment
        self.queue.ended(worker.uid, worker.place, worker.assignment[:2], result)
        worker.assignment = None

    def poll(self, name: str, job: Job) -> None:
        status = self.queue.poll(name)
        assert isinstance(status, JobStatus)
        job.failures += sum(failure.error is DIED for failure in status.failures)
        if status.stopped and not status.summary:  # it waited for workers
            assert self.is_stopped
            self.queue.cancel(name)
            del self.jobs[name]
        elif status.summary:
            assert job.trained >= JOB_SECONDS or job.stopped
            assert job.failures == job.expected, "a failure was not reported, or twice"
            self.queue.cancel(name)
            del self.jobs[name]

    def leaves_pool(self, worker: Worker) -> bool:
        return worker.place.node in self.draining or worker.place.bundle in self.given

    # Laws

    @invariant()
    def no_two_workers_have_one_part(self) -> None:
        parts = Counter(worker.assignment[:2] for worker in self.workers
                        if worker.assignment and worker.frozen_until <= self.now)
        assert all(count == 1 for count in parts.values()), parts

    @invariant()
    def no_job_has_more_workers_than_it_can_use(self) -> None:
        staying = Counter(worker.assignment.job for worker in self.workers
                          if worker.assignment and worker.frozen_until <= self.now and not self.leaves_pool(worker))
        assert all(count <= self.jobs[job].most for job, count in staying.items() if job in self.jobs), staying

    def teardown(self) -> None:
        """When nothing happens any more, all jobs end, and the queue knows all workers."""
        self.take_away(set(), set())
        for worker in self.workers:
            worker.frozen_until = 0.0
        for job in self.jobs.values():
            job.polled = True
        for bundle in BUNDLES:
            self.start(bundle)
        self.run(CALM + JOB_SECONDS * len(self.jobs))
        assert not self.jobs
        assert len(self.workers) == len(BUNDLES) == self.queue.present()


TestPool = Pool.TestCase
TestPool.settings = settings(stateful_step_count=30)
