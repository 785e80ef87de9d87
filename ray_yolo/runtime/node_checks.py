"""What every node of a cluster is asked before anything begins there: the same code and libraries, storage, data, time.

`report` runs on the node and `faults` judges what it says; both are plain. A cluster of one node is not asked.
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
import uuid
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
from ray_yolo.core.errors import InputError, RayYoloError, ResourcesError
from ray_yolo.core.formatting import format_size
from ray_yolo.core.structures import AnnotationIndex, DatasetSnapshot
from ray_yolo.core.system import multiplies_bf16
from ray_yolo.data.image_cache import room_for_images
from ray_yolo.data.index_cache import cache_folder
from ray_yolo.data.remote import WAIT_SECONDS, snapshot
from ray_yolo.runtime import cluster
from ray_yolo.runtime.ray_internals import available_resources
from ray_yolo.storage.lease import store_time
from ray_yolo.storage.store import is_address, open_store

SAMPLE = 32  # images that every node is asked for
ANSWER_SECONDS = 60.0  # in which a node starts a process and answers
SKEW_SECONDS = 5.0
LEAST_BYTES = 2 * 1024**3  # free for what Ray and torch put aside
SHARED = "/dev/shm"  # loader processes hand images over through it; containers have 64 MB of it unless told otherwise
LEAST_SHARED = 512 * 1024**2
LIBRARIES = ("torch", "torchvision", "numpy", "opencv-python-headless", "opencv-python", "ray")

T = TypeVar("T")
_log = logging.getLogger(__name__)
Files = tuple[tuple[str, int], ...]


class Report(NamedTuple):
    """What a node says of itself."""

    versions: dict[str, str]
    unseen: bool  # of the storage folder
    refuses: str  # why it cannot be written to; ''
    lacks: tuple[str, ...]  # files that are not there, or of another size
    clock: float  # seconds since 1970
    free: int  # bytes where temporary files are put
    shared: int  # bytes of memory that processes can share


def versions() -> dict[str, str]:
    """What results depend on, by name: Python, libraries, and a digest of our own code."""
    found = {"Python": ".".join(platform.python_version_tuple()[:2])}
    for name in (*LIBRARIES, *(each.package for each in plugins())):
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            continue
    code = hashlib.sha256()
    for path in sorted(Path(ray_yolo.__file__).parent.rglob("*.py")):
        code.update(path.read_bytes())
    return {**found, "ray_yolo": f"{ray_yolo.__version__} ({code.hexdigest()[:8]})"}


def sample(*indices: AnnotationIndex) -> Files:
    """(path, bytes) of some images of each index, at equal distances, that are here; of none that was mirrored."""
    paths = [index.paths[int(number * len(index) / SAMPLE)] for index in indices if not index.snapshot
             for number in range(min(SAMPLE, len(index)))]
    return tuple((path, os.path.getsize(path)) for path in dict.fromkeys(paths) if os.path.isfile(path))


def report(folder: str, files: Files) -> Report:
    """What this node finds: `folder` of storage, or a file in it, can be seen and written beside, or as a store written
    to; `files` are there.
    """
    unseen, refuses = not (is_address(folder) or os.path.exists(folder)), ""
    if is_address(folder):
        try:
            store_time(open_store(folder), "")
            folder = str(cache_folder())  # where workers put what they bring there
            os.makedirs(folder, exist_ok=True)
        except (OSError, InputError) as error:
            refuses = str(error)
    if not (unseen or refuses):
        probe = Path(folder if os.path.isdir(folder) else os.path.dirname(folder)) / f".ray_yolo-{uuid.uuid4().hex}"
        try:
            with probe.open("wb") as file:
                file.write(b"0")
                os.fsync(file.fileno())
            probe.unlink()
        except OSError as error:
            refuses = str(error)
    lacks = tuple(path for path, size in files if not os.path.isfile(path) or os.path.getsize(path) != size)
    temporary = os.environ.get("RAY_TMPDIR") or "/tmp"
    shared = shutil.disk_usage(SHARED).free if os.path.isdir(SHARED) else LEAST_SHARED
    return Report(versions(), unseen, refuses, lacks, time.time(), shutil.disk_usage(temporary).free, shared)


def bring(data: DatasetSnapshot) -> tuple[str, list[str]]:
    """Make this node's mirror of a data set. Why there is none, and what was fetched."""
    told: list[str] = []
    try:
        snapshot(data.address, data.version, told.append)
    except InputError as error:
        return str(error), told
    return "", told


