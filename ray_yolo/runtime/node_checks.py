"""Checks every node of a cluster before training starts: same code and libraries, storage, data set, clock.

`report` runs on each node; `node_errors` and `node_warnings` evaluate the reports. A cluster of one node is not
checked.
"""

from __future__ import annotations

import hashlib
import logging
import os
import platform
import shutil
import socket
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any, NamedTuple, TypeVar, cast

import ray
import ray.exceptions
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

import ray_yolo
from ray_yolo.config.model_facts import plugins
from ray_yolo.config.placement import Placement
from ray_yolo.core.cache_folder import cache_folder
from ray_yolo.core.errors import InputError, RayYoloError, ResourcesError
from ray_yolo.core.formatting import format_size
from ray_yolo.core.structures import AnnotationIndex, DatasetSnapshot
from ray_yolo.core.system import is_bf16_faster
from ray_yolo.data.image_cache import SHARED_MEMORY, NodeRoom, node_room, room_in_shared_memory
from ray_yolo.data.remote import WAIT_SECONDS, snapshot
from ray_yolo.engine.loading import ENLARGE
from ray_yolo.runtime import cluster
from ray_yolo.runtime.ray_internals import available_resources
from ray_yolo.storage.lease import store_time
from ray_yolo.storage.store import is_address, open_store

SAMPLE = 32  # images that every node is checked for
ANSWER_SECONDS = 60.0  # a node may take this long to start a process and answer
SKEW_SECONDS = 5.0
LEAST_BYTES = 2 * 1024**3  # free space for temporary files of Ray and torch
LEAST_SHARED = 512 * 1024**2  # the batches of loader processes need this much; by default, containers have 64 MB
LIBRARIES = ("torch", "torchvision", "numpy", "opencv-python-headless", "opencv-python", "pillow", "ray")

T = TypeVar("T")
_log = logging.getLogger(__name__)
Files = tuple[tuple[str, int], ...]


class Report(NamedTuple):
    """A node's report on itself."""

    versions: dict[str, str]
    unseen: bool  # the storage folder does not exist there
    refuses: str  # why storage cannot be written; ''
    lacks: tuple[str, ...]  # files that are missing or have another size
    clock: float  # seconds since 1970
    free: int  # bytes for temporary files
    shared: int  # bytes of shared memory


def versions() -> dict[str, str]:
    """Versions that results depend on: Python, libraries, and a digest of our own code."""
    versions_here = {"Python": ".".join(platform.python_version_tuple()[:2])}
    for name in (*LIBRARIES, *(each.package for each in plugins())):
        try:
            versions_here[name] = version(name)
        except PackageNotFoundError:
            continue
    code = hashlib.sha256()
    for path in sorted(Path(ray_yolo.__file__).parent.rglob("*.py")):
        code.update(path.read_bytes())
    return {**versions_here, "ray_yolo": f"{ray_yolo.__version__} ({code.hexdigest()[:8]})"}


def sample(*indices: AnnotationIndex) -> Files:
    """(path, bytes) of some evenly spaced images of each index that exist on this machine; none of a snapshot."""
    paths = [index.paths[int(number * len(index) / SAMPLE)] for index in indices if not index.snapshot
             for number in range(min(SAMPLE, len(index)))]
    return tuple((path, os.path.getsize(path)) for path in dict.fromkeys(paths) if os.path.isfile(path))


def report(folder: str, files: Files) -> Report:
    """This node's report.

    Args:
        folder: the storage folder, or a file in it; or the address of a store.
        files: that should exist on this node.
    """
    unseen, refuses = not (is_address(folder) or os.path.exists(folder)), ""
    place = Path(folder if os.path.isdir(folder) else os.path.dirname(folder))
    try:
        if is_address(folder):
            store_time(open_store(folder), "")
            place = cache_folder()  # for the workers' local copies
            place.mkdir(parents=True, exist_ok=True)
        if not unseen:
            with tempfile.NamedTemporaryFile(prefix=".ray_yolo-", dir=place) as probe:
                probe.write(b"0")
                probe.flush()
                os.fsync(probe.fileno())
    except (OSError, InputError) as error:
        refuses = str(error)
    lacks = tuple(path for path, size in files if not os.path.isfile(path) or os.path.getsize(path) != size)
    temporary = os.environ.get("RAY_TMPDIR") or "/tmp"
    return Report(versions(), unseen, refuses, lacks, time.time(), shutil.disk_usage(temporary).free,
                  room_in_shared_memory())


