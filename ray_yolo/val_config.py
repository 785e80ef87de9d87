"""The configuration of `ray_yolo.val`: what is validated, how, and on which workers."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from ray_yolo.config import STRIDE, Placement
from ray_yolo.recipe_sections import EvaluateConfig, Frozen


class ValPlacement(Placement):
    """Where a validation runs: in this process unless workers are asked for."""

    num_workers: int | tuple[int, int] = 0
    """Ray workers: a number, or 0 to validate in this process without Ray."""
    project: str = "runs/val"
    """Folder of validations."""
    name: str = ""
    """Name of the validation; '': a new expN."""
    exist_ok: bool = False
    """Use --name again: results that lie there already are moved aside to NAME.oldN, never mixed or overwritten."""
    max_failures: int = Field(0, ge=-1)
    """Restarts after worker failures, each from the first image; -1: no limit."""


class ValConfig(Frozen):
    """One validation of trained weights. The numbers do not depend on the placement."""

    weights: str
    """Weights to validate, such as runs/train/exp/weights/best.pt."""
    data: str = ""
    """Data set: a YAML file or a built-in one; '': the one that the weights were trained on."""
    split: Literal["val", "test", "train"] = "val"
    """Part of the data set."""
    imgsz: int | None = Field(None, ge=2 * STRIDE, multiple_of=STRIDE)
    """Long side of the network input in pixels, a multiple of 32; left out: that of the training."""
    precision: Literal["auto", "fp32", "bf16", "fp16"] = "auto"
    """Arithmetic of the forward pass; auto: that of the training, as in its epochs (fp32 if the file does not say)."""
    single_cls: bool = False
    """Treat every label and every detection as class 0."""
    allow_empty: bool = False
    """Validate also where the split holds no box at all."""
    coco: bool = False
    """Also give the twelve numbers of the COCO protocol."""
    evaluate: EvaluateConfig = EvaluateConfig()
    placement: ValPlacement = ValPlacement()
