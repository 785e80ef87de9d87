"""Static facts of each model name: family, grid, loss gains, release page. This module does not import torch."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from functools import cache
from importlib.metadata import EntryPoint, entry_points
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple

from ray_yolo.config.synonyms import did_you_mean
from ray_yolo.config.yaml import load_yaml
from ray_yolo.core.errors import ConfigError, InputError

GROUP = "ray_yolo.families"  # a group of entry points; each is a `Plugin`
GRID = 32  # image sides are multiples of it and of the model's largest stride
_YOLOV3, _YOLOV5, _ULTRALYTICS = (f"https://github.com/ultralytics/{name}/releases"
                                  for name in ("yolov3", "yolov5", "assets"))
_NO_ANCHORS = MappingProxyType({"box": 7.5})
_CLOSE_MOSAIC = 10  # the default of the anchor-free families
_CLASSIFICATION = frozenset({"loss.cls", "loss.cls_pw", "loss.label_smoothing"})
_READ_WITH_ANCHORS = _CLASSIFICATION | {"loss.box", "loss.obj", "loss.obj_pw", "loss.anchor_t", "loss.fl_gamma",
                                        "autoanchor", "evaluate.iou"}
_READ_WITHOUT_ANCHORS = frozenset({"loss.box", "loss.cls", "loss.dfl", "evaluate.iou"})
_READ_END_TO_END = _READ_WITHOUT_ANCHORS - {"evaluate.iou"}  # its detections need no suppression
_SCALE = re.compile(r"[0-9]([a-z])(?![a-z])")  # yolo11s, yolov8n-p2


_TABLES = (".yaml", ".yml")
_WEIGHTS = (".pt", ".safetensors")
_EXPORTED = (".onnx", ".torchscript", ".engine", ".tflite", ".pb", ".mlpackage", ".mlmodel")
_OTHER_TASKS = {"seg": "segmentation", "cls": "classification", "pose": "pose estimation",
                "obb": "detection of rotated boxes", "world": "open-vocabulary detection",
                "worldv2": "open-vocabulary detection"}


class ModelFacts(NamedTuple):
    """Facts of one model."""

    family: str
    grid: int = GRID
    gains: Mapping[str, float] = MappingProxyType({})  # loss gains that differ from the recipe's defaults
    releases: str = ""  # page of the published weights
    close_mosaic: int = 0  # final epochs without mosaic, as its authors train it
    # Config paths of the settings of `loss`, of `autoanchor` and `evaluate.iou` that its family reads; None: unknown
    reads: frozenset[str] | None = None
    unread_with_one_class: frozenset[str] = frozenset()  # those of them that a single class leaves without effect

    @property
    def has_anchors(self) -> bool:
        """Whether its head predicts boxes relative to anchors."""
        return not self.gains


class Plugin(NamedTuple):
    """The models of another package: an entry point of `GROUP` names an object of this type, which imports no torch."""

    models: Mapping[str, ModelFacts]
    family: str  # `package.module:name` of its `models.families.Family`
    package: str = ""  # it provides the family; `plugins` fills in its name and version
    version: str = ""


_ANCHOR_BASED = ModelFacts("yolov5", releases=_YOLOV5, reads=_READ_WITH_ANCHORS, unread_with_one_class=_CLASSIFICATION)
_ANCHOR_FREE = ModelFacts("yolov8", GRID, _NO_ANCHORS, _ULTRALYTICS, _CLOSE_MOSAIC, _READ_WITHOUT_ANCHORS)
_BY_FAMILY = {
    "yolov3": _ANCHOR_BASED._replace(family="yolov3", releases=_YOLOV3),
    "yolov5": _ANCHOR_BASED,
    "yolov8": _ANCHOR_FREE,
    "yolo11": _ANCHOR_FREE._replace(family="yolo11"),
    "yolo12": _ANCHOR_FREE._replace(family="yolo12"),
    "yolo26": _ANCHOR_FREE._replace(family="yolo26", reads=_READ_END_TO_END),
}
_PATTERNS = {
    "yolov5{}": _ANCHOR_BASED,
    "yolov5{}6": _ANCHOR_BASED._replace(grid=64),
    "yolov8{}": _ANCHOR_FREE,
    "yolov5{}u": _ANCHOR_FREE,
    "yolov5{}6u": _ANCHOR_FREE._replace(grid=64),
    "yolo11{}": _BY_FAMILY["yolo11"],
    "yolo12{}": _BY_FAMILY["yolo12"],
    "yolo26{}": _BY_FAMILY["yolo26"],
}
MODELS = {pattern.format(size): facts for pattern, facts in _PATTERNS.items() for size in "nsmlx"} | dict.fromkeys(
    ("yolov3", "yolov3-spp", "yolov3-tiny"), _BY_FAMILY["yolov3"])


def facts_of(model: str) -> ModelFacts | None:
    """Facts of a model name or of a model YAML; None if unknown. A missing yolov5s.yaml means yolov5s.

    The grid of a YAML model is known only after it is built.
    """
    if not model.endswith(_TABLES):
        found = plugin_of(model)
        return found.models[model] if found else MODELS.get(model)
    if not os.path.exists(model):
        return MODELS.get(Path(model).stem)
    try:
        family = family_of_table(read_model_file(model))
    except InputError:
        return None  # the preflight check reports it
    return _BY_FAMILY[family]._replace(releases="")


def missing_weights(path: Path) -> str:
    """What to do where there is no such weights file."""
    facts = MODELS.get(path.stem) if path.suffix == ".pt" else None
    if facts is None:
        advice = "give a .pt file of a run, of YOLOv5 or of Ultralytics, or a .safetensors file"
    else:
        advice = (f"nothing is downloaded automatically: download {path.name} from {facts.releases} (under their "
                  f"licence) to {path.absolute()}, or give its path")
    return f"{path}: no such weights file; {advice}"


def read_model_file(path: str | Path) -> dict[str, Any]:
    """The mapping of a model YAML. With several `scales`, `scale` is the letter in the file's name, else the first.

    Raises:
        InputError: if the file cannot be read as YAML.
    """
    table = dict(load_yaml(path).data)
    scales = table.get("scales")
    if isinstance(scales, dict) and scales and "scale" not in table:
        first = next(iter(scales))
        table["scale"] = _scale_in_name(path, scales) or first
    return table


def assumed_scale(path: str | Path) -> str:
    """The scale of a model YAML with several, if neither the file nor its name chooses it; '': it is chosen."""
    table = load_yaml(path).data
    scales = table.get("scales")
    if not isinstance(scales, dict) or len(scales) < 2:
        return ""
    if "scale" in table or _scale_in_name(path, scales):
        return ""
    return str(next(iter(scales)))


def file_of_scales(path: Path) -> tuple[Path, str] | None:
    """The file with several scales that Ultralytics reads where there is no file at `path`, and the scale: yolov8.yaml
    and n of yolov8n.yaml. None if the name has no letter of a scale."""
    match = _SCALE.search(path.stem)
    if match is None:
        return None
    stem = path.stem[: match.start(1)] + path.stem[match.end(1) :]
    return path.with_name(stem + path.suffix), match[1]


def _scale_in_name(path: str | Path, scales: Mapping[str, Any]) -> str | None:
    in_name = [letter for letter in _SCALE.findall(Path(path).stem) if letter in scales]
    return in_name[0] if in_name else None


def family_of_table(table: Mapping[str, Any]) -> str:
    """Family of a model YAML: that of its head."""
    if table.get("anchors") is not None:
        return "yolov5"
    if table.get("end2end"):
        return "yolo26"
    for part in ("backbone", "head"):
        rows = table.get(part)
        if not isinstance(rows, list):  # refused later, with its line
            continue
        for row in rows:
            if isinstance(row, list) and len(row) > 2 and row[2] in ("C3k2", "A2C2f"):  # [from, repeats, block, ...]
                return "yolo11"
    return "yolov8"


def check_model_name(model: str) -> None:
    """Refuse a model that is neither known nor a YAML file. A YAML file is not read.

    Raises:
        ConfigError: with the nearest known name.
    """
    if model.endswith(_TABLES) or model in MODELS or plugin_of(model):
        return
    known = list(MODELS)
    for plugin in plugins():
        known += plugin.models
    if model.endswith(_WEIGHTS):
        stem = model.rpartition("/")[2].partition(".")[0]
        name = f" --model {stem}" if stem in known else ", and the name of its model with --model"
        raise ConfigError(f"model: {model} is a file of weights; give it with --weights {model}{name}")
    for suffix in _EXPORTED:
        if model.endswith(suffix):
            raise ConfigError(f"model: {model} is an exported model ({suffix[1:]}), which is not read here; give the "
                              ".pt file that it was made from")
    detector, dash, task = model.rpartition("-")
    if dash and task in _OTHER_TASKS:  # yolov8n-seg
        hint = f"; {_OTHER_TASKS[task]} is not supported, only detection"
        if detector in known:
            hint += f": {detector}"
    else:
        hint = did_you_mean(model, {name: name for name in known})
    listed = " Known: " if hint.endswith("?") else "; known: "
    raise ConfigError(f"model: {model!r} is unknown{hint}{listed}{', '.join(known)}, or a YAML file")


def plugin_of(model: str) -> Plugin | None:
    """The installed plug-in that offers a model; None if there is none. Our own names and names of files are not
    looked up.

    Raises:
        ConfigError: if two packages offer the name, or one cannot be loaded.
    """
    is_file = model.endswith((*_TABLES, *_WEIGHTS, *_EXPORTED))  # a name may have a dot as well: rtdetr-v2.1
    if is_file or model in MODELS:
        return None
    offers = [each for each in plugins() if model in each.models]
    if len(offers) > 1:
        raise ConfigError(
            f"model: {model!r} is offered by {' and by '.join(each.package for each in offers)}; uninstall one of them"
        )
    return offers[0] if offers else None


@cache
def plugins() -> tuple[Plugin, ...]:
    """All installed plug-ins.

    Raises:
        ConfigError: if one cannot be loaded, or offers a name of ours.
    """
    return tuple(_load(entry) for entry in sorted(entry_points(group=GROUP), key=lambda entry: entry.name))


def _load(entry: EntryPoint) -> Plugin:
    if entry.dist:
        package, version = entry.dist.name, entry.dist.version
    else:
        package, version = entry.value, ""
    try:
        plugin = entry.load()
    except Exception as error:  # the code of others
        raise ConfigError(
            f"the package {package} offers models, but cannot be imported: {type(error).__name__}: {error}; "
            "mend or uninstall it"
        ) from error
    if not isinstance(plugin, Plugin):
        raise ConfigError(f"the package {package}: its entry point {GROUP}.{entry.name} is no "
                          "ray_yolo.config.model_facts.Plugin")
    taken = plugin.models.keys() & MODELS.keys()
    if taken:
        raise ConfigError(f"the package {package} offers {min(taken)!r}, which is a model of ray_yolo; uninstall it")
    return plugin._replace(package=package, version=version)


def off_grid(imgsz: int, grid: int) -> str | None:
    """Why an image size is not legal on a grid, with the nearest legal sizes; None if it is legal."""
    if imgsz % grid == 0 and imgsz >= 2 * grid:
        return None
    low = max(imgsz // grid, 2) * grid
    nearest = f"{low} or {low + grid}" if low < imgsz else str(low)
    return f"must be a multiple of {grid}, at least {2 * grid}; nearest: {nearest}"
