"""Connects to a Ray cluster or starts one, and computes and waits for the resources of workers."""

from __future__ import annotations

import logging
import os
import re
import secrets
import signal
import socket
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import wait
from functools import partial
from pathlib import Path

import ray
import ray.exceptions
import torch
from ray.autoscaler.sdk import request_resources
from ray.util.client import ray as ray_client
from ray.util.placement_group import PlacementGroup, placement_group_table, remove_placement_group

from ray_yolo.config.placement import Placement
from ray_yolo.core.cache_folder import home_folder
from ray_yolo.core.errors import ConfigError, InputError, RayYoloError, ResourcesError
from ray_yolo.core.events import PlacementEvent
from ray_yolo.core.redact import redact
from ray_yolo.core.system import SPINS, cores
from ray_yolo.core.threads import run_in_thread
from ray_yolo.engine.devices import local_device
from ray_yolo.runs.event_log import EVENTS_FILE, read_events
from ray_yolo.runs.working_copy import FINISHED
from ray_yolo.runtime.local_ray import PREFIX, in_own_groups, session_folder
from ray_yolo.runtime.ray_internals import (
    DRIVER_ENVIRONMENT,
    available_resources,
    creator_of,
    draining_nodes,
    holdings,
    local_head,
    other_jobs,
    placement_group_rows,
    running_heads,
)
from ray_yolo.runtime.resources import NodeResources, count_places
from ray_yolo.runtime.sharing import Bundle, Group, Node, named_group

# Large blocks are reused instead of returned to the system after each layer, and huge pages reduce page faults. glibc
# reads these variables when a process starts, so they take effect in Ray's workers. Measured gain on CPU:
# tests/benchmarks/README.md.
MALLOC = ("glibc.malloc.hugetlb=1:glibc.malloc.mmap_threshold=17179869184:glibc.malloc.trim_threshold=17179869184:"
          "glibc.malloc.top_pad=268435456")

_TYPE = "accelerator_type:"  # Ray's resource of a node with GPUs of a type begins with it
_CONNECT_SECONDS, _INIT_SECONDS = 10.0, 60.0  # a head's port answers within, a cluster is joined within
_HTTP2_PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + b"\0\0\0\4\0\0\0\0\0"  # the settings are empty
_FRAME_HEAD, _SETTINGS = 9, b"\4"  # bytes; a frame's type follows its length of three bytes
_LONGEST_JOB = 100  # characters of another job's command
_DYING_SECONDS = 1.0  # a worker ends within, after it has lost its placement group
_is_shared = True  # whether other jobs may use the cluster: False if `connect` has started it
LOCAL = "RAY_YOLO_LOCAL"  # set for a Ray that a command starts for itself: all its workers are on this machine


def connect(placement: Placement, *, start: bool = True, logs: bool = False) -> float:
    """Connect to the cluster, or start one on this machine. Returns the GPUs that each worker gets.

    Args:
        start: whether a cluster may be started.
        logs: whether this process prints what Ray's workers log.

    Raises:
        InputError: for a malformed address, and one through which no training runs.
        ResourcesError: if there is no cluster at the address, or it denies access. Without `start`, also if none runs
        on this machine.
    """
    global _is_shared
    if ray_client.is_connected():  # by the caller
        check_address("ray://HOST:10001")
    os.environ.update({**DRIVER_ENVIRONMENT, **os.environ})
    if not ray.is_initialized():
        address = _address(placement, lambda text: print(f"warning: {text}", file=sys.stderr))
        _is_shared = address != "local"
        if fault := _connection_fault(address):
            raise ResourcesError(f"address: {fault}")
        if address == "local" and not start:
            raise ResourcesError("address: no cluster runs here; give --address or RAY_ADDRESS, or `ray start --head`")
        init = partial(ray.init, address=address, log_to_driver=logs, logging_level=logging.ERROR)
        try:
            if address == "local":
                own_token()
                os.environ[LOCAL] = "1"  # its workers inherit it
                _start_local(partial(
                    init, num_cpus=cores(), include_dashboard=False,  # a dashboard would add eleven processes
                    _temp_dir=str(session_folder())))  # Ray's own folder is writable by all users
            else:
                _init_in_time(init, address)
        except RayYoloError:
            raise
        except Exception as error:  # Ray raises many kinds, even bare ones, such as for a slow node
            raise _refusal(address, error) from None
        finally:
            os.environ.pop(LOCAL, None)
        if threading.current_thread() is threading.main_thread():  # Ray's core has set a handler that aborts
            signal.signal(signal.SIGTERM, signal.getsignal(signal.SIGTERM))
    if placement.gpus_per_worker != "auto":
        return float(placement.gpus_per_worker)
    return 1.0 if ray.cluster_resources().get("GPU", 0) else 0.0


