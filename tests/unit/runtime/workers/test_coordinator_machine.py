"""Whatever happens to the workers of a training: in the end one group trains, and no finished step is lost.

`hypothesis` draws workers that come, die, freeze, drain and give their places to other programs, and coordinators that
are restarted. The workers follow the protocol of `RendezvousClient` on a simulated clock.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, precondition, rule

from ray_yolo.core.structures import Orders, Progress
from ray_yolo.core.system import Process
from ray_yolo.runtime.workers.coordinator import Coordinator, Heartbeat, Quorum, Registration

NUMBERS = range(4)  # of bundles
TICK = 0.5  # seconds
LIMIT = 10.0  # seconds that a phase, and a silence, may last
REPORTED_DEPARTURE = 2.0  # seconds after a loss until the others train again, if the driver reports it
SILENT_LOSS = 15.0  # if no report comes
CALM = 240.0  # seconds without disturbance after which all is well


@dataclass
class Worker:
    """A process that trains, or waits to."""

    uid: str
    number: int
    step: int | None = None  # that its state has reached; None: it has no state
    quorum: Quorum | None = None  # of the group that it trains in; None: it has registered
    frozen_until: float = 0.0
    orders: Orders = field(default_factory=Orders)
    blocked_since: float | None = None  # since when it waits for a peer that does not come
    is_saved: bool = False  # its state is on storage

    @property
    def node(self) -> str:
        return f"node{self.number % 2}"


class Training(RuleBasedStateMachine):
    """One training with its coordinator, its workers and its driver."""

    def __init__(self) -> None:
        super().__init__()
        self.now = 0.0
        self.workers: list[Worker] = []
        self.born = 0
        self.draining: set[str] = set()
        self.given: set[int] = set()  # bundles that other programs get
        self.stored = 0  # newest step on storage
        self.furthest = 0  # step of a state that some worker still has
        self.was_restarted = self.is_stopped = False
        self.trained_in = 0  # the newest group that has finished a step
        self.late: set[int] = set()  # older groups that have finished one after that

    @initialize(wanted=st.integers(1, 3))
    def begin(self, wanted: int) -> None:
        self.coordinator = Coordinator(wanted, lambda: self.now)
        for number in range(wanted):
            self.start(number)

    # What happens

    @rule(number=st.sampled_from(NUMBERS))
    def start(self, number: int) -> None:
        """The pool starts a worker in a bundle that has none."""
        if any(worker.number == number for worker in self.workers):
            return
        self.born += 1
        worker = Worker(f"w{self.born}", number)
        if worker.node in self.draining or number in self.given:
            return
        self.workers.append(worker)
        self.register(worker)

    @rule(seconds=st.sampled_from([TICK, 2.0, 6.0]))
    def run(self, seconds: float) -> None:
        end = self.now + seconds
        while self.now < end:
            self.tick()

    @precondition(lambda self: self.workers)
    @rule(data=st.data(), is_reported=st.booleans())
    def kill(self, data: st.DataObject, is_reported: bool) -> None:
        """A process ends; the driver reports it, or cannot know of it."""
        self.lose(data.draw(st.sampled_from(self.workers)), is_reported=is_reported)

    @precondition(lambda self: self.workers)
    @rule(data=st.data(), seconds=st.sampled_from([2.0, 5.0, 30.0]))
    def freeze(self, data: st.DataObject, seconds: float) -> None:
        """A process stops, and goes on later."""
        data.draw(st.sampled_from(self.workers)).frozen_until = self.now + seconds

    @rule(nodes=st.sets(st.sampled_from(["node0", "node1"])))
    def drain(self, nodes: set[str]) -> None:
        self.draining = nodes
        self.coordinator.drain_nodes(nodes)

    @rule(numbers=st.sets(st.sampled_from(NUMBERS)))
    def give(self, numbers: set[int]) -> None:
        self.given = numbers
        self.order_leaves()

    def order_leaves(self) -> None:
        for worker in self.workers:
            if worker.number in self.given:
                self.coordinator.let_leave(worker.uid, at_once=True)

    @rule()
    def restart(self) -> None:
        """The coordinator's process dies, and Ray starts it again without its memory."""
        self.coordinator = Coordinator(1, lambda: self.now, restarted=True)
        self.was_restarted = True

    @precondition(lambda self: self.born > len(NUMBERS) + 2)
    @rule()
    def stop(self) -> None:
        """The driver is interrupted. It repeats the order until it has ended."""
        self.is_stopped = True

    # The workers, one tick each

    def tick(self) -> None:
        self.now += TICK
        self.coordinator.drain_nodes(self.draining)
        awake = [worker for worker in self.workers if worker.frozen_until <= self.now]
        for worker in awake:
            self.send_heartbeat(worker)
        self.order_leaves()
        for worker in awake:
            if worker.quorum is None:
                self.ask_for_quorum(worker)
        if self.is_stopped and not self.coordinator.stop():
            assert all(worker.step is None for worker in awake), "the driver would not wait for their step"
        self.train(awake)
        self.coordinator.describe_stall()  # the driver's watchdog asks for both
        hung = self.coordinator.find_hung_worker()
        if hung:
            for worker in [worker for worker in self.workers if worker.number == hung.process.pid]:
                self.lose(worker, is_reported=True)

    def register(self, worker: Worker) -> None:
        worker.quorum, worker.orders, worker.blocked_since = None, Orders(), None
        self.coordinator.register(worker.uid, self.registration(worker))

    def registration(self, worker: Worker) -> Registration:
        progress = None if worker.step is None else Progress(step=worker.step)
        process = Process(worker.node, "elsewhere", worker.number, 0)
        return Registration(worker.number, process, (worker.uid, 1), progress,
                            self.heartbeat(worker), worker.node, timeout_seconds=2 * LIMIT,
                            is_saved=worker.is_saved)

    def heartbeat(self, worker: Worker) -> Heartbeat:
        if worker.quorum is None:
            return Heartbeat("joining", worker.step or 0, 0.0, LIMIT, LIMIT)
        if worker.blocked_since is None:
            return Heartbeat("computing", worker.step or 0, 0.0, LIMIT, LIMIT)
        return Heartbeat("exchanging", worker.step or 0, self.now - worker.blocked_since, LIMIT, LIMIT)

    def send_heartbeat(self, worker: Worker) -> None:
        current = worker.quorum and (self.registration(worker), worker.quorum)
        orders = self.coordinator.heartbeat(worker.uid, self.heartbeat(worker), current)
        if worker.quorum is None:
            return
        worker.orders = orders
        if orders.abort and worker.blocked_since is not None:  # it aborts the exchange
            self.register(worker)

    def ask_for_quorum(self, worker: Worker) -> None:
        reply: Any = self.coordinator.quorum(worker.uid)
        if reply == "unknown":
            self.register(worker)
        elif reply == "left":
            self.end(worker)
            kept = max([self.stored, *(other.step or 0 for other in self.workers)])
            assert kept >= (worker.step or 0), "a finished step is lost"
        elif isinstance(reply, Quorum):
            worker.quorum = reply
            group = [peer.quorum for peer in self.workers
                     if peer.quorum and (peer.quorum.number, peer.quorum.address) == (reply.number, reply.address)]
            assert {quorum.size for quorum in group} == {reply.size}
            assert len({quorum.rank for quorum in group}) == len(group) <= reply.size

    def train(self, awake: list[Worker]) -> None:
        """A group finishes a step if all its members take part in it; else those that do are blocked."""
        groups: dict[tuple[int, tuple[str, int]], list[Worker]] = {}
        for worker in awake:
            if worker.quorum:
                groups.setdefault((worker.quorum.number, worker.quorum.address), []).append(worker)
        for (number, _), members in groups.items():
            quorum = members[0].quorum
            assert quorum
            if len(members) < quorum.size:
                for worker in members:
                    worker.blocked_since = self.now if worker.blocked_since is None else worker.blocked_since
                continue
            self.finish_step(number, members)

    def finish_step(self, number: int, members: list[Worker]) -> None:
        if not self.was_restarted:  # a restarted one may form a group beside an older one, which then gives way
            # An older group, all of whose members were silent, learns of the newer one by its next heartbeat
            assert number not in self.late, "two groups train at once"
            if number < self.trained_in:
                self.late.add(number)
            self.trained_in = max(self.trained_in, number)
        known = [worker.step for worker in members if worker.step is not None]
        source = next(worker.quorum.source for worker in members if worker.quorum)
        if source is None:
            assert not known
        else:
            (of_source,) = [worker.step for worker in members if worker.quorum and worker.quorum.rank == source]
            assert of_source == max(known), "a finished step is lost"
        step = max(known, default=self.stored) + 1
        regroups = any(worker.orders.regroup for worker in members)
        # With a checkpoint, from which others start. Those that leave without `regroup` train until their node goes
        saves = any(worker.orders.save or worker.orders.stop for worker in members)
        stops = any(worker.orders.stop for worker in members)
        self.stored = step if saves else self.stored
        for worker in members:
            worker.step, worker.blocked_since, worker.is_saved = step, None, saves
            assert worker.quorum
            worker.quorum = worker.quorum._replace(source=0)  # from now on all have the state
        for worker in members:
            if stops:
                self.end(worker)
            elif regroups:
                self.register(worker)

    def lose(self, worker: Worker, *, is_reported: bool) -> None:
        self.workers.remove(worker)
        if is_reported:
            self.coordinator.mark_departed([worker.number])

    def end(self, worker: Worker) -> None:
        self.workers.remove(worker)
        self.coordinator.leave(worker.uid)

    def teardown(self) -> None:
        """When nothing happens any more, all workers train in one group; then a loss costs seconds. After a stop, all
        have ended."""
        self.draining = set()
        for worker in self.workers:
            worker.frozen_until = 0.0
        self.run(CALM)
        assert not [worker for worker in self.workers if worker.number in self.given], "they hold given places"
        self.given = set()
        if self.is_stopped:
            self.run(CALM)
            assert not self.workers
            return
        for _ in range(2):  # those that had to leave have left after the first time
            for number in NUMBERS:
                self.start(number)
            self.run(CALM)
        assert {worker.number for worker in self.workers} == set(NUMBERS)
        self.train_together_within(TICK)
        self.lose(self.workers[-1], is_reported=True)
        self.train_together_within(REPORTED_DEPARTURE)
        self.lose(self.workers[0], is_reported=False)
        self.train_together_within(SILENT_LOSS)

    def train_together_within(self, seconds: float) -> None:
        """Until then, all workers have finished another step, in one group."""
        reached = max(worker.step or 0 for worker in self.workers)
        self.run(seconds)
        groups = {worker.quorum.number for worker in self.workers if worker.quorum}
        assert len(groups) == 1
        assert all(worker.quorum for worker in self.workers)
        assert all((worker.step or 0) > reached for worker in self.workers)


TestTraining = Training.TestCase
TestTraining.settings = settings(stateful_step_count=30)
