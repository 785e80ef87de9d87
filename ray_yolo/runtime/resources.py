"""The resources of each worker: its CPUs, loader processes and image cache, from what the nodes have free."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Literal

from ray_yolo.config.placement import Placement
from ray_yolo.core.events import ResourcesEvent
from ray_yolo.core.formatting import format_count, format_size
from ray_yolo.data.image_cache import SHARED_MEMORY
from ray_yolo.engine.loading import ENLARGE

FED_FROM_FILES, FED_FROM_MEMORY = 10, 40
"""CPUs of arithmetic that one loader process keeps busy: time to train a sample / time to load it, measured with
yolov5n, the fastest model (tests/benchmarks/README.md)."""
MAX_LOADERS = 8
MAX_GPU_LOADERS = 64  # a GPU trains up to 3,800 images a second; one from a JPEG file takes 4 to 14 ms of a core
_PART_OF_GPU = "a part of a GPU is for one worker of a training"
_ROOM_FOR_OTHERS = 0.5  # cores that may be missing without a word: programs that only blink
_EPSILON = 1e-9  # three shares of a third of a GPU are one GPU, whatever the rounding


@dataclass(frozen=True)
class NodeResources:
    """Free resources of a node."""

    cpus: float
    gpus: float = 0.0
    cpus_per_gpu: float = 0.0
    """All CPUs of the node for each of its GPUs; 0: the free ones for each free GPU."""
    is_shared: bool = False
    """Whether other jobs use the node, too."""


@dataclass(frozen=True)
class Images:
    """Memory that a dataset's decoded images need."""

    num_bytes: int
    """The bytes of both splits, decoded at the network's size."""
    room: int
    """The bytes that a node has for them."""


