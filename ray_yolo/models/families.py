"""The table of model families, and the construction of a model from a name or a YAML mapping."""

from __future__ import annotations

import importlib
import os
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from ray_yolo.config.model_facts import check_model_name, family_of_table, plugin_of, read_model_file
from ray_yolo.config.sections import LossConfig
from ray_yolo.core.errors import CheckpointError, ConfigError
from ray_yolo.models import zoo
from ray_yolo.models.criterion import Criterion
from ray_yolo.models.detector import Architecture, Detector
from ray_yolo.models.heads import AnchorFree, Anchors, Detect, Predictions, decode_anchors, decode_distances
from ray_yolo.models.loss_anchor_based import AnchorLoss
from ray_yolo.models.loss_anchor_free import AnchorFreeLoss, EndToEndLoss
from ray_yolo.models.yaml_rows import read_architecture
from ray_yolo.ops.anchors import fit_anchors


class Family(NamedTuple):
    """Models that share a loss and a decoder. The rest of the package uses only this interface to a model."""

    models: Mapping[str, Architecture]
    fit: Callable[[Any, np.ndarray, LossConfig, int], Anchors | None]  # (head, label sizes, gains, seed)
    build_loss: Callable[[Any, LossConfig, int, int], Criterion]  # (head, gains, number of classes, image size)
    decode: Callable[[Any, Sequence[Tensor]], Predictions]  # (head, outputs of the detector)
    suppress: bool = True  # whether detections need non-maximum suppression


def fit_head(head: Detect, sizes: np.ndarray, loss: LossConfig, seed: int) -> Anchors | None:
    """Better anchors in pixels for labels of these sizes (n, 2), or None if the head's anchors fit."""
    current = (head.anchors * torch.tensor(head.strides)[:, None, None]).numpy()
    fitted = fit_anchors(current, sizes, loss.anchor_t, seed)
    return None if fitted is None else fitted.tolist()


def fit_nothing(head: AnchorFree, sizes: np.ndarray, loss: LossConfig, seed: int) -> None:
    """Anchor-free heads have no anchors to fit."""


def _anchor_free(models: Mapping[str, Architecture]) -> Family:
    return Family(models, fit_nothing, lambda head, gains, *_: AnchorFreeLoss(head, gains), decode_distances)


FAMILIES = {
    "yolov5": Family(zoo.YOLOV5, fit_head, AnchorLoss, decode_anchors),
    "yolov3": Family(zoo.YOLOV3, fit_head, AnchorLoss, decode_anchors),
    "yolov8": _anchor_free(zoo.YOLOV8),
    "yolo11": _anchor_free(zoo.YOLO11),
    "yolo12": _anchor_free(zoo.YOLO12),
    "yolo26": _anchor_free(zoo.YOLO26)._replace(
        build_loss=lambda head, gains, *_: EndToEndLoss(head, gains), suppress=False),
}
FAMILY_OF = {name: family for family in FAMILIES.values() for name in family.models}


class Transfer(NamedTuple):
    """Coverage of a model by a weights file."""

    matched: int
    total: int
    left_out: tuple[str, ...]  # the model's tensors that keep their initial values
    has_classes: bool = True  # whether the class layers are covered, so that class numbers have a meaning


def find_family(model: str | Mapping[str, object]) -> Family:
    """The family of a known name, or of the head of a YAML mapping.

    Raises:
        ConfigError: for an unknown name, with the nearest known one.
    """
    if not isinstance(model, str):
        return FAMILIES[family_of_table(model)]
    if model in FAMILY_OF:
        return FAMILY_OF[model]
    if found := plugin_of(model):
        module, _, name = found.family.partition(":")
        family: Family = getattr(importlib.import_module(module), name)
        return family
    check_model_name(model)
    raise ConfigError(f"model: {model} is a file; read it first")  # a YAML file is given as its mapping


def build_model(model: str | Mapping[str, object], num_classes: int, anchors: Anchors | None = None) -> Detector:
    """A model with fresh weights.

    Args:
        model: a known name, or the mapping of a model YAML (see `read_architecture`).
        anchors: per level and anchor (width, height) in pixels at the training size; default: the model's own.

    Raises:
        ConfigError: for an unknown name, or incompatible rows or anchors.
    """
    family = find_family(model)
    architecture = family.models[model] if isinstance(model, str) else read_architecture(model)
    return architecture.build(num_classes, anchors)


