"""Clusters that cannot be reached, hold too little, or have nodes on which nothing can be trained; failed workers."""

from __future__ import annotations

import os
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import Any
from unittest import mock

import ray
import ray.exceptions
from ray.train.v2._internal.exceptions import WorkerHealthCheckFailedError

from ray_yolo.config.placement import Placement
from ray_yolo.core.errors import (
    CheckpointError,
    InputError,
    LostWorkersError,
    PeerDepartedError,
    ResourcesError,
    TrainingError,
)
from ray_yolo.core.events import WorkerEvent
from ray_yolo.runs.event_log import EVENTS_FILE, EventLog
from ray_yolo.runtime import cluster, map_on_workers, ray_internals
from ray_yolo.runtime.node_checks import Report, node_errors
from ray_yolo.runtime.workers.failures import FailurePolicy
from tests.support.messages import Refusal
from tests.support.servers import answering

AUTO, SSH = Placement(gpus_per_worker=0.0), b"SSH-2.0-OpenSSH_9.2p1\r\n"
CHECK = "check that the head runs (ray status), and that this user has its token (ray get-auth-token, " \
        "RAY_AUTH_MODE=token)"
LOCAL = "try again; `ray start --head` writes detailed logs to /tmp/ray/session_latest/logs"
TOKEN = "give this user the cluster's token (RAY_AUTH_TOKEN, or RAY_AUTH_TOKEN_PATH with its file)"
NO_ADDRESS = "is not a cluster's address ({}); give HOST:PORT of its head, as `ray start --head` prints it, with " \
             "--address or RAY_ADDRESS"
JOB = "through which no training runs; submit the command as a job (ray job submit --address {} -- python -m " \
      "ray_yolo...), or run it on a machine of the cluster with the head's address (--address {}:6379)"

INTERFACES = {
    "ray://head:10001": "is Ray Client's address, " + JOB.format("http://head:8265", "head"),
    "http://10.0.0.1:8265/": "is a dashboard's address, " + JOB.format("http://10.0.0.1:8265/", "10.0.0.1"),
    "https://head": "is a dashboard's address, " + JOB.format("https://head", "head"),
}
"""Addresses of a cluster's other interfaces."""

REPLIES = {
    b"HTTP/1.1 400 Bad Request\r\n\r\n":
        "… is the port of a web server, such as the dashboard of a Ray (8265), not of a head (6379); submit the "
        "command as a job there (ray job submit --address http://… -- python -m ray_yolo...), or give the head's port",
    SSH: "what answers at … is no head of a Ray; give HOST:PORT of one, as `ray start --head` prints it",
    b"": "no answer from … (timed out); check --address or RAY_ADDRESS, and that the head runs (ray status)",
}
"""What answers at an address that is no head's. Ray would wait for ever there."""

VERSIONS = "Version mismatch: The cluster was started with:\n    Ray: 2.50.0\n    Python: 3.11.7\n" \
           "This process on node n2 was started with:\n    Ray: 2.60.0\n    Python: 3.11.7\n"
STARTS: list[tuple[Exception, str]] = [
    (ConnectionError("Could not find any running Ray instance. Please specify"),
     f"Could not find any running Ray instance; {LOCAL}"),
    (TimeoutError("Timed out after 30 seconds while waiting for node. Did not"),
     f"Timed out after 30 seconds while waiting for node; {LOCAL}"),
    (RuntimeError("Timed out waiting for node info for node_id=5."),
     f"Timed out waiting for node info for node_id=5; {LOCAL}"),
    (RuntimeError(""), f"RuntimeError; {LOCAL}"),
    (Exception("The current node timed out during startup. This could"),
     f"The current node timed out during startup; {LOCAL}"),
    (ray.exceptions.RpcError("the head hung up\nand more"), f"the head hung up; {LOCAL}"),
    (ray.exceptions.AuthenticationError("Token mode, but no token"), f"Token mode, but no token…; {TOKEN}"),
    (RuntimeError("\nFailed to connect\nto it"), f"Failed to connect; {LOCAL}"),
    (RuntimeError("no node (e.g. a head) found. Start one"), f"no node (e.g. a head) found; {LOCAL}"),
    (RuntimeError(VERSIONS), "Version mismatch: The cluster was started with: Ray: 2.50.0 Python: 3.11.7 This process "
                             f"on node n2 was started with: Ray: 2.60.0 Python: 3.11.7; {LOCAL}"),
    (ValueError("Attempting to cap object store memory usage at 5 bytes"),
     f"Attempting to cap object store memory usage at 5 bytes; {LOCAL}"),
]
"""Errors of Ray at the start of a cluster for this command."""