def _start_local(init: Callable[[], object]) -> None:
    """Start a Ray on this machine, in another thread: a signal interrupts the main thread at once.

    Ray forks in the thread that calls `init`. Python drops what the handler of a signal raises in functions that are
    called at each `fork`, such as those of `logging` and of libraries of file locks; and Ray sets a handler of its own.
    """
    def start() -> None:
        with in_own_groups():
            init()

    run_in_thread(start, "Ray", stays=True).result()


def _init_in_time(init: Callable[[], object], address: str) -> None:
    """Connect to a head within `_INIT_SECONDS`. Ray itself waits for ever for a head that is frozen or cut off."""
    connected = run_in_thread(init, "connection")
    wait([connected], _INIT_SECONDS)
    if not connected.done():
        raise ResourcesError(f"address: {address} answers, but this machine could not join its cluster within "
                             f"{_INIT_SECONDS:g} s; check that the head runs (ray status), and that a firewall lets "
                             "this machine reach all ports of its nodes")
    connected.result()


def is_shared() -> bool:
    """Whether other jobs may use the cluster; False for one that `connect` has started."""
    return _is_shared


def connect_and_wait(placement: Placement, notify: Callable[[str], None] = lambda text: print(text, file=sys.stderr)
                     ) -> float:
    """`connect`, then `wait_for_room`. Returns the GPUs that each worker gets."""
    gpus = connect(placement)
    wait_for_room(placement, gpus, notify)
    return gpus


def free_nodes(placement: Placement) -> list[NodeResources]:
    """The free resources of the nodes that workers may be placed on."""
    kind = f"{_TYPE}{placement.accelerator_type}"
    cpus_per_gpu = {}
    for node in ray.nodes():
        total = node["Resources"]
        if total.get("GPU"):
            cpus_per_gpu[node["NodeID"]] = total.get("CPU", 0.0) / total["GPU"]
    nodes = []
    for node_id, free in available_resources().items():
        if placement.accelerator_type and kind not in free:
            continue
        cpus, gpus = free.get("CPU", 0.0), free.get("GPU", 0.0)
        nodes.append(NodeResources(cpus, gpus, cpus_per_gpu.get(node_id, 0.0), is_shared=is_shared()))
    return nodes


def room(placement: Placement, gpus: float) -> int:
    """Workers that fit on the nodes, assuming that other jobs hold nothing."""
    needed = resources_of(placement, gpus).items()
    return sum(min(count_places(kind, max(node[kind], 0.0), amount) for kind, amount in needed)
               for node in _nodes_without_own())


def _nodes_without_own() -> list[Counter[str]]:
    """The resources of live, non-draining nodes, without what this job itself holds: it never becomes free."""
    draining, own, nodes = draining_nodes(), own_job(), {}
    for node in ray.nodes():
        if node["Alive"] and node["NodeID"] not in draining:
            nodes[node["NodeID"]] = Counter[str](node["Resources"])
    for holding in holdings():
        if holding.job == own and holding.node in nodes:
            nodes[holding.node].subtract(holding.resources)
    return list(nodes.values())


def _held_by_own(*kinds: str) -> str:
    """What this job itself holds of these kinds of resources, in words; '': nothing."""
    held: dict[str, Counter[str]] = {}
    for holding in sorted(holdings(), key=lambda each: (not each.is_entry_point, each.name)):
        if holding.job == own_job():
            what = "its entry point (--entrypoint-num-cpus)" if holding.is_entry_point else f"actor {holding.name}"
            held.setdefault(what, Counter()).update({kind: holding.resources.get(kind, 0) for kind in kinds})
    parts = [f"{amounts} for {what}" for what, each in held.items() if (amounts := _amounts(each))]
    return ", ".join(parts)


def _amounts(resources: Mapping[str, float]) -> str:
    return ", ".join(f"{amount:g} {kind}" for kind, amount in resources.items() if amount)


def own_job() -> str:
    """Ray's id of this program."""
    return str(ray.get_runtime_context().get_job_id())


def placement_groups() -> list[Group]:
    """The cluster's placement groups that hold resources or wait for them."""
    return [named_group(row.id, creator_of(row.id), row.name, tuple(Bundle(*bundle) for bundle in row.bundles),
                        row.strategy) for row in placement_group_rows()]


def nodes_with_places() -> list[Node]:
    """The nodes on which Ray places groups, with what is free."""
    labels = {node["NodeID"]: node.get("Labels") or {} for node in ray.nodes() if node["Alive"]}
    usable = labels.keys() - draining_nodes()
    return [Node(node, free, labels[node]) for node, free in available_resources().items() if node in usable]


