"""The one table of model families, and the way from a name or a YAML mapping to a model.

A family is the tables of its models, the loss they are trained with, and the meaning of what they predict.
"""

from __future__ import annotations

import difflib
from collections.abc import Callable, Mapping
from typing import NamedTuple

import torch
from torch import Tensor

from ray_yolo.errors import CheckpointError, ConfigError
from ray_yolo.losses import anchor_based
from ray_yolo.models import heads, yolov3, yolov5
from ray_yolo.models.detector import Architecture, Detector
from ray_yolo.models.heads import Anchors
from ray_yolo.models.yaml_rows import read_architecture


class Family(NamedTuple):
    """What belongs together: models, loss and decoding."""

    models: Mapping[str, Architecture]
    build_loss: Callable[..., anchor_based.AnchorLoss]
    decode: Callable[..., Tensor]


FAMILIES = {
    "yolov5": Family(yolov5.MODELS, anchor_based.build_loss, heads.decode),
    "yolov3": Family(yolov3.MODELS, anchor_based.build_loss, heads.decode),
}
YAML_FAMILY = FAMILIES["yolov5"]  # what a user's own table of rows belongs to


class Transfer(NamedTuple):
    """How much of a model came from a weights file."""

    matched: int
    total: int
    left_out: tuple[str, ...]  # the model's tensors that kept their initial values


def find_family(model: str | Mapping[str, object]) -> Family:
    """The family of a model.

    Raises:
        ConfigError: for an unknown name, with the nearest known one.
    """
    if not isinstance(model, str):
        return YAML_FAMILY
    for family in FAMILIES.values():
        if model in family.models:
            return family
    known = [name for family in FAMILIES.values() for name in family.models]
    near = difflib.get_close_matches(model, known, n=1, cutoff=0.0)[0]
    raise ConfigError(f"model: {model!r} is unknown; did you mean {near}? Known: {', '.join(known)}, or a YAML file")


def build_model(model: str | Mapping[str, object], num_classes: int, anchors: Anchors | None = None) -> Detector:
    """A model with fresh weights.

    Args:
        model: a known name, or the mapping read from a YOLOv5-style model YAML.
        anchors: per level and anchor (width, height) in pixels at the training size; left out, the model's own.

    Raises:
        ConfigError: for an unknown name, or rows or anchors that do not fit together.
    """
    family = find_family(model)
    architecture = family.models[model] if isinstance(model, str) else read_architecture(model)
    return architecture.build(num_classes, anchors)


def load_weights(detector: Detector, state: Mapping[str, object], *, keep_anchors: bool = False) -> Transfer:
    """Copy into a model the tensors whose name and shape match; the rest keeps its initial values.

    Args:
        state: tensors by name, as from a state dict; a prefix `module.` is ignored.
        keep_anchors: leave the head's anchors as they are (the user gave other ones).

    Raises:
        CheckpointError: if no tensor matches.
    """
    given = {name.removeprefix("module."): value for name, value in state.items() if isinstance(value, Tensor)}
    own = detector.state_dict()
    left_out = []
    with torch.no_grad():
        for name, tensor in own.items():
            kept = keep_anchors and name.endswith(".anchors")
            if name in given and given[name].shape == tensor.shape and not kept:
                tensor.copy_(given[name])
            else:
                left_out.append(name)
    if len(left_out) == len(own):
        raise CheckpointError(f"weights: none of the model's {len(own)} tensors is among the {len(given)} given ones; "
                              f"expected names such as {next(iter(own))}")
    return Transfer(len(own) - len(left_out), len(own), tuple(left_out))