HEADS: list[tuple[Exception, str]] = [
    (ValueError("Invalid Ray address: 'x'. It looks\nlike"), NO_ADDRESS.format("Invalid Ray address: 'x'")),
    (RuntimeError("\nFailed to connect\nto it"), f"Failed to connect; {CHECK}"),
]
"""Errors of Ray at a head that is there."""

ROOMS: list[tuple[float, str, str]] = [
    (2.0, "replica", "8 replicas need 8 CPU, the cluster has 2; use --num-replicas 2, a smaller --cpus-per-replica, or "
                     "add nodes"),
    (2.0, "worker", "8 workers need 8 CPU, the cluster has 2; use --num-workers 2, a smaller --cpus-per-worker, or add "
                    "nodes (--wait-for-resources waits longer)"),
    (0.5, "worker", "8 workers need 8 CPU, the cluster has 0.5; use a smaller --cpus-per-worker…"),
]
"""The CPUs of a cluster that can never hold 8 workers."""

OURS = {"Python": "3.11", "torch": "2.9.0", "ray_yolo": "0.2.0 (aaaaaaaa)"}
SOUND = Report(OURS, unseen=False, refuses="", lacks=(), clock=0.0, free=10**12, shared=10**9)
DIFFER = "results would differ; give all nodes one environment (a container image, or `ray job submit` with a " \
         "runtime environment)"
NODES: list[tuple[dict[str, Any], str]] = [
    ({"versions": {**OURS, "torch": "2.8.0"}}, f"node n1 has torch 2.8.0, the driver 2.9.0: {DIFFER}"),
    ({"versions": {}}, f"node n1 has ray_yolo (none), the driver 0.2.0 (aaaaaaaa): {DIFFER}"),
    ({"versions": {**OURS, "ray_yolo": "0.2.0 (bbbbbbbb)"}},
     f"node n1 has ray_yolo 0.2.0 (bbbbbbbb), the driver 0.2.0 (aaaaaaaa): {DIFFER}"),
    ({"unseen": True}, "storage_path: node n1 does not see /runs; give a folder that every node mounts under the same "
                       "path (NFS, Lustre, a bucket through its driver)"),
    ({"refuses": "Read-only file system"}, "storage_path: node n1 cannot write to /runs: Read-only file system; "
                                           "workers write their checkpoints there"),
    ({"lacks": ("/data/1.jpg",)}, "data: node n1 lacks /data/1.jpg, or has another file there (1 of 32 checked); put "
                                  "the data set where every node has it under the same path"),
]
"""What a node reports, over the report of a sound one."""

LOST = PeerDepartedError("[gloo/transport/tcp/pair.cc:534] Connection closed by peer [10.0.0.2]:4321")
DEAD = WorkerHealthCheckFailedError("Worker 1 is gone.", ray.exceptions.ActorDiedError())
FULL = RuntimeError("CUDA out of memory")
WITHOUT = "given up after 1 restarts without a new checkpoint"
FAILURES: list[tuple[Exception, int, type[Exception], str]] = [
    (FULL, 1, TrainingError, f"worker 1 on right: RuntimeError: CUDA out of memory; {WITHOUT}"),
    (FULL, 0, TrainingError, "worker 1 on right: RuntimeError: CUDA out of memory"),
    (DEAD, 1, LostWorkersError, f"worker 1 on right: …; {WITHOUT}"),
    (CheckpointError("a.pt: damaged; use another"), -1, CheckpointError,
     "worker 1 on right: a.pt: damaged; use another"),
    (FileNotFoundError(2, "No such file or directory", "/data/a.png"), -1, TrainingError,
     "worker 1 on right: FileNotFoundError: [Errno 2] No such file or directory: '/data/a.png'"),
]
"""Errors of a worker whose connection others have lost, and the restarts that are allowed."""

