"""From a recipe to the objects that train it: model, optimiser, loader, and what connects them to their host."""

from __future__ import annotations

import gc
import inspect
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cache
from pathlib import Path
from typing import Any, Literal, TypeVar, cast

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader

from ray_yolo.checkpoints.foreign import read_weights
from ray_yolo.checkpoints.remote import StoredCheckpoints, local_file
from ray_yolo.config.model_facts import GRID
from ray_yolo.config.recipe import Recipe, accumulate_batches, check_workers, resolved_batch
from ray_yolo.core.errors import ResourcesError
from ray_yolo.core.structures import AnnotationIndex
from ray_yolo.data.dataset import (
    TrainDataset,
    ValDataset,
    as_it_is,
    cut_batches,
    padded_shapes,
    start_forkserver,
    worker_init,
)
from ray_yolo.data.image_cache import ImageStore
from ray_yolo.data.index import image_weights
from ray_yolo.engine.collectives import Replicas, bare
from ray_yolo.engine.gradients import GradientTree
from ray_yolo.engine.membership import Pulse
from ray_yolo.engine.plan import Plan, ShardSampler
from ray_yolo.models.batch_norm import BatchNorm, Statistics
from ray_yolo.models.blocks import avoid_slow_convolutions
from ray_yolo.models.criterion import Criterion
from ray_yolo.models.detector import Detector
from ray_yolo.models.families import Family, build_model, find_family, load_weights
from ray_yolo.models.heads import Anchors
from ray_yolo.ops import sharding
from ray_yolo.ops.ema import Ema

AnyOptimizer = TypeVar("AnyOptimizer", bound=torch.optim.Optimizer)


def build_optimizer(model: nn.Module, recipe: Recipe) -> torch.optim.Optimizer:
    """Optimiser over (biases, decayed weights, norm weights), in this order; fused, so that a step can skip itself.

    Weight decay is scaled by batch_size x accumulation / nominal_batch, the part of a nominal step that is taken.
    """
    config = recipe.optimizer
    decay = config.weight_decay * resolved_batch(recipe)[0] * accumulate_batches(recipe) / config.nominal_batch
    biases: list[nn.Parameter] = []
    weights: list[nn.Parameter] = []
    norms: list[nn.Parameter] = []
    for module in model.modules():
        for name, parameter in module.named_parameters(recurse=False):
            if parameter.requires_grad:
                (biases if name == "bias" else norms if isinstance(module, BatchNorm) else weights).append(parameter)
    groups: list[dict[str, Any]] = [
        {"params": biases, "weight_decay": 0.0},  # said for each group: AdamW's own default is not 0
        {"params": weights, "weight_decay": decay}, {"params": norms, "weight_decay": 0.0}]
    if config.name == "SGD":
        sgd = _plain(torch.optim.SGD)(groups, lr=config.lr0, momentum=config.momentum, nesterov=config.momentum > 0,
                                      fused=True)
        if config.momentum:  # a first step that is skipped would leave it uninitialised
            for parameter in (*biases, *weights, *norms):
                sgd.state[parameter]["momentum_buffer"] = torch.zeros_like(parameter)
        return sgd
    kind = torch.optim.Adam if config.name == "Adam" else torch.optim.AdamW
    return _plain(kind)(groups, lr=config.lr0, betas=(config.momentum, 0.999), fused=True)


@cache
def _plain(kind: type[AnyOptimizer]) -> type[AnyOptimizer]:
    """The same optimiser without wrappers that import torch's compiler, which takes seconds, to be left alone by it."""
    names = ("add_param_group", "zero_grad", "state_dict", "load_state_dict")
    methods = {name: inspect.unwrap(getattr(kind, name)) for name in names}
    return type(kind.__name__, (kind,), {**methods, "step": torch.no_grad()(inspect.unwrap(kind.step))})


Batches = Iterable[Mapping[str, Tensor]]

ALONE = Replicas(0, 1)
CPU = torch.device("cpu")


def local_device(gpus_per_worker: float | Literal["auto"]) -> torch.device:
    """The device of this process: a GPU if there is one and it was not refused.

    Raises:
        ResourcesError: if a GPU was asked for by number, and there is none.
    """
    if gpus_per_worker not in ("auto", 0) and not torch.cuda.is_available():
        raise ResourcesError(f"gpus_per_worker: {gpus_per_worker:g} was asked for, but this machine has no GPU that "
                             "torch can use; use --gpus-per-worker 0 (or auto), or a machine with one")
    return torch.device("cuda" if gpus_per_worker and torch.cuda.is_available() else "cpu")


@dataclass(frozen=True)
class Job:
    """What the driver has decided for all workers: everything a training needs beside its surroundings."""

    recipe: Recipe  # resolved
    digest: str  # of the recipe
    names: tuple[str, ...]
    architecture: Mapping[str, Any] | None  # contents of a model YAML file; None for a model known by name
    anchors: Anchors | None  # pixels, when autoanchor has replaced the model's own
    train: AnnotationIndex
    val: AnnotationIndex
    run_dir: Path


