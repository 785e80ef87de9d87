"""Networks in files that `ray_yolo.export` has written: ONNX, run by ONNX Runtime, and OpenVINO."""

from __future__ import annotations

import ast
import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from ray_yolo.config.model_facts import GRID
from ray_yolo.core.errors import CheckpointError, ConfigError
from ray_yolo.data.pixels import PixelRange, read_pixel_range
from ray_yolo.models.heads import Predictions

SUFFIXES = (".onnx", ".xml")
METADATA_SECTION = "ray_yolo"  # the section of an OpenVINO file with our metadata

RunExported = Callable[[np.ndarray], np.ndarray]
"""Images (B, 3, H, W) float32 in 0..1 -> predictions (B, N, 4 + classes)."""


@dataclass(frozen=True)
class Exported:
    """An exported network. A file with static shapes takes batches of one size of squares; others take any."""

    path: Path
    names: tuple[str, ...]  # names of the classes
    imgsz: int  # the side of the export's input
    grid: int  # sides are multiples of it
    suppress: bool  # whether its predictions need non-maximum suppression
    batch_size: int | None  # images of a call; None: any number of images, of any sides
    pixel_range: PixelRange  # the range of the training images with more than 8 bits
    run: RunExported
    trained_classes: tuple[int, ...] | None = None  # None: all

    @property
    def takes_rectangles(self) -> bool:
        """Whether images need no padding to squares."""
        return self.batch_size is None

    def check_size(self, imgsz: int) -> None:
        """Refuse an image size that the file does not take."""
        if not self.takes_rectangles and imgsz != self.imgsz:
            raise ConfigError(f"imgsz: {self.path.name} takes squares of {self.imgsz} px only; leave --imgsz out, or "
                              "export with --dynamic")

    def check_precision(self, precision: str) -> None:
        """Refuse another arithmetic than that of the file."""
        if precision != "fp32":
            raise ConfigError(f"precision: {self.path.name} computes in fp32; leave --half and --precision out")

    def __call__(self, pixels: np.ndarray, precision: str) -> Predictions:
        """Predictions of images (B, height, width, 3) uint8. Only fp32 is supported."""
        self.check_precision(precision)
        images = np.ascontiguousarray(pixels.transpose(0, 3, 1, 2), np.float32) / np.float32(255)
        size = self.batch_size or len(images)
        outputs = []
        for start in range(0, len(images), size):
            part = images[start : start + size]
            num_missing = size - len(part)  # a static file takes full batches only
            blank = np.zeros((num_missing, *part.shape[1:]), np.float32)
            output = self.run(np.concatenate([part, blank]))
            outputs.append(output[: len(part)])
        predictions = torch.from_numpy(np.concatenate(outputs))
        return Predictions(predictions[..., :4], predictions[..., 4:])


def load_exported(path: Path) -> Exported:
    """The network of an .onnx file, or of an OpenVINO .xml file with its .bin file.

    Raises:
        CheckpointError: if the file or its runtime is missing, or `ray_yolo.export` has not written it.
    """
    if not path.is_file():
        raise CheckpointError(f"{path}: no such file; python -m ray_yolo.export writes one")
    try:
        run, metadata, batch_size = _open_onnx(path) if path.suffix == ".onnx" else _open_openvino(path)
    except ImportError as error:
        extra = "export" if path.suffix == ".onnx" else "openvino"
        raise CheckpointError(f"{path}: needs {error.name}; pip install 'ray_yolo[{extra}]'") from None
    except Exception as error:  # the runtimes raise many kinds
        reason = str(error).strip().splitlines()[0][:200]
        raise CheckpointError(f"{path}: cannot be opened ({reason}); export it again") from None
    if metadata.get("nms") == "True" or metadata.get("detections") == "True":
        raise CheckpointError(f"{path}: was exported with --nms, so its thresholds are fixed; export it without --nms "
                              "to predict with it here")
    try:
        names = ast.literal_eval(metadata["names"])
        side, _ = ast.literal_eval(metadata["imgsz"])
        suppress = "nms" in metadata  # else the model's detections need none
        if not suppress and "detections" not in metadata:
            raise KeyError("detections")
        return Exported(
            path=path,
            names=tuple(names[number] for number in range(len(names))),
            imgsz=side,
            grid=max(GRID, int(metadata["stride"])),
            suppress=suppress,
            batch_size=batch_size,
            pixel_range=read_pixel_range(json.loads(metadata.get("pixel_range", "{}"))),
            run=run,
            trained_classes=tuple(json.loads(metadata["classes"])) if "classes" in metadata else None)
    except (KeyError, TypeError, ValueError, SyntaxError):
        raise CheckpointError(f"{path}: was not exported by ray_yolo; export the .pt file with python -m "
                              "ray_yolo.export") from None


def _open_onnx(path: Path) -> tuple[RunExported, Mapping[str, str], int | None]:
    """The network, its metadata, and its batch size if it is static."""
    import onnxruntime

    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = 1  # images run in parallel, so that results do not depend on the number of threads
    options.log_severity_level = 3  # errors only
    content = path.read_bytes()  # ONNX Runtime takes no path that is not UTF-8
    session = onnxruntime.InferenceSession(content, options, providers=["CPUExecutionProvider"])
    [given] = session.get_inputs()
    batch_size = given.shape[0] if isinstance(given.shape[0], int) else None
    metadata = session.get_modelmeta().custom_metadata_map
    return lambda images: np.asarray(session.run(None, {given.name: images})[0]), metadata, batch_size


def _open_openvino(path: Path) -> tuple[RunExported, Mapping[str, str], int | None]:
    """The network, its metadata, and its batch size if it is static."""
    import openvino

    core = openvino.Core()
    model = core.read_model(path)
    compiled = core.compile_model(model, "CPU", {"INFERENCE_NUM_THREADS": 1, "INFERENCE_PRECISION_HINT": "f32"})
    keys = ("names", "imgsz", "stride", "nms", "detections", "pixel_range", "classes")
    metadata = {key: model.get_rt_info([METADATA_SECTION, key]).astype(str) for key in keys
                if model.has_rt_info([METADATA_SECTION, key])}
    size: Any = model.inputs[0].get_partial_shape()[0]

    def run(images: np.ndarray) -> np.ndarray:
        request = compiled.create_infer_request()  # each call has its own, because calls run in parallel
        return np.array(request.infer([images])[compiled.outputs[0]])

    return run, metadata, size.get_length() if size.is_static else None
