"""A worker's side of membership: it joins generations, and a thread reports what it is doing."""

from __future__ import annotations

import os
import sys
import threading
import time
import traceback
import uuid
from collections.abc import Callable

import ray
import ray.exceptions
import torch
from ray.util import get_node_ip_address

from ray_yolo.core.events import Summary
from ray_yolo.core.structures import Orders, Progress
from ray_yolo.core.system import own_process
from ray_yolo.engine.collectives import (
    LOOPBACK,
    abort_process_group,
    form_process_group,
    leave_process_group,
    serve_rendezvous_store,
)
from ray_yolo.engine.membership import Activity, Generation, Rendezvous
from ray_yolo.ops.torch_internals import import_compiler
from ray_yolo.runtime import cluster
from ray_yolo.runtime.workers.client import JobClient
from ray_yolo.runtime.workers.coordinator import PEERS_NEEDED, Heartbeat, Quorum, Registration

_POLL_SECONDS = 0.05  # two heartbeats are at least this far apart; at first, so are two questions for a quorum
_SLOWEST_SECONDS = 1.0  # later, questions for a quorum, or to a queue that does not answer, are this far apart


def own_address() -> str:
    """The address at which other workers reach this one: loopback if all of them are on this node."""
    return LOOPBACK if os.environ.get(cluster.LOCAL) else str(get_node_ip_address())


class RendezvousClient(Rendezvous):
    """A client of the coordinator, which forms the generations. A thread sends it this worker's `activity`.

    Args:
        worker: this worker's number in the job.
        device: on which it trains.
        timeout_seconds: after which a collective operation has failed.
        notify: receives this worker's stacks, if others wait for it.
        is_leaving: whether this worker leaves after the current step.
        is_orphan: whether the training's driver has ended.
        alone: this worker may start before its peers, and before it has loaded what only groups need.
        max_failures: groups in a row that may fail although no worker has departed; -1: any number.
    """

    lasting = False

    def __init__(self, coordinator: JobClient, worker: int, activity: Activity, device: torch.device,
                 timeout_seconds: float, notify: Callable[[str], None], is_leaving: Callable[[], bool],
                 is_orphan: Callable[[], bool], *, alone: bool, max_failures: int = -1) -> None:
        self._coordinator, self._worker, self._activity, self._timeout = coordinator, worker, activity, timeout_seconds
        self._notify, self._device, self._alone = notify, device, alone
        self._is_leaving, self._is_orphan = is_leaving, is_orphan
        self._max_failures = max_failures
        self._uid = uuid.uuid4().hex
        """By which the coordinator knows this worker."""
        self.orders = Orders()
        """The newest orders: the heartbeat thread writes them, the training reads them."""
        self._left = threading.Event()
        """It is set when this worker has left: its heartbeats end."""
        self._groups = 0
        """How many groups this worker has been in."""
        self._generation = 0
        """The number of the newest generation."""
        self._current: tuple[Registration, Quorum] | None = None
        """The generation in which this worker trains, and its request for it; None: it waits for one."""
        self._preload = threading.Thread(target=import_compiler, name="ray_yolo preload", daemon=True)
        """Loads what only groups need, while a worker that is alone trains; `_can_join` starts it."""
        threading.Thread(target=self._send_heartbeats, name="ray_yolo heartbeat", daemon=True).start()

    def join(self, progress: Progress | None, *, is_saved: bool = False) -> Generation | Summary | None:
        """Wait for the next generation and form its process group. Collective.

        Raises:
            PeerDepartedError: if a peer has departed meanwhile.
            ray.exceptions.RayError: if the coordinator does not answer.
        """
        leave_process_group()
        self._current = None  # otherwise the heartbeat thread would report the generation that this worker has left
        if not self._alone:
            import_compiler()
        host = own_address()
        store = serve_rendezvous_store(host)
        node = ray.get_runtime_context().get_node_id()
        request = Registration(self._worker, own_process(), (host, store.port), progress, self._now(), node,
                               self._timeout, is_saved)
        self._coordinator.register(self._uid, request)
        began = time.monotonic()
        while True:
            reply = self._coordinator.quorum(self._uid)
            if reply not in (None, "unknown"):
                break
            if reply == "unknown":  # the coordinator was restarted
                self._coordinator.register(self._uid, request)
            waited = time.monotonic() - began  # many may wait, and some for long
            time.sleep(min(max(_POLL_SECONDS, waited / 10), _SLOWEST_SECONDS))
        self.orders = Orders(stop=self.orders.stop)  # the others were about the last generation
        if not isinstance(reply, Quorum):
            return reply if isinstance(reply, Summary) else None
        self._groups += 1
        self._current = request, reply._replace(members=(), nodes=())  # a heartbeat has it, and should be small
        self._generation = reply.number
        collectives = form_process_group(store, reply.address, reply.rank, reply.size, self._timeout,
                                         self._device, reply.nodes)
        return Generation(collectives, reply.source, reply.behind, reply.members)

    def may_regroup(self) -> bool:
        """By the coordinator, which counts the groups that have failed by themselves."""
        return self._coordinator.may_regroup(self._max_failures)

    def elect_saver(self) -> bool:
        """Whether this worker saves the last finished step: the coordinator elects one worker of each generation."""
        return self._coordinator.elect_saver(self._generation)

    def finish(self, summary: Summary) -> None:
        """Report to the coordinator that training has ended."""
        self._coordinator.end(summary)

    def close(self) -> None:
        """Leave the generation; peers notice it by their connections and from the coordinator."""
        self._left.set()
        self._coordinator.leave(self._uid)
        leave_process_group()

    def _now(self) -> Heartbeat:
        activity = self._activity
        return Heartbeat(activity.phase, activity.step, time.monotonic() - activity.since, activity.limit,
                         activity.heartbeat_limit, self._is_leaving())

    def _send_heartbeats(self) -> None:
        """Report this worker's activity and take its orders, until it has left."""
        known, dumps = Orders(), None
        while not self._left.wait(_POLL_SECONDS):
            group, heartbeat = self._groups, self._now()

            def has_news(leaves: bool = heartbeat.leaves) -> bool:
                return self._left.is_set() or self._is_leaving() != leaves

            try:
                orders = self._coordinator.heartbeat(self._uid, heartbeat, self._current, known, has_news)
            except ray.exceptions.ActorDiedError:  # for good, so the driver has ended, too
                self.stop()
                return
            except ray.exceptions.RayError:  # it is being restarted
                self._left.wait(_SLOWEST_SECONDS)
                continue
            if self._is_orphan() or (orders and orders.stop):
                self.stop()
            if orders is None:
                continue
            known = orders
            if dumps not in (None, orders.dumps):
                self._notify(stacks())
            dumps = orders.dumps
            if group != self._groups:  # they are about a generation that this worker has left
                continue
            self.orders = orders._replace(stop=self.orders.stop, regroup=orders.regroup and self._can_join())
            # The host of a GPU may also wait in other phases, for kernels that wait for a peer
            if orders.abort and (self._activity.phase in PEERS_NEEDED or self._device.type == "cuda"):
                abort_process_group()

    def _can_join(self) -> bool:
        """Whether this worker has loaded what a group needs. A worker that started alone loads it while it trains."""
        if self._alone and self._preload.ident is None:
            self._preload.start()
        return not self._preload.is_alive()


def stacks() -> str:
    """The stack of every thread of this process."""
    names = {thread.ident: thread.name for thread in threading.enumerate()}
    return "\n".join(f"{names.get(number, number)}:\n{''.join(traceback.format_stack(frame))}"
                     for number, frame in sys._current_frames().items())
