"""What is known of a model by its name alone: family, grid, gains, where its weights are published. No torch."""

from __future__ import annotations

import os
from collections.abc import Mapping
from functools import cache
from importlib.metadata import EntryPoint, entry_points
from types import MappingProxyType
from typing import NamedTuple

from ray_yolo.core.errors import ConfigError

GROUP = "ray_yolo.families"  # of entry points; each is a `Plugin`
GRID = 32  # sides of images are multiples of it, and of a model's largest stride
SIZES = "nsmlx"
_YOLOV3, _YOLOV5, _ULTRALYTICS = (f"https://github.com/ultralytics/{name}/releases"
                                  for name in ("yolov3", "yolov5", "assets"))
_NO_ANCHORS = MappingProxyType({"box": 7.5})


class ModelFacts(NamedTuple):
    """One model."""

    family: str
    grid: int = GRID
    gains: Mapping[str, float] = MappingProxyType({})  # of the loss, where they differ from the recipe's defaults
    releases: str = ""  # page of the published weights; '': there are none under this name


class Plugin(NamedTuple):
    """The models of another package: an entry point of `GROUP` names an object of this type, which imports no torch."""

    models: Mapping[str, ModelFacts]
    family: str  # `package.module:name` of its `models.families.Family`


class InstalledPlugin(NamedTuple):
    """A plug-in and the package that brings it."""

    plugin: Plugin
    package: str
    version: str


def _sizes(pattern: str, facts: ModelFacts) -> dict[str, ModelFacts]:
    return {pattern.format(size): facts for size in SIZES}


MODELS: Mapping[str, ModelFacts] = {
    **_sizes("yolov5{}", ModelFacts("yolov5", releases=_YOLOV5)),
    **_sizes("yolov5{}6", ModelFacts("yolov5", 64, releases=_YOLOV5)),
    **dict.fromkeys(("yolov3", "yolov3-spp", "yolov3-tiny"), ModelFacts("yolov3", releases=_YOLOV3)),
    **_sizes("yolov8{}", ModelFacts("yolov8", gains=_NO_ANCHORS, releases=_ULTRALYTICS)),
    **_sizes("yolov5{}u", ModelFacts("yolov8", gains=_NO_ANCHORS, releases=_ULTRALYTICS)),
    **_sizes("yolov5{}6u", ModelFacts("yolov8", 64, _NO_ANCHORS, _ULTRALYTICS)),
    **_sizes("yolo11{}", ModelFacts("yolo11", gains=_NO_ANCHORS, releases=_ULTRALYTICS)),
    **_sizes("yolo12{}", ModelFacts("yolo12", gains=_NO_ANCHORS, releases=_ULTRALYTICS)),
    **_sizes("yolo26{}", ModelFacts("yolo26", gains=_NO_ANCHORS, releases=_ULTRALYTICS)),
}


def facts_of(model: str) -> ModelFacts | None:
    """The facts of a model by its name, also as the name of a YAML file that is called so; None: it is unknown here."""
    stem, suffix = os.path.splitext(os.path.basename(model))
    if suffix in (".yaml", ".yml"):
        return MODELS.get(stem)
    if model in MODELS:
        return MODELS[model]
    found = plugin_of(model)
    return found.plugin.models[model] if found else None


def plugin_of(model: str) -> InstalledPlugin | None:
    """The installed plug-in that offers a model; None if there is none. Our own names are not looked up.

    Raises:
        ConfigError: if two packages offer the name, or one cannot be loaded.
    """
    if model in MODELS or os.path.splitext(model)[1]:
        return None
    offers = [each for each in plugins() if model in each.plugin.models]
    if len(offers) > 1:
        raise ConfigError(
            f"model: {model!r} is offered by {' and by '.join(each.package for each in offers)}; uninstall one of them"
        )
    return offers[0] if offers else None


@cache
def plugins() -> tuple[InstalledPlugin, ...]:
    """All installed plug-ins.

    Raises:
        ConfigError: if one cannot be loaded, or offers a name of ours.
    """
    return tuple(_load(entry) for entry in sorted(entry_points(group=GROUP), key=lambda entry: entry.name))


def _load(entry: EntryPoint) -> InstalledPlugin:
    package, version = (entry.dist.name, entry.dist.version) if entry.dist else (entry.value, "")
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
    if taken := plugin.models.keys() & MODELS.keys():
        raise ConfigError(f"the package {package} offers {min(taken)!r}, which is a model of ray_yolo; uninstall it")
    return InstalledPlugin(plugin, package, version)


def off_grid(imgsz: int, grid: int) -> str | None:
    """Why an image size does not fit a grid, with the nearest sizes that do; None if it fits."""
    if imgsz % grid == 0 and imgsz >= 2 * grid:
        return None
    low = max(imgsz // grid, 2) * grid
    nearest = f"{low} or {low + grid}" if low < imgsz else str(low)
    return f"must be a multiple of {grid}, at least {2 * grid}; nearest: {nearest}"
