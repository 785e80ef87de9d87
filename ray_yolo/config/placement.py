"""Where training runs, and the configuration tree `RunConfig = Recipe + Placement`.

The recipe determines the weights; the placement determines where they are trained. A checkpoint stores the recipe and
can be resumed with any placement.
"""

from __future__ import annotations

import re
from typing import Annotated, Literal

from pydantic import Field, NonNegativeFloat, field_validator

from ray_yolo.config.addresses import corrected_store, corrected_tracking_uri
from ray_yolo.config.recipe import Recipe
from ray_yolo.config.sections import ConfigModel

CudaGraphs = Literal["auto", "on", "loss", "update", "off"]

GRAPHS_OF_SEVERAL_WORKERS = False
"""Whether `cuda_graphs: auto` is on for several workers. It becomes true when the row "DDP and NCCL in a group of one"
of `make gpu-test` has passed on a GPU."""


def repeats_passes(setting: CudaGraphs, num_workers: int) -> bool:
    """Whether the workers of a group of this size repeat their network's passes as CUDA graphs, if they have GPUs."""
    if setting == "auto":
        return num_workers == 1 or GRAPHS_OF_SEVERAL_WORKERS
    return setting != "off"


def split_names(text: str) -> tuple[str, ...]:
    """The names in a text that separates them by commas."""
    return tuple(name.strip() for name in text.split(",")) if text else ()


