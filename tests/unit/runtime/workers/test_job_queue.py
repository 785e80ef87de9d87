"""The job queue alone, on the test's clock: assignments of workers to jobs."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from typing import Any

import pytest

from ray_yolo.core.errors import ConfigError, ResourcesError
from ray_yolo.core.events import Summary
from ray_yolo.core.structures import Orders, Progress
from ray_yolo.core.system import Process
from ray_yolo.runtime.workers.coordinator import Heartbeat, Quorum, Registration
from ray_yolo.runtime.workers.job_queue import (
    ABSENCE_SECONDS,
    ENDING_SECONDS,
    HUNG_SECONDS,
    IDLE_SECONDS,
    SILENCE_SECONDS,
    START_SECONDS,
    JobAssignment,
    JobQueue,
    JobStatus,
    NextTask,
    PoolWorker,
)

ELSEWHERE = Process("node7", "pid:[1]", 42, 7)
NODES = {"a": "left", "b": "right"}  # of workers; else a third one
JOINING = Heartbeat("joining", 0, 0.0, 30.0)
LIMIT = 20.0  # seconds without a heartbeat
DIED = RuntimeError("out of memory")
ENDED = Summary(step=8, epoch=1, best_epoch=1, best_fitness=0.5, stopped_early=False, stopped=False, last_epoch=None)


class Desk:
    """A job queue, its clock, and workers a, b, c, ...; jobs have numbers."""

    def __init__(self) -> None:
        self.now = 0.0
        self.queue = JobQueue(lambda: self.now)
        self.at: dict[str, tuple[str, int]] = {}
        self.step = 0

    def place(self, name: str) -> PoolWorker:
        """Of a worker: a has number 0, b 1, ..."""
        return PoolWorker(ord(name) - ord("a"), NODES.get(name, "middle"), ELSEWHERE)

    def submit(self, *jobs: str, wanted: int = 2, most: int = 2, folder: str = "", priority: float = 0.0) -> None:
        for job in jobs:
            self.queue.submit(job, folder or f"trial{job}", wanted, most, {"of": job}, priority)

    def acquire(self, names: str) -> list[tuple[str, int] | str | None]:
        """What each is given: (job, number); None: it has to ask again."""
        given: list[tuple[str, int] | str | None] = []
        for name in names:
            orders, task, ask_again = self.queue.next_task(name, self.place(name))
            if task:
                assert task.config == {"of": task.job}
                self.at[name] = task[:2]
                given.append(self.at[name])
            else:
                assert bool(ask_again) is not (orders.leave or orders.stop)
                given.append("leave" if orders.leave else "over" if orders.stop else None)
        return given

    def heartbeat(self, names: str, leaving: str = "") -> list[bool]:
        """Whether each has to leave; it has finished another step."""
        self.step += 1
        sent = Heartbeat("computing", self.step, 0.0, 30.0, heartbeat_limit=LIMIT)
        return [self.queue.heartbeat(name, self.place(name), self.at[name], 1, name,
                                     sent._replace(leaves=name in leaving)).leave for name in names]

    def end(self, names: str, outcome: Summary | Exception | None = ENDED) -> None:
        for name in names:
            self.queue.ended(name, self.place(name), self.at.pop(name), outcome)

    def pass_by(self, seconds: float, busy: str = "", jobs: str = "") -> None:
        """Seconds pass, in each of which busy workers send a heartbeat, and jobs are polled."""
        for _ in range(int(seconds)):
            self.now += 1.0
            self.heartbeat(busy)
            for job in jobs:
                assert isinstance(self.queue.poll(job), JobStatus)

    def failures(self, job: str) -> list[tuple[int, str]]:
        news = self.queue.poll(job)
        assert isinstance(news, JobStatus)
        return [(number, "lost" if error is None else str(error)) for number, error in news.failures]


def working() -> Desk:
    """a and b train job 1, c and d job 2."""
    desk = Desk()
    desk.submit("1", "2")
    for name in "abcd":
        desk.acquire(name)
    assert desk.at == {"a": ("1", 0), "b": ("1", 1), "c": ("2", 0), "d": ("2", 1)}
    return desk


def test_workers_go_from_job_to_job_in_the_order_of_the_offers() -> None:
    desk = working()
    desk.submit("3", "4", "5")
    desk.end("cd")
    assert desk.queue.poll("2") == JobStatus(ENDED, ())
    for name in "cd":
        desk.acquire(name)
    desk.end("ab")
    for name in "ab":
        desk.acquire(name)
    assert desk.at == {"c": ("3", 0), "d": ("3", 1), "a": ("4", 0), "b": ("4", 1)}
    assert desk.acquire("e") == [("5", 0)]
    assert desk.queue.poll("6") is None


def test_a_job_has_ended_when_all_its_workers_have_or_their_time_is_up() -> None:
    desk = working()
    desk.end("a")
    assert desk.queue.poll("1") == JobStatus(None, ())
    assert desk.acquire("a") == [None]  # an ended job needs no worker
    desk.end("b")
    assert desk.queue.poll("1") == JobStatus(ENDED, ())
    desk.end("c")
    desk.pass_by(ENDING_SECONDS, "d")
    assert desk.queue.poll("2") == JobStatus(None, ())
    desk.pass_by(1, "d")
    assert desk.queue.poll("2") == JobStatus(ENDED, ())


def test_a_silent_worker_is_lost_and_another_one_takes_its_number() -> None:
    desk = working()
    desk.heartbeat("abcd")
    desk.pass_by(LIMIT + HUNG_SECONDS + 1, "acd", "12")
    assert desk.queue.present() == 3
    desk = working()
    desk.heartbeat("abcd")
    desk.pass_by(LIMIT + HUNG_SECONDS, "acd", "12")
    desk.now += 0.5
    assert desk.failures("1") == [(1, "lost")]
    assert desk.acquire("e") == [None]  # until the failure was judged
    assert desk.failures("1") == []
    desk.acquire("e")
    assert desk.at["e"] == ("1", 1)
    desk.heartbeat("b")  # was only slow: both stay, the job's coordinator admits it too
    assert desk.queue.present() == 5


def test_the_driver_of_a_job_finds_a_hung_worker_before_the_queue_forgets_it() -> None:
    """Code that holds the interpreter sends no heartbeats. The process must be killed: it holds its bundle."""
    desk = working()
    for number, name in enumerate("ab"):
        desk.queue.coordinator("1", 2, "register", name, Registration(number, ELSEWHERE, (name, 1), None, JOINING))
    for name in "ab":
        assert desk.queue.coordinator("1", 2, "quorum", name)
    desk.heartbeat("abcd")
    hung = None
    while not hung:
        desk.pass_by(1, "acd", "2")
        assert desk.failures("1") == []
        hung = desk.queue.coordinator("1", 2, "find_hung_worker")
        assert desk.now < 3 * LIMIT
    assert hung.process == ELSEWHERE
    assert "worker 1" in hung.text
    assert desk.queue.mark_departed({1: DIED}) == []  # Ray has noticed the end of the process
    assert desk.failures("1") == [(1, "out of memory")]


def test_an_idle_worker_is_lost_sooner_than_a_busy_one() -> None:
    desk = Desk()
    assert desk.acquire("a") == [None]
    desk.now += SILENCE_SECONDS + 1
    assert desk.queue.present() == 0
    desk.submit("1", wanted=1)
    assert desk.acquire("a") == [("1", 0)]
    desk.now += SILENCE_SECONDS + 1  # it receives the job
    assert desk.queue.present() == 1
    desk.now += START_SECONDS
    assert desk.failures("1") == [(0, "lost")]


def test_a_failure_is_reported_to_the_jobs_trial_alone() -> None:
    desk = working()
    desk.end("ab", ConfigError("lr0: bad"))
    assert desk.acquire("ab") == [None, None]
    assert desk.failures("1") == [(0, "lr0: bad"), (1, "lr0: bad")]
    desk.queue.cancel("1")
    desk.submit("3")
    for name in "ab":
        desk.acquire(name)
    assert desk.at["b"] == ("3", 1)
    assert desk.failures("2") == []


def test_a_job_that_is_not_polled_is_not_assigned() -> None:
    desk = Desk()
    desk.submit("1")
    desk.now += ABSENCE_SECONDS + 1
    assert desk.acquire("a") == [None]
    desk.queue.poll("1")  # it was only slow
    assert desk.acquire("a") == [("1", 0)]


def test_another_attempt_gets_a_folder_once_no_worker_uses_it() -> None:
    desk = Desk()
    desk.submit("1", wanted=1)
    desk.acquire("a")
    desk.queue.cancel("1")  # its trial died
    desk.submit("2", wanted=1, folder="trial1")
    assert desk.acquire("b") == [None]
    desk.end("a", None)
    assert desk.acquire("b") == [("2", 0)]


def test_idle_workers_help_where_they_can_and_are_called_back() -> None:
    desk = Desk()
    desk.submit("1", "2", most=3)
    for name in "abcdef":
        desk.acquire(name)
    assert desk.at.keys() == set("abcd")
    desk.pass_by(IDLE_SECONDS - 1, "abcd", "12")
    assert desk.acquire("ef") == [None, None]
    desk.pass_by(1, "abcd", "12")
    assert desk.acquire("ef") == [("1", 2), ("2", 2)]
    desk.submit("3")
    assert desk.heartbeat("abcdef") == [False] * 5 + [True]
    assert desk.heartbeat("abcdef") == [False] * 5 + [True]  # one after the other
    desk.end("f", None)
    assert desk.acquire("f") == [("3", 0)]
    assert desk.heartbeat("abcdef") == [False] * 4 + [True, False]


def test_workers_of_a_node_that_is_taken_away_leave_after_the_step_and_are_no_failures() -> None:
    desk = working()
    assert desk.queue.drain_nodes({"left"}) == {0: "left"}
    assert desk.heartbeat("abcd") == [True, False, False, False]
    desk.end("a", None)
    assert desk.acquire("a") == ["leave"]
    assert desk.queue.drain_nodes({"left", "right"}) == {1: "right"}
    assert desk.queue.mark_departed({1: DIED}) == []  # with its node, before it could leave
    assert desk.failures("1") == []
    assert desk.acquire("e") == [("1", 0)]
    assert desk.queue.mark_departed({2: DIED, 9: DIED}) == [9]  # the latter has never asked for a job
    assert desk.failures("2") == [(0, "out of memory")]
    desk.queue.drain_nodes(set())
    assert desk.acquire("a") == [("1", 1)]


def test_the_workers_of_bundles_that_are_given_away_leave_after_the_step_and_are_no_failures() -> None:
    desk = working()
    desk.queue.give_bundles({0})
    assert desk.heartbeat("abcd") == [True, False, False, False]
    desk.end("a", None)
    assert desk.acquire("a") == ["leave"]
    desk.queue.give_bundles({0, 1})
    assert desk.queue.mark_departed({1: DIED}) == []  # before it could leave
    assert desk.failures("1") == []
    desk.queue.give_bundles(set())
    assert desk.acquire("a") == [("1", 0)]


def test_the_only_worker_of_a_job_leaves_at_once_for_another_program() -> None:
    """On a node that is taken away it trains on meanwhile; as soon as its step is saved, its place is another's."""
    desk = Desk()
    desk.submit("1", wanted=1, most=1)
    assert desk.acquire("a") == [("1", 0)]

    def register(step: int | None, *, is_saved: bool = False) -> Any:
        progress = None if step is None else Progress(step=step)
        request = Registration(0, ELSEWHERE, ("a", 1), progress, JOINING, is_saved=is_saved)
        desk.queue.coordinator("1", 1, "register", "a", request)
        return desk.queue.coordinator("1", 1, "quorum", "a")

    def orders() -> Orders:
        sent = Heartbeat("computing", 3, 0.0, 30.0, heartbeat_limit=LIMIT)
        current = Registration(0, ELSEWHERE, ("a", 1), None, JOINING), generation
        desk.now += 1.0
        return desk.queue.heartbeat("a", desk.place("a"), ("1", 0), 1, "a", sent, current)

    generation = register(None)
    desk.queue.drain_nodes({"left"})
    assert orders() == Orders(save=True, leave=True)
    desk.queue.give_bundles({0})
    assert orders() == Orders(save=True, leave=True, regroup=True)
    generation = register(3)  # without a save it stays
    assert isinstance(generation, Quorum)
    assert register(4, is_saved=True) == "left"
    desk.end("a", None)
    assert desk.acquire("ab") == ["leave", ("1", 0)]
    assert desk.failures("1") == []


