"""Connects to a Ray cluster or starts one, and computes and waits for the resources of workers."""

from __future__ import annotations

import logging
import math
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
from pathlib import Path
from typing import Any

import ray
import ray.exceptions
import torch
from ray.autoscaler.sdk import request_resources
from ray.util.placement_group import PlacementGroup, placement_group_table, remove_placement_group

from ray_yolo.config.placement import Placement
from ray_yolo.core.errors import InputError, ResourcesError
from ray_yolo.core.events import PlacementEvent
from ray_yolo.core.redact import redact
from ray_yolo.core.system import SPINS, cores
from ray_yolo.engine.devices import local_device
from ray_yolo.runs.event_log import EVENTS_FILE, read_events
from ray_yolo.runtime.local_ray import in_own_groups, session_folder
from ray_yolo.runtime.ray_internals import (
    DRIVER_ENVIRONMENT,
    available_resources,
    creator_of,
    draining_nodes,
    local_head,
    other_jobs,
)
from ray_yolo.runtime.resources import NodeResources, count_places
from ray_yolo.runtime.sharing import Group, read_groups

# Large blocks are reused instead of returned to the system after each layer, and huge pages reduce page faults. glibc
# reads these variables when a process starts, so they take effect in Ray's workers. Measured gain on CPU:
# tests/benchmarks/README.md.
MALLOC = ("glibc.malloc.hugetlb=1:glibc.malloc.mmap_threshold=17179869184:glibc.malloc.trim_threshold=17179869184:"
          "glibc.malloc.top_pad=268435456")

_TYPE = "accelerator_type:"  # Ray's resource of a node with GPUs of a type begins with it
_CONNECT_SECONDS = 10.0
_LONGEST_JOB = 100  # characters of another job's command
_DYING_SECONDS = 1.0  # in which a worker ends after it has lost its placement group
_is_shared = True  # whether other jobs may use the cluster: False if `connect` has started it
LOCAL = "RAY_YOLO_LOCAL"  # set for a Ray that a command starts for itself: all its workers are on this machine


def connect(placement: Placement, *, start: bool = True, logs: bool = False) -> float:
    """Connect to the cluster, or start one on this machine. Returns the GPUs that each worker gets.

    Args:
        start: whether a cluster may be started.
        logs: whether this process prints what Ray's workers log.

    Raises:
        InputError: for a malformed address.
        ResourcesError: if there is no cluster at the address, or it denies access. Without `start`, also if none runs
        on this machine.
    """
    global _is_shared
    os.environ.update({**DRIVER_ENVIRONMENT, **os.environ})
    if not ray.is_initialized():
        address = _address(placement, lambda text: print(f"warning: {text}", file=sys.stderr))
        _is_shared = address != "local"
        if fault := _connection_fault(address):
            raise ResourcesError(f"address: no answer from {address} ({fault}); check --address or RAY_ADDRESS, and "
                                 "that the head runs (ray status)")
        if address == "local" and not start:
            raise ResourcesError("address: no cluster runs here; give --address or RAY_ADDRESS, or `ray start --head`")
        own: dict[str, Any] = {}
        if address == "local":
            own_token()
            os.environ[LOCAL] = "1"  # its workers inherit it
            own = {"num_cpus": cores(), "include_dashboard": False,  # a dashboard would add eleven processes
                   "_temp_dir": str(session_folder())}  # Ray's own folder is writable by all users
        try:
            with in_own_groups():
                ray.init(address=address, log_to_driver=logs, logging_level=logging.ERROR, **own)
        except Exception as error:  # Ray raises many kinds, even bare ones, such as for a slow node
            raise _refusal(address, error) from None
        finally:
            os.environ.pop(LOCAL, None)
        if threading.current_thread() is threading.main_thread():  # Ray's core has set a handler that aborts
            signal.signal(signal.SIGTERM, signal.getsignal(signal.SIGTERM))
    if placement.gpus_per_worker != "auto":
        return float(placement.gpus_per_worker)
    return 1.0 if ray.cluster_resources().get("GPU", 0) else 0.0


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
    """Workers that fit on live, non-draining nodes, assuming they are otherwise idle."""
    draining = draining_nodes()
    needed = resources_of(placement, gpus).items()
    workers = 0
    for node in ray.nodes():
        if not node["Alive"] or node["NodeID"] in draining:
            continue
        total = node["Resources"]
        workers += min(count_places(kind, total.get(kind, 0.0), amount) for kind, amount in needed)
    return workers


def own_job() -> str:
    """Ray's id of this program."""
    return str(ray.get_runtime_context().get_job_id())