PRIVATE: list[tuple[str, str, Callable[[], object]]] = [
    ("ray._private.state", "available_resources_per_node", ray_internals.available_resources),
    ("ray._private.state", "state", ray_internals.draining_nodes),
    ("ray._private.state", "state", ray_internals._state),
    ("ray._raylet", "RAY_INTERNAL_NAMESPACE_PREFIX", ray_internals._running_jobs),
    ("ray.util.placement_group", "NODE_ID_LABEL_KEY", lambda: ray_internals.on_node("a")),
    ("ray.train.torch.config", "_TorchBackend", lambda: ray_internals.in_place_backend.__wrapped__(print)),
]
"""Private names of Ray, and what uses them."""


@contextmanager
def _alone(init: Callable[..., object] = lambda **_: None) -> Iterator[None]:
    """On a machine without any known cluster, where `ray.init` is `init`."""
    here = str(Path.cwd())
    with ExitStack() as patches:
        for thing, name, value in ((ray, "init", init), (ray, "is_initialized", lambda: False),
                                   (cluster, "DRIVER_ENVIRONMENT", {}), (cluster, "running_heads", lambda _: set()),
                                   (cluster, "_CONNECT_SECONDS", 0.3), (cluster, "_INIT_SECONDS", 0.2)):
            patches.enter_context(mock.patch.object(thing, name, value))
        patches.enter_context(mock.patch.dict(os.environ, {
            "RAY_TMPDIR": here, "HOME": here, "RAY_AUTH_TOKEN": "", "RAY_AUTH_TOKEN_PATH": "", "RAY_ADDRESS": ""}))
        yield


def _connect(address: str = "", *, variable: bool = False, init: Callable[..., object] = lambda **_: None) -> None:
    with _alone(init), mock.patch.dict(os.environ, {"RAY_ADDRESS": address if variable else ""}):
        cluster.connect(AUTO if variable else AUTO.model_copy(update={"address": address}))


def _connect_to(reply: bytes) -> None:
    with answering(reply) as address:
        _connect(address)


def _connect_with(error: Exception) -> None:
    _connect(init=mock.Mock(side_effect=error))


def _join(init: Callable[..., object]) -> None:
    """Connect to a head that is there."""
    with answering() as address:
        _connect(address, init=init)


def _connect_by_client() -> None:
    """A script has called `ray.init("ray://...")`."""
    with _alone(), mock.patch.object(cluster.ray_client, "is_connected", return_value=True):
        cluster.connect(AUTO)


def _wait_for_room(cpus: float, unit: str) -> None:
    node = {"NodeID": "a", "Alive": True, "Resources": {"CPU": cpus}}
    with ExitStack() as patches:
        for thing, name, value in ((ray, "nodes", [node]), (ray, "cluster_resources", Counter(CPU=cpus)),
                                   (cluster, "draining_nodes", set()), (cluster, "own_job", "01"),
                                   (cluster, "holdings", []), (cluster, "request_resources", None)):
            patches.enter_context(mock.patch.object(thing, name, mock.Mock(return_value=value)))
        placement = Placement(num_workers=8, cpus_per_worker=1.0, wait_for_resources=0.1)
        cluster.wait_for_room(placement, 0.0, lambda text: None, unit)


