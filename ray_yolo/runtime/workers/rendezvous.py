"""A worker's client of the coordinator, and the driver's watchdog, which kills workers that hang."""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import threading
import time
import traceback
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, TypeVar, cast

import ray
import torch
from ray.actor import ActorHandle
from ray.util import get_node_ip_address
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from ray_yolo.core.events import Summary
from ray_yolo.core.structures import Progress
from ray_yolo.core.system import Process, own_process, undo_niceness
from ray_yolo.engine.collectives import (
    LOOPBACK,
    abort_process_group,
    form_process_group,
    leave_process_group,
    serve_rendezvous_store,
)
from ray_yolo.engine.membership import Activity, Generation, Rendezvous
from ray_yolo.ops.torch_internals import import_compiler
from ray_yolo.runs.status import MEMBERS_FILE, write_members
from ray_yolo.runtime import cluster
from ray_yolo.runtime.workers.coordinator import (
    PEERS_NEEDED,
    Coordinator,
    Heartbeat,
    HeartbeatReply,
    HungWorker,
    Quorum,
    Registration,
)
from ray_yolo.runtime.workers.job_queue import JobQueue

_HEARTBEAT_SECONDS = 1.0
_LEAVE_SECONDS = 0.2  # until the heartbeat that says that this worker must leave
_POLL_SECONDS = 0.05
_ANSWER_SECONDS = 60.0
_DEPARTURE_SECONDS = 15.0  # for the other workers, after the first has finished

T = TypeVar("T")


def start_here(kind: type[T], *arguments: Any) -> ActorHandle[T]:
    """Start an actor on this node, without reserving a CPU. If its process dies, Ray restarts it with `restarted`."""
    here = NodeAffinitySchedulingStrategy(ray.get_runtime_context().get_node_id(), soft=False)

    def initialise(self: Any, *arguments: Any) -> None:
        undo_niceness()  # all workers wait for it
        restarted = bool(ray.get_runtime_context().was_current_actor_reconstructed)
        cast(Any, kind).__init__(self, *arguments, restarted=restarted)

    actor = ray.remote(type(kind.__name__, (kind,), {"__init__": initialise})).options(
        num_cpus=0, max_restarts=-1, max_task_retries=-1, scheduling_strategy=here)
    return cast("ActorHandle[T]", actor.remote(*arguments))


def own_address() -> str:
    """The address at which other workers reach this one: loopback if all of them are on this node."""
    return LOOPBACK if os.environ.get(cluster.LOCAL) else str(get_node_ip_address())


class RendezvousClient(Rendezvous):
    """A client of the coordinator, which forms the generations. A thread sends it this worker's `activity`.

    Args:
        worker: this worker's number in Ray.
        device: on which it trains.
        timeout_seconds: after which a collective operation has failed.
        notify: receives this worker's stacks, if others wait for it.
        must_leave: whether this worker has to leave after the current step.
        alone: this worker may start before its peers, and before it has loaded what only groups need.
    """

    lasting = False

    def __init__(self, coordinator: ActorHandle[Coordinator], worker: int, activity: Activity, device: torch.device,
                 timeout_seconds: float, notify: Callable[[str], None], must_leave: Callable[[], bool], *, alone: bool
                 ) -> None:
        self._coordinator, self._worker, self._activity, self._timeout = coordinator, worker, activity, timeout_seconds
        self._uid, self._left = uuid.uuid4().hex, threading.Event()
        self._must_regroup = self._all_draining = False
        self._notify, self._must_leave, self._device, self._alone = notify, must_leave, device, alone
        self._groups = 0  # formed so far
        self._generation = 0  # number of the newest one
        self._current: tuple[Registration, Quorum] | None = None  # the generation, and the request for it
        self._preload = threading.Thread(target=import_compiler, name="ray_yolo preload", daemon=True)
        threading.Thread(target=self._send_heartbeats, name="ray_yolo heartbeat", daemon=True).start()

    def join(self, progress: Progress | None) -> Generation | Summary | None:
        """Wait for the next generation and form its process group. Collective.

        Raises:
            PeerLostError: if a peer was lost meanwhile.
            ray.exceptions.RayError: if the coordinator does not answer.
        """
        leave_process_group()
        self._current = None  # otherwise the heartbeat thread would introduce the generation that this worker has left
        if not self._alone:
            import_compiler()
        host = own_address()
        store = serve_rendezvous_store(host)
        node = ray.get_runtime_context().get_node_id()
        request = Registration(self._worker, own_process(), (host, store.port), progress, self._now(), node,
                               self._timeout)
        answer(self._coordinator.register.remote(self._uid, request))
        began = time.monotonic()
        while (reply := answer(self._coordinator.quorum.remote(self._uid))) in (None, "unknown"):
            if reply:  # the coordinator was restarted
                answer(self._coordinator.register.remote(self._uid, request))
            waited = time.monotonic() - began  # many may wait, and some for long
            time.sleep(min(max(_POLL_SECONDS, waited / 10), _HEARTBEAT_SECONDS))
        self._must_regroup = False
        if not isinstance(reply, Quorum):
            return reply if isinstance(reply, Summary) else None
        self._groups, self._current = self._groups + 1, (request, reply)
        self._generation = reply.number
        collectives = form_process_group(store, reply.address, reply.worker, reply.num_workers, self._timeout,
                                         self._device)
        return Generation(collectives, reply.source, reply.behind)

    def must_regroup(self) -> bool:
        """By the last heartbeat's reply."""
        return self._must_regroup

    def all_draining(self) -> bool:
        """By the last heartbeat's reply."""
        return self._all_draining

    def elect_saver(self) -> bool:
        """Whether this worker saves the last finished step: the coordinator elects one worker of each generation."""
        return cast(bool, answer(self._coordinator.elect_saver.remote(self._generation)))

    def finish(self, summary: Summary) -> None:
        """Report to the coordinator that training has ended."""
        answer(self._coordinator.end.remote(summary))

    def close(self) -> None:
        """Leave the generation; peers notice it by their connections and from the coordinator."""
        self._left.set()
        self._coordinator.leave.remote(self._uid)
        leave_process_group()

    def _now(self) -> Heartbeat:
        activity = self._activity
        return Heartbeat(activity.phase, activity.step, time.monotonic() - activity.since, activity.limit,
                         activity.heartbeat_limit, self._must_leave())

    def _send_heartbeats(self) -> None:
        stack_dump_requests, sent, leaves = None, time.monotonic(), False
        while not self._left.wait(_LEAVE_SECONDS):
            if time.monotonic() - sent < _HEARTBEAT_SECONDS and self._must_leave() == leaves:
                continue
            sent, leaves = time.monotonic(), self._must_leave()
            with contextlib.suppress(ray.exceptions.RayError):
                group = self._groups
                reply: HeartbeatReply = answer(self._coordinator.heartbeat.remote(self._uid, self._now()))
                is_over = reply.unknown and not self._introduce()
                self._must_regroup = (is_over or reply.must_regroup) and self._can_join()
                self._all_draining = reply.all_draining
                if stack_dump_requests not in (None, reply.stack_dump_requests):
                    self._notify(stacks())
                stack_dump_requests = reply.stack_dump_requests
                waits = self._activity.phase in PEERS_NEEDED
                if (reply.peer_lost or is_over) and waits and group == self._groups:  # else it is for another group
                    abort_process_group()

    def _introduce(self) -> bool:
        """Report this worker's generation to a restarted coordinator. Returns whether it is the current one."""
        if self._current is None or self._left.is_set():
            return True
        request, quorum = self._current
        request = request._replace(heartbeat=self._now())
        return cast(bool, answer(self._coordinator.introduce.remote(self._uid, request, quorum)))

    def _can_join(self) -> bool:
        """Whether this worker has loaded what a group needs. A worker that started alone loads it while it trains."""
        if self._alone and self._preload.ident is None:
            self._preload.start()
        return not self._preload.is_alive()


