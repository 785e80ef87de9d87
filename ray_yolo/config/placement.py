"""Where training runs, and the configuration tree `RunConfig = Recipe + Placement`.

The recipe determines the weights; the placement determines where they are trained. A checkpoint stores the recipe and
can be resumed with any placement.
"""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Annotated, Literal

from pydantic import Field, NonNegativeFloat, field_validator

from ray_yolo.config.addresses import corrected_store, corrected_tracking_uri
from ray_yolo.config.recipe import Recipe
from ray_yolo.config.sections import ConfigModel
from ray_yolo.core.events import ResourcesEvent
from ray_yolo.core.formatting import format_count


class Placement(ConfigModel):
    """Where the recipe is trained and its results are written. No setting here changes the weights."""

    num_workers: int | tuple[int, int] | Literal["auto"] = "auto"
    """Ray workers: a number, a range 'low-high' (elastic), 0 to train in this process without Ray, or auto: one per GPU
    of the requested cluster, or per node without GPUs; without a cluster one per local GPU, 0 for at most one."""
    gpus_per_worker: NonNegativeFloat | Literal["auto"] = "auto"
    """GPUs of each worker; auto: 1 if the cluster has any, else 0."""
    cpus_per_worker: Annotated[float, Field(gt=0, le=4096)] | Literal["auto"] = "auto"
    """CPUs of each worker; auto: the most that all workers can have at once. On a requested cluster this is out of half
    of the free CPUs; with GPUs it is the worker's share of the node; in a sweep it is 1."""
    placement_strategy: Literal["PACK", "SPREAD", "STRICT_PACK", "STRICT_SPREAD"] = "PACK"
    """Ray's strategy for placing workers on nodes."""
    accelerator_type: str = ""
    """Type of GPU to request, by Ray's names (A100, H100, ...)."""
    address: str = ""
    """Ray cluster to use; '': RAY_ADDRESS, else a local one is started."""
    workers: int = Field(-1, ge=-1, le=256)
    """Loader processes of each worker, on its CPUs; -1: the fewest that keep up (0 on 3 CPUs), with a GPU all CPUs but
    1, at most 16."""
    cache: Literal["auto", "none", "ram", "disk"] = "auto"
    """Cache decoded images, once per node, in memory or on disk; auto: ram if they fit in a quarter of free memory."""
    project: str = "runs/train"
    """Folder of runs."""
    name: str = ""
    """Run name; '': continue the newest unfinished run of the same recipe, else a new expN."""
    exist_ok: bool = False
    """Restart a finished --name; the old run is renamed, never overwritten."""
    storage_path: str = ""
    """Folder on shared storage, or an address (s3://bucket/path, gs://, az://) that every node can write to; `project`
    is relative to it. '': an absolute `project`, else the current folder (~/ray-yolo in Ray's copy of a job's
    files)."""
    resume: str = ""
    """Run folder, its address, or checkpoint to continue; 'auto': the newest unfinished run under `project`."""
    mlflow_uri: str = ""
    """Tracking server; '': MLFLOW_TRACKING_URI, else sqlite in the storage folder; 'off': none."""
    registered_name: str = ""
    """Name for the best weights in MLflow's model registry, with the alias 'best'."""
    callbacks: str = ""
    """User functions that the driver calls: package.module[:object] or file.py[:object] with any of
    on_run_start(run_dir, recipe), on_epoch_end(event), on_run_end(result)."""
    max_failures: int = Field(3, ge=-1)
    """Consecutive worker failures allowed without a new checkpoint; -1: no limit."""
    wait_for_resources: float = Field(15.0, ge=0.0)
    """Seconds to wait before giving up on workers that the cluster can never provide (exit 4)."""
    save_period: int = Field(-1, ge=-1)
    """Epochs between permanent checkpoints epochN.pt, N counted from 0; -1: none."""
    save_steps: int = Field(0, ge=0)
    """Optimiser steps between checkpoints, also within epochs; 0: at epoch ends only."""
    save_seconds: NonNegativeFloat | Literal["auto"] = "auto"
    """Seconds between checkpoints within epochs; auto: 60, or more if that costs over a hundredth of the time; 0: not
    by time."""
    keep_checkpoints: int = Field(2, ge=1)
    """Newest checkpoints kept on storage."""
    nosave: bool = False
    """Write a checkpoint only at the end."""
    stop_after: int = Field(0, ge=0)
    """Pause with a checkpoint after this many epochs; the same command with more epochs, or 0, continues; 0: train to
    the end."""
    noplots: bool = False
    """Draw no plots."""
    timeout_seconds: float = Field(600.0, gt=0.0)
    """A collective operation that takes longer counts as a failure."""
    stall_seconds: float = Field(0.0, ge=0.0)
    """A worker without progress for this long while others wait is replaced; 0: ten times a step, at least 30."""

    @field_validator("num_workers", mode="before")
    @classmethod
    def _read_range(cls, value: object) -> object:
        if isinstance(value, str) and (match := re.fullmatch(r"([0-9]{1,6})-([0-9]{1,6})", value)):
            return int(match[1]), int(match[2])
        return tuple(value) if isinstance(value, list) else value

    @field_validator("num_workers")
    @classmethod
    def _check_workers(cls, value: int | tuple[int, int] | str) -> int | tuple[int, int] | str:
        if isinstance(value, str):
            return value
        low, high = value if isinstance(value, tuple) else (value, value)
        if low < 0 or high > 4096 or low > high or (isinstance(value, tuple) and low < 1):
            raise ValueError("must be 0 (no Ray), a number up to 4096, a range such as 2-8, or auto")
        return value

    @field_validator("storage_path", "project", "resume")
    @classmethod
    def _store_address(cls, value: str) -> str:
        if address := corrected_store(value):
            raise ValueError(f"is no address and no usual folder; write {address}, or ./{value} for a folder")
        return value

    @field_validator("mlflow_uri")
    @classmethod
    def _server_address(cls, value: str) -> str:
        if uri := corrected_tracking_uri(value):
            raise ValueError(f"has no scheme; write {uri}")
        return value

    @field_validator("name", "registered_name")
    @classmethod
    def _plain_name(cls, value: str) -> str:
        allowed = all(c.isascii() and (c.isalnum() or c in "._-") for c in value)
        if value and not (allowed and value[0].isalnum() and len(value) <= 63):
            raise ValueError("a name is up to 63 letters, digits, '.', '_' or '-', starting with a letter or "
                             "digit; folders go into --project")
        return value

    @property
    def max_workers(self) -> int:
        """Largest requested number of workers (at least 1: 0 and `auto` count as one)."""
        return self._bound(1)

    @property
    def min_workers(self) -> int:
        """Number of workers at the start, at least 1."""
        return self._bound(0)

    def _bound(self, end: Literal[0, 1]) -> int:
        number = 1 if self.num_workers == "auto" else self.num_workers
        return max(1, number[end] if isinstance(number, tuple) else number)

    @property
    def cpus(self) -> float:
        """CPUs of each worker; 1 while `cpus_per_worker` is auto."""
        return 1.0 if self.cpus_per_worker == "auto" else self.cpus_per_worker

    @property
    def loader_processes(self) -> int:
        """Loader processes per worker; 0 while `workers` is -1."""
        return max(0, self.workers)

    @property
    def image_cache(self) -> Literal["none", "ram", "disk"]:
        """Cache of decoded images; none while `cache` is auto."""
        return "none" if self.cache == "auto" else self.cache

    @property
    def threads(self) -> int:
        """Arithmetic threads of each worker: its CPUs minus the loader processes."""
        return max(1, int(self.cpus) - self.loader_processes)