def describe_job(job: str) -> str:
    """The command of another job of the cluster, without secrets, or its id if it has ended."""
    return _shortened(redact(other_jobs().get(job, f"job {job}")))


def _shortened(job: str) -> str:
    """A job's command and node without the middle of a long command: its end tells which run it is, and where."""
    if len(job) <= _LONGEST_JOB:
        return job
    return f"{job[:_LONGEST_JOB // 2]} ... {job[-_LONGEST_JOB // 2:]}"


def parallel_trainings(placement: Placement, workers: int, gpus: float) -> int:
    """The number of trainings on `workers` workers each that the whole cluster, or else this machine, can hold at
    once."""
    total: Mapping[str, float] = {"CPU": cores(), "GPU": torch.cuda.device_count()}
    if ray.is_initialized():
        total = ray.cluster_resources()
    needed = {"CPU": placement.cpus * workers, "GPU": gpus * workers}
    return min(count_places(kind, total.get(kind, 0), amount) for kind, amount in needed.items() if amount)


def no_room(setting: str, placement: Placement, workers: int, gpus: float) -> ConfigError:
    """The error of a training on so many workers that the whole cluster cannot hold; a setting gives their number."""
    total = ray.cluster_resources()
    return ConfigError(f"{setting}: {workers} workers need {placement.cpus * workers:g} CPU and {gpus * workers:g} "
                       f"GPU, the cluster has {total.get('CPU', 0):g} and {total.get('GPU', 0):g}; use fewer")


def describe_wait(placement: Placement, gpus: float) -> str:
    """The reserved resources that the minimum number of workers waits for, and the jobs that hold them; '': no wait, or
    Ray does not answer.
    """
    needed = resources_of(placement, gpus).items()
    try:
        if not any(all(group["bundles"][0].get(kind) == amount for kind, amount in needed)
                   for group in placement_group_table().values() if group["state"] == "PENDING"):
            return ""
        free, others = ray.available_resources(), "; ".join(_other_holders()) or "none"
    except ray.exceptions.RayError:
        return ""
    each = ", ".join(f"{amount:g} {kind} ({free.get(kind, 0.0):g} are free)" for kind, amount in needed
                     if not kind.startswith(_TYPE))
    own = f"this job itself holds {held}; " if (held := _held_by_own("CPU", "GPU")) else ""
    return (f"waiting for {placement.min_workers} workers of {each}, until they are free; {own}other jobs on this "
            f"cluster: {others}")


def _other_holders() -> list[str]:
    """The cluster's other jobs, each with the CPUs and GPUs that its placement groups and actors hold."""
    jobs = other_jobs()
    held = {job: Counter[str]() for job in jobs}
    for group in placement_group_table().values():
        job = creator_of(group["placement_group_id"])
        if group["state"] != "CREATED" or job not in held:
            continue
        for bundle in group["bundles"].values():
            held[job].update({kind: bundle.get(kind, 0) for kind in ("CPU", "GPU")})
    for holding in holdings():
        if holding.job in held:
            held[holding.job].update({kind: holding.resources.get(kind, 0) for kind in ("CPU", "GPU")})
    return [f"{_shortened(redact(jobs[job]))}: {_amounts(amounts) or 'nothing'}" for job, amounts in held.items()]


def planned_gpus(placement: Placement) -> float | None:
    """The GPUs that each worker would get, without a call to Ray; None if a running cluster decides."""
    if placement.num_workers == 0:
        return float(local_device(placement.gpus_per_worker).type == "cuda")
    if placement.gpus_per_worker != "auto":
        return float(placement.gpus_per_worker)
    return float(torch.cuda.is_available()) if _address(placement) == "local" else None


def own_token() -> None:
    """Set a new token for the cluster that is about to start, unless this user has one.

    Otherwise Ray would write a token to ~/.ray, and each later `ray start --head` of this user would require it.
    """
    given = os.environ.get("RAY_AUTH_TOKEN") or os.environ.get("RAY_AUTH_TOKEN_PATH")
    if not given and not (home_folder() / ".ray" / "auth_token").exists():
        os.environ["RAY_AUTH_TOKEN"] = secrets.token_hex(32)


