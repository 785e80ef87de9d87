"""One training on one worker, between two optimiser steps: all that a checkpoint holds. It outlives the generations of
workers.
"""

from __future__ import annotations

import inspect
import math
import os
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import cache
from typing import Any, TypeVar, cast

import torch
from torch import Tensor, nn

from ray_yolo.checkpoints.foreign import read_weights
from ray_yolo.checkpoints.weights_file import local_file
from ray_yolo.config.recipe import Recipe, accumulate_batches, resolved_batch
from ray_yolo.core.events import EpochEvent
from ray_yolo.core.structures import Progress
from ray_yolo.engine.plan import Plan
from ray_yolo.engine.spec import TrainSpec, WorkerContext
from ray_yolo.models.batch_norm import BatchNorm
from ray_yolo.models.blocks import avoid_slow_convolutions
from ray_yolo.models.criterion import Criterion
from ray_yolo.models.detector import Detector, backbone_of
from ray_yolo.models.families import Family, GivenClasses, build_model, find_family, load_weights
from ray_yolo.ops.ema import Ema

AnyOptimizer = TypeVar("AnyOptimizer", bound=torch.optim.Optimizer)


@dataclass
class TrainState:
    """Progress, and the few values that cannot be recomputed from it."""

    progress: Progress = field(default_factory=Progress)
    best_fitness: float = -1.0
    best_epoch: int = -1
    class_maps: tuple[float, ...] = ()  # mAP50-95 per class of the last validation; drives image weights
    skipped_in_row: int = 0
    epoch_sums: tuple[float, ...] = (0.0, 0.0, 0.0, 0)  # loss terms times images; images
    last_epoch: EpochEvent | None = None  # the event of the last completed epoch: emitted again if it was lost
    skipped: int = 0  # steps of this epoch
    first_skipped: int = 0  # number of the first of them
    moved: bool = False  # a step has changed the weights

    def count(self, losses: Tensor, num_images: int, skipped: bool) -> None:
        """Add the step that has just ended to the epoch's losses, or to its skipped steps."""
        self.skipped_in_row = self.skipped_in_row + 1 if skipped else 0
        if skipped:
            self.first_skipped = self.first_skipped if self.skipped else self.progress.step
            self.skipped += 1
        else:
            new = (*(losses.double() * num_images).tolist(), num_images)
            self.epoch_sums = tuple(old + more for old, more in zip(self.epoch_sums, new, strict=True))

    def close_epoch(self) -> tuple[float, ...]:
        """Advance to the next epoch. Returns this epoch's mean of each loss term per image; NaN without images."""
        *sums, images = self.epoch_sums
        self.progress = Progress(self.progress.epoch + 1, 0, self.progress.step)
        self.epoch_sums, self.skipped = (0.0,) * len(self.epoch_sums), 0
        return tuple(value / images if images else math.nan for value in sums)


@dataclass
class Learner:
    """A model in training, and what trains it."""

    spec: TrainSpec  # Its recipe has the settings of the present epoch.
    family: Family
    model: Detector
    ema: Ema[Detector]
    optimizer: torch.optim.Optimizer
    scaler: torch.amp.GradScaler
    criterion: Criterion
    state: TrainState = field(default_factory=TrainState)

    @property
    def plan(self) -> Plan:
        """The order in which it visits its images."""
        return Plan(self.spec.recipe, len(self.spec.train))

    def change_settings(self, recipe: Recipe) -> None:
        """Continue with the settings of another recipe. Weights and the optimiser's state are kept."""
        self.spec = replace(self.spec, recipe=recipe)
        moments = self.optimizer.state_dict()["state"]
        self.optimizer = build_optimizer(self.model, recipe)
        self.optimizer.load_state_dict({**self.optimizer.state_dict(), "state": moments})
        self.ema.limit, self.ema.ramp = recipe.schedule.ema_decay, recipe.schedule.ema_ramp
        self.criterion = self.family.build_loss(self.model.head, recipe.loss, len(self.spec.names), recipe.imgsz)


def build_learner(spec: TrainSpec, context: WorkerContext) -> Learner:
    """The learner of `spec` before its first step, on this worker's device. Sets torch's switches for this process.

    Raises:
        CheckpointError: if the initial weights do not fit.
    """
    recipe, device = spec.recipe, context.device
    torch.set_num_threads(recipe.threads or context.threads)
    if recipe.exact:  # before the first call of cuBLAS, which otherwise may add in any order, so torch refuses it
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    torch.backends.cudnn.allow_tf32 = not recipe.no_tf32  # only kernels of fp32 on GPUs look at it
    if recipe.exact != torch.are_deterministic_algorithms_enabled():  # a needless call would import torch's compiler
        torch.use_deterministic_algorithms(recipe.exact)  # then a nondeterministic kernel raises
    model = build_network(spec).to(memory_format=torch.channels_last)
    if device.type == "cpu":
        avoid_slow_convolutions(model)
    for number in recipe.freeze:
        model.model[number].requires_grad_(False)
    model = model.to(device)
    family = find_family(spec.architecture or recipe.model)
    return Learner(
        spec=spec, family=family, model=model,
        ema=Ema(model, recipe.schedule.ema_decay, recipe.schedule.ema_ramp),
        optimizer=build_optimizer(model, recipe),
        scaler=torch.amp.GradScaler(device.type, enabled=recipe.precision == "fp16"),
        criterion=family.build_loss(model.head, recipe.loss, len(spec.names), recipe.imgsz))


def build_optimizer(model: Detector, recipe: Recipe) -> torch.optim.Optimizer:
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
        groups = _with_backbone_rates(groups, model, config.backbone_lr)
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
