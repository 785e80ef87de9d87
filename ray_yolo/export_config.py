"""The configuration of `ray_yolo.export`."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from ray_yolo.config import STRIDE
from ray_yolo.predict_config import NmsConfig


class ExportConfig(NmsConfig):
    """Trained weights as a file for other programs. The thresholds count with `nms` only."""

    weights: str
    """Weights to export, such as runs/train/exp/weights/best.pt; the new file lies beside them."""
    format: Literal["onnx", "torchscript"] = "onnx"
    """Form of the file."""
    imgsz: int | None = Field(None, ge=2 * STRIDE, multiple_of=STRIDE)
    """Sides of the network input in pixels, a multiple of 32; left out: that of the training."""
    batch_size: int = Field(1, ge=1)
    """Images of one call."""
    dynamic: bool = False
    """Take any number of images of any size in multiples of 32 (TorchScript always does)."""
    nms: bool = False
    """Suppress overlapping boxes inside: gives rows of image, x1, y1, x2, y2, score, class."""
    opset: int | None = Field(None, ge=16)
    """ONNX operator set; left out: the exporter's own."""
