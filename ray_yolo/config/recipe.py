"""The recipe: everything that decides the trained weights, validated once and frozen afterwards.

Search spaces may name its fields only. Defaults are YOLOv5's (scratch-low) where YOLOv5 has the setting. Nothing here
imports torch or ray.
"""

from __future__ import annotations

import hashlib
import json
import math
import re
from operator import attrgetter
from typing import Annotated, Any, Literal

from pydantic import (
    AfterValidator,
    BeforeValidator,
    Field,
    ValidationError,
    field_validator,
    model_serializer,
    model_validator,
)

from ray_yolo.config import sections
from ray_yolo.config.model_facts import GRID, facts_of, off_grid
from ray_yolo.config.sections import SECTIONS, ConfigModel
from ray_yolo.config.settings import canonical, did_you_mean
from ray_yolo.core.errors import ConfigError

CHANGEABLE = tuple(
    path for section, model in SECTIONS.items() for name in model.model_fields
    if (path := f"{section}.{name}") not in ("optimizer.name", "optimizer.nominal_batch"))
"""Paths of the settings that may change."""

_EPOCH = re.compile(r"\s*[0-9]{1,9}\s*")


class Change(ConfigModel):
    """Other values for some settings from an epoch on; its plain form is the text that users write."""

    epoch: int = Field(ge=1)
    """Trained epochs before it."""
    settings: dict[str, Any]
    """New values by path."""

    @model_validator(mode="before")
    @classmethod
    def _read(cls, value: object) -> object:
        if not isinstance(value, str):
            return value
        epoch, colon, words = value.partition(":")
        if not (colon and _EPOCH.fullmatch(epoch) and all("=" in word for word in words.split())):
            raise ValueError("write 'EPOCHS: NAME=VALUE ...', e.g. '30: lr0=0.005 mosaic=0'")
        return {"epoch": int(epoch), "settings": dict(word.split("=", 1) for word in words.split())}

    @field_validator("settings")
    @classmethod
    def _check(cls, settings: dict[str, Any]) -> dict[str, Any]:
        return dict(sorted(_checked(name, value) for name, value in settings.items()))

    @model_serializer
    def _write(self) -> str:
        return f"{self.epoch}:" + "".join(f" {path}={str(value).lower()}" for path, value in self.settings.items())


def _checked(name: str, value: object) -> tuple[str, Any]:
    """Path and value of a setting, by the rules of its section."""
    path = canonical(name)
    if path not in CHANGEABLE:
        raise ValueError(f"{name} cannot change in the middle of a training"
                         f"{did_you_mean(name, {path.rpartition('.')[2]: path for path in CHANGEABLE})}")
    section, _, field = path.partition(".")
    try:
        return path, getattr(SECTIONS[section].model_validate({field: value}), field)
    except ValidationError as error:
        raise ValueError(f"{name}={value}: {error.errors(include_url=False)[0]['msg']}") from None


MAX_LAYERS = 1000
AUTO_BATCH = -1
BATCH_PER_WORKER = 16
QUAD = 4  # images that --quad merges into one

_REMOVED = {"augment": {"mosaic_window": 0}}  # settings of earlier recipes, by section, and what they did nothing at


def _freeze_list(value: object) -> object:
    """YOLOv5's `--freeze 10` means the first ten layers; `--freeze 0 1 2` names them, `--freeze 10 10` the one."""
    return tuple(range(min(value, MAX_LAYERS))) if isinstance(value, int) else value


