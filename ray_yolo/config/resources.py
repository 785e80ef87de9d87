"""What each worker is given of its node: CPUs, arithmetic threads, loader processes, and images in memory.

One pure function decides what the placement leaves open, once, where the cluster is known. Threads and loader processes
of all workers together are never more than the CPUs that they are given, unless a flag asks for more.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from ray_yolo.config.placement import Placement
from ray_yolo.events import ResourcesEvent

FED_FROM_FILES, FED_FROM_MEMORY = 10, 40
"""CPUs whose arithmetic one loader process feeds: yolov5n, the fastest model, trains a sample in so many times the time
that it takes to make it (tests/benchmarks/README.md)."""
MAX_LOADERS, MAX_GPU_LOADERS = 8, 16


@dataclass(frozen=True)
class Node:
    """What a node has free."""

    cpus: float
    gpus: float = 0.0


@dataclass(frozen=True)
class Images:
    """A data set's images as they are kept."""

    num_bytes: int  # of both splits, decoded at the network's size
    room: int  # bytes that a node spares for them


@dataclass(frozen=True)
class Resources:
    """What each worker is given, with the reasons for what was chosen."""

    placement: Placement  # with nothing open
    threads: int
    reasons: tuple[str, ...]

    @property
    def event(self) -> ResourcesEvent:
        """What is told of it."""
        given = self.placement
        return ResourcesEvent(cpus=given.cpus, threads=self.threads, loader_processes=given.loader_processes,
                              cache=given.cache, reasons=self.reasons)


def share_out(placement: Placement, gpus: float, nodes: Sequence[Node], threads: int = 0,
              images: Images | None = None) -> Resources:
    """The placement with everything decided that the user left open.

    cpus_per_worker becomes the most that all workers can have at once (no more than go with their GPUs, and with
    `threads`), at least 1; loader processes what feeds the rest; cache ram where the images have room.

    Args:
        gpus: of each worker.
        nodes: those that workers may be placed on.
        threads: of arithmetic, where the recipe fixes them; else 0.
        images: None for work that does not keep any.
    """
    chosen = placement
    reasons: list[str] = []
    if chosen.cache == "auto":
        cache, reason = _cache(images)
        chosen = chosen.model_copy(update={"cache": cache})
        reasons += filter(None, [reason])
    feeds = FED_FROM_FILES if chosen.cache == "none" else FED_FROM_MEMORY
    if chosen.cpus_per_worker == "auto":
        cpus = most_cpus(nodes, placement.max_workers, gpus, placement.placement_strategy)
        if threads and not gpus:
            cpus = min(cpus, threads + math.ceil(threads / feeds))
        chosen = chosen.model_copy(update={"cpus_per_worker": float(cpus)})
        reasons.insert(0, _free(nodes, placement.max_workers))
    if chosen.workers < 0:
        loaders = loader_processes(int(chosen.cpus), gpus, threads, feeds)
        chosen = chosen.model_copy(update={"workers": loaders})
    return Resources(chosen, threads or chosen.threads, tuple(reasons))


def workers_here(gpus: int, gpus_per_worker: float | Literal["auto"]) -> tuple[int, str]:
    """How many workers `auto` means where no cluster was asked for, and why: one for each of several GPUs, else 0."""
    each = 1.0 if gpus_per_worker == "auto" else gpus_per_worker
    number = int(gpus / each + 1e-9) if each else 0
    if number > 1:
        return number, f"{gpus} GPUs here"
    return 0, "in this process: no cluster was asked for, and no more than one GPU"


def workers_on(nodes: Sequence[Node], gpus: float, cpus: float) -> tuple[int, str]:
    """How many workers `auto` means on a cluster, and why: one for each free GPU, else one for each node with so many
    free CPUs; at least 1, which waits for them.
    """
    if gpus:
        number = sum(int(node.gpus / gpus + 1e-9) for node in nodes)
        return max(1, number), f"free GPUs: {sum(node.gpus for node in nodes):g}"
    number = sum(node.cpus >= cpus for node in nodes)
    return max(1, number), f"nodes with free CPUs: {number}"


def most_cpus(nodes: Sequence[Node], workers: int, gpus: float, strategy: str) -> int:
    """The most whole CPUs, at least 1, that each of so many workers with so many GPUs can have at the same time.

    A worker with GPUs has at most the part of a node's CPUs that its GPUs are of the node's.
    """
    nodes = [node for node in nodes if node.gpus >= gpus]
    most = min((node.cpus * gpus / node.gpus for node in nodes), default=1) if gpus else max(
        (node.cpus for node in nodes), default=1)

    def fits(cpus: int) -> bool:
        rooms = [math.floor(min(node.cpus / cpus, node.gpus / gpus if gpus else math.inf) + 1e-9) for node in nodes]
        return {"STRICT_PACK": max(rooms, default=0), "STRICT_SPREAD": sum(room > 0 for room in rooms)}.get(
            strategy, sum(rooms)) >= workers

    return next((cpus for cpus in range(int(most), 1, -1) if fits(cpus)), 1)


def loader_processes(cpus: int, gpus: float, threads: int, feeds: int) -> int:
    """Loader processes of a worker: beside a GPU all but one of its CPUs, else as few as feed its arithmetic.

    With s the arithmetic of a sample and s / feeds its making, c CPUs take s / c + s / feeds for both, one after the
    other, or s / (c - 1) beside a loader process: less where c (c - 1) > feeds.

    Args:
        threads: of arithmetic, where they are fixed; else 0.
        feeds: CPUs whose arithmetic one of them feeds.
    """
    if gpus:
        return max(0, min(MAX_GPU_LOADERS, cpus - 1))
    if threads:
        return max(0, min(MAX_LOADERS, cpus - threads, math.ceil(threads / feeds)))
    return min(MAX_LOADERS, math.ceil(cpus / feeds)) if cpus * (cpus - 1) > feeds else 0


def _cache(images: Images | None) -> tuple[str, str]:
    """Whether images are kept, and why."""
    if images is None:
        return "none", ""
    needed = f"{images.num_bytes / 1e9:.2g} GB of decoded images, memory spares {images.room / 1e9:.2g}"
    return "ram" if images.num_bytes <= images.room else "none", needed


def _free(nodes: Sequence[Node], workers: int) -> str:
    cpus = sum(node.cpus for node in nodes)
    shared = f"{workers} workers" if workers > 1 else "1 worker"
    return f"{cpus:g} CPUs free for {shared}"
