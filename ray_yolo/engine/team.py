"""One generation on one worker: what exchanges numbers with the other workers, and what loads this worker's share of
the images.
"""

from __future__ import annotations

import gc
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache, partial
from importlib.util import find_spec
from types import TracebackType
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader

from ray_yolo.config.effects import needs_host, renders_all
from ray_yolo.config.model_facts import GRID
from ray_yolo.config.placement import repeats_passes
from ray_yolo.config.recipe import Recipe, check_workers, resolved_batch
from ray_yolo.core.errors import ConfigError, release_frames
from ray_yolo.core.structures import AnnotationIndex
from ray_yolo.data.augment import colour_tables
from ray_yolo.data.dataset import (
    TrainDataset,
    ValDataset,
    cut_batches,
    identity,
    padded_shapes,
    start_forkserver,
)
from ray_yolo.data.image_cache import ImageStore, decoded_bytes
from ray_yolo.data.index import image_weights
from ray_yolo.data.views import ViewDataset
from ray_yolo.engine.balance import LoadBalancer
from ray_yolo.engine.collectives import Collectives
from ray_yolo.engine.cuda_graphs import CudaRecorder, Recordings
from ray_yolo.engine.gradients import GradientTree
from ray_yolo.engine.held_images import HeldImages, hold_images, require_memory
from ray_yolo.engine.learner import Learner, build_network
from ray_yolo.engine.loading import (
    PREFETCH,
    LoadedDataset,
    Loader,
    MicrobatchLoader,
    part_images,
    prefetched_parts,
)
from ray_yolo.engine.loss_graph import GraphedLoss
from ray_yolo.engine.network_graph import GraphedForward, repeat_passes
from ray_yolo.engine.plan import Plan, ShardSampler
from ray_yolo.engine.spec import TrainSpec, WorkerContext
from ray_yolo.engine.update import Update
from ray_yolo.engine.update_graph import GraphedUpdate
from ray_yolo.models.batch_norm import Normalise, Statistics, plain_norm, spread_norm
from ray_yolo.models.criterion import Criterion
from ray_yolo.ops import sharding
from ray_yolo.ops.recolour import ColourTables, RecolouredInput, recoloured_input
from ray_yolo.ops.views import RenderedInput

Batches = Iterable[Mapping[str, Tensor]]


class Stores(NamedTuple):
    """The images of training and of validation, the former also on the device if that renders samples."""

    train: ImageStore
    val: ImageStore
    held: HeldImages | None = None


class Loaders(NamedTuple):
    """What loads this worker's share of the images, under one set of settings."""

    balancer: LoadBalancer
    sampler: ShardSampler
    train: Batches
    val: Batches
    colours: RecolouredInput | None  # how the device changes colours of images; None: it need not
    rendered: RenderedInput | None  # how the device renders views; None: the loaders send images


@dataclass
class Team:
    """One generation on this worker: all that the next one replaces.

    It is a context manager, complete from `form_team` to the end of its context. The learner's model then belongs to no
    group: DDP and its hooks, repeated passes and loaders are gone, also if an error ends the context.
    """

    context: WorkerContext
    collectives: Collectives
    network: nn.Module  # the learner's model, wrapped by DDP if there are several workers
    graphs: GraphedForward | None  # the model's forward pass in training, if CUDA graphs repeat it
    criterion: Criterion  # the learner's, whose passes CUDA graphs repeat if that is wanted
    statistics: Statistics
    update: Update  # CUDA graphs repeat it if that is wanted
    gradients: GradientTree
    loaders: Loaders
    complaints: list[str]  # why a part of a step could not be recorded; what has been a warning is taken out

    def __enter__(self) -> Team:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None) -> None:
        """Without references, the process group closes its connections, so peers that wait for this worker fail."""
        if self.graphs:
            self.graphs.remove()
        self.gradients.close()
        del self.network, self.graphs, self.criterion, self.update, self.gradients, self.loaders
        if self.collectives.num_workers == 1:
            return
        # What still held DDP would keep its hooks on parameters, which would wait for the abandoned step.
        if error:
            release_frames(error)
        gc.collect()