def test_the_part_of_a_worker_that_leaves_is_given_to_an_idle_one() -> None:
    """One that got SIGTERM, and one on a node that is taken away: a single worker saves and trains on until then."""
    desk = working()
    assert desk.acquire("e") == [None]
    assert desk.heartbeat("cd", leaving="d") == [False, True]
    assert desk.acquire("e") == [("2", 2)]
    assert desk.heartbeat("abcd") == [False, False, False, True]
    desk.queue.drain_nodes({"left"})
    assert desk.acquire("f") == [("1", 2)]


@pytest.mark.parametrize("asks", ["ask", "news"])
def test_closing_the_queue_is_reported_to_workers_and_trials(asks: str) -> None:
    desk = working()
    assert desk.queue.progress() == 4  # have come up
    desk.heartbeat("ab")
    assert desk.queue.progress() == 6
    reason = ResourcesError("the sweep has ended")
    desk.queue.close(reason)
    assert (desk.acquire("e") == ["over"]) if asks == "ask" else (desk.queue.poll("1") is reason)


def test_each_job_has_a_coordinator_that_outlives_it() -> None:
    desk = Desk()
    desk.submit("1", "2")
    for job, name in (("1", "a"), ("2", "b")):
        desk.queue.coordinator(job, 1, "register", name, Registration(0, ELSEWHERE, (name, 1), None, JOINING))
    assert [desk.queue.coordinator(job, 1, "quorum", name).address for job, name in (("1", "a"), ("2", "b"))] == [
        ("a", 1), ("b", 1)]
    desk.queue.cancel("1")
    desk.queue.coordinator("1", 1, "end", ENDED)
    assert [desk.queue.coordinator(job, 1, "outcome") for job in "12"] == [ENDED, None]