def faults(node: str, told: Report, here: dict[str, str], folder: str, looked_at: int) -> Iterator[RayYoloError]:
    """What makes a node unfit, the worst first. `here` are the driver's versions."""
    for name, ours in sorted(here.items(), key=lambda item: item[0] != "ray_yolo"):
        if told.versions.get(name) != ours:
            yield ResourcesError(
                f"node {node} has {name} {told.versions.get(name, '(none)')}, the driver {ours}: results would differ; "
                "give all nodes one environment (a container image, or `ray job submit` with a runtime environment)")
    if told.unseen:
        yield InputError(f"storage_path: node {node} does not see {folder}; give a folder that every node mounts under "
                         "the same path (NFS, Lustre, a bucket through its driver)")
    if told.refuses:
        yield InputError(f"storage_path: node {node} cannot write to {folder}: {told.refuses}; workers write their "
                         "checkpoints there")
    if told.lacks:
        yield InputError(f"data: node {node} lacks {told.lacks[0]}, or has another file there ({len(told.lacks)} of "
                         f"{looked_at} looked at); put the data set where every node has it under the same path")


def concerns(node: str, told: Report, skew: float) -> Iterator[str]:
    """What is told of a node that may be used all the same; `skew` is its clock's from the driver's, in seconds."""
    if abs(skew) > SKEW_SECONDS:
        yield f"node {node}: its clock is {abs(skew):.0f} s {'ahead' if skew > 0 else 'behind'}: times in logs will be"
    if told.free < LEAST_BYTES:
        yield f"node {node}: only {format_size(told.free)} free for temporary files"
    if told.shared < LEAST_SHARED:
        yield (f"node {node}: only {format_size(told.shared)} free in {SHARED}, through which loader processes hand "
               "over images: give it more (`--shm-size` of a container, in Kubernetes an emptyDir of medium Memory)")


def check_nodes(folder: Path | str, *indices: AnnotationIndex) -> list[str]:
    """Refuse a node on which workers could not train as on the others. Returns what else there is to say of them.

    A data set that lies in a store is mirrored on each.

    Args:
        folder: of storage, or a file in it; or a store's address.

    Raises:
        InputError: storage or data are not what they are here.
        ResourcesError: it has other code or libraries, or does not answer.
    """
    nodes = other_nodes()
    if not nodes:
        return []
    files, ours = sample(*indices), versions()
    answers = _ask(nodes, report, str(folder), files)
    for name, (told, _) in answers.items():
        for fault in faults(name, told, ours, str(folder), len(files)):
            raise fault
    bring_everywhere(*indices)
    return [text for name, (told, now) in answers.items() for text in concerns(name, told, told.clock - now)]


def bring_everywhere(*indices: AnnotationIndex) -> None:
    """Make the mirrors of data sets that lie in a store on the other nodes, so that none waits there for another.

    Raises:
        InputError: if one cannot be made.
        ResourcesError: if a node does not answer.
    """
    for data in {index.snapshot for index in indices if index.snapshot}:
        for name, ((refused, lines), _) in _ask(other_nodes(), bring, data, seconds=WAIT_SECONDS).items():
            if refused:
                raise InputError(f"node {name}: {refused}")
            for line in lines:
                _log.warning("node %s: %s", name, line)


