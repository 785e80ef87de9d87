"""The optimiser of a recipe."""

from __future__ import annotations

import inspect
from functools import cache
from typing import Any, TypeVar

import torch
from torch import nn

from ray_yolo.config.recipe import Recipe, accumulate_batches, resolved_batch
from ray_yolo.models.batch_norm import BatchNorm

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
