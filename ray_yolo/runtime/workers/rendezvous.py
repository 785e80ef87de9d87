"""A worker's place on the roster, and the driver's eye on it: how a training goes on when a worker is lost or hangs."""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import threading
import time
import traceback
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
from ray_yolo.core.system import Process, own_process
from ray_yolo.engine.collectives import (
    LOOPBACK,
    abort_process_group,
    form_process_group,
    leave_process_group,
    preload,
    serve_rendezvous_store,
)
from ray_yolo.engine.membership import Activity, Generation
from ray_yolo.runs.status import MEMBERS_FILE, Member, write_members
from ray_yolo.runtime.cluster import LOCAL
from ray_yolo.runtime.workers.coordinator import (
    PEERS_NEEDED,
    Coordinator,
    Heartbeat,
    HeartbeatReply,
    HungWorker,
    Quorum,
    Registration,
    WorkerStatus,
)

_HEARTBEAT_SECONDS = 1.0
_ASK_SECONDS = 0.05
_ANSWER_SECONDS = 60.0

T = TypeVar("T")


def start_here(kind: type[T], *arguments: Any) -> ActorHandle[T]:
    """An actor on this node that costs no CPU of it. If its process dies it is started again, empty and `restarted`."""
    here = NodeAffinitySchedulingStrategy(ray.get_runtime_context().get_node_id(), soft=False)

    def begin(self: Any, *given: Any) -> None:
        restarted = bool(ray.get_runtime_context().was_current_actor_reconstructed)
        cast(Any, kind).__init__(self, *given, restarted=restarted)

    actor = ray.remote(type(kind.__name__, (kind,), {"__init__": begin})).options(
        num_cpus=0, max_restarts=-1, max_task_retries=-1, scheduling_strategy=here)
    return cast("ActorHandle[T]", actor.remote(*arguments))


def own_address() -> str:
    """Where other workers reach this one: at the address by which Ray knows its node, if they can be on others."""
    return LOOPBACK if os.environ.get(LOCAL) else str(get_node_ip_address())


class RendezvousClient:
    """How a session finds the others by the roster; see `Membership`. A thread tells the roster of `pulse`.

    Args:
        worker: this worker's number among Ray's.
        device: what it trains on.
        timeout_seconds: after which a collective operation has failed.
        tell: takes this worker's stacks, if it holds up the others.
        uid: what the roster knows this worker by.
        alone: it may begin before others come, hence without what only groups need.
    """

    lasting = False

    def __init__(self, coordinator: ActorHandle[Coordinator], worker: int, activity: Activity, device: torch.device,
                 timeout_seconds: float, notify: Callable[[str], None], uid: str, *, alone: bool) -> None:
        self._coordinator, self._worker, self._activity, self._timeout = coordinator, worker, activity, timeout_seconds
        self._uid, self._left = uid, threading.Event()
        self._must_regroup = self._all_draining = False
        self._notify, self._device, self._alone = notify, device, alone
        self._groups = 0  # so far
        # the generation, and what this worker asked for it with
        self._present: tuple[Registration, Quorum] | None = None
        self._preload = threading.Thread(target=preload, name="ray_yolo preload", daemon=True)
        threading.Thread(target=self._heartbeat, name="ray_yolo pulse", daemon=True).start()

    def join(self, progress: Progress | None) -> Generation | Summary | None:
        """Wait for the next generation and form its process group. Collective.

        Raises:
            PeerLostError: if somebody was lost on the way.
            ray.exceptions.RayError: if the roster does not answer.
        """
        leave_process_group()
        if not self._alone:
            preload()
        host = own_address()
        store = serve_rendezvous_store(host)
        node = ray.get_runtime_context().get_node_id()
        arrival = Registration(
            self._worker, own_process(), (host, store.port), progress, self._now(), node, self._timeout
        )
        answer(self._coordinator.register.remote(self._uid, arrival))
        began = time.monotonic()
        while (found := answer(self._coordinator.quorum.remote(self._uid))) in (None, "unknown"):
            if found:  # by a roster that was started again
                answer(self._coordinator.register.remote(self._uid, arrival))
            waited = time.monotonic() - began  # many may wait, and some for long
            time.sleep(min(max(_ASK_SECONDS, waited / 10), _HEARTBEAT_SECONDS))
        self._must_regroup = False
        if not isinstance(found, Quorum):
            return found if isinstance(found, Summary) else None
        self._groups, self._present = self._groups + 1, (arrival, found)
        collectives = form_process_group(store, found.address, found.worker, found.num_workers, self._timeout,
                              self._device)
        return Generation(collectives, found.source, found.behind)

    def must_regroup(self) -> bool:
        """As the last beat was told."""
        return self._must_regroup

    def all_draining(self) -> bool:
        """As the last beat was told."""
        return self._all_draining

    def elect_saver(self) -> bool:
        """Asks the roster."""
        return cast(bool, answer(self._coordinator.elect_saver.remote()))

    def finish(self, summary: Summary) -> None:
        """Tells the roster."""
        answer(self._coordinator.end.remote(summary))

    def close(self) -> None:
        """Leave the others, who are told by their connections and by the roster."""
        self._left.set()
        self._coordinator.leave.remote(self._uid)
        leave_process_group()

    def _now(self) -> Heartbeat:
        activity = self._activity
        return Heartbeat(
            activity.phase, activity.step, time.monotonic() - activity.since, activity.limit, activity.heartbeat_limit
        )

    def _heartbeat(self) -> None:
        stack_dump_requests = None
        while not self._left.wait(_HEARTBEAT_SECONDS):
            with contextlib.suppress(ray.exceptions.RayError):
                asked_in = self._groups
                reply: HeartbeatReply = answer(self._coordinator.heartbeat.remote(self._uid, self._now()))
                is_over = reply.unknown and not self._introduces()
                self._must_regroup = (is_over or reply.must_regroup) and self._can_join()
                self._all_draining = reply.all_draining
                if stack_dump_requests not in (None, reply.stack_dump_requests):
                    self._notify(stacks())
                stack_dump_requests = reply.stack_dump_requests
                waits = self._activity.phase in PEERS_NEEDED
                if (reply.peer_lost or is_over) and waits and asked_in == self._groups:  # else of a group that is over
                    abort_process_group()

    def _introduces(self) -> bool:
        """Tell a roster that does not know this worker of its generation. Returns whether that is the present one."""
        if self._present is None or self._left.is_set():
            return True
        arrival, quorum = self._present
        arrival = arrival._replace(heartbeat=self._now())
        return cast(bool, answer(self._coordinator.introduce.remote(self._uid, arrival, quorum)))

    def _can_join(self) -> bool:
        """Whether this worker has all that a group needs; one that began alone gets it now, while it trains on."""
        if self._alone and self._preload.ident is None:
            self._preload.start()
        return not self._preload.is_alive()


