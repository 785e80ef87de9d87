"""The recipe: all settings that determine the trained weights, validated once, then frozen.

Search spaces may name only its fields. Some defaults are those of the model's family. The others are YOLOv5's
(scratch-low) where YOLOv5 has the setting. This module imports neither torch nor ray.
"""

from __future__ import annotations

import hashlib
import json
import math
import re
from collections.abc import Mapping
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
from ray_yolo.config.settings import canonical
from ray_yolo.config.synonyms import did_you_mean
from ray_yolo.core.errors import ConfigError
from ray_yolo.core.formatting import format_count

_FIXED = ("optimizer.name", "optimizer.nominal_batch")
_PATHS = [f"{section}.{name}" for section, model in SECTIONS.items() for name in model.model_fields]
CHANGEABLE = tuple(path for path in _PATHS if path not in _FIXED)
"""Config paths of the settings that may change during training."""

_EPOCH = re.compile(r"\s*[0-9]{1,9}\s*")


class Change(ConfigModel):
    """New values for some settings from an epoch on; serialises to the text that users write."""

    epoch: int = Field(ge=1)
    """Completed epochs before the change."""
    settings: dict[str, Any]
    """New values by path."""

    @model_validator(mode="before")
    @classmethod
    def _parse_text(cls, value: object) -> object:
        """The user writes '30: lr0=0.005 mosaic=0'; a mapping is taken as it is."""
        if not isinstance(value, str):
            return value
        epoch, colon, words = value.partition(":")
        if not (colon and _EPOCH.fullmatch(epoch) and all("=" in word for word in words.split())):
            raise ValueError("write 'EPOCHS: NAME=VALUE ...', e.g. '30: lr0=0.005 mosaic=0'")
        settings = [word.partition("=")[::2] for word in words.split()]
        paths = [canonical(name) for name, _ in settings]
        for path in paths:
            if paths.count(path) > 1:
                raise ValueError(f"{path} is given twice; give it once")
        return {"epoch": int(epoch), "settings": dict(settings)}

    @field_validator("settings")
    @classmethod
    def _check_settings(cls, settings: dict[str, Any]) -> dict[str, Any]:
        return dict(sorted(_checked(name, value) for name, value in settings.items()))

    @model_serializer
    def _as_text(self) -> str:
        """The text that `_parse_text` reads."""
        return f"{self.epoch}:" + "".join(f" {path}={str(value).lower()}" for path, value in self.settings.items())


def _checked(name: str, value: object) -> tuple[str, Any]:
    """Config path and validated value of a setting."""
    path = canonical(name)
    if path not in CHANGEABLE:
        last_words = {path.rpartition(".")[2]: path for path in CHANGEABLE}
        raise ValueError(f"{name} cannot change during training{did_you_mean(name, last_words)}")
    section, _, field = path.partition(".")
    try:
        checked = SECTIONS[section].model_validate({field: value})
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        raise ValueError(f"{name}={value}: {first['msg']}") from None
    return path, getattr(checked, field)


MAX_LAYERS = 1000
AUTO_BATCH = -1
BATCH_PER_WORKER = 16
MICROBATCH, LEAST_MICROBATCH = 16, 4  # images that BatchNorm averages over by default, and at least
QUAD = 4  # images that --quad merges into one


def _freeze_list(value: object) -> object:
    """As in YOLOv5: `--freeze 10` means the first ten layers, `--freeze 0 1 2` these layers."""
    if not isinstance(value, int):
        return value
    if value < 0:
        raise ValueError("the number of the first layers is 0 or more")
    return tuple(range(min(value, MAX_LAYERS)))


def family_defaults(model: str) -> dict[str, float]:
    """Defaults of a model's family that differ from those of the fields, by config path."""
    facts = facts_of(model)
    if facts is None:
        return {}
    defaults = {f"loss.{gain}": value for gain, value in facts.gains.items()}
    return defaults | ({"augment.close_mosaic": facts.close_mosaic} if facts.close_mosaic else {})