def make_snapshot(data: DatasetSnapshot) -> tuple[str, list[str]]:
    """Make this node's snapshot of a data set. Returns why that failed ('': it did not), and lines about the download.
    """
    lines: list[str] = []
    try:
        snapshot(data.address, data.version, lines.append)
    except InputError as error:
        return str(error), lines
    return "", lines


def node_errors(node: str, report: Report, driver: dict[str, str], folder: str, num_files: int
                ) -> Iterator[RayYoloError]:
    """Errors that make a node unusable, the worst first. `driver` has the driver's versions."""
    for name, ours in sorted(driver.items(), key=lambda item: item[0] != "ray_yolo"):
        if report.versions.get(name) != ours:
            yield ResourcesError(
                f"node {node} has {name} {report.versions.get(name, '(none)')}, the driver {ours}: results would "
                "differ; give all nodes one environment (a container image, or `ray job submit` with a runtime "
                "environment)")
    if report.unseen:
        yield InputError(f"storage_path: node {node} does not see {folder}; give a folder that every node mounts under "
                         "the same path (NFS, Lustre, a bucket through its driver)")
    if report.refuses:
        yield InputError(f"storage_path: node {node} cannot write to {folder}: {report.refuses}; workers write their "
                         "checkpoints there")
    if report.lacks:
        yield InputError(f"data: node {node} lacks {report.lacks[0]}, or has another file there ({len(report.lacks)} "
                         f"of {num_files} checked); put the data set where every node has it under the same path")


def node_warnings(node: str, report: Report, skew: float) -> Iterator[str]:
    """Warnings about a usable node; `skew` is its clock's offset from the driver's, in seconds."""
    if abs(skew) > SKEW_SECONDS:
        yield f"node {node}: its clock is {abs(skew):.0f} s {'ahead' if skew > 0 else 'behind'}; so are times in logs"
    if report.free < LEAST_BYTES:
        yield f"node {node}: only {format_size(report.free)} free for temporary files"
    if report.shared < LEAST_SHARED:
        yield (f"node {node}: only {format_size(report.shared)} free in {SHARED_MEMORY}, through which loader "
               f"processes pass images: {ENLARGE}")


def check_nodes(folder: Path | str, *indices: AnnotationIndex) -> list[str]:
    """Raise if training could not run on a node as on the others. Returns warnings about the nodes.

    A data set in a store is copied to each node as a snapshot.

    Args:
        folder: the storage folder, or a file in it; or the address of a store.

    Raises:
        InputError: a node has other storage or data than the driver.
        ResourcesError: a node has other code or libraries, or does not answer.
    """
    nodes = other_nodes()
    if not nodes:
        return []
    files, ours = sample(*indices), versions()
    answers = _run_on(nodes, report, str(folder), files)
    for name, (node_report, _) in answers.items():
        for error in node_errors(name, node_report, ours, str(folder), len(files)):
            raise error
    make_snapshots(*indices)
    return [text for name, (node_report, now) in answers.items()
            for text in node_warnings(name, node_report, node_report.clock - now)]


def make_snapshots(*indices: AnnotationIndex) -> None:
    """Make snapshots of data sets in a store on all other nodes in parallel, so that no worker waits for another.

    Raises:
        InputError: if a snapshot cannot be made.
        ResourcesError: if a node does not answer.
    """
    for data in {index.snapshot for index in indices if index.snapshot}:
        replies = _run_on(other_nodes(), make_snapshot, data, seconds=WAIT_SECONDS)
        for name, ((error, lines), _) in replies.items():
            if error:
                raise InputError(f"node {name}: {error}")
            for line in lines:
                _log.warning("node %s: %s", name, line)


def bf16_is_faster_everywhere() -> bool:
    """Whether the processors of the other nodes multiply bf16 faster than fp32."""
    return all(supported for supported, _ in _run_on(other_nodes(), is_bf16_faster).values())