def form_team(learner: Learner, context: WorkerContext, collectives: Collectives, stores: Stores) -> Team:
    """This worker's part in a group of workers with equal learners. Collective.

    DDP gives all workers the weights of worker 0.

    Raises:
        ConfigError: if the recipe has too few microbatches for the workers, or needs kernels that are missing here.
    """
    recipe, model = learner.spec.recipe, learner.model
    check_workers(recipe, collectives.num_workers)
    loaders = make_loaders(learner.spec, model.grid, context, collectives, stores)
    statistics = Statistics(model, normalisation(recipe, collectives, context.device))
    network = context.prepare_model(model)  # the only part that communicates; hooks exist only after it has succeeded
    complaints: list[str] = []
    graphs = graphed_forward(learner, context, collectives, complaints)
    criterion = repeated_loss(learner, context, graphs, complaints)
    update = repeated_update(statistics, context, graphs, complaints)
    return Team(context, collectives, network, graphs, criterion, statistics, update,
                GradientTree(network, collectives, statistics.size), loaders, complaints)


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


def repeated_loss(learner: Learner, context: WorkerContext, graphs: GraphedForward | None, complaints: list[str]
                  ) -> Criterion:
    """The learner's criterion; its passes are repeated if those of the network are, and if that is wanted."""
    if graphs is None or context.cuda_graphs not in ("loss", "update"):
        return learner.criterion
    return GraphedLoss(learner.criterion, Recordings("loss", CudaRecorder(context.device), complaints))


def repeated_update(statistics: Statistics, context: WorkerContext, graphs: GraphedForward | None,
                    complaints: list[str]) -> Update:
    """What updates the learner; it is repeated if the network's passes are, and if that is wanted."""
    if graphs is None or context.cuda_graphs != "update":
        return Update(statistics)
    return GraphedUpdate(statistics, Recordings("update", CudaRecorder(context.device), complaints))


def graphed_forward(learner: Learner, context: WorkerContext, collectives: Collectives, complaints: list[str]
                    ) -> GraphedForward | None:
    """The model's repeated passes on a GPU, unless they are switched off. With sync_bn, a pass exchanges numbers."""
    is_on = repeats_passes(context.cuda_graphs, collectives.num_workers)
    if context.device.type != "cuda" or not is_on or learner.spec.recipe.sync_bn:
        return None
    return repeat_passes(learner.model, Recordings("network", CudaRecorder(context.device), complaints))


def image_stores(spec: TrainSpec, context: WorkerContext) -> Stores:
    """The images of the two splits, cached as the context says. The caller closes them. If the device renders samples
    in any epoch, it holds those of training: it gets them from the cache, which the workers of a node share. If it
    renders in all epochs, the cache in memory then ends with the last worker that reads it.

    Raises:
        ConfigError: if the device has too little memory for them, or cannot render.
    """
    recipe, device = spec.recipe, context.device
    num_bytes = held_bytes(recipe, spec.train, device)
    if num_bytes:
        if not find_spec("triton"):
            raise ConfigError("augment.render: device: Triton is not installed where this worker runs; install it, or "
                              "leave augment.render out")
        require_memory(num_bytes, len(spec.train), device)
    train = ImageStore(spec.train, recipe.imgsz, context.cache)
    val = ImageStore(spec.val, recipe.imgsz, context.cache, smooth=True)
    held = hold_images(train, device) if num_bytes else None
    if held and renders_all(recipe):
        train.close()
    return Stores(train, val, held)