class Recipe(ConfigModel):
    """All settings that determine the trained weights."""

    data: str = "shapes"
    """Dataset: a YAML file, the address of one (s3://bucket/coco/data.yaml, gs://, az://), or a built-in one (shapes,
    shapes8, shapes1k)."""
    model: str = "yolov5s"
    """Architecture: yolov5{n,s,m,l,x} with the optional suffix 6, u or 6u, yolov3, yolov3-spp, yolov3-tiny,
    {yolov8,yolo11,yolo12,yolo26}{n,s,m,l,x}, or a YAML file in the format of YOLOv5 or Ultralytics. A command without
    it takes the model that the file of `weights` is named after, as yolov5m.pt."""
    weights: str = ""
    """Initial weights: best.pt of a run, a file released by YOLOv5 or Ultralytics, .safetensors; '': from scratch."""
    epochs: int = Field(100, ge=1)
    """Passes over the training images."""
    batch_size: int | None = Field(None, ge=-1, le=2**17)
    """Images per batch over all workers; default: 16 per requested worker; -1: per worker as many as fit into the
    memory of the smallest GPU (16 without GPUs)."""
    microbatch: int | None = Field(None, ge=1, le=2**17)
    """Images per forward pass, with one set of BatchNorm statistics and one loss mean; never split over workers.
    Default: the largest divisor of batch_size up to 16. It is smaller, but at least 4, if a step would otherwise have
    fewer microbatches than there are workers at the first start."""
    imgsz: int = Field(640, ge=2 * GRID, le=8192)
    """Long side of the network input in pixels; a multiple of 32, or of 64 for P6 models."""
    seed: int = Field(0, ge=0, lt=2**32)
    """Determines initial weights, order of samples and every augmentation."""
    precision: Literal["auto", "fp32", "bf16", "fp16"] = "auto"
    """Arithmetic of forward and backward; auto: bf16 on GPUs and on CPUs where it is faster, else fp32."""
    no_tf32: bool = False
    """On GPUs, convolutions of fp32 keep all bits of their inputs. By default they round them to TF32, as torch does,
    which is faster; bf16 and fp16 are not affected."""
    sync_bn: bool = False
    """Spread each batch over all workers with shared BatchNorm statistics and loss means."""
    norm_kernels: bool = False
    """On GPUs, compute BatchNorm by other kernels, with other rounding: BatchNorm and SiLU by kernels of Triton, with
    16 bytes of memory traffic for 26; under sync_bn BatchNorm by torch's kernels for it, with half the exchanges and a
    third of the traffic. Off, because they have not yet run on a GPU."""
    exact: bool = False
    """Bit-reproducible training: fixed arithmetic threads (see `threads`) and deterministic kernels only."""
    threads: int = Field(0, ge=0, le=1024)
    """Arithmetic threads per worker; 0: 1 with exact, else the worker's CPUs."""
    patience: int = Field(100, ge=0)
    """Stop after this many epochs without better fitness; 0: never."""
    freeze: Annotated[tuple[Annotated[int, Field(ge=0)], ...], BeforeValidator(_freeze_list),
                      AfterValidator(lambda layers: tuple(sorted(set(layers))))] = ()
    """Frozen layers: one number n freezes the first n layers, several numbers these layers."""
    single_cls: bool = False
    """Treat every label as class 0."""
    classes: sections.Classes = None
    """Numbers of the classes to detect; labels of other classes become background; default: all."""
    fraction: float = Field(1.0, gt=0.0, le=1.0)
    """Fraction of the training images to train on, drawn by the seed."""
    multi_scale: bool = False
    """Draw each step's image size from [0.5, 1.5) x imgsz."""
    rect: bool = False
    """Rectangular batches by aspect ratio; no shuffling, no mosaic."""
    quad: bool = False
    """Merge groups of four images into one of twice the size."""
    image_weights: bool = False
    """Sample images with weights that grow with the error of their classes."""
    autoanchor: bool = True
    """Replace the anchors if they fit the labels badly."""
    noval: bool = False
    """Validate after the last epoch only."""
    strict: bool = False
    """Refuse a dataset if any image or label has to be left out."""
    allow_empty: bool = False
    """Train even if a split has no boxes."""
    labels_with_confidence: bool = False
    """YOLO rows may end with a confidence (pseudo-labels), which is not used; else such rows are left out."""
    keep_difficult: bool = False
    """Use VOC objects that are marked difficult; else they are left out, as YOLOv5's converter does."""
    keep_repeats: bool = False
    """Train on an image as often as the sources of the training split have it (oversampling); else once."""
    allow_names: bool = False
    """Start from weights with other class names, equal in number: names that match go together, the others by order."""
    match_classes: bool = False
    """Start from weights with other classes: class layers keep the rows of classes with equal names, and others start
    with new values. --from sets it."""
    changes: Annotated[
        tuple[Change, ...], BeforeValidator(lambda value: (value,) if isinstance(value, str) else value),
        AfterValidator(lambda changes: tuple(sorted(changes, key=attrgetter("epoch"))))] = ()
    """Settings of optimizer, schedule, loss and augment that change during training, each 'EPOCHS: NAME=VALUE ...': the
    values hold after that many epochs. The best weights and patience restart there."""
    optimizer: sections.OptimizerConfig = sections.OptimizerConfig()
    schedule: sections.ScheduleConfig = sections.ScheduleConfig()
    loss: sections.LossConfig = sections.LossConfig()
    augment: sections.AugmentConfig = sections.AugmentConfig()
    evaluate: sections.EvaluateConfig = sections.EvaluateConfig()
    objective: sections.ObjectiveConfig = sections.ObjectiveConfig()

    @model_validator(mode="before")
    @classmethod
    def _defaults_of_the_family(cls, tree: object) -> object:
        """Use the loss gains and `close_mosaic` of the model's family as defaults."""
        if not isinstance(tree, dict):
            return tree
        filled = dict(tree)
        for path, value in family_defaults(str(tree.get("model", ""))).items():
            section, field = path.split(".")
            given = filled.get(section, {})
            if isinstance(given, dict):
                filled[section] = {field: value, **given}
        return filled

    @field_validator("batch_size")
    @classmethod
    def _some_images(cls, value: int | None) -> int | None:
        if value == 0:
            raise ValueError("must be 1 or more, or -1 for as many as fit into the workers' memory")
        return value

    @field_validator("imgsz")
    @classmethod
    def _on_the_grid(cls, value: int) -> int:
        reason = off_grid(value, GRID)
        if reason:
            raise ValueError(reason)
        return value

    @model_validator(mode="after")
    def _fits_together(self) -> Recipe:
        facts = facts_of(self.model)
        reason = off_grid(self.imgsz, facts.grid) if facts else None
        if facts and reason:
            raise ValueError(f"imgsz {self.imgsz} {reason} (largest stride of {self.model}: {facts.grid})")
        if self.exact and self.sync_bn:
            raise ValueError("exact and sync_bn exclude each other: the rounding of synchronised statistics depends on "
                             "the worker count; drop one of them")
        if self.exact and self.precision == "fp16":
            raise ValueError("exact needs fp32 or bf16: the loss scale of fp16 depends on earlier steps")
        batch = 0 if self.batch_size in (None, AUTO_BATCH) else self.batch_size  # 0: known at the start only
        if batch and self.microbatch and batch % self.microbatch:
            raise ValueError(f"microbatch {self.microbatch} does not divide batch_size {batch}; "
                             f"legal: {', '.join(map(str, divisors(batch)))}")
        for one, other in (("quad", "rect"), ("quad", "sync_bn"), ("rect", "image_weights"),
                           ("allow_names", "match_classes")):
            if getattr(self, one) and getattr(self, other):
                raise ValueError(f"{one} and {other} exclude each other; drop one of them")
        for size in (batch, self.microbatch):
            if self.quad and size and size % QUAD:
                raise ValueError(f"quad merges groups of {QUAD} images: batch_size and microbatch must be multiples of "
                                 f"{QUAD}, not {size}")
        if self.changes and self.changes[-1].epoch >= self.epochs:
            raise ValueError(f"changes after epoch {self.changes[-1].epoch} of {self.epochs} epochs have no effect; "
                             "drop them, or raise epochs")
        held: dict[tuple[int, str], Any] = {}
        for change in self.changes:
            for path, value in change.settings.items():
                if held.setdefault((change.epoch, path), value) != value:
                    raise ValueError(f"changes after epoch {change.epoch} give {path} two values; give it once")
        return self

    def at(self, epoch: int) -> Recipe:
        """The settings of an epoch (from 0) as a recipe without changes."""
        tree = self.model_dump(exclude={"changes"})
        for change in self.changes:
            if change.epoch > epoch:
                continue
            for path, value in change.settings.items():
                section, name = path.split(".")
                tree[section][name] = value
        return Recipe.model_validate(tree)

    def last_change(self, epoch: int) -> int:
        """Epoch of the last change at or before an epoch, or 0."""
        return max((change.epoch for change in self.changes if change.epoch <= epoch), default=0)