class Placement(ConfigModel):
    """Where the recipe is trained and its results are written. No setting here changes the weights."""

    num_workers: int | tuple[int, int] | Literal["auto"] = "auto"
    """Ray workers: a number, a range 'low-high' (elastic), 0 to train in this process without Ray, or auto: one per GPU
    of the requested cluster, or per node without GPUs; without a cluster one per local GPU, 0 for at most one."""
    gpus_per_worker: NonNegativeFloat | Literal["auto"] = "auto"
    """GPUs of each worker; auto: 1 if the cluster has any, else 0. With a part of one, such as 0.5, a training has one
    worker: NCCL connects no two processes on a GPU."""
    cpus_per_worker: Annotated[float, Field(gt=0, le=4096)] | Literal["auto"] = "auto"
    """CPUs of each worker; auto: the most that all workers can have at once. On a requested cluster this is out of half
    of the free CPUs; with GPUs it is the worker's share of the node; in a sweep it is 1."""
    placement_strategy: Literal["PACK", "SPREAD", "STRICT_PACK", "STRICT_SPREAD"] = "PACK"
    """Ray's strategy for placing workers on nodes. A range of workers excludes the STRICT_ ones."""
    accelerator_type: str = ""
    """Type of GPU to request, by Ray's names (A100, H100, ...)."""
    address: str = ""
    """Ray cluster to use; '': RAY_ADDRESS, else the one that `ray start` started here, else a private one."""
    workers: int = Field(-1, ge=-1, le=256)
    """Loader processes of each worker, on its CPUs; -1: the fewest that keep up (0 on 3 CPUs), with a GPU all CPUs but
    1, at most 64."""
    cuda_graphs: CudaGraphs = "auto"
    """On a GPU, repeat the network's passes as CUDA graphs: on, off, or auto: on for one worker, off for several,
    where it has not yet run on GPUs; loss: on, and the loss as well; update: loss, and the clip and the averages as
    well. The last two have not yet run on a GPU. The weights are the same; it is faster where the host is the limit:
    small models, few images."""
    colour_kernel: bool = False
    """On a GPU, change the colours of images by one kernel of Triton instead of fifty of torch: the same bytes. Off,
    because it has not yet run on a GPU."""
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
    trackers: str = ""
    """Other trackers of the run, separated by commas: wandb, or one that a package offers by an entry point of
    ray_yolo.records."""
    callbacks: str = ""
    """The user's functions: package.module[:object] or file.py[:object] with any of on_run_start(run_dir, recipe),
    on_batch_end(event), on_step_end(event), on_val_end(event), on_epoch_end(event), on_run_end(result); `"stop"`, if
    one returns it, ends the training."""
    priority: int = Field(0, ge=-10, le=10)
    """Of a range of workers: those above the minimum leave for jobs of equal or higher priority that wait."""
    max_failures: int = Field(3, ge=-1)
    """Consecutive worker failures allowed without progress (a step if other workers continue, else a new checkpoint);
    -1: no limit."""
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
    max_hours: float = Field(0.0, ge=0.0)
    """Pause with a checkpoint this long after the start of the command; the same command continues; 0: no limit."""
    noplots: bool = False
    """Draw no plots."""
    timeout_seconds: float = Field(600.0, gt=0.0)
    """A collective operation that takes longer counts as a failure."""
    stall_seconds: float = Field(0.0, ge=0.0)
    """A worker without progress for this long while others wait is replaced; 0: ten times a step, at least 30."""

    @field_validator("num_workers", mode="before")
    @classmethod
    def _read_range(cls, value: object) -> object:
        if isinstance(value, list):  # A YAML file gives a list.
            return tuple(value)
        if not isinstance(value, str):
            return value
        match = re.fullmatch(r"([0-9]{1,6})-([0-9]{1,6})", value)
        return (int(match[1]), int(match[2])) if match else value

    @field_validator("num_workers")
    @classmethod
    def _check_workers(cls, value: int | tuple[int, int] | str) -> int | tuple[int, int] | str:
        if isinstance(value, str):
            return value
        if isinstance(value, tuple):
            low, high = value
            is_valid = 1 <= low <= high <= 4096
        else:
            is_valid = 0 <= value <= 4096
        if not is_valid:
            raise ValueError("must be 0 (no Ray), a number up to 4096, a range such as 2-8, or auto")
        return value

    @field_validator("storage_path", "project", "resume")
    @classmethod
    def _store_address(cls, value: str) -> str:
        address = corrected_store(value)
        if address:
            raise ValueError(f"is no address and no usual folder; write {address}, or ./{value} for a folder")
        return value

    @field_validator("mlflow_uri")
    @classmethod
    def _server_address(cls, value: str) -> str:
        uri = corrected_tracking_uri(value)
        if uri:
            raise ValueError(f"has no scheme; write {uri}")
        return value

    @field_validator("name", "registered_name")
    @classmethod
    def _plain_name(cls, value: str) -> str:
        is_plain = re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9._-]{0,62}", value)
        if value and not is_plain:
            raise ValueError("a name is up to 63 letters, digits, '.', '_' or '-', starting with a letter or "
                             "digit; folders go into --project")
        return value

    @field_validator("trackers")
    @classmethod
    def _names_of_trackers(cls, value: str) -> str:
        names = split_names(value)
        if value and not all(re.fullmatch(r"[A-Za-z0-9._-]{1,63}", name) for name in names):
            raise ValueError("write names separated by commas, such as wandb")
        if len(set(names)) < len(names):
            raise ValueError("names a tracker twice")
        return value

    @property
    def is_elastic(self) -> bool:
        """Whether workers may join and leave."""
        return isinstance(self.num_workers, tuple)

    @property
    def shares_gpus(self) -> bool:
        """Whether two of its workers could be on one GPU, with a part of it each."""
        is_part = self.gpus_per_worker != "auto" and 0 < self.gpus_per_worker < 1
        return is_part and self.placement_strategy != "STRICT_SPREAD"

    @property
    def max_workers(self) -> int:
        """Largest requested number of workers (at least 1: 0 and `auto` count as one)."""
        return self._bounds[1]

    @property
    def min_workers(self) -> int:
        """Number of workers at the start, at least 1."""
        return self._bounds[0]

    @property
    def _bounds(self) -> tuple[int, int]:
        """The lowest and the highest number of workers."""
        if isinstance(self.num_workers, tuple):
            return self.num_workers
        number = 1 if self.num_workers == "auto" else max(1, self.num_workers)  # 0 is this process
        return number, number

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