@dataclass(frozen=True)
class Host:
    """What surrounds the worker: handed in by Ray Train, or by the caller that trains in-process."""

    replicas: Replicas = ALONE
    device: torch.device = CPU
    prepare_model: Callable[[nn.Module], nn.Module] = lambda model: model
    prepare_loader: Callable[[DataLoader], Batches] = lambda loader: loader
    loader_processes: int = 0
    loader_init: Callable[[int], None] = worker_init  # called in each of them with its number
    threads: int = 1
    cache: Literal["none", "ram", "disk"] = "none"
    cache_dir: Path | None = None
    pulse: Pulse = field(default_factory=Pulse)
    stored: StoredCheckpoints | None = None  # where workers have no folder in common


@dataclass
class Parts:
    """Everything one worker trains with."""

    job: Job
    host: Host
    plan: Plan
    family: Family
    model: Detector  # the bare model
    replica: nn.Module  # the same model, wrapped by DDP where there are several workers
    ema: Ema[Detector]
    optimizer: torch.optim.Optimizer
    scaler: torch.amp.GradScaler
    loss: Criterion
    statistics: Statistics
    gradients: GradientTree
    sampler: ShardSampler
    loader: Batches
    val_batches: Batches  # this worker's shard
    stores: tuple[ImageStore, ImageStore]  # of both; to be closed at the end


def build(job: Job, host: Host) -> Parts:
    """Everything that trains `job` on this worker, at its first step.

    Raises:
        ConfigError: if the recipe cannot be shared out over so many workers.
        CheckpointError: if the initial weights do not fit.
    """
    recipe = job.recipe
    torch.set_num_threads(recipe.threads or host.threads)
    if recipe.exact != torch.are_deterministic_algorithms_enabled():  # or torch's compiler is imported for nothing
        torch.use_deterministic_algorithms(recipe.exact)  # a kernel that cannot be had is an error
    model = build_network(job).to(memory_format=torch.channels_last)
    if host.device.type == "cpu":
        avoid_slow_convolutions(model)
    family = find_family(job.architecture or recipe.model)
    for number in recipe.freeze:
        model.model[number].requires_grad_(False)
    shared = _shared_parts(job, host, model)
    model = cast(Detector, bare(shared["replica"]))  # on its device
    stores = (ImageStore(job.train, recipe.imgsz, host.cache, host.cache_dir),
              ImageStore(job.val, recipe.imgsz, host.cache, host.cache_dir, smooth=True))
    return Parts(
        family=family, model=model, ema=Ema(model, recipe.schedule.ema_decay, recipe.schedule.ema_ramp),
        optimizer=build_optimizer(model, recipe), stores=stores,
        scaler=torch.amp.GradScaler(host.device.type, enabled=recipe.precision == "fp16"),
        loss=family.build_loss(model.head, recipe.loss, len(job.names), recipe.imgsz),
        **shared, **_loaders(job, host, stores, model.grid))


def ungroup(parts: Parts) -> None:
    """Let go of the process group: it closes its connections, which tells those who wait, when nothing holds it."""
    alone = parts.replica is parts.model
    if parts.gradients is not None:  # somebody may be lost before the next group is whole
        parts.gradients.close()
    vars(parts).update(replica=None, gradients=None)
    if not alone:
        gc.collect()  # DDP is part of a circle; its hooks on parameters would still wait for a step that was given up


def regroup(parts: Parts, replicas: Replicas) -> Parts:
    """The same training on this worker as one of other replicas, between two steps. Collective."""
    host = replace(parts.host, replicas=replicas)
    return replace(parts, **_shared_parts(parts.job, host, parts.model),
                   **_loaders(parts.job, host, parts.stores, parts.model.grid))


def _shared_parts(job: Job, host: Host, model: Detector) -> dict[str, Any]:
    """The parts, by name, that know the other workers."""
    check_workers(job.recipe, host.replicas.num_workers)
    replica = host.prepare_model(model)
    statistics = Statistics(cast(Detector, bare(replica)), host.replicas.global_sum if job.recipe.sync_bn else None)
    return {"host": host, "replica": replica, "statistics": statistics,
            "gradients": GradientTree(replica, host.replicas, statistics.size)}


def rebuild(parts: Parts, recipe: Recipe) -> Parts:
    """The same training by a recipe that differs in settings that may change; weights and optimiser go on."""
    job = replace(parts.job, recipe=recipe)
    optimizer = build_optimizer(parts.model, recipe)
    optimizer.load_state_dict({**optimizer.state_dict(), "state": parts.optimizer.state_dict()["state"]})
    parts.ema.limit, parts.ema.ramp = recipe.schedule.ema_decay, recipe.schedule.ema_ramp
    loss = parts.family.build_loss(parts.model.head, recipe.loss, len(job.names), recipe.imgsz)
    return replace(parts, optimizer=optimizer, loss=loss,
                   **_loaders(job, parts.host, parts.stores, parts.model.grid))