_FOR_TRAINING_ONLY = {"optimizer", "schedule", "augment", "objective", "changes"}


def recipe_of_later_version(tree: Mapping[str, Any]) -> Recipe:
    """What inference needs of a recipe that a later version has written.

    Settings that this version does not know are left out, and so are the sections that only training reads.

    Raises:
        ValueError: if one of the rest has a value that this version does not know.
    """
    known: dict[str, Any] = {}
    for name, value in tree.items():
        if name not in Recipe.model_fields or name in _FOR_TRAINING_ONLY:
            continue
        section = Recipe.model_fields[name].annotation
        if isinstance(value, dict) and isinstance(section, type) and issubclass(section, sections.ConfigModel):
            value = {key: setting for key, setting in value.items() if key in section.model_fields}
        known[name] = value
    return Recipe.model_validate(known)


def divisors(number: int) -> list[int]:
    """Divisors of a positive number, ascending."""
    return [d for d in range(1, number + 1) if number % d == 0]


def recipe_digest(recipe: Recipe) -> str:
    """Identity of a recipe: 16 hex digits of the SHA-256 of its non-default values as canonical JSON.

    A new field with its default value does not change it.
    """
    text = json.dumps(recipe.model_dump(mode="json", exclude_defaults=True), sort_keys=True, separators=(",", ":"))
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def resolve(recipe: Recipe, num_workers: int, *, gpu: bool, bf16: bool = False,
            images_per_worker: int = BATCH_PER_WORKER) -> Recipe:
    """The recipe with all open settings resolved for a first start.

    | setting | value |
    |---|---|
    | batch_size | 16 x num_workers; under AutoBatch images_per_worker or microbatch, x num_workers |
    | microbatch | `default_microbatch`; under AutoBatch images_per_worker; under sync_bn batch_size |
    | precision | bf16 on GPUs or with `bf16`, else fp32 |
    | threads | 1 with exact |

    Args:
        bf16: whether the workers' CPUs are faster in bf16.
        images_per_worker: result of AutoBatch under `batch_size: -1`.

    Raises:
        ConfigError: if a full step has fewer microbatches than there are workers.
    """
    batch, micro = recipe.batch_size, recipe.microbatch
    if batch is None:
        batch = BATCH_PER_WORKER * num_workers
    elif batch == AUTO_BATCH:  # only a microbatch is in memory at once
        micro = micro or images_per_worker
        batch = micro * num_workers
    if recipe.sync_bn:
        micro = batch
    elif micro is None:
        micro = default_microbatch(batch, num_workers, recipe.optimizer.nominal_batch, QUAD if recipe.quad else 1)
    precision = recipe.precision
    if precision == "auto":
        precision = "bf16" if gpu or bf16 else "fp32"
    resolved = recipe.model_copy(update={"batch_size": batch, "microbatch": micro, "precision": precision,
                                         "threads": recipe.threads or int(recipe.exact)})
    check_workers(resolved, num_workers)
    return resolved