def describe_cluster(address: str) -> tuple[list[str], bool]:
    """Lines about each node's resources and fitness, and whether all nodes with CPUs are fit for training.

    Raises:
        RayYoloError: from `cluster.connect`.
    """
    cluster.connect(Placement(address=address), start=False)
    ours = versions()
    lines = ["driver: " + ", ".join(f"{name} {version}" for name, version in ours.items())]
    fit = True
    free, others = available_resources(), other_nodes()
    answers = _run_on(others, report, tempfile.gettempdir(), ())
    for node in ray.nodes():
        if not node["Alive"]:
            continue
        name = _name(node)
        lines.append(f"node {name}: {_free_amounts(node, free.get(node['NodeID'], {})) or 'takes no workers'}")
        if node["NodeID"] in others:
            node_report, now = answers[name]
            errors = [str(error) for error in node_errors(name, node_report, ours, tempfile.gettempdir(), 0)]
            warnings = node_warnings(name, node_report, node_report.clock - now)
            lines += [f"  {text}" for text in (*errors, *warnings)]
            fit = fit and not errors
    return lines, fit


def _free_amounts(node: Mapping[str, Any], free: Mapping[str, float]) -> str:
    """The CPUs and GPUs of a node, and how many of them are free; '': it has none."""
    amounts = []
    for kind in ("CPU", "GPU"):
        amount = node["Resources"].get(kind, 0)
        if amount:
            amounts.append(f"{free.get(kind, 0):g} of {amount:g} {kind} free")
    return ", ".join(amounts)


def _name(node: Mapping[str, Any]) -> str:
    return f"{node['NodeManagerHostname']} ({node['NodeManagerAddress']})"


def other_nodes() -> dict[str, str]:
    """{id: name} of the nodes with CPUs for workers, without this one."""
    here = ray.get_runtime_context().get_node_id()
    return {node["NodeID"]: _name(node) for node in ray.nodes()
            if node["Alive"] and node["NodeID"] != here and node["Resources"].get("CPU")}


def least_room() -> NodeRoom:
    """The least free memory of each kind that any node with CPUs has."""
    nodes = {node["NodeID"]: node for node in ray.nodes() if node["Alive"] and node["Resources"].get("CPU")}
    remote = {}
    for number, node in nodes.items():
        if node["NodeManagerHostname"] != socket.gethostname():  # nodes of one machine share its memory
            remote[number] = _name(node)
    rooms = [room for room, _ in _run_on(remote, node_room).values()]
    is_here = len(remote) < len(nodes)  # a worker may run on this machine
    if is_here or not rooms:
        rooms.append(node_room())
    return NodeRoom(min(room.images for room in rooms), min(room.shared for room in rooms))


def _run_on(nodes: Mapping[str, str], function: Callable[..., T], *arguments: Any, seconds: float = ANSWER_SECONDS
            ) -> dict[str, tuple[T, float]]:
    """The result of a function on each node, by the node's name, with its time of arrival.

    Raises:
        ResourcesError: if a node does not answer, has left, or cannot run it.
    """
    task = ray.remote(num_cpus=0, max_retries=0)(function)
    names = {task.options(scheduling_strategy=NodeAffinitySchedulingStrategy(node, soft=False)).remote(*arguments): name
             for node, name in nodes.items()}
    pending, results, deadline = list(names), {}, time.monotonic() + seconds
    while pending:
        ready, pending = ray.wait(pending, num_returns=1, timeout=max(0.0, deadline - time.monotonic()))
        now = time.time()
        if not ready:
            raise ResourcesError(f"node {names[pending[0]]} has not answered for {seconds:g} s; check it with "
                                 "`ray status`, or remove it from the cluster")
        name = names[ready[0]]
        try:
            results[name] = cast(T, ray.get(ready[0])), now
        except (ray.exceptions.TaskUnschedulableError, ray.exceptions.NodeDiedError):
            raise ResourcesError(f"node {name} has left the cluster during the checks; run the command again") from None
        except ray.exceptions.RayError as error:
            reason = str(error).strip().splitlines()[-1]
            raise ResourcesError(f"node {name} cannot run ray_yolo {ray_yolo.__version__}: {reason}; "
                                 "give all nodes one environment") from None
    return {name: results[name] for name in nodes.values()}