def test_a_restarted_queue_hears_of_its_workers_before_it_assigns_jobs() -> None:
    """Otherwise an idle worker would start a job that others train, and its coordinator another generation."""
    desk = working()
    desk.queue = JobQueue(lambda: desk.now, restarted=True)
    desk.submit("1", "2", wanted=2)
    assert desk.acquire("e") == [None]
    desk.queue.coordinator("1", 1, "register", "e", Registration(4, ELSEWHERE, ("e", 1), None, JOINING))
    assert desk.queue.coordinator("1", 1, "quorum", "e") is None
    desk.pass_by(4, "abcd", "12")
    assert desk.acquire("e") == [None]
    desk.queue.coordinator("1", 1, "heartbeat", "e", JOINING)
    assert desk.queue.coordinator("1", 1, "quorum", "e").size == 1
    desk.submit("3", wanted=1)
    assert desk.acquire("e") == [("3", 0)]
    desk.queue.coordinator("3", 1, "register", "e", Registration(0, ELSEWHERE, ("e", 1), None, JOINING))
    assert desk.queue.coordinator("3", 1, "quorum", "e").size == 1  # a new job's coordinator does not wait


def test_what_is_known_does_not_grow_with_the_jobs_that_have_ended() -> None:
    desk = Desk()
    for number in range(1_000):
        job = str(number)
        desk.submit(job, wanted=1, most=1)
        desk.acquire("a")
        desk.queue.coordinator(job, 1, "register", job, Registration(0, ELSEWHERE, (job, 1), None, JOINING))
        desk.end("a")
        desk.queue.cancel(job)
        desk.queue.coordinator(job, 1, "end", ENDED)
    assert desk.queue.coordinator("950", 1, "outcome") == ENDED  # its workers may still ask
    assert all(len(value) <= 101 for value in vars(desk.queue).values() if hasattr(value, "__len__"))