class Recipe(ConfigModel):
    """Everything that decides the trained weights."""

    data: str = "shapes"
    """Data set: a YAML file, the address of one (s3://bucket/coco/data.yaml, gs://, az://), or a built-in one (shapes,
    shapes8, shapes1k)."""
    model: str = "yolov5s"
    """Architecture: yolov5{n,s,m,l,x}, the same with 6, u or 6u behind it, yolov3, yolov3-spp, yolov3-tiny,
    {yolov8,yolo11,yolo12,yolo26}{n,s,m,l,x}, or a YAML file as YOLOv5 and Ultralytics write them."""
    weights: str = ""
    """Initial weights: best.pt of a run, what YOLOv5 or Ultralytics have released, .safetensors; '': from scratch."""
    epochs: int = Field(100, ge=1)
    """Passes over the training images."""
    batch_size: int | None = Field(None, ge=-1, le=2**17)
    """Images per batch over all workers; left out: 16 for each worker asked for; -1: as many as the memory of the
    smallest worker's GPU holds, for each worker (16 without GPUs)."""
    microbatch: int | None = Field(None, ge=1, le=2**17)
    """Images of one forward, one set of BatchNorm statistics, one loss mean; never split over workers.
    Left out: the largest divisor of batch_size that gives every worker one at the first start."""
    imgsz: int = Field(640, ge=2 * GRID, le=8192)
    """Long side of the network input in pixels; a multiple of 32, of 64 for models with a 6."""
    seed: int = Field(0, ge=0, lt=2**32)
    """FailureHandler initial weights, order of samples and every augmentation."""
    precision: Literal["auto", "fp32", "bf16", "fp16"] = "auto"
    """Arithmetic of forward and backward; auto: bf16 on GPUs and processors that multiply it, else fp32."""
    sync_bn: bool = False
    """Spread each batch over all workers with common BatchNorm statistics and loss means."""
    exact: bool = False
    """Fix what else decides the bits: arithmetic threads (see `threads`), and deterministic kernels or none."""
    threads: int = Field(0, ge=0, le=1024)
    """Arithmetic threads per worker; 0: 1 under exact, else the worker's CPUs."""
    patience: int = Field(100, ge=0)
    """Stop after so many epochs without a better fitness; 0: never."""
    freeze: Annotated[tuple[Annotated[int, Field(ge=0)], ...], BeforeValidator(_freeze_list),
                      AfterValidator(lambda layers: tuple(sorted(set(layers))))] = ()
    """Layers whose weights stay as they are: one number n freezes the first n, several name them."""
    single_cls: bool = False
    """Treat every label as class 0."""
    classes: sections.Classes = None
    """Numbers of the classes that are looked for; labels of others are background; left out: all."""
    fraction: float = Field(1.0, gt=0.0, le=1.0)
    """Part of the training images that is trained on, drawn by the seed."""
    multi_scale: bool = False
    """Draw each step's image size from [0.5, 1.5) x imgsz."""
    rect: bool = False
    """Rectangular batches by aspect ratio; no shuffling, no mosaic."""
    quad: bool = False
    """Merge groups of four images into one of twice the size."""
    image_weights: bool = False
    """Draw images in proportion to how badly their classes are detected."""
    autoanchor: bool = True
    """Replace the anchors when they fit the labels badly."""
    noval: bool = False
    """Validate after the last epoch only."""
    strict: bool = False
    """Refuse a data set in which any image or label has to be left out."""
    allow_empty: bool = False
    """Train also where a split holds no box at all."""
    changes: Annotated[
        tuple[Change, ...], BeforeValidator(lambda value: (value,) if isinstance(value, str) else value),
        AfterValidator(lambda changes: tuple(sorted(changes, key=attrgetter("epoch"))))] = ()
    """Settings of the four following sections that change on the way, each 'EPOCHS: NAME=VALUE ...': from so many
    trained epochs on. Best weights and patience count anew from there."""
    optimizer: sections.OptimizerConfig = sections.OptimizerConfig()
    schedule: sections.ScheduleConfig = sections.ScheduleConfig()
    loss: sections.LossConfig = sections.LossConfig()
    augment: sections.AugmentConfig = sections.AugmentConfig()
    evaluate: sections.EvaluateConfig = sections.EvaluateConfig()
    objective: sections.ObjectiveConfig = sections.ObjectiveConfig()

    @model_validator(mode="before")
    @classmethod
    def _without_removed_settings(cls, tree: object) -> object:
        """Recorded recipes name all settings of their time, also those that have been removed since."""
        if not isinstance(tree, dict):
            return tree
        kept = {section: {name: value for name, value in tree[section].items() if (name, value) not in removed.items()}
                for section, removed in _REMOVED.items() if isinstance(tree.get(section), dict)}
        return {**tree, **kept}

    @model_validator(mode="before")
    @classmethod
    def _gains_of_the_family(cls, tree: object) -> object:
        """A family has gains of its own where the user has not given any."""
        if not isinstance(tree, dict) or not (facts := facts_of(str(tree.get("model", "")))) or not facts.gains:
            return tree
        loss = tree.get("loss", {})
        return {**tree, "loss": {**facts.gains, **loss}} if isinstance(loss, dict) else tree

    @field_validator("batch_size")
    @classmethod
    def _some_images(cls, value: int | None) -> int | None:
        if value == 0:
            raise ValueError("must be 1 or more, or -1 for as many as the workers' memory holds")
        return value

    @field_validator("imgsz")
    @classmethod
    def _on_the_grid(cls, value: int) -> int:
        if reason := off_grid(value, GRID):
            raise ValueError(reason)
        return value

    @model_validator(mode="after")
    def _on_the_grid_of_the_model(self) -> Recipe:
        facts = facts_of(self.model)
        if facts and (reason := off_grid(self.imgsz, facts.grid)):
            raise ValueError(f"imgsz {self.imgsz} {reason} ({self.model} has cells of {facts.grid} px)")
        return self

    @model_validator(mode="after")
    def _fits_together(self) -> Recipe:
        if self.exact and self.sync_bn:
            raise ValueError("exact and sync_bn exclude each other: synchronised statistics are sums whose rounding "
                             "depends on the worker count; drop one of them")
        if self.exact and self.precision == "fp16":
            raise ValueError("exact needs fp32 or bf16: fp16 scales the loss by its own history")
        if self.microbatch and self.batch_size and self.batch_size != AUTO_BATCH and self.batch_size % self.microbatch:
            raise ValueError(f"microbatch {self.microbatch} does not divide batch_size {self.batch_size}; "
                             f"legal: {', '.join(map(str, divisors(self.batch_size)))}")
        for one, other in (("quad", "rect"), ("quad", "sync_bn"), ("rect", "image_weights")):
            if getattr(self, one) and getattr(self, other):
                raise ValueError(f"{one} and {other} exclude each other; drop one of them")
        for size in (self.batch_size, self.microbatch):
            if self.quad and size and size != AUTO_BATCH and size % QUAD:
                raise ValueError(f"quad merges groups of {QUAD} images: batch_size and microbatch must be multiples of "
                                 f"{QUAD}, not {size}")
        if self.changes and self.changes[-1].epoch >= self.epochs:
            raise ValueError(f"changes after epoch {self.changes[-1].epoch} of {self.epochs} epochs would never hold; "
                             "drop them, or raise epochs")
        return self

    def at(self, epoch: int) -> Recipe:
        """The settings that hold in an epoch (from 0), as a recipe without changes."""
        tree = self.model_dump(exclude={"changes"})
        for change in self.changes:
            for path, value in change.settings.items() if change.epoch <= epoch else ():
                section, name = path.split(".")
                tree[section][name] = value
        return Recipe.model_validate(tree)

    def last_change(self, epoch: int) -> int:
        """The epoch from which the settings of an epoch have held: that of its last change, or 0."""
        return max((change.epoch for change in self.changes if change.epoch <= epoch), default=0)


