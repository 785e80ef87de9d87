"""The configuration of `ray_yolo.predict`: what is looked at, what counts as found, and on which workers."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import BeforeValidator, Field

from ray_yolo.config import STRIDE, Placement
from ray_yolo.recipe_sections import Frozen


class NmsConfig(Frozen):
    """How predictions become detections, for use; validation has its own numbers."""

    confidence: float = Field(0.25, ge=0.0, lt=1.0)
    """Detections below this score are dropped."""
    iou: float = Field(0.45, gt=0.0, le=1.0)
    """Overlap above which non-maximum suppression removes a detection."""
    max_detections: int = Field(1000, ge=1)
    """Detections kept per image."""
    agnostic_nms: bool = False
    """Let detections suppress those of other classes too."""


class DetectConfig(NmsConfig):
    """What counts as found in an image."""

    classes: Annotated[tuple[int, ...] | None, BeforeValidator(lambda v: (v,) if isinstance(v, int) else v)] = None
    """Numbers of the classes that are looked for; left out: all."""


class PredictPlacement(Placement):
    """Where a prediction runs: in this process unless workers are asked for."""

    num_workers: int | tuple[int, int] = 0
    """Ray workers: a number, a range 'low-high', or 0 to predict in this process without Ray."""
    project: str = "runs/detect"
    """Folder of predictions."""
    name: str = ""
    """Name of the prediction; '': a new expN."""
    exist_ok: bool = False
    """Use --name again: results that lie there already are moved aside to NAME.oldN, never mixed or overwritten."""
    nosave: bool = False
    """Write no pictures and videos with boxes."""


class PredictConfig(DetectConfig):
    """One prediction. What is found in an image depends on that image alone, not on the placement."""

    weights: str
    """Weights to use, such as runs/train/exp/weights/best.pt."""
    source: str
    """Pictures and videos: a folder, a file, a pattern such as 'day*/*.jpg', or a .txt file with one path per line."""
    imgsz: int | None = Field(None, ge=2 * STRIDE, multiple_of=STRIDE)
    """Long side of the network input in pixels, a multiple of 32; left out: that of the training."""
    precision: Literal["fp32", "bf16", "fp16"] = "fp32"
    """Arithmetic of the forward pass."""
    save_txt: bool = False
    """Write labels/NAME.txt: rows of class, centre x, centre y, width, height as shares of the image."""
    save_conf: bool = False
    """Add the score to each row of the text files."""
    save_json: bool = False
    """Write predictions.json: all detections in pixels."""
    placement: PredictPlacement = PredictPlacement()
