"""The two inputs of a training on a worker: what to train, which is equal on all workers, and the worker's own
environment."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import torch
from torch import nn
from torch.utils.data import DataLoader

from ray_yolo.checkpoints.remote_checkpoints import RemoteCheckpoints
from ray_yolo.config.placement import CudaGraphs
from ray_yolo.config.recipe import Recipe
from ray_yolo.core.structures import AnnotationIndex
from ray_yolo.data.dataset import worker_init
from ray_yolo.engine.callbacks import TrainingCallbacks
from ray_yolo.engine.membership import Activity
from ray_yolo.models.heads import Anchors

CPU = torch.device("cpu")


@dataclass(frozen=True)
class TrainSpec:
    """What to train. It is equal on all workers and contains everything except the worker's own context."""

    recipe: Recipe  # resolved
    digest: str  # the recipe's digest
    names: tuple[str, ...]
    architecture: Mapping[str, Any] | None  # contents of a model YAML file; None for a model known by name
    anchors: Anchors | None  # pixels, if autoanchor has replaced the model's own
    train: AnnotationIndex
    val: AnnotationIndex
    run_dir: Path
    # For each class its number in the initial weights, None if it is new there; None: the same numbers
    weight_classes: tuple[int | None, ...] | None = None
    weights_licence: str = ""  # the file of the initial weights states it


@dataclass(frozen=True)
class WorkerContext:
    """A worker's environment, from Ray Train or from a caller that trains in-process. It stays the same in all
    generations."""

    device: torch.device = CPU
    prepare_model: Callable[[nn.Module], nn.Module] = lambda model: model  # wraps a model that is on the device
    prepare_loader: Callable[[DataLoader], DataLoader] = lambda loader: loader
    loader_processes: int = 0
    loader_init: Callable[[int], None] = worker_init  # called in each loader process with its number
    threads: int = 1
    cuda_graphs: CudaGraphs = "auto"  # whether the network runs as CUDA graphs on a GPU
    colour_kernel: bool = False  # a GPU changes colours by one kernel
    cache: Literal["none", "ram", "disk"] = "none"
    activity: Activity = field(default_factory=Activity)
    callbacks: TrainingCallbacks = field(default_factory=TrainingCallbacks)
    stored: RemoteCheckpoints | None = None  # workers that share no folder use it
