"""Weights as YOLOv5 and Ultralytics release them: whole models, pickled under the names of their own code.

That code exists only while a file is written: empty classes in modules of the same dotted names.
"""

from __future__ import annotations

import sys
from argparse import Namespace
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path, PosixPath
from types import ModuleType
from typing import Any

import numpy as np
import torch
from torch import nn

YOLOV5 = {"Conv": "models.common.Conv", "C3": "models.common.C3", "Bottleneck": "models.common.Bottleneck",
          "C2f": "models.common.C2f",
          "SPPF": "models.common.SPPF", "Concat": "models.common.Concat", "Detect": "models.yolo.Detect",
          "Detector": "models.yolo.DetectionModel"}
ULTRALYTICS = {name: f"ultralytics.nn.modules.{name}" for name in YOLOV5} | {
    "AnchorFree": "ultralytics.nn.modules.head.Detect", "Detector": "ultralytics.nn.tasks.DetectionModel"}


def write_released(path: Path, detector: nn.Module, names: object, code: Mapping[str, str] = YOLOV5,
                   **more: Any) -> Path:
    """A file of a model in half precision with what stands beside it in released files; `more` over that."""
    with _written(code) as classes:
        model = _disguised(detector, classes).half()
        model.names, model.stride, model.yaml = names, torch.tensor([8.0, 16.0, 32.0]), {"nc": 80}
        torch.save({"epoch": -1, "best_fitness": np.float64(0.5), "model": model, "ema": None, "optimizer": None,
                    "opt": Namespace(weights=PosixPath("yolov5s.pt")), "date": "2022-11-22", **more}, path)
    return path


@contextmanager
def _written(code: Mapping[str, str]) -> Iterator[dict[str, type[nn.Module]]]:
    """Classes by our own name for them, findable under the dotted names meanwhile."""
    before, classes = dict(sys.modules), {}
    for ours, dotted in code.items():
        parts = dotted.split(".")
        for length in range(1, len(parts)):
            sys.modules.setdefault(name := ".".join(parts[:length]), ModuleType(name))
        classes[ours] = type(parts[-1], (nn.Module,), {"__module__": ".".join(parts[:-1])})
        setattr(sys.modules[classes[ours].__module__], parts[-1], classes[ours])
    try:
        yield classes
    finally:
        sys.modules.clear()
        sys.modules.update(before)


def _disguised(module: nn.Module, classes: Mapping[str, type[nn.Module]]) -> nn.Module:
    """The same tree of tensors, of other classes where there are any."""
    of_torch = {"ModuleList": nn.Sequential, "BatchNorm": nn.BatchNorm2d, "Upsample": nn.Upsample}
    kind = of_torch.get(type(module).__name__, type(module))
    made = classes.get(type(module).__name__, kind)
    other = made.__new__(made)
    nn.Module.__init__(other)
    for name, tensor in (*module.named_parameters(recurse=False), *module.named_buffers(recurse=False)):
        if isinstance(tensor, nn.Parameter):
            other.register_parameter(name, nn.Parameter(tensor.detach().clone(), tensor.requires_grad))
        else:
            other.register_buffer(name, tensor.clone())
    for name in ("mode", "scale_factor", "dilation", "padding_mode", "eps"):  # settings of torch's layers
        if hasattr(module, name):
            setattr(other, name, getattr(module, name))
    for name, child in module.named_children():
        other.add_module(name, _disguised(child, classes))
    return other
