"""The sections of a recipe: optimiser, schedule, loss, augmentation, validation and objective.

Defaults are YOLOv5's (scratch-low) where YOLOv5 has the setting. This module imports neither torch nor ray.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from typing import Annotated, Literal

from pydantic import AfterValidator, BaseModel, BeforeValidator, ConfigDict, Field, field_validator, model_validator


class ConfigModel(BaseModel):
    """Base of all configuration values: immutable, without unknown keys, infinities and control characters."""

    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False, use_attribute_docstrings=True)

    @field_validator("*")
    @classmethod
    def _plain_text(cls, value: object) -> object:
        if isinstance(value, str) and not all(ord(character) >= ord(" ") for character in value):
            raise ValueError("must not contain line ends or control characters")
        return value


def _class_numbers(value: object) -> object:
    """One number alone or a text of numbers (0,1 or 0 1) as a list; names are refused, because a name has a number
    only with a data set."""
    if isinstance(value, int):
        return (value,)
    for each in value if isinstance(value, (list, tuple)) else (value,):
        if isinstance(each, str) and re.search(r"[^\W\d_]", each):
            raise ValueError(f"{each!r} is no number; a class has the number of its place in the data set's `names`, "
                             "from 0")
    return re.split(r"[\s,]+", value.strip("[] ")) if isinstance(value, str) else value


Classes = Annotated[tuple[int, ...] | None, BeforeValidator(_class_numbers)]


class OptimizerConfig(ConfigModel):
    """The optimiser."""

    name: Literal["SGD", "Adam", "AdamW"] = "SGD"
    """SGD is Nesterov; the betas of Adam and AdamW are (momentum, 0.999)."""
    lr0: float = Field(0.01, ge=1e-6, le=1.0)
    """Learning rate at the end of warm-up, for one step of `nominal_batch` images."""
    momentum: float = Field(0.937, ge=0.0, lt=1.0)
    """Momentum (SGD) or beta1 (Adam) after warm-up."""
    weight_decay: float = Field(0.0005, ge=0.0, le=0.1)
    """Decay of convolution weights, for steps of `nominal_batch` images; norms and biases have none."""
    nominal_batch: int = Field(64, ge=1, le=2**17)
    """Images that one optimiser step accumulates after warm-up (rounded to full batches)."""
    backbone_lr: float = Field(1.0, ge=0.0, le=10.0)
    """Learning rate of the layers before the first upsampling layer, relative to that of the others; below 1 where
    initial weights are better than the data could train them."""
    clip_norm: float = Field(10.0, gt=0.0)
    """Largest L2 norm of the total gradient."""

    @field_validator("name", mode="before")
    @classmethod
    def _no_auto(cls, value: object) -> object:
        if value == "auto":
            raise ValueError("leave it out: without it, a short training from weights takes AdamW, and any other SGD "
                             "(docs/running.md, Fine-tuning)")
        return value


class ScheduleConfig(ConfigModel):
    """Learning rates, momentum and moving average over the epochs."""

    lrf: float = Field(0.01, gt=0.0, le=1.0)
    """Final learning rate as a fraction of lr0."""
    cos_lr: bool = False
    """Cosine instead of linear decay."""
    warmup_epochs: float = Field(3.0, ge=0.0)
    """Length of warm-up; see `warmup_min_batches`."""
    warmup_min_batches: int = Field(100, ge=0)
    """Least number of warm-up batches, unless warmup_epochs is 0 (no warm-up)."""
    warmup_momentum: float = Field(0.8, ge=0.0, lt=1.0)
    """Momentum at the first batch of warm-up."""
    warmup_bias_lr: float = Field(0.1, ge=0.0)
    """Learning rate of the biases at the first batch of warm-up."""
    ema_decay: float = Field(0.9999, ge=0.0, lt=1.0)
    """Limit of the moving average's decay: d(n) = ema_decay (1 - exp(-n / ema_ramp))."""
    ema_ramp: float = Field(2000.0, gt=0.0)
    """Steps over which the moving average's decay rises."""


class LossConfig(ConfigModel):
    """Gains of the loss terms and the assignment rule."""

    box: float = Field(0.05, ge=0.0)
    """Gain of 1 - CIoU; anchor-based: scaled by 3 / levels; anchor-free: not scaled, default 7.5."""
    obj: float = Field(1.0, ge=0.0)
    """Gain of objectness; scaled by (imgsz / 640)^2 x 3 / levels."""
    cls: float = Field(0.5, ge=0.0)
    """Gain of classification; anchor-based: scaled by classes / 80 x 3 / levels."""
    dfl: float = Field(1.5, ge=0.0)
    """Gain of the distances (distribution focal loss, or l1 for end-to-end models); anchor-free only."""
    obj_pw: float = Field(1.0, gt=0.0)
    """Weight of positive objectness targets."""
    cls_pw: float = Field(1.0, gt=0.0)
    """Weight of positive class targets."""
    anchor_t: float = Field(4.0, gt=1.0)
    """A target is assigned to anchors whose sides differ from its own by less than this factor."""
    fl_gamma: float = Field(0.0, ge=0.0)
    """Focal exponent; 0 is plain binary cross-entropy."""
    label_smoothing: float = Field(0.0, ge=0.0, lt=1.0)
    """Class targets become 1 - eps/2 and eps/2."""


