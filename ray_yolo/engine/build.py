"""Builds the objects that train a recipe on one worker: model, optimiser, loss and loaders."""

from __future__ import annotations

import gc
import inspect
import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cache, partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Literal, TypeVar, cast

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader

from ray_yolo.checkpoints.foreign import read_weights
from ray_yolo.checkpoints.remote_checkpoints import RemoteCheckpoints
from ray_yolo.checkpoints.weights_file import local_file
from ray_yolo.config.model_facts import GRID
from ray_yolo.config.placement import CudaGraphs, repeats_passes
from ray_yolo.config.recipe import Recipe, accumulate_batches, check_workers, resolved_batch
from ray_yolo.core.errors import ConfigError
from ray_yolo.core.structures import AnnotationIndex
from ray_yolo.data.augment import colour_tables
from ray_yolo.data.dataset import (
    TrainDataset,
    ValDataset,
    cut_batches,
    identity,
    padded_shapes,
    start_forkserver,
    worker_init,
)
from ray_yolo.data.image_cache import ImageStore
from ray_yolo.data.index import image_weights
from ray_yolo.engine.balance import LoadBalancer
from ray_yolo.engine.collectives import Collectives, bare
from ray_yolo.engine.cuda_graphs import GraphedForward, repeat_passes
from ray_yolo.engine.gradients import GradientTree
from ray_yolo.engine.loading import (
    PREFETCH,
    LoadedDataset,
    Loader,
    MicrobatchLoader,
    part_images,
    prefetched_parts,
)
from ray_yolo.engine.loss_graph import GraphedLoss
from ray_yolo.engine.membership import Activity
from ray_yolo.engine.plan import Plan, ShardSampler
from ray_yolo.models.batch_norm import BatchNorm, Normalise, Statistics, plain_norm, spread_norm
from ray_yolo.models.blocks import avoid_slow_convolutions
from ray_yolo.models.criterion import Criterion
from ray_yolo.models.detector import Detector, backbone_of
from ray_yolo.models.families import Family, GivenClasses, build_model, find_family, load_weights
from ray_yolo.models.heads import Anchors
from ray_yolo.ops import sharding
from ray_yolo.ops.ema import Ema
from ray_yolo.ops.recolour import ColourTables, RecolouredInput, recoloured_input

AnyOptimizer = TypeVar("AnyOptimizer", bound=torch.optim.Optimizer)
Batches = Iterable[Mapping[str, Tensor]]

ALONE = Collectives(0, 1)
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
    weights_licence: str = ""  # that the file of the initial weights states


@dataclass(frozen=True)
class WorkerContext:
    """A worker's environment, from Ray Train or from a caller that trains in-process."""

    collectives: Collectives = ALONE
    device: torch.device = CPU
    prepare_model: Callable[[nn.Module], nn.Module] = lambda model: model
    prepare_loader: Callable[[DataLoader], DataLoader] = lambda loader: loader
    loader_processes: int = 0
    loader_init: Callable[[int], None] = worker_init  # called in each loader process with its number
    threads: int = 1
    cuda_graphs: CudaGraphs = "auto"  # whether the network runs as CUDA graphs on a GPU
    colour_kernel: bool = False  # a GPU changes colours by one kernel
    cache: Literal["none", "ram", "disk"] = "none"
    activity: Activity = field(default_factory=Activity)
    stored: RemoteCheckpoints | None = None  # if workers share no folder


@dataclass
class TrainComponents:
    """The objects with which one worker trains."""

    spec: TrainSpec
    context: WorkerContext
    plan: Plan
    family: Family
    model: Detector  # the bare model
    replica: nn.Module  # the same model, wrapped by DDP if there are several workers
    graphs: GraphedForward | None  # the model's forward pass in training, if CUDA graphs repeat it
    ema: Ema[Detector]
    optimizer: torch.optim.Optimizer
    scaler: torch.amp.GradScaler
    loss: Criterion
    statistics: Statistics
    gradients: GradientTree
    balancer: LoadBalancer
    sampler: ShardSampler
    loader: Batches
    val_batches: Batches  # this worker's shard
    stores: tuple[ImageStore, ImageStore]  # those of training and validation; the session closes them
    colours: RecolouredInput | None  # how the device changes colours; None: the loaders do


