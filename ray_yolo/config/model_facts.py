"""Static facts of each model name: family, grid, loss gains, release page. This module does not import torch."""

from __future__ import annotations

import os
from collections.abc import Mapping
from types import MappingProxyType
from typing import NamedTuple

GRID = 32  # image sides are multiples of it and of the model's largest stride
SIZES = "nsmlx"
_YOLOV3, _YOLOV5, _ULTRALYTICS = (f"https://github.com/ultralytics/{name}/releases"
                                  for name in ("yolov3", "yolov5", "assets"))
_NO_ANCHORS = MappingProxyType({"box": 7.5})


class ModelFacts(NamedTuple):
    """Facts of one model."""

    family: str
    grid: int = GRID
    gains: Mapping[str, float] = MappingProxyType({})  # loss gains that differ from the recipe's defaults
    releases: str = ""  # page of the published weights


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
    return MODELS.get(stem if suffix in (".yaml", ".yml") else model)


def off_grid(imgsz: int, grid: int) -> str | None:
    """Why an image size is not legal on a grid, with the nearest legal sizes; None if it is legal."""
    if imgsz % grid == 0 and imgsz >= 2 * grid:
        return None
    low = max(imgsz // grid, 2) * grid
    nearest = f"{low} or {low + grid}" if low < imgsz else str(low)
    return f"must be a multiple of {grid}, at least {2 * grid}; nearest: {nearest}"