def placement_groups() -> list[Group]:
    """The cluster's placement groups that hold CPUs or GPUs or wait for them."""
    return read_groups(placement_group_table(), creator_of)


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
    return (f"waiting for {placement.min_workers} workers of {each}, until they are free; other jobs on this cluster: "
            f"{others}")


def _other_holders() -> list[str]:
    """The cluster's other jobs, each with the CPUs and GPUs that its placement groups hold."""
    jobs = other_jobs()
    held = {job: Counter[str]() for job in jobs}
    for group in placement_group_table().values():
        job = creator_of(group["placement_group_id"])
        if group["state"] != "CREATED" or job not in held:
            continue
        for bundle in group["bundles"].values():
            held[job].update({kind: bundle.get(kind, 0) for kind in ("CPU", "GPU")})
    lines = []
    for job, amounts in held.items():
        parts = [f"{amount:g} {kind}" for kind, amount in amounts.items() if amount]
        lines.append(f"{_shortened(redact(jobs[job]))}: {', '.join(parts) or 'no placement group'}")
    return lines


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
    if not given and not (Path.home() / ".ray" / "auth_token").exists():
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
    is returned as `auto`, because Ray uses this user's token only if it finds the head itself.
    """
    if requested := placement.address or os.environ.get("RAY_ADDRESS"):
        return requested
    address = local_head(notify)
    return "local" if not address or _connection_fault(address) else "auto"


def _connection_fault(address: str) -> str | None:
    """Why a connection to host:port fails; None if it succeeds, and for other kinds of addresses."""
    match = re.fullmatch(r"(?:ray://)?([^/:]+):(\d+)", address)
    try:
        if match:
            socket.create_connection((match[1], int(match[2])), timeout=_CONNECT_SECONDS).close()
    except (OSError, OverflowError) as error:  # the latter: a port beyond 65535
        return str(error)
    return None


def resources_of(placement: Placement, gpus: float) -> dict[str, float]:
    """The resources of one worker."""
    resources = {"CPU": placement.cpus}
    if gpus:
        resources["GPU"] = gpus
    if placement.accelerator_type:
        resources[f"{_TYPE}{placement.accelerator_type}"] = 0.001  # a node with such GPUs has 1
    return resources


def wait_for_room(placement: Placement, gpus: float, notify: Callable[[str], None]) -> None:
    """Wait until the cluster could hold the minimum number of workers, assuming it is otherwise idle.

    If there is an autoscaler, the nodes are requested from it.

    Raises:
        ResourcesError: what is missing after `wait_for_resources` seconds.
    """
    deadline, asked = time.monotonic() + placement.wait_for_resources, False
    try:
        while lacking := missing_resources(placement, placement.min_workers, gpus):
            if time.monotonic() >= deadline:
                room = math.floor(ray.cluster_resources().get("CPU", 0) / placement.cpus)
                if "GPU of type" in lacking:
                    advice = "another --accelerator-type, or add nodes"
                elif " GPU," in lacking:
                    advice = "fewer --num-workers, --gpus-per-worker 0, or add nodes"
                else:
                    advice = (f"--num-workers {room}, a smaller --cpus-per-worker, or add nodes (--wait-for-resources "
                              "waits longer)")
                raise ResourcesError(f"{lacking}; use {advice}")
            if not asked:
                asked = True
                request_resources(bundles=[resources_of(placement, gpus)] * placement.min_workers)
                notify(f"waiting for nodes, at most {placement.wait_for_resources:g} s (--wait-for-resources): "
                       f"{lacking}")
            time.sleep(0.5)
    finally:
        if asked:
            request_resources(bundles=[])  # the workers make their own requests


def missing_resources(placement: Placement, workers: int, gpus: float) -> str:
    """The resources that an idle cluster lacks for a number of workers, as text; '': none."""
    total = ray.cluster_resources()
    lacking = []
    for kind, each in resources_of(placement, gpus).items():
        amount, present = each * workers, total.get(kind, 0)
        if amount <= present + 1e-9:
            continue
        if kind.startswith(_TYPE):
            lacking.append(f"no node has a GPU of type {placement.accelerator_type}")
        else:
            lacking.append(f"{workers} workers need {amount:g} {kind}, the cluster has {present:g}")
    return "; ".join(lacking)


def held_by(run_dir: Path) -> list[str]:
    """The placement groups of a training's workers, from its log; none if it has finished or never started."""
    groups = [event.group for event in read_events(run_dir / EVENTS_FILE) if isinstance(event, PlacementEvent)]
    return [] if (run_dir / "finished").exists() else groups


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