def build(spec: TrainSpec, context: WorkerContext) -> TrainComponents:
    """The components that train `spec` on this worker, in their state before the first step.

    Raises:
        ConfigError: if the recipe has too few microbatches for the workers.
        CheckpointError: if the initial weights do not fit.
    """
    recipe = spec.recipe
    torch.set_num_threads(recipe.threads or context.threads)
    if recipe.exact:  # before the first call of cuBLAS, which otherwise may add in any order, so torch refuses it
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    torch.backends.cudnn.allow_tf32 = not recipe.no_tf32  # only kernels of fp32 on GPUs look at it
    if recipe.exact != torch.are_deterministic_algorithms_enabled():  # a needless call would import torch's compiler
        torch.use_deterministic_algorithms(recipe.exact)  # then a nondeterministic kernel raises
    model = build_network(spec).to(memory_format=torch.channels_last)
    if context.device.type == "cpu":
        avoid_slow_convolutions(model)
    family = find_family(spec.architecture or recipe.model)
    for number in recipe.freeze:
        model.model[number].requires_grad_(False)
    shared = _shared_components(spec, context, model)
    model = cast(Detector, bare(shared["replica"]))  # the model, on its device
    stores = (ImageStore(spec.train, recipe.imgsz, context.cache),
              ImageStore(spec.val, recipe.imgsz, context.cache, smooth=True))
    ema = Ema(model, recipe.schedule.ema_decay, recipe.schedule.ema_ramp)  # a copy: made before graphs are
    graphs = graphed_forward(spec, context, model)
    return TrainComponents(
        family=family, model=model, ema=ema, graphs=graphs,
        optimizer=build_optimizer(model, recipe), stores=stores,
        scaler=torch.amp.GradScaler(context.device.type, enabled=recipe.precision == "fp16"),
        loss=build_loss(spec, context, family, model, graphs),
        **shared, **_loaders(spec, context, stores, model.grid))


def release_process_group(components: TrainComponents) -> None:
    """Release the process group. Without references, it closes its connections, so waiting peers fail."""
    wrapped = components.replica is not components.model
    if components.gradients is not None:  # None: a worker was lost before the next group was complete
        components.gradients.close()
    vars(components).update(replica=None, gradients=None)
    if wrapped:
        gc.collect()  # DDP is in a reference cycle, and its hooks on parameters would wait for the abandoned step


def regroup(components: TrainComponents, collectives: Collectives) -> TrainComponents:
    """The same components in another group of workers. Called between two steps. Collective."""
    context = replace(components.context, collectives=collectives)
    shared = _shared_components(components.spec, context, components.model)
    vars(components.model).pop("forward", None)  # the recordings of the last group, whose scratch memory is gone
    graphs = graphed_forward(components.spec, context, components.model)
    loss = build_loss(components.spec, context, components.family, components.model, graphs)
    return replace(components, graphs=graphs, loss=loss, **shared,
                   **_loaders(components.spec, context, components.stores, components.model.grid))


def rebuild(components: TrainComponents, recipe: Recipe) -> TrainComponents:
    """The same components for a recipe with other settings. Weights and optimiser state are kept."""
    spec = replace(components.spec, recipe=recipe)
    optimizer = build_optimizer(components.model, recipe)
    optimizer.load_state_dict({**optimizer.state_dict(), "state": components.optimizer.state_dict()["state"]})
    components.ema.limit, components.ema.ramp = recipe.schedule.ema_decay, recipe.schedule.ema_ramp
    loss = build_loss(spec, components.context, components.family, components.model, components.graphs)
    return replace(components, optimizer=optimizer, loss=loss,
                   **_loaders(spec, components.context, components.stores, components.model.grid))