def _refusal(address: str, error: Exception) -> InputError | ResourcesError:
    """The one-line error for a Ray that cannot be reached, or started (address `local`)."""
    reason = _first_sentence(str(error)) or type(error).__name__
    if isinstance(error, ValueError) and address != "local":
        return InputError(f"address: {address} is not a cluster's address ({reason}); give HOST:PORT of its head, as "
                          "`ray start --head` prints it, with --address or RAY_ADDRESS")
    advice = ("check that the head runs (ray status), and that this user has its token (ray get-auth-token, "
              "RAY_AUTH_MODE=token)")
    if isinstance(error, ray.exceptions.AuthenticationError):
        advice = "give this user the cluster's token (RAY_AUTH_TOKEN, or RAY_AUTH_TOKEN_PATH with its file)"
    elif address == "local":
        advice = "try again; `ray start --head` writes detailed logs to /tmp/ray/session_latest/logs"
    return ResourcesError(f"address: {address}: {reason}; {advice}")


_ANNOUNCED = 6  # lines of Ray's message on two versions


def _first_sentence(text: str) -> str:
    """The first sentence of a text, or its first line; a line that ends with a colon with the lines that it announces,
    such as the two versions of Ray."""
    lines = text.strip().split("\n")
    if lines[0].endswith(":"):
        return " ".join(line.strip() for line in lines[:_ANNOUNCED])
    return re.split(r"(?<!e\.g)(?<!i\.e)\. ", lines[0])[0].rstrip(".")


def _address(placement: Placement, notify: Callable[[str], None] = lambda text: None) -> str:
    """The requested address, or `auto` (the cluster that `ray start` noted on this machine), or `local` (a new one).
    `notify` gets a message about a note that is not used.

    A killed head leaves its note behind, and Ray would trust it for many minutes, so the address is tried. A live head
    is returned as `auto`, because Ray uses this user's token only if it finds the head itself. There is no note in the
    default folder of a head with another `--temp-dir`, or of a program that has started a Ray for itself: `notify` gets
    how to use it.
    """
    if requested := placement.address or os.environ.get("RAY_ADDRESS"):
        check_address(requested)
        return requested
    address = local_head(notify)
    if address and not _connection_fault(address):
        return "auto"
    others = [head for head in sorted(running_heads(f"/{PREFIX}")) if not _connection_fault(head)]
    if others:
        notify(f"this command starts a Ray of its own; another one runs here, at {' and '.join(others)}: to use it, "
               "give its address with --address or RAY_ADDRESS")
    return "local"


def _connection_fault(address: str) -> str:
    """Why no head can be at host:port; '': one may be there, and for other kinds of addresses.

    A head is a gRPC server: it answers the first bytes of an HTTP/2 client with a frame of settings.
    """
    match = re.fullmatch(r"([^/:]+):(\d+)", address)
    if not match:
        return ""
    answer = b""
    try:
        with socket.create_connection((match[1], int(match[2])), timeout=_CONNECT_SECONDS) as connection:
            connection.sendall(_HTTP2_PREFACE)
            while len(answer) < _FRAME_HEAD and (part := connection.recv(_FRAME_HEAD - len(answer))):
                answer += part
    except (OSError, OverflowError) as error:  # the latter: a port beyond 65535
        return (f"no answer from {address} ({error}); check --address or RAY_ADDRESS, and that the head runs (ray "
                "status)")
    if answer.startswith(b"HTTP/"):
        return (f"{address} is the port of a web server, such as the dashboard of a Ray (8265), not of a head (6379); "
                f"submit the command as a job there (ray job submit --address http://{address} -- python -m "
                "ray_yolo...), or give the head's port")
    if answer[3:4] != _SETTINGS:
        return f"what answers at {address} is no head of a Ray; give HOST:PORT of one, as `ray start --head` prints it"
    return ""


def check_address(address: str) -> None:
    """Refuse the addresses of a cluster's other interfaces, through which no training runs.

    Raises:
        InputError: with the ways that work.
    """
    scheme, _, place = address.rpartition("://")
    host = place.partition("/")[0].partition(":")[0]
    if scheme == "ray":
        what, dashboard = "Ray Client's", f"http://{host}:8265"
    elif scheme in ("http", "https"):
        what, dashboard = "a dashboard's", address
    else:
        return
    raise InputError(f"address: {address} is {what} address, through which no training runs; submit the command as a "
                     f"job (ray job submit --address {dashboard} -- python -m ray_yolo...), or run it on a machine of "
                     f"the cluster with the head's address (--address {host}:6379)")


def resources_of(placement: Placement, gpus: float) -> dict[str, float]:
    """The resources of one worker."""
    resources = {"CPU": placement.cpus}
    if gpus:
        resources["GPU"] = gpus
    if placement.accelerator_type:
        resources[f"{_TYPE}{placement.accelerator_type}"] = 0.001  # a node with such GPUs has 1
    return resources