def make_loaders(spec: TrainSpec, grid: int, context: WorkerContext, collectives: Collectives, stores: Stores
                 ) -> Loaders:
    """The loaders of a worker's share of the images. Their processes begin when batches are requested.

    Args:
        grid: of the model, pixels.
    """
    recipe = spec.recipe
    plan, (order, shapes) = Plan(recipe, len(spec.train)), _rect(spec, grid)
    rank, num_workers = collectives.rank, collectives.num_workers
    balancer = LoadBalancer(plan, num_workers, context.activity)
    images = plan.worker_images(num_workers, rank)
    part_size = part_images(recipe, images, context.loader_processes)
    sampler = ShardSampler(plan, rank, num_workers, order, balancer.seconds, part_size)
    leaves_colours = recolours_on_device(recipe, context.device)
    held = stores.held if renders_on_device(recipe, context.device) else None
    samples = train_dataset(spec, stores.train, shapes, leaves_colours=leaves_colours, held=held)
    prefetch = prefetched_parts(images, part_size, max(context.loader_processes, 1))
    loader = Loader(context.prepare_loader(DataLoader(
        LoadedDataset(samples.load), batch_size=None, sampler=sampler, collate_fn=identity,
        **_processes(context, prefetch))))
    train = MicrobatchLoader(loader, context.device)
    val = val_loader(spec.val, stores.val, recipe.imgsz, grid, recipe.evaluate.batch_size, context, collectives)
    colours = rendered = None
    if held:
        rendered = rendered_on(context.device, held, has_colours=leaves_colours)
    elif leaves_colours:
        colours = colours_on(context.device, in_one_kernel=context.colour_kernel)
    return Loaders(balancer, sampler, train, val, colours, rendered)


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
                  leaves_colours: bool = False, held: HeldImages | None = None) -> TrainDataset:
    """The augmented training samples; with views where the device has `held` images, from which it renders them."""
    recipe = spec.recipe
    given = (spec.train, store, recipe.augment, recipe.imgsz, recipe.seed, recipe.epochs, shapes)
    if held:
        return ViewDataset(*given, leaves_colours=leaves_colours, readable=held.readable)
    return TrainDataset(*given, quad=recipe.quad, leaves_colours=leaves_colours)


def renders_on_device(recipe: Recipe, device: torch.device) -> bool:
    """Whether the device renders the samples of a recipe without changes. A CPU never does: it has no kernel for it."""
    return device.type == "cuda" and recipe.augment.render == "device" and not needs_host(recipe)


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


def held_bytes(recipe: Recipe, train: AnnotationIndex, device: torch.device) -> int:
    """Bytes of decoded training images that the device holds; 0 if it renders samples in no epoch."""
    epochs = (0, *(change.epoch for change in recipe.changes))
    if any(renders_on_device(recipe.at(epoch), device) for epoch in epochs):
        return decoded_bytes(train, recipe.imgsz)
    return 0


def rendered_on(device: torch.device, held: HeldImages, *, has_colours: bool) -> RenderedInput:
    """What renders views on a device."""
    from ray_yolo.ops import render_kernel  # imports Triton, which takes a second

    return partial(render_kernel.rendered_input, held.pixels, colour_tables_on(device) if has_colours else None)


def first_batches(spec: TrainSpec) -> Batches:
    """The batches of the first epoch, one microbatch each, as a single worker trains them: for plots."""
    grid, context = build_network(spec).grid if spec.recipe.rect else GRID, WorkerContext()
    loaders = make_loaders(spec, grid, context, Collectives(), image_stores(spec, context))
    loaders.sampler.start(0, weights=draw_weights(spec, ()))
    return loaders.train


def draw_weights(spec: TrainSpec, class_maps: Sequence[float]) -> np.ndarray | None:
    """Under `image_weights`, the sampling weight of each image, from the last validation's class results, if any."""
    if not spec.recipe.image_weights:
        return None
    return image_weights(spec.train, np.array(class_maps or (0.0,) * len(spec.names)))


def val_loader(index: AnnotationIndex, store: ImageStore, imgsz: int, grid: int, batch_size: int,
               context: WorkerContext, collectives: Collectives) -> Batches:
    """The worker's share of the validation batches, about the same number of pixels for each worker.

    Batches have images of equal padded shape and do not depend on the number of workers.
    """
    batches = cut_batches(index, imgsz, batch_size, grid)
    pixels = [len(batch.indices) * batch.shape[0] * batch.shape[1] for batch in batches]
    shard = sharding.balanced_shard(pixels, collectives.rank, collectives.num_workers)
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