def _wait_for_all() -> None:
    """Wait for three workers whose resources do not become free."""
    placement = Placement(num_workers=(1, 4), cpus_per_worker=1.0, workers=0)
    placement = placement.model_copy(update={"timeout_seconds": 0})
    with ExitStack() as patches:
        for thing, name, value in ((map_on_workers, "placement_group", "group"), (map_on_workers, "is_waiting", True),
                                   (map_on_workers, "remove_placement_group", None), (cluster, "room", 3)):
            patches.enter_context(mock.patch.object(thing, name, mock.Mock(return_value=value)))
        next(map_on_workers.map_on_workers(print, None, ["a", "b", "c"], placement, 0.0))


def _check_node(change: dict[str, Any]) -> None:
    raise next(node_errors("n1", SOUND._replace(**change), OURS, "/runs", 32))


def _fail(error: Exception, max_failures: int) -> None:
    log = EventLog(Path(EVENTS_FILE))
    for worker, node in enumerate(("left", "right")):
        log.append(WorkerEvent(worker=worker, node=node, pid=1))
    log.close()
    policy = FailurePolicy(Path(), max_failures, lambda event: None)
    for _ in range(2):
        policy.decide({0: LOST, 1: error}, others_continue=False)


def _without(module: str, name: str, use: Callable[[], object]) -> None:
    home = import_module(module)
    with mock.patch.object(home, name):
        delattr(home, name)
        use()


def _refusals() -> Iterator[Refusal]:
    for address, message in INTERFACES.items():
        yield Refusal(f"--address {address}", f"address: {address} {message}", partial(_connect, address))
        yield Refusal(f"RAY_ADDRESS={address}", f"address: {address} {message}",
                      partial(_connect, address, variable=True))
    yield Refusal("a connection of Ray Client", "address: … is Ray Client's address, " + JOB.format("…", "…"),
                  _connect_by_client)
    for reply, message in REPLIES.items():
        yield Refusal(f"a port that answers {reply!r}", f"address: {message}", partial(_connect_to, reply),
                      ResourcesError)
    yield Refusal("no port", "address: no answer from 127.0.0.1:99999 (…); check --address or RAY_ADDRESS, and that "
                  "the head runs (ray status)", partial(_connect, "127.0.0.1:99999"), ResourcesError)
    for error, message in STARTS:
        yield Refusal(f"a start: {error!r}", f"address: local: {message}", partial(_connect_with, error),
                      ResourcesError)
    for error, message in HEADS:
        yield Refusal(f"a head: {error!r}", f"address: …: {message}" if message.endswith(CHECK) else
                      f"address: … {message}", partial(_join, mock.Mock(side_effect=error)),
                      ResourcesError if message.endswith(CHECK) else InputError)
    yield Refusal("a head that is frozen", "address: … answers, but this machine could not join its cluster within "
                  "0.2 s; check that the head runs (ray status), and that a firewall lets this machine reach all ports "
                  "of its nodes", partial(_join, lambda **_: threading.Event().wait()), ResourcesError)
    for cpus, unit, message in ROOMS:
        yield Refusal(f"{cpus} CPUs for 8 {unit}s", message, partial(_wait_for_room, cpus, unit), ResourcesError)
    yield Refusal("workers that are never free at once", "3 workers were not free at once for 0 seconds; use fewer "
                  "--num-workers, or wait", _wait_for_all, ResourcesError)
    for change, message in NODES:
        kind = ResourcesError if "versions" in change else InputError
        yield Refusal(f"a node: {change}", message, partial(_check_node, change), kind)
    for error, allowed, kind, message in FAILURES:
        yield Refusal(f"a worker, {allowed} restarts: {error!r}", message, partial(_fail, error, allowed), kind)
    for number, (module, name, use) in enumerate(PRIVATE):
        yield Refusal(f"a Ray without {name} ({number})", f"ray {ray.__version__} has no {module}.{name}; this needs "
                      "Ray 2.60: install the versions of constraints.txt", partial(_without, module, name, use))


REFUSALS = list(_refusals())
