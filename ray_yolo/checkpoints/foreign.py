"""Weights as others release them, read without running anything that their files hold.

YOLOv5 and Ultralytics release whole models as pickled objects: names of classes, and what their instances hold. torch's
weights-only reader builds nothing but tensors and plain values. Each class that a file names is answered with `Inert`,
which does nothing whatever it is called with and keeps the instance's attributes aside; tensors and class names are
taken from there. A file that names anything but what such models are made of is refused.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from threading import Lock
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ray_yolo.checkpoints.state_file import CONVERT_HINT, check_file, kind_of_file, load_plain
from ray_yolo.config.model_facts import MODELS
from ray_yolo.core.errors import CheckpointError

_MODEL_CODE = re.compile(r"(models|utils|ultralytics|yolov5|torch\.nn|numpy|pathlib|argparse|datetime)\.|"
                         r"builtins\.(getattr|object)$")
_MODEL_KEYS = ("ema", "model", "model_state_dict", "state_dict")  # where the weights are, the better ones first
_MOST_MODULES, _LONGEST_NAME = 20_000, 300
_reading = Lock()  # torch's list of allowed names is the process's


class Weights(NamedTuple):
    """What a weights file holds, whoever wrote it."""

    tensors: Mapping[str, Tensor]  # by name; floating point in float32
    names: tuple[str, ...] = ()  # of the classes, where the file has them
    meta: Mapping[str, Any] | None = None  # of a checkpoint of ours: recipe, names, anchors, ...


class StubClass:
    """Stands in for every class and function that a file names."""

    __slots__ = ("attributes",)
    attributes: dict[Any, Any]

    def __new__(cls, *ignored: object, **also: object) -> StubClass:
        self = object.__new__(cls)
        self.attributes = {}
        return self

    def __setstate__(self, state: object) -> None:
        self.attributes = state if type(state) is dict else {}

    def part(self, name: str) -> dict[Any, Any]:
        """An attribute that is a dict; an empty one if it is none."""
        found = self.attributes.get(name)
        return found if isinstance(found, dict) else {}


def read_weights(path: Path) -> Weights:
    """Tensors and class names of a checkpoint of ours, of YOLOv5's and Ultralytics' files, of a state dict, or of a
    .safetensors file.

    Raises:
        CheckpointError: if it is missing, damaged, or holds something else; what to do is said.
    """
    if not os.path.isfile(path):
        raise CheckpointError(f"{path}: no such weights file; {_where_from(path)}")
    if path.suffix == ".safetensors":
        return Weights(_taken(_read_safetensors(path), path))
    check_file(path)
    with _reading, torch.serialization.safe_globals([(StubClass, name) for name in _names_in(path)]):
        state = load_plain(path)
    if isinstance(state, dict) and isinstance(state.get("meta"), str) and isinstance(state.get("ema"), dict):
        return _own(state["meta"], state["ema"], path)
    places = [*map(state.get, _MODEL_KEYS), state] if isinstance(state, dict) else [state]
    for place in places:
        tensors = _tensors_of(place, path) if isinstance(place, StubClass) else place
        if isinstance(tensors, dict) and any(isinstance(value, Tensor) for value in tensors.values()):
            return Weights(_taken(tensors, path), _class_names(place) if isinstance(place, StubClass) else ())
    raise CheckpointError(f"{path}: holds no tensors by name, neither plain nor in a model")


def _own(text: str, tensors: dict[str, Any], path: Path) -> Weights:
    """The weights of a checkpoint of ours.

    Raises:
        CheckpointError: for a file that only looks like one.
    """
    try:
        meta = json.loads(text)
        names = tuple(meta["names"])
    except (ValueError, KeyError, TypeError):
        names, meta = (), None
    if meta is None or not all(isinstance(name, str) for name in names) or not all(
            isinstance(tensor, Tensor) for tensor in tensors.values()):
        raise CheckpointError(f"{path}: has `meta` and `ema`, but not what a checkpoint of ray_yolo holds there; give "
                              "a .pt file of a run")
    return Weights(tensors, names, meta)


def _where_from(path: Path) -> str:
    facts = MODELS.get(path.stem) if path.suffix == ".pt" else None
    if facts is None:
        return "give a .pt file of a run, of YOLOv5 or of Ultralytics, or a .safetensors file"
    return (f"nothing is downloaded here: fetch {path.name} from {facts.releases} (under their licence) and put it at "
            f"{path.absolute()}, or say where it lies")


def _names_in(path: Path) -> list[str]:
    """The classes and functions that a file names beside what torch allows.

    Raises:
        CheckpointError: for a name that is no part of a model.
    """
    try:
        names = torch.serialization.get_unsafe_globals_in_checkpoint(path)
    except Exception:  # no zip of torch's, or a damaged one: reading it without any tells more
        return []
    if strange := sorted(name for name in names if not _MODEL_CODE.match(name)):
        raise CheckpointError(f"{path}: names {strange[0]}, which is no part of a model; nothing of it was run; if "
                              f"you trust it, {CONVERT_HINT}")
    return names


def _tensors_of(model: StubClass, path: Path) -> dict[str, Tensor]:
    """Parameters and buffers of a pickled `nn.Module` and all below it, named as in its state dict."""
    found: dict[str, Tensor] = {}
    waiting, seen = [("", model)], 0
    while waiting:
        prefix, module = waiting.pop()
        seen += 1
        if seen > _MOST_MODULES or len(prefix) > _LONGEST_NAME:
            raise CheckpointError(f"{path}: its modules go on without end")
        for name, value in (*module.part("_parameters").items(), *module.part("_buffers").items()):
            if isinstance(name, str) and isinstance(value, Tensor):
                found[prefix + name] = value
        waiting += [(f"{prefix}{name}.", child) for name, child in module.part("_modules").items()
                    if isinstance(name, str) and isinstance(child, StubClass)]
    return found


def _class_names(model: StubClass) -> tuple[str, ...]:
    """The names of a model's classes: a list, or a dict by number as newer files have it."""
    names = model.attributes.get("names")
    if isinstance(names, dict):
        names = [names.get(number) for number in range(len(names))]
    plain = isinstance(names, Sequence) and all(isinstance(name, str) for name in names)
    return tuple(names) if plain and names else ()


def _taken(tensors: Mapping[Any, object], path: Path) -> dict[str, Tensor]:
    """The tensors of a file in float32.

    Raises:
        CheckpointError: if they take more memory than the file, as views of a single number would.
    """
    fit = {name.removeprefix("module."): value.detach() for name, value in tensors.items()
           if isinstance(name, str) and isinstance(value, Tensor) and value.layout is torch.strided
           and value.device.type == "cpu" and not (value.is_quantized or value.is_complex())}
    if sum(value.numel() * value.element_size() for value in fit.values()) > path.stat().st_size:
        raise CheckpointError(f"{path}: its tensors claim to be larger than the file")
    return {name: value.float() if value.is_floating_point() else value for name, value in fit.items()}


def _read_safetensors(path: Path) -> dict[str, Tensor]:
    try:
        from safetensors import SafetensorError
        from safetensors.torch import load_file
    except ImportError:
        raise CheckpointError(f"{path}: reading it needs pip install safetensors") from None
    try:
        return dict(load_file(path))
    except (SafetensorError, OSError, ValueError) as error:
        told = kind_of_file(path) or f"not a readable safetensors file ({error})"
        raise CheckpointError(f"{path}: {told}") from None