def default_microbatch(batch_size: int, num_workers: int = 1, nominal_batch: int = 64, multiple_of: int = 1) -> int:
    """The microbatch of a batch size, the same for every number of workers that it suffices for.

    The candidates are the divisors of the batch size from 4 on. The first one with which each worker has a microbatch
    in a full step is taken: those up to 16 from the largest on, then those above 16 from the smallest on (a batch of 17
    images has no others). If there is none, the smallest candidate is taken, and `check_workers` refuses the workers.

    Args:
        nominal_batch: images of a full step, as in `accumulate_batches`.
        multiple_of: the microbatch is a multiple of it.
    """
    least = min(LEAST_MICROBATCH, batch_size)
    candidates = [number for number in divisors(batch_size) if number >= least and number % multiple_of == 0]
    if not candidates:  # the recipe refuses such a batch
        return batch_size
    usual = [number for number in candidates if number <= MICROBATCH]
    large = [number for number in candidates if number > MICROBATCH]
    step_images = accumulated(batch_size, nominal_batch) * batch_size
    for number in [*reversed(usual), *large]:
        if step_images // number >= num_workers:
            return number
    return candidates[0]


def check_workers(recipe: Recipe, num_workers: int) -> None:
    """Refuse more workers than a full step of a resolved recipe has parts.

    Raises:
        ConfigError: naming the legal numbers and the alternatives.
    """
    batch, micro = resolved_batch(recipe)
    if batch % micro:
        raise ConfigError(f"microbatch: {micro} does not divide batch size {batch}; "
                          f"legal: {', '.join(map(str, divisors(batch)))}")
    units = most_workers(recipe)
    if num_workers > units:
        raise ConfigError(
            f"num_workers: {num_workers} workers, but a step of batch size {batch} and microbatch {micro} has only "
            f"{format_count(units, 'part')}; use {'1 worker' if units == 1 else f'1 to {units} workers'}, a smaller "
            "--microbatch, a larger --batch-size, or --sync-bn")