@dataclass(frozen=True)
class LoaderRoom:
    """Shared memory (`/dev/shm`), through which loader processes pass their batches."""

    free: int
    """The bytes of it that are free on a node; 0: there is none, or it cannot be written."""
    per_loader: int
    """The bytes of the batches that a loader process has ready."""
    per_worker: int
    """The bytes of the batches that a worker computes with."""

    def limit(self, loaders: int, workers: int = 1, images: int = 0) -> tuple[int, str]:
        """As many of the loader processes of a worker as have room, and the reason if they are fewer; else ''.

        Args:
            workers: on the node.
            images: bytes of decoded images in the same memory.
        """
        room = (self.free - images) / workers - self.per_worker
        fitting = max(0, min(loaders, int(room // self.per_loader)))
        if fitting == loaders:
            return loaders, ""
        state = f"has only {format_size(self.free - images)} free" if self.free else "cannot be written"
        each = f" for each of {workers} workers" if workers > 1 else ""
        need = workers * (loaders * self.per_loader + self.per_worker)
        return fitting, (f"{format_count(fitting, 'loader process')} instead of {loaders}{each}: {SHARED_MEMORY} "
                         f"{state}, and their batches need {format_size(need)}; {ENLARGE}")


def share_out(placement: Placement, gpus: float, nodes: Sequence[NodeResources], threads: int = 0,
              images: Images | None = None, room: LoaderRoom | None = None) -> tuple[Placement, ResourcesEvent]:
    """The placement with all open settings resolved, and the resources of each worker for the run's log.

    `cpus_per_worker` becomes the most that all workers can have at once, at least 1. Their share of GPUs, half of a
    shared node without GPUs, and `threads` limit it. `workers` becomes the number of loader processes that keep the
    rest busy, and `cache` becomes `ram` if the images fit.

    Args:
        gpus: of each worker.
        nodes: candidates for workers.
        threads: of arithmetic, if the recipe fixes them; else 0.
        images: None if the command caches none.
        room: for the batches of loader processes, which may be fewer for it; None: not known.
    """
    cache = placement.cache
    if cache == "auto":
        cache = "ram" if images and images.num_bytes <= images.room else "none"
    feeds = FED_FROM_FILES if cache == "none" else FED_FROM_MEMORY

    cpus = placement.cpus_per_worker
    if cpus == "auto":
        most = most_cpus(nodes, placement.max_workers, gpus, placement.placement_strategy)
        if threads and not gpus:  # more CPUs than the threads and their loader processes would idle
            most = min(most, threads + math.ceil(threads / feeds))
        cpus = float(most)

    loaders = placement.workers
    if loaders < 0:
        loaders = loader_processes(int(cpus), gpus, threads, feeds)

    reasons = []
    if room and loaders:
        fitting = max((_num_on(node, int(cpus), gpus) for node in nodes), default=1)
        sharing = max(1, min(fitting, placement.max_workers))  # the workers that share the memory of a node
        cached = images.num_bytes if images and cache == "ram" else 0
        loaders, reason = room.limit(loaders, sharing, cached)
        reasons += [reason] if reason else []
    if placement.cpus_per_worker == "auto":
        reasons.append(_free_cpus(nodes, placement.max_workers, gpus, cpus))
    if placement.cache == "auto" and images:
        reasons.append(f"{images.num_bytes / 1e9:.2g} GB of decoded images, {images.room / 1e9:.2g} GB of memory "
                       "available")

    chosen = placement.model_copy(update={"cache": cache, "cpus_per_worker": cpus, "workers": loaders})
    resources = ResourcesEvent(cpus=cpus, threads=threads or chosen.threads, cache=cache, loader_processes=loaders,
                               reasons=tuple(reasons))
    return chosen, resources


def busy_line(threads: int, others: float, machine: int) -> str:
    """What to do where other programs use the cores on which this training computes; '' if there is room for both.

    Args:
        threads: of arithmetic.
        others: the cores that other programs use, of the `machine`'s.
    """
    if threads < 2 or machine - others > threads - _ROOM_FOR_OTHERS:
        return ""
    return (f"other programs use {others:.1f} of {machine} cores, and {threads} threads wait for each other at every "
            "layer: --threads 1 may be several times as fast (docs/running.md)")


def workers_here(gpus: int, gpus_per_worker: float | Literal["auto"]) -> tuple[int, str]:
    """Worker count of `auto` without a requested cluster, and the reason: one for each of several GPUs, else 0."""
    each = 1.0 if gpus_per_worker == "auto" else gpus_per_worker
    if 0 < each < 1:
        return 0, f"in this process: {_PART_OF_GPU}"
    number = count_places("GPU", gpus, each) if each else 0
    if number > 1:
        return number, f"{gpus} GPUs here"
    return 0, "in this process: no cluster was requested, and there is at most one GPU"


def workers_on(nodes: Sequence[NodeResources], gpus: float, cpus: float) -> tuple[int, str]:
    """Worker count of `auto` on a cluster, and the reason: one per free GPU, else one per node with `cpus` free CPUs.

    At least 1, which waits for resources.
    """
    if 0 < gpus < 1:
        return 1, _PART_OF_GPU
    if gpus:
        number = sum(count_places("GPU", node.gpus, gpus) for node in nodes)
        return max(1, number), f"free GPUs: {sum(node.gpus for node in nodes):g}"
    number = sum(node.cpus >= cpus for node in nodes)
    return max(1, number), f"nodes with free CPUs: {number}"


def most_cpus(nodes: Sequence[NodeResources], workers: int, gpus: float, strategy: str) -> int:
    """The most whole CPUs, at least 1, that all workers can have at the same time with `gpus` GPUs each.

    A worker with GPUs gets at most the same share of a node's CPUs as of its GPUs. Workers without get at most half of
    the CPUs that are free on a shared node.
    """
    if gpus:
        candidates = [node for node in nodes if node.gpus >= gpus]
        # All workers are equal, so the node with the fewest CPUs for each GPU decides.
        cpus_per_gpu = [node.cpus_per_gpu or node.cpus / node.gpus for node in candidates]
        limit = gpus * min(cpus_per_gpu) if candidates else 1.0
    else:
        candidates = [replace(node, cpus=node.cpus / 2) if node.is_shared else node for node in nodes]
        limit = max((node.cpus for node in candidates), default=1.0)
    for cpus in range(int(limit), 1, -1):
        if _num_placed(candidates, cpus, gpus, strategy) >= workers:
            return cpus
    return 1  # also if not all workers fit: the cluster is asked elsewhere


def _num_placed(nodes: Sequence[NodeResources], cpus: int, gpus: float, strategy: str) -> int:
    """How many workers of this size a placement strategy of Ray can place at once."""
    rooms = [_num_on(node, cpus, gpus) for node in nodes]
    if strategy == "STRICT_PACK":  # all workers on one node
        return max(rooms, default=0)
    if strategy == "STRICT_SPREAD":  # each worker on a node of its own
        return sum(room > 0 for room in rooms)
    return sum(rooms)


def _num_on(node: NodeResources, cpus: int, gpus: float) -> int:
    """How many workers of this size fit on a node."""
    places = count_places("CPU", node.cpus, cpus)
    return min(places, count_places("GPU", node.gpus, gpus)) if gpus else places


def count_places(kind: str, amount: float, each: float) -> int:
    """The workers that fit on an amount of a kind of resource, `each` a worker. A part of a GPU is of one GPU alone."""
    if kind == "GPU" and each < 1:
        whole = math.floor(amount + _EPSILON)
        return whole * math.floor(1 / each + _EPSILON) + math.floor((amount - whole) / each + _EPSILON)
    return math.floor(amount / each + _EPSILON)


def loader_processes(cpus: int, gpus: float, threads: int, feeds: int) -> int:
    """Loader processes of a worker: with a GPU all but one of its CPUs, else the fewest that keep its CPUs busy.

    Let s be the arithmetic time of a sample and s / feeds its loading time. In sequence, c CPUs take s / c + s / feeds.
    With a loader process they take s / (c - 1), which is less if c (c - 1) > feeds.

    Args:
        threads: the threads of arithmetic, if fixed; else 0.
        feeds: CPUs that one loader process keeps busy.
    """
    if gpus:
        return max(0, min(MAX_GPU_LOADERS, cpus - 1))
    if threads:
        return max(0, min(MAX_LOADERS, cpus - threads, math.ceil(threads / feeds)))
    if cpus * (cpus - 1) <= feeds:  # a CPU is worth more as a thread than as a loader process
        return 0
    return min(MAX_LOADERS, math.ceil(cpus / feeds))


def _free_cpus(nodes: Sequence[NodeResources], workers: int, gpus: float, each: float) -> str:
    """The reason for the CPUs of each worker, in words."""
    cpus = sum(node.cpus for node in nodes)
    text = f"{cpus:g} CPUs free for {format_count(workers, 'worker')}"
    is_shared = any(node.is_shared for node in nodes)
    if is_shared and not gpus and workers * each <= cpus / 2:  # more only if each has a single CPU
        return f"{text}, half of them left to other jobs"
    return text