def _shared_components(spec: TrainSpec, context: WorkerContext, model: Detector) -> dict[str, Any]:
    """The components, by name, that communicate with other workers."""
    check_workers(spec.recipe, context.collectives.num_workers)
    replica = context.prepare_model(model)
    statistics = Statistics(
        cast(Detector, bare(replica)), normalisation(spec.recipe, context.collectives, context.device)
    )
    return {"context": context, "replica": replica, "statistics": statistics,
            "gradients": GradientTree(replica, context.collectives, statistics.size)}


def normalisation(recipe: Recipe, collectives: Collectives, device: torch.device) -> Normalise:
    """What normalises microbatches in training.

    Raises:
        ConfigError: if the recipe's kernels need Triton, and it is not installed: others would give other weights.
    """
    by_kernels = recipe.norm_kernels and device.type == "cuda"
    if recipe.sync_bn:
        return spread_norm(collectives, by_kernels=by_kernels)
    if not by_kernels:
        return plain_norm
    if not find_spec("triton"):
        raise ConfigError("norm_kernels: Triton is not installed where this worker runs; install it, or leave "
                          "norm_kernels out")
    from ray_yolo.ops.norm_kernel import fused_norm  # imports Triton, which takes a second

    return fused_norm


def build_loss(spec: TrainSpec, context: WorkerContext, family: Family, model: Detector, graphs: GraphedForward | None
               ) -> Criterion:
    """The criterion of a training; its passes are repeated if those of the network are, and if that is wanted."""
    loss = family.build_loss(model.head, spec.recipe.loss, len(spec.names), spec.recipe.imgsz)
    return GraphedLoss(loss, graphs) if graphs is not None and context.cuda_graphs == "loss" else loss


def graphed_forward(spec: TrainSpec, context: WorkerContext, model: Detector) -> GraphedForward | None:
    """The model's repeated passes on a GPU, unless they are switched off. With sync_bn, a pass exchanges numbers."""
    is_on = repeats_passes(context.cuda_graphs, context.collectives.num_workers)
    if context.device.type != "cuda" or not is_on or spec.recipe.sync_bn:
        return None
    return repeat_passes(model)


def _loaders(spec: TrainSpec, context: WorkerContext, stores: tuple[ImageStore, ImageStore], grid: int
             ) -> dict[str, Any]:
    """The components, by name, that load this worker's shard of the data."""
    recipe = spec.recipe
    return {**_train_loader(spec, context, stores[0], grid), "val_batches": val_loader(
        spec.val, stores[1], recipe.imgsz, grid, recipe.evaluate.batch_size, context)}


def build_optimizer(model: nn.Module, recipe: Recipe) -> torch.optim.Optimizer:
    """A fused optimiser over (biases, decayed weights, norm weights), in this order; the device can skip its step.

    Weight decay is scaled by batch_size x accumulation / nominal_batch, a step's share of a nominal step. With a
    `backbone_lr` other than 1, each of the three is two groups, the backbone's first.
    """
    config = recipe.optimizer
    decay = config.weight_decay * resolved_batch(recipe)[0] * accumulate_batches(recipe) / config.nominal_batch
    biases: list[nn.Parameter] = []
    weights: list[nn.Parameter] = []
    norms: list[nn.Parameter] = []
    for module in model.modules():
        for name, parameter in module.named_parameters(recurse=False):
            if not parameter.requires_grad:
                continue
            if name == "bias":
                biases.append(parameter)
            elif isinstance(module, BatchNorm):
                norms.append(parameter)
            else:
                weights.append(parameter)
    groups: list[dict[str, Any]] = [
        {"params": biases, "weight_decay": 0.0},  # explicit for each group: AdamW's default is not 0
        {"params": weights, "weight_decay": decay}, {"params": norms, "weight_decay": 0.0}]
    if config.backbone_lr != 1:
        groups = _with_backbone_rates(groups, cast(Detector, bare(model)), config.backbone_lr)
    if config.name == "SGD":
        sgd = _plain(torch.optim.SGD)(groups, lr=config.lr0, momentum=config.momentum, nesterov=config.momentum > 0,
                                      fused=True)
        if config.momentum:  # a skipped first step would leave the buffer uninitialised
            for parameter in (*biases, *weights, *norms):
                sgd.state[parameter]["momentum_buffer"] = torch.zeros_like(parameter)
        return sgd
    kind = torch.optim.Adam if config.name == "Adam" else torch.optim.AdamW
    return _plain(kind)(groups, lr=config.lr0, betas=(config.momentum, 0.999), fused=True)