def test_the_most_urgent_job_gets_workers_and_helpers_first() -> None:
    desk = Desk()
    desk.submit("1", wanted=1, most=3, priority=9.0)
    desk.submit("2", wanted=1, most=3, priority=3.0)
    assert desk.acquire("ab") == [("2", 0), ("1", 0)]
    assert desk.acquire("c") == [None]
    desk.pass_by(4, "ab", "12")
    assert desk.acquire("c") == [("2", 1)]


def test_a_trial_learns_of_the_end_of_its_job_when_it_ends() -> None:
    desk = Desk()
    desk.submit("0", wanted=1)
    desk.acquire("a")

    async def end_while_it_waits() -> None:
        waiting = asyncio.create_task(desk.queue.wait_for_news("0", 60.0))
        await asyncio.sleep(0.01)
        assert not waiting.done()
        desk.end("a")
        assert await asyncio.wait_for(waiting, 1.0) == JobStatus(ENDED, ())
        assert await desk.queue.wait_for_news("0", 0.01) == JobStatus(ENDED, ())

    asyncio.run(end_while_it_waits())


def assigned(reply: NextTask) -> JobAssignment:
    assert reply.task
    return reply.task


def cpu_seconds(num_workers: int, busy_share: float) -> float:
    """CPU seconds of one second of calls: ten of each idle worker, a heartbeat of each other one, polls of each job."""
    now = [0.0]
    queue = JobQueue(lambda: now[0])
    workers = {str(number): PoolWorker(number, "node", ELSEWHERE) for number in range(num_workers)}
    busy = list(workers)[:int(num_workers * busy_share)]
    jobs = [str(number) for number in range(8 * bool(busy))]
    for job in jobs:
        queue.submit(job, job, len(busy) // 8, len(busy) // 8, None)
    at = {uid: assigned(queue.next_task(uid, workers[uid])) for uid in busy}
    began = time.process_time()
    for turn in range(10):
        now[0] += 0.1
        for uid, worker in workers.items():
            if uid not in at:
                queue.next_task(uid, worker)
        for uid in busy[turn::10]:
            queue.heartbeat(uid, workers[uid], at[uid][:2], 1, uid, JOINING)
        for job in jobs:
            queue.poll(job)
    return time.process_time() - began


@pytest.mark.parametrize("busy_share", [0.0, 0.5])
def test_the_cost_of_a_second_grows_no_faster_than_the_number_of_workers(busy_share: float) -> None:
    """Four times as many workers may take four times as long; a pass over all of them at each call took 16 times."""
    small, large = (min(cpu_seconds(number, busy_share) for _ in range(3)) for number in (256, 1024))
    assert large < 9 * small


def test_idle_workers_ask_less_often_where_there_are_many() -> None:
    queue = JobQueue(lambda: 0.0)
    waits = [queue.next_task(str(number), PoolWorker(number, "node", ELSEWHERE)).ask_again for number in range(3000)]
    assert waits[0] == waits[99] == 0.1  # seconds
    assert waits[999] == 1.0
    assert waits[-1] == 2.0  # far below the limit of silence


@pytest.mark.parametrize("order", [
    lambda queue: queue.stop(), lambda queue: queue.order("1", 2, "stop"), lambda queue: queue.give_bundles({0}),
    lambda queue: queue.drain_nodes({"left"})])
def test_a_heartbeat_waits_for_an_order_and_gets_it_at_once(order: Callable[[JobQueue], object]) -> None:
    desk = working()
    desk.queue = JobQueue()  # with a real clock
    desk.submit("1")
    desk.acquire("a")
    heartbeat = Heartbeat("computing", 1, 0.0, 30.0)

    async def order_while_it_waits() -> float:
        report = desk.queue.report(Orders(), "1", 2, "a", heartbeat, None, ("a", desk.place("a"), 0))
        waiting = asyncio.create_task(report)
        await asyncio.sleep(0.05)
        assert not waiting.done()
        began = time.monotonic()
        order(desk.queue)
        orders = await waiting
        assert orders.stop or orders.leave
        return time.monotonic() - began

    assert asyncio.run(order_while_it_waits()) < 0.5


def test_a_heartbeat_without_an_order_is_answered_within_a_second() -> None:
    began = time.monotonic()
    heartbeat = Heartbeat("computing", 1, 0.0, 30.0)
    assert asyncio.run(JobQueue().report(Orders(), "1", 1, "a", heartbeat, None, None)) == Orders()
    assert 0.9 < time.monotonic() - began < SILENCE_SECONDS
