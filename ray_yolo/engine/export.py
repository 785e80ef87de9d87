"""Trained weights as a file for other programs: decoded predictions, or detections with suppression inside.

A file exists only if it has given the same numbers as torch.
"""

from __future__ import annotations

import importlib.util
import json
import logging
import os
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from ray_yolo.config.commands import ExportConfig
from ray_yolo.engine.export_check import (
    LARGEST_DIFFERENCE,
    Run,
    compare_predictions,
    compare_suppression,
    random_predictions,
)
from ray_yolo.engine.export_nms import Suppression, onnx_suppression
from ray_yolo.engine.trained import Trained, load_trained
from ray_yolo.errors import InputError
from ray_yolo.families import Family
from ray_yolo.models.detector import Detector, fuse

_NEEDED = ("onnx", "onnxruntime", "onnxscript")


@dataclass(frozen=True)
class ExportResult:
    """An exported file that has been checked."""

    path: Path
    metadata: dict[str, str]
    largest_difference: float  # from torch, see LARGEST_DIFFERENCE

    def __str__(self) -> str:
        return (f"{self.path}: the largest difference from torch is {self.largest_difference:.1e} "
                f"(allowed: {LARGEST_DIFFERENCE})")


class Decoded(nn.Module):
    """A detector whose output is (B, N, 4 + classes): xyxy in pixels, and the score of each class."""

    def __init__(self, detector: Detector, family: Family) -> None:
        super().__init__()
        self.detector = detector
        self._decode = family.decode

    def forward(self, images: Tensor) -> Tensor:
        """Predictions of images (B, 3, H, W) in 0..1."""
        return torch.cat(self._decode(self.detector.head, self.detector(images)), 2)


def export(config: ExportConfig) -> ExportResult:
    """Write trained weights in another form beside them, and check it against torch.

    Raises:
        InputError: if the weights cannot be used (CheckpointError), or the extra packages are missing.
        RayYoloError: if the new file gives other numbers than torch; it is removed.
    """
    config, trained = check(config)
    path = Path(config.weights).with_suffix(f".{config.format}")
    imgsz = config.imgsz or trained.recipe.imgsz
    model = Decoded(fuse(trained.model).requires_grad_(False), trained.family).eval()
    metadata = describe(trained, config, imgsz)
    temporary = path.with_name(f".{path.name}")
    write = _write_onnx if config.format == "onnx" else _write_torchscript
    try:
        with _quiet():
            difference = write(model, config, imgsz, metadata, temporary)
        temporary.replace(path)
    finally:
        temporary.unlink(missing_ok=True)
    return ExportResult(path, metadata, difference)


def check(config: ExportConfig) -> tuple[ExportConfig, Trained]:
    """The configuration with what the weights decide, and the weights; nothing is written.

    Raises:
        InputError: as `export` does.
    """
    if config.format == "onnx" and (missing := [name for name in _NEEDED if importlib.util.find_spec(name) is None]):
        raise InputError(f"format: onnx needs {', '.join(missing)}; install with pip install ray_yolo[export]")
    folder = Path(config.weights).parent
    trained = load_trained(Path(config.weights))
    if not os.access(folder, os.W_OK):
        raise InputError(f"weights: {folder} cannot be written to; copy the weights to where the export may lie")
    return config.model_copy(update={"imgsz": config.imgsz or trained.recipe.imgsz}), trained


def describe(trained: Trained, config: ExportConfig, imgsz: int) -> dict[str, str]:
    """What the file says of itself, under YOLOv5's keys; `names` reads as a Python dict."""
    return {"names": str(dict(enumerate(trained.names))), "stride": str(max(trained.model.head.strides)),
            "imgsz": str([imgsz, imgsz]), "batch": str(config.batch_size), "task": "detect", "nms": str(config.nms)}


def _write_onnx(model: Decoded, config: ExportConfig, imgsz: int, metadata: dict[str, str], path: Path) -> float:
    import onnx
    from onnx import compose, helper

    example = torch.zeros(max(config.batch_size, 2 if config.dynamic else 1), 3, imgsz, imgsz)  # 1 would be fixed
    sides = {0: torch.export.Dim("batch"), 2: 32 * torch.export.Dim("h"), 3: 32 * torch.export.Dim("w")}
    program = torch.onnx.export(
        model, (example,), input_names=["images"], output_names=["predictions"], dynamo=True, verbose=False,
        opset_version=config.opset, dynamic_shapes={"images": sides} if config.dynamic else None)
    assert program is not None
    graph = program.model_proto
    opset = next(entry.version for entry in graph.opset_import if entry.domain == "")
    if config.opset not in (None, opset):
        raise InputError(f"opset: the exporter cannot write {config.opset}, only {opset}; leave --opset out")
    helper.set_model_props(graph, metadata)
    onnx.save(graph, path)
    difference = compare_predictions(model, _onnx_run(path), config.batch_size, imgsz, dynamic=config.dynamic)
    if config.nms:
        suppression = onnx_suppression(config, graph.ir_version, opset)
        onnx.save(suppression, path)
        difference = max(difference, compare_suppression(_onnx_run(path), config))
        graph = compose.merge_models(graph, suppression, io_map=[("predictions", "predictions")])
        onnx.checker.check_model(graph)
        onnx.save(graph, path)
        _onnx_run(path)(example)
    return difference


def _write_torchscript(model: Decoded, config: ExportConfig, imgsz: int, metadata: dict[str, str],
                       path: Path) -> float:
    traced = _trace(model, torch.zeros(config.batch_size, 3, imgsz, imgsz))
    difference = compare_predictions(model, _script_run(traced), config.batch_size, imgsz, dynamic=True)
    if config.nms:
        suppression = _trace(Suppression(config), random_predictions())
        difference = max(difference, compare_suppression(_script_run(suppression), config))
        traced = _trace(nn.Sequential(traced, suppression), torch.zeros(config.batch_size, 3, imgsz, imgsz))
    torch.jit.save(traced, path, _extra_files={"config.txt": json.dumps(metadata)})
    return difference


def _trace(model: nn.Module, example: Tensor) -> Any:
    return torch.jit.trace(model, example, check_trace=False)


def _onnx_run(path: Path) -> Run:
    import onnxruntime

    session = onnxruntime.InferenceSession(path, providers=["CPUExecutionProvider"])
    name = session.get_inputs()[0].name
    return lambda tensor: np.asarray(session.run(None, {name: tensor.numpy()})[0])


def _script_run(traced: Any) -> Run:
    return lambda tensor: np.asarray(traced(tensor).numpy())


@contextmanager
def _quiet() -> Iterator[None]:
    """Without what exporters say of themselves, of their versions and of TorchScript's future."""
    before = logging.root.manager.disable
    logging.disable(logging.CRITICAL)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        logging.disable(before)