def _with_backbone_rates(groups: Sequence[dict[str, Any]], model: Detector, factor: float) -> list[dict[str, Any]]:
    """Each group as two: the parameters of the backbone, whose rates are `factor` times as high, and the others.

    The order of all parameters stays, because the backbone's come first in each group: checkpoints number them.
    """
    backbone = {parameter for layer in backbone_of(model) for parameter in layer.parameters()}
    split = []
    for group in groups:
        own = [parameter for parameter in group["params"] if parameter in backbone]
        others = [parameter for parameter in group["params"] if parameter not in backbone]
        split.append({**group, "params": own, "lr_factor": factor})
        split.append({**group, "params": others, "lr_factor": 1.0})
    return split


@cache
def _plain(kind: type[AnyOptimizer]) -> type[AnyOptimizer]:
    """The optimiser class without the wrappers that would import torch's compiler, which takes seconds."""
    names = ("add_param_group", "zero_grad", "state_dict", "load_state_dict")
    methods = {name: inspect.unwrap(getattr(kind, name)) for name in names}
    return type(kind.__name__, (kind,), {**methods, "step": torch.no_grad()(inspect.unwrap(kind.step))})


def build_network(spec: TrainSpec) -> Detector:
    """The model with initial weights, which are drawn from the recipe's seed or read from its weights file."""
    recipe = spec.recipe
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(recipe.seed)
        model = build_model(spec.architecture or recipe.model, len(spec.names), spec.anchors)
    if not recipe.weights:
        return model
    weights, rows = read_weights(local_file(recipe.weights)), spec.weight_classes
    keep_anchors = spec.anchors is not None
    if rows is None:
        load_weights(model, weights.tensors, keep_anchors=keep_anchors)
    elif recipe.match_classes:
        given = GivenClasses(rows, len(weights.names))
        load_weights(model, weights.tensors, keep_anchors=keep_anchors, given=given)
    else:  # the same number of classes, none of them new
        load_weights(model, weights.tensors, keep_anchors=keep_anchors, classes=cast(tuple[int, ...], rows))
    return model


def _rect(spec: TrainSpec, grid: int) -> tuple[np.ndarray, np.ndarray] | tuple[None, None]:
    """Under `rect`, the order of images by aspect ratio, the same in every epoch, and the (height, width) of each
    image: the smallest shape that fits every image of its microbatch."""
    if not spec.recipe.rect:
        return None, None
    order = np.argsort(spec.train.sizes[:, 0] / spec.train.sizes[:, 1], kind="stable")
    shapes = padded_shapes(spec.train.sizes, spec.recipe.imgsz, grid, pad=0.0)
    _, size = resolved_batch(spec.recipe)
    for first in range(0, len(order), size):
        microbatch = order[first : first + size]
        shapes[microbatch] = shapes[microbatch].max(axis=0)
    return order, shapes


def train_dataset(spec: TrainSpec, store: ImageStore, shapes: np.ndarray | None = None, *,
                  leaves_colours: bool = False) -> TrainDataset:
    """The augmented training samples."""
    recipe = spec.recipe
    return TrainDataset(spec.train, store, recipe.augment, recipe.imgsz, recipe.seed, recipe.epochs, shapes,
                        quad=recipe.quad, leaves_colours=leaves_colours)


def recolours_on_device(recipe: Recipe, device: torch.device) -> bool:
    """Whether the device changes the colours of training images. On a CPU the loader processes do: they are faster
    (`cv2` needs no table), and there are several.

    Samples that `quad` merges have colours of their own, which the loaders change before.
    """
    augment = recipe.augment
    has_colours = bool(augment.hsv_h or augment.hsv_s or augment.hsv_v)
    return device.type == "cuda" and has_colours and not recipe.quad