def answer(reference: Any) -> Any:
    """The coordinator's reply, within a time limit."""
    return ray.get(reference, timeout=_ANSWER_SECONDS)


def drain_nodes(coordinator: ActorHandle[Coordinator] | ActorHandle[JobQueue], known: set[str],
                notify: Callable[[str], None]) -> tuple[set[str], dict[int, str]]:
    """Have workers leave draining nodes after the current step; notify of nodes that were not `known` as draining.

    Returns:
        The draining nodes, and the node of each worker that has to leave, by its number.
    """
    nodes = cluster.draining_nodes()
    leaving = answer(coordinator.drain_nodes.remote(nodes)) if nodes else {}
    for node in nodes - known:
        notify(cluster.leave_notice(node))
    return nodes, leaving


def await_departure(coordinator: ActorHandle[Coordinator]) -> None:
    """Wait until all living workers have left an ended training: each sends its last events before."""
    deadline = time.monotonic() + _DEPARTURE_SECONDS
    with contextlib.suppress(ray.exceptions.RayError):
        while answer(coordinator.present.remote()) and time.monotonic() < deadline:
            time.sleep(_POLL_SECONDS)


@contextlib.contextmanager
def watchdog(coordinator: ActorHandle[Coordinator] | None, run_dir: Path, notify: Callable[[str], None]
             ) -> Iterator[None]:
    """Context in which the driver reports stalls, kills hung workers, and writes the status of workers to a file."""
    over = threading.Event()

    def watch(coordinator: ActorHandle[Coordinator]) -> None:
        while not over.wait(_HEARTBEAT_SECONDS):
            with contextlib.suppress(ray.exceptions.RayError):
                write_members(run_dir, answer(coordinator.worker_statuses.remote()))
                if stall := answer(coordinator.describe_stall.remote()):
                    notify(stall)
                hung: HungWorker | None = answer(coordinator.find_hung_worker.remote())
                if hung:
                    notify(f"{hung.text}: it is killed, and the others continue")
                    kill(hung.process)
        with contextlib.suppress(OSError):
            (run_dir / MEMBERS_FILE).unlink(missing_ok=True)

    if coordinator:
        threading.Thread(target=watch, args=(coordinator,), name="ray_yolo watchdog", daemon=True).start()
    try:
        yield
    finally:
        over.set()


def kill(process: Process) -> None:
    """Send SIGKILL to a process on any node; it also ends a frozen one."""
    if process.is_here:
        _kill(process)
        return
    nodes = [node["NodeID"] for node in ray.nodes() if node["Alive"] and node["NodeManagerHostname"] == process.node]
    for node in nodes:
        strategy = NodeAffinitySchedulingStrategy(node, soft=False)
        answer(ray.remote(num_cpus=0)(_kill).options(scheduling_strategy=strategy).remote(process))


def _kill(process: Process) -> None:
    if process.is_here:  # several nodes may share a host name, and a process id may exist on each
        with contextlib.suppress(ProcessLookupError):
            os.kill(process.pid, signal.SIGKILL)


def stacks() -> str:
    """The stack of every thread of this process."""
    names = {thread.ident: thread.name for thread in threading.enumerate()}
    return "\n".join(f"{names.get(number, number)}:\n{''.join(traceback.format_stack(frame))}"
                     for number, frame in sys._current_frames().items())