def answer(reference: Any) -> Any:
    """What the roster answers, within a limit."""
    return ray.get(reference, timeout=_ANSWER_SECONDS)


@contextlib.contextmanager
def watchdog(
    coordinator: ActorHandle[Coordinator] | None, run_dir: Path, notify: Callable[[str], None]
) -> Iterator[None]:
    """Context in which the driver tells for whom others wait, ends those for whom they wait in vain, and leaves in the
    run folder what it sees of the workers."""
    over = threading.Event()

    def watch(coordinator: ActorHandle[Coordinator]) -> None:
        while not over.wait(_HEARTBEAT_SECONDS):
            with contextlib.suppress(ray.exceptions.RayError):
                seen: tuple[WorkerStatus, ...] = answer(coordinator.worker_statuses.remote())
                write_members(run_dir, [Member(node=each.process.node, pid=each.process.pid, **each._asdict())
                                        for each in seen])
                if held_up := answer(coordinator.describe_stall.remote()):
                    notify(held_up)
                stalled: HungWorker | None = answer(coordinator.find_hung_worker.remote())
                if stalled:
                    notify(f"{stalled.text}: it is ended, and the others go on")
                    end(stalled.process)
        (run_dir / MEMBERS_FILE).unlink(missing_ok=True)

    if coordinator:
        threading.Thread(target=watch, args=(coordinator,), name="ray_yolo watch", daemon=True).start()
    try:
        yield
    finally:
        over.set()


def end(process: Process) -> None:
    """kill -9 a process on whatever node it runs; one that is frozen ends, too."""
    if process.is_here:
        _kill(process)
        return
    nodes = [node["NodeID"] for node in ray.nodes() if node["Alive"] and node["NodeManagerHostname"] == process.node]
    for node in nodes:
        there = NodeAffinitySchedulingStrategy(node, soft=False)
        answer(ray.remote(num_cpus=0)(_kill).options(scheduling_strategy=there).remote(process))


def _kill(process: Process) -> None:
    if process.is_here:  # several nodes, whose ids mean other processes, may share a host name
        with contextlib.suppress(ProcessLookupError):
            os.kill(process.pid, signal.SIGKILL)


def stacks() -> str:
    """What every thread of this process is at."""
    names = {thread.ident: thread.name for thread in threading.enumerate()}
    return "\n".join(f"{names.get(number, number)}:\n{''.join(traceback.format_stack(frame))}"
                     for number, frame in sys._current_frames().items())