def wait_for_room(placement: Placement, gpus: float, notify: Callable[[str], None], unit: str = "worker") -> None:
    """Wait until the cluster could hold the minimum number of workers, assuming that other jobs hold nothing.

    If there is an autoscaler, the nodes are requested from it.

    Args:
        unit: what the placement's workers are called in messages and flags.

    Raises:
        ResourcesError: what is missing after `wait_for_resources` seconds.
    """
    deadline, asked = time.monotonic() + placement.wait_for_resources, False
    try:
        while lacking := missing_resources(placement, placement.min_workers, gpus, unit):
            if time.monotonic() >= deadline:
                raise ResourcesError(f"{lacking}; use {_advice(placement, gpus, unit)}")
            if not asked:
                asked = True
                request_resources(bundles=[resources_of(placement, gpus)] * placement.min_workers)
                notify(f"waiting for nodes, at most {placement.wait_for_resources:g} s (--wait-for-resources): "
                       f"{lacking}" if unit == "worker" else f"waiting for nodes: {lacking}")
            time.sleep(0.5)
    finally:
        if asked:
            request_resources(bundles=[])  # the workers make their own requests


def missing_resources(placement: Placement, workers: int, gpus: float, unit: str = "worker") -> str:
    """What the cluster lacks for a number of workers if other jobs hold nothing, as text; '': nothing."""
    fitting = room(placement, gpus)
    if fitting >= workers:
        return ""
    scarce, needed = _scarce(placement, workers, gpus), resources_of(placement, gpus)
    if not scarce:
        return (f"{workers} {unit}s of {_amounts(needed)} each do not fit: the cluster's nodes have room for "
                f"{fitting}")
    total, lacking = ray.cluster_resources(), []
    for kind in scarce:
        own = f", of which this job itself holds {held}" if (held := _held_by_own(kind)) else ""
        lacking.append(
            f"no node has a GPU of type {placement.accelerator_type}" if kind.startswith(_TYPE) else
            f"{workers} {unit}s need {needed[kind] * workers:g} {kind}, the cluster has {total.get(kind, 0):g}{own}")
    return "; ".join(lacking)


def _scarce(placement: Placement, workers: int, gpus: float) -> list[str]:
    """The kinds of resources of which the cluster has too little for a number of workers, on all nodes together."""
    total: Counter[str] = sum(_nodes_without_own(), Counter())
    return [kind for kind, each in resources_of(placement, gpus).items() if each * workers > total[kind] + 1e-9]


def _advice(placement: Placement, gpus: float, unit: str) -> str:
    """What to do about `missing_resources`."""
    scarce = _scarce(placement, placement.min_workers, gpus)
    if any(kind.startswith(_TYPE) for kind in scarce):
        return "another --accelerator-type, or add nodes"
    if "GPU" in scarce:
        return f"fewer --num-{unit}s, --gpus-per-{unit} 0, or add nodes"
    fitting = room(placement, gpus)
    fewer = f"--num-{unit}s {fitting}, " if fitting else ""
    longer = " (--wait-for-resources waits longer)" if unit == "worker" else ""
    return f"{fewer}a smaller --cpus-per-{unit}, or add nodes{longer}"


def held_by(run_dir: Path) -> list[str]:
    """The placement groups of a training's workers, from its log; none if it has finished or never started."""
    groups = [event.group for event in read_events(run_dir / EVENTS_FILE) if isinstance(event, PlacementEvent)]
    return [] if (run_dir / FINISHED).exists() else groups


def free(groups: Sequence[str]) -> None:
    """Remove placement groups by id; ids of groups that are gone are ignored."""
    for group in groups:
        remove_placement_group(PlacementGroup(ray.PlacementGroupID(bytes.fromhex(group))))


def stop_workers(run_dir: Path) -> None:
    """Kill a training's workers, while its log can still record what they have done."""
    if groups := held_by(run_dir):
        free(groups)
        time.sleep(_DYING_SECONDS)


def leave_notice(node: str) -> str:
    """The warning for a draining node, by its id."""
    name = next((each["NodeManagerHostname"] for each in ray.nodes() if each["NodeID"] == node), node)
    return f"node {name} will be taken away: its workers leave after the current step"


def worker_environment(placement: Placement) -> dict[str, str]:
    """Environment of worker processes."""
    spins = {name: os.environ.get(name, value) for name, value in SPINS.items()}
    return {**spins, "OMP_NUM_THREADS": str(placement.threads),
            "GLIBC_TUNABLES": os.environ.get("GLIBC_TUNABLES", MALLOC),
            "CUBLAS_WORKSPACE_CONFIG": ":4096:8"}  # for --exact on GPUs; without it cuBLAS may add in any order