def most_workers(recipe: Recipe) -> int:
    """Parts of a full step of a resolved recipe, each of which one worker computes."""
    batch, micro = resolved_batch(recipe)
    return batch if recipe.sync_bn else accumulate_batches(recipe) * batch // micro


def resolved_batch(recipe: Recipe) -> tuple[int, int]:
    """(batch_size, microbatch) of a resolved recipe."""
    assert recipe.batch_size, "the recipe is not resolved"
    assert recipe.microbatch, "the recipe is not resolved"
    return recipe.batch_size, recipe.microbatch


def accumulate_batches(recipe: Recipe) -> int:
    """Batches per optimiser step after warm-up: max(round(nominal_batch / batch_size), 1)."""
    return accumulated(resolved_batch(recipe)[0], recipe.optimizer.nominal_batch)


def accumulated(batch_size: int, nominal_batch: int) -> int:
    """Batches of a full step: max(round(nominal_batch / batch_size), 1)."""
    return max(round(nominal_batch / batch_size), 1)


def warmup_batches(recipe: Recipe, batches_per_epoch: int) -> int:
    """Batches of warm-up: max(round(warmup_epochs x batches per epoch), warmup_min_batches); 0 if there is none."""
    schedule = recipe.schedule
    if schedule.warmup_epochs == 0:
        return 0
    return max(round(schedule.warmup_epochs * batches_per_epoch), schedule.warmup_min_batches)


def batches_per_epoch(recipe: Recipe, num_images: int) -> int:
    """Batches of one epoch; the last may be short."""
    return math.ceil(num_images / resolved_batch(recipe)[0])