class RunConfig(ConfigModel):
    """A training run: what (`recipe`) and where (`placement`)."""

    recipe: Recipe = Recipe()
    placement: Placement = Placement()


FED_FROM_FILES, FED_FROM_MEMORY = 10, 40
"""CPUs of arithmetic that one loader process keeps busy: time to train a sample / time to load it, measured with
yolov5n, the fastest model (tests/benchmarks/README.md)."""
MAX_LOADERS, MAX_GPU_LOADERS = 8, 16


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

    num_bytes: int  # of both splits, decoded at the network's size
    room: int  # bytes available for them on a node


def share_out(placement: Placement, gpus: float, nodes: Sequence[NodeResources], threads: int = 0,
              images: Images | None = None) -> tuple[Placement, ResourcesEvent]:
    """The placement with all open settings resolved, and the resources of each worker for the run's log.

    `cpus_per_worker` becomes the most that all workers can have at once, at least 1. Their share of GPUs, half of a
    shared node without GPUs, and `threads` limit it. `workers` becomes the number of loader processes that keep the
    rest busy, and `cache` becomes `ram` if the images fit.

    Args:
        gpus: of each worker.
        nodes: candidates for workers.
        threads: of arithmetic, if the recipe fixes them; else 0.
        images: None if the command caches none.
    """
    chosen = placement
    reasons: list[str] = []
    if chosen.cache == "auto":
        fits = images is not None and images.num_bytes <= images.room
        chosen = chosen.model_copy(update={"cache": "ram" if fits else "none"})
        if images:
            reasons.append(f"{images.num_bytes / 1e9:.2g} GB of decoded images, {images.room / 1e9:.2g} GB of memory "
                           "available")
    feeds = FED_FROM_FILES if chosen.cache == "none" else FED_FROM_MEMORY
    if chosen.cpus_per_worker == "auto":
        cpus = most_cpus(nodes, placement.max_workers, gpus, placement.placement_strategy)
        if threads and not gpus:
            cpus = min(cpus, threads + math.ceil(threads / feeds))
        chosen = chosen.model_copy(update={"cpus_per_worker": float(cpus)})
        reasons.insert(0, _free(nodes, placement.max_workers, gpus, cpus))
    if chosen.workers < 0:
        loaders = loader_processes(int(chosen.cpus), gpus, threads, feeds)
        chosen = chosen.model_copy(update={"workers": loaders})
    return chosen, ResourcesEvent(cpus=chosen.cpus, threads=threads or chosen.threads, cache=chosen.cache,
                                  loader_processes=chosen.loader_processes, reasons=tuple(reasons))