def divisors(number: int) -> list[int]:
    """Divisors of a positive number, ascending."""
    return [d for d in range(1, number + 1) if number % d == 0]


def given_settings(settings: ConfigModel, above: str = "") -> dict[str, Any]:
    """What the user has set of a recipe, also to its default, by path."""
    given: dict[str, Any] = {}
    for name in sorted(settings.model_fields_set):
        value = getattr(settings, name)
        given |= (
            given_settings(value, f"{above}{name}.") if isinstance(value, ConfigModel) else {f"{above}{name}": value}
        )
    return given


def recipe_digest(recipe: Recipe) -> str:
    """Identity of a recipe: 16 hex digits of the SHA-256 of what differs from the defaults, as canonical JSON.

    A field that is added later, at its default, leaves it as it is.
    """
    text = json.dumps(recipe.model_dump(mode="json", exclude_defaults=True), sort_keys=True, separators=(",", ":"))
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def resolve(recipe: Recipe, num_workers: int, *, gpu: bool, bf16: bool = False, num_images: int | None = None,
            images_per_worker: int = BATCH_PER_WORKER) -> Recipe:
    """The recipe with everything the user left open decided for a first start.

    batch_size becomes 16 x num_workers (under AutoBatch images_per_worker or microbatch x num_workers); microbatch the
    largest divisor of batch_size that leaves each worker at least one, also where a batch is the whole data set
    (batch_size itself under sync_bn); precision bf16 on GPU or with `bf16`, else fp32; threads 1 under exact.

    Args:
        bf16: whether the workers' processors multiply it.
        num_images: of the training set; None where it is not known yet.
        images_per_worker: what AutoBatch has found under `batch_size: -1`.

    Raises:
        ConfigError: if a full step has fewer microbatches than there are workers.
    """
    batch = recipe.batch_size or BATCH_PER_WORKER * num_workers
    if batch == AUTO_BATCH:  # only a microbatch is in memory at once
        batch = (recipe.microbatch or images_per_worker) * num_workers
    micro = batch if recipe.sync_bn else recipe.microbatch
    if micro is None:
        room = min(batch, num_images or batch) // num_workers
        least = QUAD if recipe.quad else 1
        micro = max((d for d in divisors(batch) if d <= room and d % least == 0), default=least)
    precision = recipe.precision if recipe.precision != "auto" else ("bf16" if gpu or bf16 else "fp32")
    resolved = recipe.model_copy(update={
        "batch_size": batch, "microbatch": micro, "precision": precision,
        "threads": recipe.threads or int(recipe.exact),
    })
    check_workers(resolved, num_workers)
    return resolved


