"""Settings of a command that change nothing: which they are, and why.

A family reads some settings of the loss only (`ModelFacts.reads`). The data set, the devices, the workers and other
settings leave further ones without effect. This module is the one place that knows these rules. It imports neither
torch nor ray.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator, Mapping, Sequence
from importlib.util import find_spec
from operator import attrgetter
from typing import Any, NamedTuple

from pydantic import BaseModel

from ray_yolo.config.commands import ExportConfig, LabelFiles, NmsConfig, PredictConfig, ValConfig
from ray_yolo.config.model_facts import facts_of
from ray_yolo.config.placement import Placement, repeats_passes
from ray_yolo.config.recipe import Recipe, family_defaults
from ray_yolo.config.sections import LossConfig
from ray_yolo.config.settings import SourcedValue, config_fields
from ray_yolo.core.errors import ConfigError

LOSS = frozenset(f"loss.{name}" for name in LossConfig.model_fields)
"""The settings of the loss, by config path."""
PERMISSIONS = ("strict", "allow_empty", "allow_names")
"""Settings that decide only whether a training is refused."""
DECIDING = ("model", "weights", "rect", "sync_bn", "precision", "augment.mosaic", "augment.close_mosaic", "loss.obj",
            "loss.cls", "schedule.lrf", "schedule.warmup_epochs", "schedule.ema_decay")
"""Settings that a search may change, and that decide whether others have an effect."""

_MOSAICS = ("augment.mosaic", "augment.mixup", "augment.copy_paste", "augment.partners")
_OF_CLASSES = ("loss.cls_pw", "loss.label_smoothing")
_WARM_UP = ("schedule.warmup_min_batches", "schedule.warmup_momentum", "schedule.warmup_bias_lr")
_ON_RAY = ("placement_strategy", "accelerator_type", "address", "priority", "max_failures", "wait_for_resources",
           "timeout_seconds", "stall_seconds")
_OF_A_TRAINING = ("resume", "registered_name", "trackers", "callbacks", "stop_after", "max_hours", "cache",
                  "save_period", "save_steps", "save_seconds", "keep_checkpoints", "cuda_graphs", "colour_kernel")
_CHECKPOINTS = ("save_period", "save_steps", "save_seconds", "keep_checkpoints")


class Surroundings(NamedTuple):
    """What decides about settings besides the recipe itself; None: not known yet."""

    num_classes: int | None = None  # the number of classes of the data set
    has_outlines: bool | None = None  # whether any training label has one
    unchanged_by: Sequence[str] = ()  # settings about labels without which the same labels are read
    gpus: float | None = None  # the GPUs of each worker


UNKNOWN = Surroundings()

Reasons = Iterator[tuple[Iterable[str], str]]  # (config paths, why they have no effect)


def without_effect(recipe: Recipe, around: Surroundings = UNKNOWN) -> dict[str, str]:
    """The settings of a recipe that change nothing in its training, by config path -> why, in one sentence.

    With `changes`, a setting is among them only if it changes nothing at any time.
    """
    found = _without_effect_from(0, recipe.at(0) if recipe.changes else recipe, around)
    for change in recipe.changes:
        later = _without_effect_from(change.epoch, recipe.at(change.epoch), around)
        found = {path: reason for path, reason in found.items() if path in later}
    return found


def _without_effect_from(epoch: int, recipe: Recipe, around: Surroundings) -> dict[str, str]:
    """The same from an epoch on, for a recipe without changes."""
    return _first_reasons(_by_family(recipe, around), _by_samples(recipe, epoch, around), _by_schedule(recipe),
                          _by_devices(recipe, around))


def _first_reasons(*rules: Reasons) -> dict[str, str]:
    """Every path of some rules, with the first reason for it."""
    found: dict[str, str] = {}
    for paths, reason in itertools.chain(*rules):
        for path in paths:
            found.setdefault(path, reason)
    return found


def _by_family(recipe: Recipe, around: Surroundings) -> Reasons:
    facts, loss = facts_of(recipe.model), recipe.loss
    if facts and facts.reads is not None:
        yield unread_by_loss(recipe.model), f"the loss of {recipe.model} does not read it"
        yield {"autoanchor"} - facts.reads, f"{recipe.model} has no anchors"
        yield {"evaluate.iou"} - facts.reads, f"detections of {recipe.model} need no suppression"
    unread_here = facts.unread_with_one_class if facts and (recipe.single_cls or around.num_classes == 1) else ()
    yield unread_here, f"the loss of {recipe.model} has no term of classes where there is only one"
    if loss.obj == 0:
        yield ("loss.obj_pw",), "loss.obj is 0"
    if loss.cls == 0:
        yield _OF_CLASSES, "loss.cls is 0"
    if loss.obj == 0 and (loss.cls == 0 or "loss.cls" in unread_here):
        yield ("loss.fl_gamma",), "loss.obj is 0, and there is no term of classes"


def _by_samples(recipe: Recipe, epoch: int, around: Surroundings) -> Reasons:
    augment = recipe.augment
    if recipe.rect:
        yield (*_MOSAICS, "augment.close_mosaic"), "rectangular batches have no mosaics"
    if augment.mosaic == 0:
        yield (*_MOSAICS[1:], "augment.close_mosaic"), "no sample is a mosaic, because augment.mosaic is 0"
    if epoch >= recipe.epochs - augment.close_mosaic:
        yield _MOSAICS, f"augment.close_mosaic {augment.close_mosaic} leaves no epoch with mosaics"
    if around.has_outlines is False:
        yield ("augment.copy_paste",), "no training label has an outline"
    if augment.render == "device" and needs_host(recipe):
        yield ("augment.render",), f"the loaders render, because {needs_host(recipe)}"
    if around.num_classes == 1:
        yield ("single_cls",), "the data set has one class"
    yield around.unchanged_by, "the training has the same images and labels without it"
    if not recipe.weights:
        yield ("allow_names", "match_classes"), "there are no initial weights"
    elif recipe.single_cls:
        yield ("allow_names", "match_classes"), "classes are not compared under single_cls"


def needs_host(recipe: Recipe) -> str:
    """Why no device can render the samples of a recipe without changes; '' if one can."""
    augment = recipe.augment
    uses = {"quad": recipe.quad, "augment.mixup": augment.mixup, "augment.copy_paste": augment.copy_paste,
            "augment.perspective": augment.perspective}
    return next((f"{name} needs pixels there" for name, value in uses.items() if value), "")


def renders_all(recipe: Recipe) -> bool:
    """Whether a GPU renders the samples of all epochs."""
    epochs = (0, *(change.epoch for change in recipe.changes))
    return all(each.augment.render == "device" and not needs_host(each) for each in map(recipe.at, epochs))


def _by_schedule(recipe: Recipe) -> Reasons:
    schedule = recipe.schedule
    if recipe.epochs == 1:
        yield ("noval",), "the last epoch is validated in any case, and there is one"
    if recipe.noval:
        yield ("patience",), "under noval, there is no validation before the last epoch"
    if recipe.patience >= recipe.epochs - 1:
        yield ("patience",), f"it ends no training of epochs {recipe.epochs}"
    if recipe.epochs == 1:
        yield ("schedule.lrf", "schedule.cos_lr"), "the learning rate changes from epoch to epoch, and there is one"
    if schedule.lrf == 1:
        yield ("schedule.cos_lr",), "the learning rate stays, because schedule.lrf is 1"
    if schedule.warmup_epochs == 0:
        yield _WARM_UP, "there is no warm-up, because schedule.warmup_epochs is 0"
    if schedule.ema_decay == 0:
        yield ("schedule.ema_ramp",), "schedule.ema_decay is 0"
    if recipe.sync_bn:
        yield ("microbatch",), "under sync_bn, a microbatch is the whole batch"


def _by_devices(recipe: Recipe, around: Surroundings) -> Reasons:
    if around.gpus == 0:
        yield ("no_tf32", "norm_kernels", "augment.render"), "there is no GPU"
    if recipe.precision in ("bf16", "fp16"):
        yield ("no_tf32",), f"the precision is {recipe.precision}"


def placement_without_effect(placement: Placement, recipe: Recipe, gpus: float | None) -> dict[str, str]:
    """As `without_effect`, for the settings of a placement whose number of workers is decided, if it can be."""
    return _first_reasons(_by_placement(placement, recipe, gpus))


def _by_placement(placement: Placement, recipe: Recipe, gpus: float | None) -> Reasons:
    if placement.num_workers == 0:
        yield _ON_RAY, "the training is in this process, without Ray"
    elif placement.num_workers != "auto" and not placement.is_elastic:
        yield ("priority",), "only a range of workers gives some of them up"
    if gpus == 0:
        yield ("cuda_graphs", "colour_kernel"), "there is no GPU"
    elif recipe.sync_bn:
        yield ("cuda_graphs",), "under sync_bn, a pass exchanges numbers, which no CUDA graph repeats"
    elif placement.cuda_graphs == "off" and not repeats_passes("auto", placement.min_workers):
        yield ("cuda_graphs",), "several workers use CUDA graphs only if it is on"
    if find_spec("triton") is None:
        yield ("colour_kernel",), "Triton is not installed, so torch's kernels change colours"
    if recipe.quad:
        yield ("colour_kernel",), "under quad, the loaders change colours"
    augment = recipe.augment
    if not (augment.hsv_h or augment.hsv_s or augment.hsv_v or recipe.changes):
        yield ("colour_kernel",), "colours stay, because hsv_h, hsv_s and hsv_v are 0"
    if augment.render == "device" and not (needs_host(recipe) or recipe.changes):
        yield ("colour_kernel",), "under augment.render device, the kernel that renders changes colours"
    if placement.nosave:
        yield _CHECKPOINTS, "under nosave, a checkpoint is written only at the end"
    if placement.stop_after >= recipe.epochs:
        yield ("stop_after",), f"the training has {recipe.epochs} epochs"
    if not placement.name:
        yield ("exist_ok",), "no name is given"
    if placement.resume:
        yield ("name", "exist_ok"), "resume names the run"


def command_without_effect(config: BaseModel) -> dict[str, str]:
    """As `without_effect`, for the settings of a validation, a prediction or an export."""
    return _first_reasons(_by_command(config))


def _by_command(config: BaseModel) -> Reasons:
    if isinstance(config, ExportConfig):
        if not config.nms:
            yield NmsConfig.model_fields, "without nms, the file suppresses nothing"
        if config.format == "torchscript":
            yield ("opset", "dynamic"), "TorchScript has no operator set, and takes images of any size"
    if isinstance(config, LabelFiles) and not config.save_txt:
        yield ("save_conf",), "without save_txt, no text files are written"
    if isinstance(config, PredictConfig):
        yield ("mlflow_uri",), "a prediction has no MLflow run"
        if config.placement.nosave:
            yield ("hide_labels", "hide_conf", "line_thickness"), "under nosave, no boxes are drawn"
    if isinstance(config, (ValConfig, PredictConfig)):
        if config.placement.num_workers == 0:
            yield _ON_RAY, "the command runs in this process, without Ray; --num-workers N uses workers"
        if not config.placement.name:
            yield ("exist_ok",), "no name is given"
        yield _OF_A_TRAINING, "it is a setting of trainings"


def given_settings(config: BaseModel) -> set[str]:
    """The config paths of the values that a user, a file or a named recipe has given.

    A value that is off by default and given as off (`label_smoothing: 0`) asks for nothing, and is not among them.
    """
    defaults = family_defaults(config.model) if isinstance(config, Recipe) else {}
    given = set()
    for path, field in config_fields(type(config)).items():
        *sections, name = field.keys
        owner = attrgetter(".".join(sections))(config) if sections else config
        value = getattr(owner, name)
        is_given = name in owner.model_fields_set
        is_default = value == defaults.get(path, field.info.default)
        if is_given and not (is_default and (path in defaults or not value)):  # those of the family are filled in
            given.add(path)
    if isinstance(config, Recipe):
        given.update(path for change in config.changes for path in change.settings)
    return given


def describe_unused(given: Iterable[str], unused: Mapping[str, str]) -> list[str]:
    """One line for each reason why given settings have no effect, with all of these settings."""
    paths_by_reason: dict[str, list[str]] = {}
    for path, reason in unused.items():
        if path in given:
            paths_by_reason.setdefault(reason, []).append(path)
    return [f"no effect: {', '.join(sorted(paths))} ({reason})" for reason, paths in paths_by_reason.items()]


def refuse_unread_loss(given: Mapping[str, SourcedValue], *recipes: Recipe) -> None:
    """Refuse a setting of the loss that was given by itself, and that the loss of no recipe's model reads.

    Args:
        given: settings of all these recipes, by config path.

    Raises:
        ConfigError: with its origin, and the settings that the loss reads.
    """
    unread = frozenset.intersection(*(unread_by_loss(recipe.model) for recipe in recipes))
    asked: set[str] = set().union(*map(given_settings, recipes))
    models = " and ".join(sorted({recipe.model for recipe in recipes}))
    for path, item in given.items():
        paths = {path}
        if path == "changes":
            paths = {name for recipe in recipes for change in recipe.changes for name in change.settings}
        for name in sorted(paths & asked & unread) if item.alone else ():
            raise ConfigError(f"{item.origin}: {name} has no effect: the loss of {models} does not read it, only "
                              f"{', '.join(sorted(LOSS - unread))}; leave it out")


def unread_by_loss(model: str) -> frozenset[str]:
    """The settings of the loss, by config path, that the loss of a model does not read."""
    facts = facts_of(model)
    return frozenset() if facts is None or facts.reads is None else LOSS - facts.reads


def effective_settings(recipe: Recipe, around: Surroundings) -> dict[str, Any]:
    """The settings on which a training's weights and results depend, by config path; the seed is not among them.

    Recipes with equal ones train equal weights from equal seeds.
    """
    unused = {*without_effect(recipe, around), *PERMISSIONS, "seed"}
    return {path: attrgetter(path)(recipe) for path in config_fields(Recipe) if path not in unused}