def workers_here(gpus: int, gpus_per_worker: float | Literal["auto"]) -> tuple[int, str]:
    """Worker count of `auto` without a requested cluster, and the reason: one for each of several GPUs, else 0."""
    each = 1.0 if gpus_per_worker == "auto" else gpus_per_worker
    number = int(gpus / each + 1e-9) if each else 0
    if number > 1:
        return number, f"{gpus} GPUs here"
    return 0, "in this process: no cluster was requested, and there is at most one GPU"


def workers_on(nodes: Sequence[NodeResources], gpus: float, cpus: float) -> tuple[int, str]:
    """Worker count of `auto` on a cluster, and the reason: one per free GPU, else one per node with `cpus` free CPUs.

    At least 1, which waits for resources.
    """
    if gpus:
        number = sum(int(node.gpus / gpus + 1e-9) for node in nodes)
        return max(1, number), f"free GPUs: {sum(node.gpus for node in nodes):g}"
    number = sum(node.cpus >= cpus for node in nodes)
    return max(1, number), f"nodes with free CPUs: {number}"


def most_cpus(nodes: Sequence[NodeResources], workers: int, gpus: float, strategy: str) -> int:
    """The most whole CPUs, at least 1, that all workers can have at the same time with `gpus` GPUs each.

    A worker with GPUs gets at most the same share of a node's CPUs as of its GPUs. Workers without get at most half of
    the CPUs that are free on a shared node.
    """
    nodes = [node if gpus or not node.is_shared else replace(node, cpus=node.cpus / 2)
             for node in nodes if node.gpus >= gpus]
    most = min((gpus * (node.cpus_per_gpu or node.cpus / node.gpus) for node in nodes), default=1) if gpus else max(
        (node.cpus for node in nodes), default=1)

    def fits(cpus: int) -> bool:
        rooms = [math.floor(min(node.cpus / cpus, node.gpus / gpus if gpus else math.inf) + 1e-9) for node in nodes]
        return {"STRICT_PACK": max(rooms, default=0), "STRICT_SPREAD": sum(room > 0 for room in rooms)}.get(
            strategy, sum(rooms)) >= workers

    return next((cpus for cpus in range(int(most), 1, -1) if fits(cpus)), 1)


def loader_processes(cpus: int, gpus: float, threads: int, feeds: int) -> int:
    """Loader processes of a worker: with a GPU all but one of its CPUs, else the fewest that keep its CPUs busy.

    Let s be the arithmetic time of a sample and s / feeds its loading time. In sequence, c CPUs take s / c + s / feeds.
    With a loader process they take s / (c - 1), which is less if c (c - 1) > feeds.

    Args:
        threads: of arithmetic, if fixed; else 0.
        feeds: CPUs that one loader process keeps busy.
    """
    if gpus:
        return max(0, min(MAX_GPU_LOADERS, cpus - 1))
    if threads:
        return max(0, min(MAX_LOADERS, cpus - threads, math.ceil(threads / feeds)))
    return min(MAX_LOADERS, math.ceil(cpus / feeds)) if cpus * (cpus - 1) > feeds else 0


def _free(nodes: Sequence[NodeResources], workers: int, gpus: float, each: int) -> str:
    cpus = sum(node.cpus for node in nodes)
    text = f"{cpus:g} CPUs free for {format_count(workers, 'worker')}"
    halved = not gpus and any(node.is_shared for node in nodes) and workers * each <= cpus / 2
    return f"{text}, half of them left to other jobs" if halved else text