def check_workers(recipe: Recipe, num_workers: int) -> None:
    """Refuse a worker count that a full step of a resolved recipe cannot occupy.

    Raises:
        ConfigError: naming the legal numbers and the ways out.
    """
    batch, micro = resolved_batch(recipe)
    if batch % micro:
        raise ConfigError(f"microbatch: {micro} does not divide batch size {batch}; "
                          f"legal: {', '.join(map(str, divisors(batch)))}")
    units = most_workers(recipe)
    if num_workers > units:
        raise ConfigError(
            f"num_workers: {num_workers} workers, but a step of batch size {batch} and microbatch {micro} has only "
            f"{units} parts; use 1 to {units} workers, a smaller --microbatch, a larger --batch-size, or --sync-bn")


def most_workers(recipe: Recipe) -> int:
    """Into how many parts a full step of a resolved recipe falls."""
    batch, micro = resolved_batch(recipe)
    return batch if recipe.sync_bn else accumulate_batches(recipe) * batch // micro


def resolved_batch(recipe: Recipe) -> tuple[int, int]:
    """(batch_size, microbatch) of a resolved recipe."""
    assert recipe.batch_size, "the recipe is not resolved"
    assert recipe.microbatch, "the recipe is not resolved"
    return recipe.batch_size, recipe.microbatch


def accumulate_batches(recipe: Recipe) -> int:
    """Batches per optimiser step after warm-up: max(round(nominal_batch / batch_size), 1)."""
    return max(round(recipe.optimizer.nominal_batch / resolved_batch(recipe)[0]), 1)


def warmup_batches(recipe: Recipe, batches_per_epoch: int) -> int:
    """Batches of warm-up: max(round(warmup_epochs x batches per epoch), warmup_min_batches); 0 if there is none."""
    schedule = recipe.schedule
    if schedule.warmup_epochs == 0:
        return 0
    return max(round(schedule.warmup_epochs * batches_per_epoch), schedule.warmup_min_batches)


def batches_per_epoch(recipe: Recipe, num_images: int) -> int:
    """Batches of one epoch; the last may be short."""
    return math.ceil(num_images / resolved_batch(recipe)[0])
