"""A worker's side of membership: it joins generations, and a thread reports what it is doing."""

from __future__ import annotations

import contextlib
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
from ray_yolo.core.structures import Progress
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

_HEARTBEAT_SECONDS = 1.0
_LEAVE_SECONDS = 0.2  # until the heartbeat that says that this worker must leave
_POLL_SECONDS = 0.05


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
        max_failures: groups in a row that may fail although no worker has departed; -1: any number.
    """

    lasting = False

    def __init__(self, coordinator: JobClient, worker: int, activity: Activity, device: torch.device,
                 timeout_seconds: float, notify: Callable[[str], None], must_leave: Callable[[], bool], *, alone: bool,
                 max_failures: int = -1) -> None:
        self._coordinator, self._worker, self._activity, self._timeout = coordinator, worker, activity, timeout_seconds
        self._uid, self._left = uuid.uuid4().hex, threading.Event()
        self._must_regroup = self._all_draining = False
        self._is_recalled = False  # the queue has another job for this worker, or its node is draining
        self._notify, self._must_leave, self._device, self._alone = notify, must_leave, device, alone
        self._max_failures = max_failures
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
        self._coordinator.register(self._uid, request)
        began = time.monotonic()
        while True:
            reply = self._coordinator.quorum(self._uid)
            if reply not in (None, "unknown"):
                break
            if reply == "unknown":  # the coordinator was restarted
                self._coordinator.register(self._uid, request)
            waited = time.monotonic() - began  # many may wait, and some for long
            time.sleep(min(max(_POLL_SECONDS, waited / 10), _HEARTBEAT_SECONDS))
        self._must_regroup = False
        if not isinstance(reply, Quorum):
            return reply if isinstance(reply, Summary) else None
        self._groups, self._current = self._groups + 1, (request, reply)
        self._generation = reply.number
        collectives = form_process_group(store, reply.address, reply.worker, reply.num_workers, self._timeout,
                                         self._device, reply.nodes)
        return Generation(collectives, reply.source, reply.behind, reply.members)

    def must_regroup(self) -> bool:
        """By the last heartbeat's reply."""
        return self._must_regroup

    def all_draining(self) -> bool:
        """By the last heartbeat's reply."""
        return self._all_draining

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
                         activity.heartbeat_limit, self._leaves())

    def _leaves(self) -> bool:
        """Whether this worker has to leave after the current step."""
        return self._is_recalled or self._must_leave()

    def _send_heartbeats(self) -> None:
        stack_dump_requests, sent, leaves = None, time.monotonic(), False
        while not self._left.wait(_LEAVE_SECONDS):
            if time.monotonic() - sent < _HEARTBEAT_SECONDS and self._leaves() == leaves:
                continue
            sent, leaves = time.monotonic(), self._leaves()
            with contextlib.suppress(ray.exceptions.RayError):
                group = self._groups
                reply = self._coordinator.heartbeat(self._uid, self._now())
                self._is_recalled |= reply.must_leave
                is_over = reply.unknown and not self._introduce()
                if group == self._groups:  # else it is for another group, and a second regrouping would be for nothing
                    self._must_regroup = (is_over or reply.must_regroup) and self._can_join()
                    self._all_draining = reply.all_draining
                if stack_dump_requests not in (None, reply.stack_dump_requests):
                    self._notify(stacks())
                stack_dump_requests = reply.stack_dump_requests
                # The host of a GPU may also wait in other phases, for kernels that wait for a peer
                waits = self._activity.phase in PEERS_NEEDED or self._device.type == "cuda"
                if (reply.peer_lost or is_over) and waits and group == self._groups:  # else it is for another group
                    abort_process_group()

    def _introduce(self) -> bool:
        """Report this worker's generation to a restarted coordinator. Returns whether it is the current one."""
        if self._current is None or self._left.is_set():
            return True
        request, quorum = self._current
        request = request._replace(heartbeat=self._now())
        return self._coordinator.introduce(self._uid, request, quorum)

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