def _loaders(job: Job, host: Host, stores: tuple[ImageStore, ImageStore], grid: int) -> dict[str, Any]:
    """The parts, by name, that bring this worker its shard of a job."""
    recipe, plan, order = job.recipe, Plan(job.recipe, len(job.train)), _rect_order(job)
    sampler = ShardSampler(plan, host.replicas.worker, host.replicas.num_workers, order)
    return {
        "job": job, "plan": plan, "sampler": sampler,
        "loader": _train_loader(train_dataset(job, stores[0], _rect_shapes(job, order, grid)), host, plan, sampler),
        "val_batches": val_loader(job.val, stores[1], recipe.imgsz, grid, recipe.evaluate.batch_size, host),
    }


def build_network(job: Job) -> Detector:
    """The model with its initial weights: drawn from the recipe's seed, or read from its weights file."""
    recipe = job.recipe
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(recipe.seed)
        model = build_model(job.architecture or recipe.model, len(job.names), job.anchors)
    if recipe.weights:
        load_weights(model, read_weights(local_file(recipe.weights)).tensors, keep_anchors=job.anchors is not None)
    return model


def _rect_order(job: Job) -> np.ndarray | None:
    """Under `rect`, images by aspect ratio, the same in every epoch."""
    if not job.recipe.rect:
        return None
    return np.argsort(job.train.sizes[:, 0] / job.train.sizes[:, 1], kind="stable")


def _rect_shapes(job: Job, order: np.ndarray | None, grid: int) -> np.ndarray | None:
    """Under `rect`, each image's (height, width): the smallest that holds every image of its microbatch."""
    if order is None:
        return None
    shapes = padded_shapes(job.train.sizes, job.recipe.imgsz, grid, pad=0.0)
    _, size = resolved_batch(job.recipe)
    for first in range(0, len(order), size):
        microbatch = order[first : first + size]
        shapes[microbatch] = shapes[microbatch].max(axis=0)
    return shapes


def train_dataset(job: Job, store: ImageStore, shapes: np.ndarray | None = None) -> TrainDataset:
    """The job's augmented samples."""
    recipe = job.recipe
    return TrainDataset(job.train, store, recipe.augment, recipe.imgsz, recipe.seed, recipe.epochs, shapes,
                        quad=recipe.quad)


def first_batches(job: Job) -> Batches:
    """The batches of the first epoch, one microbatch each, as a worker on its own trains them: for pictures."""
    order, plan = _rect_order(job), Plan(job.recipe, len(job.train))
    sampler = ShardSampler(plan, ALONE.worker, ALONE.num_workers, order)
    sampler.start(0, weights=draw_weights(job, ()))
    shapes = _rect_shapes(job, order, GRID if order is None else build_network(job).grid)
    dataset = train_dataset(job, ImageStore(job.train, job.recipe.imgsz), shapes)
    return _train_loader(dataset, Host(), plan, sampler)


def draw_weights(job: Job, class_maps: Sequence[float]) -> np.ndarray | None:
    """Under `image_weights`, how often each image is drawn, by the class results of the last validation (if any)."""
    if not job.recipe.image_weights:
        return None
    return image_weights(job.train, np.array(class_maps or (0.0,) * len(job.names)))


def _train_loader(dataset: TrainDataset, host: Host, plan: Plan, sampler: ShardSampler) -> Batches:
    return host.prepare_loader(DataLoader(
        dataset, batch_size=plan.loader_batch(host.replicas.num_workers, host.replicas.worker), sampler=sampler,
        collate_fn=as_it_is, **_processes(host)))


def val_loader(index: AnnotationIndex, store: ImageStore, imgsz: int, grid: int, batch_size: int, host: Host
               ) -> Batches:
    """The worker's validation batches, whole ones: images of equal padded shape, cut without regard to workers. Each
    worker has about as many pixels."""
    batches = cut_batches(index, imgsz, batch_size, grid)
    pixels = [len(batch.indices) * batch.shape[0] * batch.shape[1] for batch in batches]
    mine = sharding.balanced_shard(pixels, host.replicas.worker, host.replicas.num_workers)
    return DataLoader(ValDataset(index, store, batches), batch_size=None, sampler=mine, **_processes(host))


def _processes(host: Host) -> dict[str, Any]:
    """Loader processes: forkserver, because forking a process that runs Ray or CUDA threads can deadlock."""
    pinned = {"pin_memory": host.device.type == "cuda"}  # or a copy to the device waits
    if not host.loader_processes:
        return pinned
    start_forkserver()
    return {**pinned, "num_workers": host.loader_processes, "persistent_workers": True,
            "worker_init_fn": host.loader_init, "multiprocessing_context": "forkserver"}
