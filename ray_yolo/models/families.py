"""The one table of model families, and the way from a name or a YAML mapping to a model."""

from __future__ import annotations

import difflib
import importlib
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from ray_yolo.config.model_facts import plugin_of, plugins
from ray_yolo.config.sections import LossConfig
from ray_yolo.core.errors import CheckpointError, ConfigError
from ray_yolo.models import loss_anchor_based, loss_anchor_free, zoo
from ray_yolo.models.criterion import Criterion
from ray_yolo.models.detector import Architecture, Detector
from ray_yolo.models.heads import AnchorFree, Anchors, Detect, Predictions, decode_anchors, decode_distances
from ray_yolo.models.rows import AnchorFreeRow, DetectRow, EndToEndRow, LightAnchorFreeRow
from ray_yolo.models.yaml_rows import read_architecture
from ray_yolo.ops.anchors import fit_anchors


class Family(NamedTuple):
    """Tables of models, their loss, and the meaning of what they predict: all that the program knows of a model."""

    models: Mapping[str, Architecture]
    fit: Callable[[Any, np.ndarray, LossConfig, int], Anchors | None]  # (head, label sizes, gains, seed)
    build_loss: Callable[[Any, LossConfig, int, int], Criterion]  # (head, gains, number of classes, image size)
    decode: Callable[[Any, Sequence[Tensor]], Predictions]  # (head, what the detector gave)
    suppress: bool = True  # whether boxes that overlap a better one are dropped


def fit_head(head: Detect, sizes: np.ndarray, loss: LossConfig, seed: int) -> Anchors | None:
    """Better anchors in pixels for labels of these sizes (n, 2), or None where the head's own fit."""
    own = (head.anchors * torch.tensor(head.strides)[:, None, None]).numpy()
    found = fit_anchors(own, sizes, loss.anchor_t, seed)
    return None if found is None else found.tolist()


def fit_nothing(head: AnchorFree, sizes: np.ndarray, loss: LossConfig, seed: int) -> None:
    """For heads that learn sizes from the labels alone."""


FAMILIES = {
    "yolov5": Family(zoo.YOLOV5, fit_head, loss_anchor_based.build_loss, decode_anchors),
    "yolov3": Family(zoo.YOLOV3, fit_head, loss_anchor_based.build_loss, decode_anchors),
    "yolov8": Family(zoo.YOLOV8, fit_nothing, loss_anchor_free.build_loss, decode_distances),
    "yolo11": Family(zoo.YOLO11, fit_nothing, loss_anchor_free.build_loss, decode_distances),
    "yolo12": Family(zoo.YOLO12, fit_nothing, loss_anchor_free.build_loss, decode_distances),
    "yolo26": Family(zoo.YOLO26, fit_nothing, loss_anchor_free.build_end_to_end_loss, decode_distances, suppress=False),
}
FAMILY_OF = {name: family for family in FAMILIES.values() for name in family.models}
FAMILY_OF_HEAD = {DetectRow: "yolov5", AnchorFreeRow: "yolov8", LightAnchorFreeRow: "yolo11", EndToEndRow: "yolo26"}


class Transfer(NamedTuple):
    """How much of a model came from a weights file."""

    matched: int
    total: int
    left_out: tuple[str, ...]  # the model's tensors that kept their initial values


def find_family(model: str | Mapping[str, object]) -> Family:
    """The family of a model; of a YAML mapping, that of its head.

    Raises:
        ConfigError: for an unknown name, with the nearest known one.
    """
    if not isinstance(model, str):
        return FAMILIES[FAMILY_OF_HEAD[type(read_architecture(model).head)]]
    if model in FAMILY_OF:
        return FAMILY_OF[model]
    if found := plugin_of(model):
        module, _, name = found.plugin.family.partition(":")
        family: Family = getattr(importlib.import_module(module), name)
        return family
    known = [*FAMILY_OF, *(name for each in plugins() for name in each.plugin.models)]
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
    fitting = {name: given[name] for name, tensor in own.items() if name in given and given[name].shape == tensor.shape
               and not (keep_anchors and name.endswith(".anchors"))}
    if not fitting:
        raise CheckpointError(f"weights: none of the model's {len(own)} tensors is among the {len(given)} given ones; "
                              f"expected names such as {next(iter(own))}")
    detector.load_state_dict(fitting, strict=False)
    return Transfer(len(fitting), len(own), tuple(name for name in own if name not in fitting))