LEAST_PARTNERS = 4


def _number_of_partners(value: int) -> int:
    if 0 < value < LEAST_PARTNERS:
        raise ValueError(f"should be 0 (all images), or at least the {LEAST_PARTNERS} images of a mosaic")
    return value


class AugmentConfig(ConfigModel):
    """Augmentation of training images; the random numbers depend only on the sample's key."""

    hsv_h: float = Field(0.015, ge=0.0, le=1.0)
    """Hue gain: each image's hue is multiplied by 1 + uniform(-1, 1) x hsv_h."""
    hsv_s: float = Field(0.7, ge=0.0, le=1.0)
    """Saturation gain."""
    hsv_v: float = Field(0.4, ge=0.0, le=1.0)
    """Brightness gain."""
    degrees: float = Field(0.0, ge=0.0, le=180.0)
    """Rotation in +- degrees."""
    translate: float = Field(0.1, ge=0.0, le=1.0)
    """Translation in +- fractions of the image size."""
    scale: float = Field(0.5, ge=0.0, le=0.95)
    """Zoom: uniform(1 - scale, 1 + scale)."""
    shear: float = Field(0.0, ge=0.0, le=45.0)
    """Shear in +- degrees on both axes."""
    perspective: float = Field(0.0, ge=0.0, le=0.001)
    """Perspective coefficients, +-."""
    flipud: float = Field(0.0, ge=0.0, le=1.0)
    """Probability of an up-down flip."""
    fliplr: float = Field(0.5, ge=0.0, le=1.0)
    """Probability of a left-right flip."""
    mosaic: float = Field(1.0, ge=0.0, le=1.0)
    """Probability that a sample is a mosaic of four images."""
    mixup: float = Field(0.0, ge=0.0, le=1.0)
    """Probability that a mosaic is blended with a second one."""
    copy_paste: float = Field(0.0, ge=0.0, le=1.0)
    """Share of a mosaic's polygons that are mirrored and pasted."""
    close_mosaic: int = Field(0, ge=0)
    """Number of final epochs without mosaic and mixup; 10 for anchor-free models, as their authors train them."""
    partners: Annotated[int, AfterValidator(_number_of_partners)] = Field(0, ge=0)
    """Mosaic and mixup take the other images from a block of so many consecutive samples of the epoch's order, which a
    loader process decodes once for a batch; 0: from all images. Images from files load faster, at
    some cost of accuracy."""
    render: Literal["host", "device"] = "host"
    """Who makes the pictures of samples: the loader processes, or a GPU, which holds all decoded images and renders
    from labels and draws that the loaders send. Pixels differ by some levels. Off, because it has not yet run on a
    GPU."""


SECTIONS: dict[str, type[BaseModel]] = {
    "optimizer": OptimizerConfig, "schedule": ScheduleConfig, "loss": LossConfig, "augment": AugmentConfig}
"""The sections with hyper-parameters."""


class EvaluateConfig(ConfigModel):
    """Detections in validation."""

    confidence: float = Field(0.001, ge=0.0, lt=1.0)
    """Detections below this score are dropped."""
    iou: float = Field(0.6, gt=0.0, le=1.0)
    """Overlap above which non-maximum suppression removes a detection."""
    max_detections: int = Field(300, ge=1)
    """Detections kept per image."""
    batch_size: int = Field(32, ge=1)
    """Images per validation batch; part of the recipe because it affects the last bits of the metrics."""


class ObjectiveConfig(ConfigModel):
    """Fitness of an epoch: the weighted sum of these metrics."""

    precision: float = Field(0.0, ge=0.0)
    """Weight of precision."""
    recall: float = Field(0.0, ge=0.0)
    """Weight of recall."""
    map50: float = Field(0.1, ge=0.0)
    """Weight of mAP50."""
    map50_95: float = Field(0.9, ge=0.0)
    """Weight of mAP50-95."""

    @model_validator(mode="after")
    def _has_a_weight(self) -> ObjectiveConfig:
        if not any(weight for _, weight in self):
            raise ValueError("the weights of the objective must not all be 0")
        return self

    def fitness(self, metrics: Mapping[str, float | None] | None) -> float | None:
        """The weighted sum of an epoch's metrics; None if one with a weight is missing or not finite."""
        values = {objective_field(name): value for name, value in (metrics or {}).items()}
        total = 0.0
        for name, weight in self:
            if not weight:  # the metric may be missing then
                continue
            value = values.get(name)
            if value is None:
                return None
            total += weight * value
        return total if math.isfinite(total) else None


def objective_field(metric: str) -> str:
    """The field of `ObjectiveConfig` for a metric: map50_95 for mAP50-95."""
    return metric.lower().replace("-", "_")
