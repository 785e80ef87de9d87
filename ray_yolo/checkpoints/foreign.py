"""Third-party checkpoints, read without running any code from their files.

YOLOv5 and Ultralytics release whole models as pickled objects: class names and the attributes of their instances.
torch's weights-only reader builds only tensors and plain values. It replaces each class that a file names with
`StubClass`, which does nothing when called and keeps the instance's attributes. Tensors and class names are read from
these attributes. A file with names that do not belong to such models is refused.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from threading import Lock
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ray_yolo.checkpoints.state_file import CONVERT_HINT, check_file, kind_of_file, load_plain
from ray_yolo.config.model_facts import missing_weights
from ray_yolo.core.errors import CheckpointError
from ray_yolo.core.redact import printable

_MODEL_CODE = re.compile(r"(models|utils|ultralytics|yolov5|torch\.nn|numpy|pathlib|argparse|datetime)\.|"
                         r"builtins\.(getattr|object)$")
_MODEL_KEYS = ("ema", "model", "model_state_dict", "state_dict")  # keys of the weights, in order of preference
_EXPORTED = {
    ".onnx": "an exported ONNX model", ".torchscript": "an exported TorchScript model", ".engine": "a TensorRT engine",
    ".tflite": "a TensorFlow Lite model", ".pb": "a TensorFlow model",
    ".h5": "a Keras model", ".keras": "a Keras model",
    ".mlmodel": "a Core ML model", ".mlpackage": "a Core ML model", ".xml": "an OpenVINO model",
    ".bin": "a binary file, as of OpenVINO or ncnn", ".param": "an ncnn model",
    ".weights": "Darknet's file of weights",
    ".cfg": "Darknet's description of a model", ".yaml": "a YAML file", ".yml": "a YAML file",
}
"""Suffix of a file that programs give or take as a model -> what it is. None of them is read."""
_ACTIVATIONS = ("SiLU", "Identity")
# Settings of layers that no tensor shows, and the values that models here have.
_SETTINGS: dict[str, dict[str, tuple[object, ...]]] = {
    "Upsample": {"mode": ("nearest",), "scale_factor": (2.0, (2.0, 2.0))},
    "Conv2d": {"dilation": ((1, 1),), "padding_mode": ("zeros",)},
    "BatchNorm2d": {"eps": (1e-3,)}}
_LARGEST_SIZE = 100_000  # px
_MOST_MODULES, _LONGEST_NAME = 20_000, 300
_LONGEST_LICENCE = 200  # characters
_reading = Lock()  # torch's list of allowed names is global to the process


class Weights(NamedTuple):
    """The contents of a weights file of any origin."""

    tensors: Mapping[str, Tensor]  # tensors by name; floating point in float32
    names: tuple[str, ...] = ()  # names of the classes, where the file has them
    meta: Mapping[str, Any] | None = None  # what a checkpoint of ours says: recipe, names, anchors, ...
    imgsz: int | None = None  # the training's, where a YOLOv5 or Ultralytics file says it
    licence: str = ""  # the file states it for itself, or for the weights that its training has started from


class StubClass:
    """Stands in for every class and function that a file names."""

    __slots__ = ("attributes",)
    name = ""  # the class's name in the file, such as torch.nn.modules.activation.SiLU
    attributes: dict[Any, Any]

    def __new__(cls, *ignored: object, **also: object) -> StubClass:
        self = object.__new__(cls)
        self.attributes = {}
        return self

    def __setstate__(self, state: object) -> None:
        self.attributes = state if type(state) is dict else {}

    def part(self, name: str) -> dict[Any, Any]:
        """An attribute that is a dict; an empty dict if it is missing or another type."""
        value = self.attributes.get(name)
        return value if isinstance(value, dict) else {}


def _stub(class_name: str) -> type[StubClass]:
    """A class of its own for a name in a file."""
    class Named(StubClass):
        __slots__ = ()
        name = class_name

    return Named


def read_weights(path: Path) -> Weights:
    """Read a checkpoint of ours, a YOLOv5 or Ultralytics file, a state dict, or a .safetensors file.

    Raises:
        CheckpointError: if it is missing, damaged, or another kind of file; the message states what to do.
    """
    if not os.path.isfile(path):
        best = path / "weights" / "best.pt"
        if os.path.isfile(best):  # False too for a name that is too long
            raise CheckpointError(f"{path}: is the folder of a run; give the file weights/best.pt in it")
        raise CheckpointError(missing_weights(path))
    kind = _EXPORTED.get(path.suffix.lower())
    if kind:
        sibling = path.with_suffix(".pt")
        advice = f"give {sibling.name} beside it" if sibling.is_file() else "give the .pt file that it was made from"
        raise CheckpointError(f"{path}: is {kind}, which has no weights that can be read here; {advice}")
    if path.suffix == ".safetensors":
        return Weights(_checked(_read_safetensors(path), path))
    check_file(path)
    with _reading:  # also while the names are listed: torch leaves out those that it allows now
        stubs: list[Any] = [(_stub(name), name) for name in _names_in(path)]
        with torch.serialization.safe_globals(stubs):
            state = load_plain(path)
    if isinstance(state, dict) and isinstance(state.get("meta"), str) and isinstance(state.get("ema"), dict):
        return _own(state["meta"], state["ema"], path)
    models = [state]
    if isinstance(state, dict):
        models = [*(state.get(key) for key in _MODEL_KEYS), state]  # last: the file is itself a state dict
    for model in models:
        tensors: object = model
        names: tuple[str, ...] = ()
        if isinstance(model, StubClass):
            modules = _modules_of(model, path)
            _check_layers(modules, path)
            tensors, names = _tensors_of(modules), _class_names(model)
        if isinstance(tensors, dict) and any(isinstance(value, Tensor) for value in tensors.values()):
            return Weights(_checked(tensors, path), names, imgsz=_training_size(state),
                           licence=_licence(state, "license"))
    raise CheckpointError(f"{path}: holds no tensors by name, neither plain nor in a model")


def class_names(weights: Weights, num_classes: int) -> tuple[str, ...]:
    """The class names of a file; `class0`, `class1`, ... if it has none, or another number of them."""
    if len(weights.names) == num_classes:
        return weights.names
    return tuple(f"class{number}" for number in range(num_classes))


def _own(text: str, tensors: dict[str, Any], path: Path) -> Weights:
    """The weights of a checkpoint of ours; refused if `meta` and `ema` are not those of one."""
    with suppress(ValueError, KeyError, TypeError):
        meta = json.loads(text)
        names = tuple(meta["names"])
        are_names = all(isinstance(name, str) for name in names)
        are_tensors = all(isinstance(value, Tensor) for value in tensors.values())
        if are_names and are_tensors:
            return Weights(tensors, names, meta, licence=_licence(meta, "weights_licence"))
    raise CheckpointError(f"{path}: has `meta` and `ema`, but not those of a ray_yolo checkpoint; give a .pt file of a "
                          "run")


def _names_in(path: Path) -> list[str]:
    """The classes and functions that a file names beyond those that torch allows; refused if foreign to models."""
    try:
        names = torch.serialization.get_unsafe_globals_in_checkpoint(path)
    except Exception:  # no archive of torch, or a damaged one: reading it reports more
        return []
    unknown = sorted(name for name in names if not _MODEL_CODE.match(name))
    if unknown:
        raise CheckpointError(f"{path}: names {unknown[0]}, which is no part of a model; no code of it was run; if you "
                              f"trust it, {CONVERT_HINT}")
    return names


def _modules_of(model: StubClass, path: Path) -> dict[str, StubClass]:
    """A pickled `nn.Module` and its submodules by their names, which end with a dot; its own name is empty."""
    modules: dict[str, StubClass] = {}
    waiting = [("", model)]
    num_visited = 0
    while waiting:
        name, module = waiting.pop()
        num_visited += 1
        if num_visited > _MOST_MODULES or len(name) > _LONGEST_NAME:  # a file may name a module as its own child
            raise CheckpointError(f"{path}: its modules are nested without end")
        modules[name] = module
        for child_name, child in module.part("_modules").items():
            if isinstance(child_name, str) and isinstance(child, StubClass):
                waiting.append((f"{name}{child_name}.", child))
    return modules


def _tensors_of(modules: Mapping[str, StubClass]) -> dict[str, Tensor]:
    """Parameters and buffers of modules, named as in a state dict."""
    tensors: dict[str, Tensor] = {}
    for prefix, module in modules.items():
        for name, value in (*module.part("_parameters").items(), *module.part("_buffers").items()):
            if isinstance(name, str) and isinstance(value, Tensor):
                tensors[prefix + name] = value
    return tensors


def _training_size(state: object) -> int | None:
    """The image size of a training, by the settings in its checkpoint: Ultralytics' `train_args`, YOLOv5's `opt`."""
    if not isinstance(state, dict):
        return None
    for key in ("train_args", "opt"):
        settings = state.get(key)
        if isinstance(settings, StubClass):  # YOLOv5's may be an object
            settings = settings.attributes
        if not isinstance(settings, dict):
            continue
        size = settings.get("imgsz")
        sides = size if isinstance(size, (list, tuple)) else [size]
        if sides and all(type(side) is int and 0 < side <= _LARGEST_SIZE for side in sides):
            return max(sides)
    return None


def _licence(entries: object, key: str) -> str:
    """The licence that a checkpoint states: Ultralytics writes one under `license`, we carry it on."""
    value = entries.get(key) if isinstance(entries, dict) else None
    return printable(value[:_LONGEST_LICENCE]) if isinstance(value, str) else ""


def _check_layers(modules: Mapping[str, StubClass], path: Path) -> None:
    """Refuse a model whose layers compute something else than those of the same model here: its tensors would fit, and
    its predictions would be others."""
    for name, module in modules.items():
        kind = module.name.rpartition(".")[2]
        for setting, usual in _SETTINGS.get(kind, {}).items():
            value = module.attributes.get(setting, usual[0])
            if value not in usual:
                raise CheckpointError(f"{path}: its layer {name.removesuffix('.')} ({kind}) has {setting} {value}, but "
                                      f"models here have {usual[0]}; give weights of an unchanged model")
        if name.endswith(".act.") and kind not in _ACTIVATIONS:
            layer = name.removesuffix(".act.")
            raise CheckpointError(f"{path}: its layer {layer} has the activation {kind}, but models here have SiLU; "
                                  "give weights of a model with SiLU")


def _class_names(model: StubClass) -> tuple[str, ...]:
    """The class names of a model: a list, or a dict by number in newer files. Numbers among them become text."""
    names = model.attributes.get("names")
    if isinstance(names, dict):
        names = [names.get(number, names.get(str(number))) for number in range(len(names))]
    if not isinstance(names, (list, tuple)):
        return ()
    for name in names:
        if not isinstance(name, (str, int)) or isinstance(name, bool):  # True is an int in Python
            return ()
    return tuple(str(name) for name in names)


def _checked(tensors: Mapping[Any, object], path: Path) -> dict[str, Tensor]:
    """The tensors of a file in float32; refused if they take more memory than the file, as expanded views would."""
    plain: dict[str, Tensor] = {}
    for name, value in tensors.items():
        if isinstance(name, str) and isinstance(value, Tensor) and _is_plain(value):
            plain[name.removeprefix("module.")] = value.detach()  # the prefix is DDP's
    num_bytes = sum(value.numel() * value.element_size() for value in plain.values())
    if num_bytes > path.stat().st_size:
        raise CheckpointError(f"{path}: its tensors claim to be larger than the file")
    for name, value in plain.items():
        if value.is_floating_point():
            plain[name] = value.float()
    return plain


def _is_plain(tensor: Tensor) -> bool:
    """Whether a tensor has its numbers in memory: dense, on the CPU, neither quantised nor complex."""
    is_dense = tensor.layout is torch.strided and tensor.device.type == "cpu"
    return is_dense and not tensor.is_quantized and not tensor.is_complex()


def _read_safetensors(path: Path) -> dict[str, Tensor]:
    try:
        from safetensors import SafetensorError
        from safetensors.torch import load_file
    except ImportError:
        raise CheckpointError(f"{path}: reading it needs pip install safetensors") from None
    try:
        return dict(load_file(path))
    except (SafetensorError, OSError, ValueError) as error:
        # Only now: a good file begins with a length, whose bytes may look like the beginning of another kind.
        problem = kind_of_file(path) or f"not a readable safetensors file ({error})"
        raise CheckpointError(f"{path}: {problem}") from None
