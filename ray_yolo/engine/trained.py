"""Trained weights as a model that can be used: for validation, prediction and export."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from ray_yolo.config.recipe import Recipe
from ray_yolo.engine.build import initial_tensors
from ray_yolo.engine.checkpoint import read_state
from ray_yolo.errors import CheckpointError
from ray_yolo.families import FAMILIES, Family, build_model, find_family
from ray_yolo.models.detector import Detector


@dataclass(frozen=True)
class Trained:
    """A model with its weights, and what is known about its training."""

    model: Detector  # in eval mode
    family: Family
    names: tuple[str, ...]
    recipe: Recipe  # of the training; the defaults for a file of plain tensors


def load_trained(path: Path) -> Trained:
    """The averaged model of a checkpoint of ours, or a known model from a file of plain tensors.

    Raises:
        CheckpointError: if the file cannot be used, or fits no known model.
    """
    state = read_state(path)
    if "meta" not in state:
        return _recognise(initial_tensors(path), path)
    meta = json.loads(state["meta"])
    recipe = Recipe.model_validate(meta["recipe"])
    named = meta["architecture"] or recipe.model
    model = build_model(named, len(meta["names"]), meta["anchors"])
    model.load_state_dict(state["ema"])
    return Trained(model.eval(), find_family(named), tuple(meta["names"]), recipe)


def _recognise(tensors: dict[str, Tensor], path: Path) -> Trained:
    """The known model whose tensors have these names and shapes."""
    given = {name.removeprefix("module."): tensor for name, tensor in tensors.items() if isinstance(tensor, Tensor)}
    heads = [tensor for name, tensor in given.items() if name.endswith(".m.0.bias") and name.count(".") == 4]
    for family in FAMILIES.values():
        for name in family.models:
            for head in heads:
                model = _fitting(name, len(head) // 3 - 5, given)
                if model is not None:
                    names = tuple(f"class{number}" for number in range(model.num_classes))
                    return Trained(model, family, names, Recipe(model=name))
    raise CheckpointError(f"{path}: holds no recipe and its tensors fit none of the known models; train from it with "
                          "python -m ray_yolo.train --model MODEL --weights FILE")


def _fitting(name: str, num_classes: int, tensors: dict[str, Tensor]) -> Detector | None:
    """A model with these tensors, or None if its own have other names or shapes."""
    if num_classes < 1:
        return None
    with torch.device("meta"):
        wanted = {key: value.shape for key, value in build_model(name, num_classes).state_dict().items()}
    if wanted != {key: value.shape for key, value in tensors.items()}:
        return None
    model = build_model(name, num_classes)
    model.load_state_dict(tensors)
    return model.eval()