def read_model(model: str) -> tuple[str, dict[str, Any] | None]:
    """The model's name, and the contents of its YAML file, if it is one (a missing yolov5s.yaml means yolov5s).

    Raises:
        ConfigError: for an unknown name.
        InputError: for a file that cannot be read as YAML.
    """
    path = Path(model)
    if path.suffix not in (".yaml", ".yml"):
        find_family(model)
        return model, None
    if not os.path.exists(model) and path.stem in FAMILY_OF:
        return path.stem, None
    return model, read_model_file(path)


class GivenClasses(NamedTuple):
    """The classes of a state that belong to those of a model, where they are not the same in number or name."""

    rows: tuple[int | None, ...]  # the number that each class of the model has in the state; None: a new class
    total: int  # classes of the state


def compare_weights(detector: Detector, state: Mapping[str, object], *, keep_anchors: bool = False,
                    given: GivenClasses | None = None) -> Transfer:
    """The coverage of a model by a state, without copying anything.

    Args:
        state: tensors by name, as from a state dict; a prefix `module.` is ignored.
        keep_anchors: keep the head's anchors (those of the user).
        given: class layers take its rows of the state; None: only layers of equal shape are taken.

    Raises:
        CheckpointError: if no tensor matches.
    """
    fitting = _fitting(detector, state, keep_anchors=keep_anchors, given=given)
    own = detector.state_dict()
    class_tensors = _class_tensors(detector)
    return Transfer(len(fitting), len(own), tuple(name for name in own if name not in fitting),
                    has_classes=all(name in fitting for name in class_tensors))


def load_weights(detector: Detector, state: Mapping[str, object], *, keep_anchors: bool = False,
                 classes: Sequence[int] | None = None, given: GivenClasses | None = None) -> Transfer:
    """Copy the tensors whose name and shape match into a model; the others keep their initial values.

    Args:
        state: as in `compare_weights`.
        keep_anchors: as in `compare_weights`.
        classes: a permutation: class i of the model is class `classes[i]` of the state, which has as many; None: the
            same numbers.
        given: as in `compare_weights`, instead of `classes`.

    Raises:
        CheckpointError: if no tensor matches.
        ConfigError: for `classes`, if the head does not name its class layers.
    """
    transfer = compare_weights(detector, state, keep_anchors=keep_anchors, given=given)
    detector.load_state_dict(_fitting(detector, state, keep_anchors=keep_anchors, given=given), strict=False)
    if classes is not None:
        detector.head.select_classes(classes)
    return transfer


def _class_tensors(detector: Detector) -> list[str]:
    """The names of the tensors whose rows are outputs of classes."""
    head = f"model.{len(detector.model) - 1}"
    return [f"{head}.{layer}.{kind}" for layer in detector.head.class_layers() for kind in ("weight", "bias")]


def _with_rows(detector: Detector, state: Mapping[str, Tensor], given: GivenClasses) -> dict[str, Tensor]:
    """The state with class layers in the shape of the model: rows of the model's new classes keep its values.

    A layer that differs in more than the number of its outputs is left out.
    """
    matched = [number for number, row in enumerate(given.rows) if row is not None]
    targets = detector.head.class_outputs(matched)
    sources = detector.head.class_outputs([row for row in given.rows if row is not None], given.total)
    num_outputs = len(detector.head.class_outputs(range(given.total), given.total))
    own = detector.state_dict()
    joined = dict(state)
    for name in _class_tensors(detector):
        tensor = joined.pop(name, None)
        if tensor is None or tensor.shape != (num_outputs, *own[name].shape[1:]):
            continue
        rows = own[name].clone()
        rows[targets] = tensor[sources].to(rows)
        joined[name] = rows
    return joined


def _fitting(detector: Detector, state: Mapping[str, object], *, keep_anchors: bool,
             given: GivenClasses | None = None) -> dict[str, Tensor]:
    """The tensors of a state whose name and shape are those of a model's tensor."""
    tensors = {name.removeprefix("module."): value for name, value in state.items() if isinstance(value, Tensor)}
    own = detector.state_dict()
    if given is not None:
        tensors = _with_rows(detector, tensors, given)
    fitting: dict[str, Tensor] = {}
    for name, tensor in own.items():
        if keep_anchors and name.endswith(".anchors"):
            continue
        if name in tensors and tensors[name].shape == tensor.shape:
            fitting[name] = tensors[name]
    if not fitting:
        raise CheckpointError(f"weights: none of the model's {len(own)} tensors is among the {len(tensors)} given "
                              f"ones; expected names such as {next(iter(own))}")
    return fitting
