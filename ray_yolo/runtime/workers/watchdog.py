"""The driver's side of membership: it starts the queue's actor, kills workers that hang, and drains nodes."""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable, Collection, Iterator
from pathlib import Path
from typing import cast

import ray
import ray.exceptions
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from ray_yolo.core.system import Process
from ray_yolo.runs.status import MEMBERS_FILE, write_members
from ray_yolo.runtime import cluster
from ray_yolo.runtime.workers.client import JobClient, QueueHandle, answer
from ray_yolo.runtime.workers.job_queue import JobQueueActor

_MAX_CALLS = 10_000  # The queue holds so many calls at once: each worker's heartbeat waits there for orders.
_WATCH_SECONDS = 1.0
_POLL_SECONDS = 0.05
_DEPARTURE_SECONDS = 15.0  # the other workers may depart this long after the first


def start_queue() -> QueueHandle:
    """Start a job queue on this node, without reserving a CPU."""
    here = NodeAffinitySchedulingStrategy(ray.get_runtime_context().get_node_id(), soft=False)
    actor = ray.remote(JobQueueActor).options(
        num_cpus=0, max_restarts=-1, max_task_retries=-1, max_concurrency=_MAX_CALLS, scheduling_strategy=here)
    return cast(QueueHandle, actor.remote())


def drain_nodes(drain: Callable[[Collection[str]], dict[int, str]], known: set[str], notify: Callable[[str], None]
                ) -> tuple[set[str], dict[int, str]]:
    """Have workers leave draining nodes after the current step; notify of nodes that were not `known` as draining.

    Args:
        drain: makes the workers on some nodes leave; returns the node of each, by its number or its bundle's.

    Returns:
        The draining nodes, and the node of each worker that leaves, by the same number.
    """
    nodes = cluster.draining_nodes()
    leaving = drain(nodes) if nodes else {}
    for node in nodes - known:
        notify(cluster.leave_notice(node))
    return nodes, leaving


def await_departure(coordinator: JobClient) -> None:
    """Wait until all living workers have left an ended training: each sends its last events before."""
    deadline = time.monotonic() + _DEPARTURE_SECONDS
    with contextlib.suppress(ray.exceptions.RayError):
        while coordinator.present() and time.monotonic() < deadline:
            time.sleep(_POLL_SECONDS)


@contextlib.contextmanager
def watchdog(coordinator: JobClient, run_dir: Path, notify: Callable[[str], None]) -> Iterator[None]:
    """Context in which the driver reports stalls, kills hung workers, and writes the status of workers to a file."""
    over = threading.Event()

    def watch() -> None:
        to_kill: set[Process] = set()  # the coordinator names each once
        while not over.wait(_WATCH_SECONDS):
            with contextlib.suppress(ray.exceptions.RayError):
                write_members(run_dir, coordinator.worker_statuses())
                stall = coordinator.describe_stall()
                if stall:
                    notify(stall)
                hung = coordinator.find_hung_worker()
                if hung:
                    notify(f"{hung.text}: it is killed, and the others continue")
                    to_kill.add(hung.process)
            for process in tuple(to_kill):
                with contextlib.suppress(ray.exceptions.RayError):  # its node may be too busy to answer: once more
                    kill(process)
                    to_kill.discard(process)
        with contextlib.suppress(OSError):
            (run_dir / MEMBERS_FILE).unlink(missing_ok=True)

    threading.Thread(target=watch, name="ray_yolo watchdog", daemon=True).start()
    try:
        yield
    finally:
        over.set()


def kill(process: Process) -> None:
    """Send SIGKILL to a process on any node; it also ends a frozen one."""
    if process.is_here:
        process.kill()
        return
    nodes = [node["NodeID"] for node in ray.nodes() if node["Alive"] and node["NodeManagerHostname"] == process.node]
    for node in nodes:
        strategy = NodeAffinitySchedulingStrategy(node, soft=False)
        answer(ray.remote(num_cpus=0)(Process.kill).options(scheduling_strategy=strategy).remote(process))