def all_multiply_bf16() -> bool:
    """Whether the processors of the other nodes multiply bf16."""
    return all(does for does, _ in _ask(other_nodes(), multiplies_bf16).values())


def describe_cluster(address: str) -> tuple[list[str], bool]:
    """What each node has and whether it could train, line by line, and whether all that have CPUs could.

    Raises:
        RayYoloError: as `cluster.connect` does.
    """
    cluster.connect(Placement(address=address), start=False)
    free, ours = available_resources(), versions()
    others = other_nodes()
    answers = _ask(others, report, tempfile.gettempdir(), ())
    lines, fit = [f"driver: {', '.join(f'{name} {found}' for name, found in ours.items())}"], True
    for node in filter(lambda node: node["Alive"], ray.nodes()):
        name, has = _name(node), {kind: node["Resources"].get(kind, 0) for kind in ("CPU", "GPU")}
        amounts = ", ".join(f"{free.get(node['NodeID'], {}).get(kind, 0):g} of {amount:g} {kind} free"
                            for kind, amount in has.items() if amount)
        lines.append(f"node {name}: {amounts or 'takes no workers'}")
        if node["NodeID"] in others:
            told, now = answers[name]
            wrong = [str(fault) for fault in faults(name, told, ours, tempfile.gettempdir(), 0)]
            lines += [f"  {text}" for text in (*wrong, *concerns(name, told, told.clock - now))]
            fit = fit and not wrong
    return lines, fit


def _name(node: Mapping[str, Any]) -> str:
    return f"{node['NodeManagerHostname']} ({node['NodeManagerAddress']})"


def other_nodes() -> dict[str, str]:
    """{id: name} of the nodes but this one that have CPUs for workers."""
    here = ray.get_runtime_context().get_node_id()
    return {node["NodeID"]: _name(node) for node in ray.nodes()
            if node["Alive"] and node["NodeID"] != here and node["Resources"].get("CPU")}


def least_room_for_images() -> int:
    """Bytes of memory that each node with CPUs has for images, at least."""
    nodes = {node["NodeID"]: node for node in ray.nodes() if node["Alive"] and node["Resources"].get("CPU")}
    away = {number: _name(node) for number, node in nodes.items()
            if node["NodeManagerHostname"] != socket.gethostname()}  # those of one machine share its memory
    rooms = [room for room, _ in _ask(away, room_for_images).values()]
    return min(rooms if rooms and len(away) == len(nodes) else [*rooms, room_for_images()])


def _ask(nodes: Mapping[str, str], function: Callable[..., T], *arguments: Any, seconds: float = ANSWER_SECONDS
         ) -> dict[str, tuple[T, float]]:
    """What a function returns on each node, by the node's name, and the moment at which it was there.

    Raises:
        ResourcesError: if one does not answer, or cannot run it.
    """
    ask = ray.remote(num_cpus=0, max_retries=0)(function)
    asked = {ask.options(scheduling_strategy=NodeAffinitySchedulingStrategy(node, soft=False)).remote(*arguments): name
             for node, name in nodes.items()}
    pending, found, deadline = list(asked), {}, time.monotonic() + seconds
    while pending:
        ready, pending = ray.wait(pending, num_returns=1, timeout=max(0.0, deadline - time.monotonic()))
        now = time.time()
        if not ready:
            raise ResourcesError(f"node {asked[pending[0]]} has not answered for {seconds:g} s; check it with "
                                 "`ray status`, or take it out of the cluster")
        try:
            found[asked[ready[0]]] = cast(T, ray.get(ready[0])), now
        except ray.exceptions.RayError as error:
            reason = str(error).strip().splitlines()[-1]
            raise ResourcesError(f"node {asked[ready[0]]} cannot run ray_yolo {ray_yolo.__version__}: {reason}; "
                                 "give all nodes one environment") from None
    return {name: found[name] for name in nodes.values()}