@cache
def colour_tables_on(device: torch.device) -> ColourTables:
    """The tables on a device, made once: it takes half a second or more."""
    return colour_tables().to(device)


def colours_on(device: torch.device, *, in_one_kernel: bool) -> RecolouredInput:
    """What changes colours on a device; without Triton, never by one kernel."""
    if in_one_kernel and find_spec("triton"):
        from ray_yolo.ops import colour_kernel  # imports Triton, which takes a second

        return partial(colour_kernel.recoloured_input, colour_tables_on(device))
    return partial(recoloured_input, colour_tables_on(device))


def first_batches(spec: TrainSpec) -> Batches:
    """The batches of the first epoch, one microbatch each, as a single worker trains them: for plots."""
    grid = build_network(spec).grid if spec.recipe.rect else GRID
    parts = _train_loader(spec, WorkerContext(), ImageStore(spec.train, spec.recipe.imgsz), grid)
    parts["sampler"].start(0, weights=draw_weights(spec, ()))
    return cast(Batches, parts["loader"])


def draw_weights(spec: TrainSpec, class_maps: Sequence[float]) -> np.ndarray | None:
    """Under `image_weights`, the sampling weight of each image, from the last validation's class results, if any."""
    if not spec.recipe.image_weights:
        return None
    return image_weights(spec.train, np.array(class_maps or (0.0,) * len(spec.names)))


def _train_loader(spec: TrainSpec, context: WorkerContext, store: ImageStore, grid: int) -> dict[str, Any]:
    """The components, by name, that load this worker's shard of the training data."""
    plan, (order, shapes) = Plan(spec.recipe, len(spec.train)), _rect(spec, grid)
    worker, num_workers = context.collectives.rank, context.collectives.num_workers
    balancer = LoadBalancer(plan, num_workers, context.activity)
    images = plan.worker_images(num_workers, worker)
    part = part_images(spec.recipe, images, context.loader_processes)
    sampler = ShardSampler(plan, worker, num_workers, order, balancer.seconds, part)
    leaves_colours = recolours_on_device(spec.recipe, context.device)
    samples = train_dataset(spec, store, shapes, leaves_colours=leaves_colours)
    parts = Loader(context.prepare_loader(DataLoader(
        LoadedDataset(samples.load), batch_size=None, sampler=sampler, collate_fn=identity,
        **_processes(context, prefetched_parts(images, part, max(context.loader_processes, 1))))))
    loader = MicrobatchLoader(parts, context.device)
    colours = colours_on(context.device, in_one_kernel=context.colour_kernel) if leaves_colours else None
    return {"spec": spec, "plan": plan, "balancer": balancer, "sampler": sampler, "loader": loader, "colours": colours}


def val_loader(index: AnnotationIndex, store: ImageStore, imgsz: int, grid: int, batch_size: int, context: WorkerContext
               ) -> Batches:
    """The worker's share of the validation batches, about the same number of pixels for each worker.

    Batches have images of equal padded shape and do not depend on the number of workers.
    """
    batches = cut_batches(index, imgsz, batch_size, grid)
    pixels = [len(batch.indices) * batch.shape[0] * batch.shape[1] for batch in batches]
    shard = sharding.balanced_shard(pixels, context.collectives.rank, context.collectives.num_workers)
    data = LoadedDataset(ValDataset(index, store, batches).__getitem__)
    return Loader(DataLoader(data, batch_size=None, sampler=shard, **_processes(context)))


def _processes(context: WorkerContext, prefetch: int = PREFETCH) -> dict[str, Any]:
    """Loader arguments. They use forkserver: forking a process that runs Ray or CUDA threads can deadlock."""
    pinned = {"pin_memory": context.device.type == "cuda"}  # otherwise a copy to the device blocks
    if not context.loader_processes:
        return pinned
    start_forkserver()
    return {**pinned, "num_workers": context.loader_processes, "persistent_workers": True,
            "prefetch_factor": prefetch, "worker_init_fn": context.loader_init, "multiprocessing_context": "forkserver"}
