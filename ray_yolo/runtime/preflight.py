"""The decisions of a start before any worker exists: data set, run folder, resolved recipe, anchors.

Bad input is refused here, before any work on the cluster. The decisions of a run's first start are recorded. Every
later start reads them, so it trains the same recipe even with another placement.
"""

from __future__ import annotations

import logging
import os
import platform
import shlex
import shutil
import subprocess
import sys
from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from dataclasses import replace
from functools import partial
from importlib.metadata import version
from pathlib import Path
from types import MappingProxyType
from typing import Any

import torch

from ray_yolo import __version__
from ray_yolo.checkpoints.foreign import Weights, class_names, read_weights
from ray_yolo.checkpoints.weights_file import absolute_weights, local_file
from ray_yolo.config.class_names import are_placeholders, common_classes, match_classes
from ray_yolo.config.effects import (
    Surroundings,
    describe_unused,
    given_settings,
    placement_without_effect,
    without_effect,
)
from ray_yolo.config.fine_tuning import fine_tuned
from ray_yolo.config.model_facts import MODELS, assumed_scale, file_of_scales, off_grid, plugin_of
from ray_yolo.config.placement import Placement, RunConfig, split_names
from ray_yolo.config.recipe import AUTO_BATCH, Recipe, check_workers, recipe_digest, resolve
from ray_yolo.config.settings import DEFAULT, config_fields
from ray_yolo.config.yaml import load_yaml
from ray_yolo.core.errors import CheckpointError, ConfigError, DatasetError
from ray_yolo.core.redact import redact
from ray_yolo.core.signals import uninterrupted
from ray_yolo.core.structures import AnnotationIndex
from ray_yolo.core.system import is_bf16_faster
from ray_yolo.data.index import (
    label_sizes,
    read_splits,
    refuse_count_from_one,
    require_boxes,
    require_chosen,
    select_part,
)
from ray_yolo.engine.autobatch import auto_batch, labels_of_a_crowd
from ray_yolo.engine.callbacks import Hooks
from ray_yolo.engine.devices import local_device
from ray_yolo.engine.spec import TrainSpec
from ray_yolo.engine.team import held_bytes
from ray_yolo.inference.predictor import check_classes
from ray_yolo.labels import DatasetDescription
from ray_yolo.models.detector import backbone_of, count_parameters
from ray_yolo.models.families import (
    GivenClasses,
    build_model,
    compare_weights,
    find_family,
    load_weights,
    read_model,
)
from ray_yolo.models.yaml_rows import read_architecture
from ray_yolo.runs.folders import storage_probe
from ray_yolo.runs.fork import check_lineage, lineage_of
from ray_yolo.runs.run_dir import Run
from ray_yolo.runs.run_record import RunRecord, TransferRecord
from ray_yolo.runtime.resources import workers_here, workers_on
from ray_yolo.sinks.callbacks import load_callbacks
from ray_yolo.sinks.mlflow_client import tracking_uri
from ray_yolo.sinks.trackers import load_tracker

LABEL_SETTINGS = ("labels_with_confidence", "keep_difficult", "keep_repeats", "classes", "fraction")
"""Settings that decide which images and labels are read."""

_log = logging.getLogger(__name__)


def check_early(config: RunConfig) -> Hooks:
    """Refuse invalid settings before anything starts: missing or shared GPUs, batch sizes, workers, model, callbacks,
    tracking. Returns the functions of the callbacks.
    """
    placement = config.placement
    _check_strategy(placement)
    if placement.shares_gpus and placement.max_workers > 1:  # NCCL would end with "Duplicate GPU detected".
        raise ConfigError(f"gpus_per_worker: {placement.gpus_per_worker:g} for {placement.max_workers} workers: the "
                          "workers of a training cannot share a GPU, because NCCL connects no two processes on one; "
                          "use --gpus-per-worker 1, or one worker")
    if placement.num_workers == 0:
        local_device(placement.gpus_per_worker)
    uri = tracking_uri(placement.mlflow_uri, ".")  # refuses an address that is no server's
    if placement.registered_name and uri is None:
        raise ConfigError("registered_name: a model is registered on an MLflow server, and mlflow_uri is off; leave "
                          "one of them out")
    for name in split_names(placement.trackers):
        load_tracker(name)
    hooks = load_callbacks(placement.callbacks)
    if not placement.resume:
        resolve(config.recipe, placement.max_workers, gpu=False)
        check_model(config.recipe)
    return hooks


def _check_strategy(placement: Placement) -> None:
    """Refuse a strict placement of a range: Ray binds the workers that it places together, and those above the minimum
    come and move one by one."""
    if isinstance(placement.num_workers, tuple) and placement.placement_strategy.startswith("STRICT_"):
        low, high = placement.num_workers
        raise ConfigError(f"placement_strategy: {placement.placement_strategy} for {low}-{high} workers: workers of a "
                          "range join, leave and move one by one, and Ray can bind only workers that it places "
                          f"together; use --num-workers {high}, or --placement-strategy PACK or SPREAD")


def read_dataset(recipe: Recipe) -> tuple[DatasetDescription, AnnotationIndex, AnnotationIndex]:
    """The checked data set of a recipe: its description, training and validation labels.

    Findings about the description are among those of the training labels. Validation images are read with the pixel
    range of the training images.

    Raises:
        DatasetError: if the data set cannot be read as described, or has nothing to train on.
    """
    description, train, val = read_splits(recipe)
    for index in (train, val):
        refuse_count_from_one(index, description)
    check_classes(recipe.classes, train.names)
    if not recipe.allow_empty:
        require_boxes(train, description, "train")
        require_boxes(val, description, "val")
    train, val = select_part(recipe, train, val)
    if not recipe.allow_empty:
        require_chosen(train, description, "train", recipe.classes, recipe.fraction)
        require_chosen(val, description, "val", recipe.classes)
    return description, replace(train, findings=(*description.findings, *train.findings)), val


def unused_lines(asked: RunConfig, decided: RunConfig, description: DatasetDescription, train: AnnotationIndex,
                 val: AnnotationIndex, gpus: float | None) -> list[str]:
    """What a start says about given settings without effect, one line for each reason.

    Args:
        asked: the configuration as given.
        decided: the same with what was decided since.
        train: with `val` and `description`, of `read_dataset`.
        gpus: of each worker; None: not known yet.
    """
    given = given_settings(asked.recipe) | given_settings(asked.placement)
    around = surroundings(decided.recipe, description, train, val, gpus)
    unused = without_effect(decided.recipe, around)
    return describe_unused(given, unused | placement_without_effect(decided.placement, decided.recipe, gpus))


def surroundings(recipe: Recipe, description: DatasetDescription, train: AnnotationIndex, val: AnnotationIndex,
                 gpus: float | None = None) -> Surroundings:
    """What decides, besides a recipe, which of its settings have an effect. Labels are read again without each setting
    about labels that is not at its default."""
    unchanged = []
    for name in LABEL_SETTINGS:
        default = Recipe.model_fields[name].default
        if getattr(recipe, name) == default:
            continue
        without = recipe.model_copy(update={name: default, "strict": False, "allow_empty": True})
        try:
            _, other_train, other_val = read_dataset(without)
        except DatasetError:
            continue
        if (other_train.digest, other_val.digest) == (train.digest, val.digest):
            unchanged.append(name)
    return Surroundings(len(description.names), bool(train.polygons), unchanged, gpus)


def check_model(recipe: Recipe) -> None:
    """Refuse unknown models, invalid model files, unreadable weights, and freezing of missing layers or of all layers.

    A ConfigError names the line of the file or the layers; a CheckpointError names the weights.
    """
    _check_missing_model_file(recipe.model)
    name, architecture = read_model(recipe.model)
    if recipe.weights:
        read_weights(local_file(recipe.weights))
    if architecture is not None:
        _check_model_file(name, architecture, recipe.imgsz)
    epochs = [0, *(change.epoch for change in recipe.changes)]
    if any(recipe.at(epoch).optimizer.backbone_lr != 1 for epoch in epochs):
        backbone_of(build_model(architecture or name, 1))  # for its error: the model must have a backbone
    if not recipe.freeze:
        return
    layers = build_model(architecture or name, 1).model
    range_text = f"{recipe.model} has layers 0 to {len(layers) - 1}"
    missing = [number for number in recipe.freeze if number >= len(layers)]
    if missing:
        raise ConfigError(f"freeze: there is no layer {missing[0]}; {range_text}")
    with_parameters = {number for number, layer in enumerate(layers) if any(True for _ in layer.parameters())}
    if with_parameters <= set(recipe.freeze):
        raise ConfigError(f"freeze: no layer would be trained; {range_text}")
    if not with_parameters & set(recipe.freeze):
        _log.warning("no effect: freeze (layer %s has no parameters)", ", ".join(map(str, recipe.freeze)))


def _check_missing_model_file(model: str) -> None:
    """Refuse or warn where a missing file means a built-in model, and the user may mean a file of theirs."""
    path = Path(model)
    if path.suffix not in (".yaml", ".yml") or path.exists() or path.stem not in MODELS:
        return
    found = file_of_scales(path)
    if found and found[0].exists():
        file, scale = found
        raise ConfigError(f"model: {model}: no such file, but {file} exists; to use it, add the line `scale: {scale}` "
                          f"to it and give its path, or copy it to {path.name}; the built-in model is {path.stem}")
    if path.parent != Path():
        _log.warning("model: %s: no such file; the built-in %s is used", model, path.stem)


def _check_model_file(path: str, architecture: Mapping[str, Any], imgsz: int) -> None:
    """Build the model once, so that an error names its place in the file. Warn of a scale that nothing chooses."""
    rows = read_architecture(architecture, load_yaml(path).where)
    try:
        grid = rows.build(1).grid
    except ConfigError as error:
        raise ConfigError(f"{path}: {str(error).removeprefix('model: ')}") from error
    if reason := off_grid(imgsz, grid):
        raise ConfigError(f"imgsz: {imgsz} {reason} (the head of {path} has cells of {grid} px)")
    if scale := assumed_scale(path):
        _log.warning("%s: has several scales and chooses none: the first, %s, is used. Write a line scale: %s, or put "
                     "the letter behind the number in the file's name, as in yolo11%s.yaml", path, scale, scale, scale)
    unread = ("depth_multiple", "width_multiple") if architecture.get("scales") else ()
    for key in unread:
        if architecture.get(key, 1) != 1:
            _log.warning("%s: %s: %s is not used, because the file has scales", path, key, architecture[key])


def compare_initial_weights(recipe: Recipe, names: Sequence[str]) -> TransferRecord | None:
    """What a training on these classes takes from the file of `weights`; None if it starts from scratch.

    Class names are compared only if the class layers come from the file, or under `match_classes` a part of them.

    Raises:
        CheckpointError: if no tensor of the file fits the model, or few fit the default model.
        DatasetError: if the file has other classes, equal in number, unless the recipe allows that.
    """
    if not recipe.weights:
        return None
    weights = read_weights(local_file(recipe.weights))
    transfer = _compare_with(recipe, names, weights)
    if transfer.is_sparse and "model" not in recipe.model_fields_set:
        own = (weights.meta or {}).get("recipe", {}).get("model", "")  # a checkpoint of ours says it
        raise CheckpointError(f"{recipe.weights}: has only {transfer.matched} of the {transfer.total} tensors of "
                              f"{recipe.model}, the default model; give its own model with --model {own}".rstrip())
    return transfer


def _compare_with(recipe: Recipe, names: Sequence[str], weights: Weights) -> TransferRecord:
    """The result of `compare_initial_weights`, whichever model the recipe names."""
    name, architecture = read_model(recipe.model)
    with torch.device("meta"):
        model = build_model(architecture or name, len(names))
    if recipe.match_classes and weights.names and not recipe.single_cls:
        common, note = common_classes(names, weights.names, data_file=recipe.data, weights_file=recipe.weights)
        is_partial = None in common or len(common) != len(weights.names)
        has_unnamed_side = are_placeholders(names) or are_placeholders(weights.names)
        if is_partial and not has_unnamed_side:
            transfer = compare_weights(model, weights.tensors, given=GivenClasses(common, len(weights.names)))
            if not transfer.has_classes:
                note = (f"classes of {recipe.data} start with new values: the class layers of {recipe.weights} do not "
                        "fit")
            return TransferRecord(matched=transfer.matched, total=transfer.total, left_out=transfer.left_out,
                                  classes=common, note=note, licence=weights.licence)
    transfer = compare_weights(model, weights.tensors)
    rows, note = None, ""
    if transfer.has_classes and not recipe.single_cls:
        match = match_classes(names, class_names(weights, len(names)), data_file=recipe.data,
                              weights_file=recipe.weights, allow_names=recipe.allow_names)
        rows, note = None if match.is_identity else match.rows, match.note
    return TransferRecord(matched=transfer.matched, total=transfer.total, left_out=transfer.left_out, classes=rows,
                          note=note, licence=weights.licence)


def resolve_recipe(asked: Recipe, placement: Placement, train: AnnotationIndex, gpus: float) -> Recipe:
    """The recipe with all open settings decided, for a first start on these workers.

    AutoBatch takes the smallest result of all workers.
    """
    if asked.weights:  # workers have other working directories
        asked = asked.model_copy(update={"weights": absolute_weights(asked.weights)})
    asked = fine_tuned(asked, len(train), len(train.names))
    bf16 = asked.precision == "auto" and not gpus and is_bf16_faster()
    if bf16 and placement.num_workers != 0:
        from ray_yolo.runtime import node_checks  # here, as below: Ray takes seconds

        bf16 = node_checks.bf16_is_faster_everywhere()
    decided = partial(resolve, asked, placement.max_workers, gpu=gpus > 0, bf16=bf16)
    recipe = decided()
    if asked.batch_size != AUTO_BATCH or asked.microbatch:
        return recipe
    held = held_bytes(recipe, train, torch.device("cuda"))
    question = recipe, len(train.names), labels_of_a_crowd(train), gpus, held
    if placement.num_workers == 0:
        return decided(images_per_worker=_room_here(*question))
    from ray_yolo.runtime.map_on_workers import map_on_workers

    workers = range(placement.max_workers)
    results = map_on_workers(_room_on_worker, question, workers, placement, gpus, timeout=placement.timeout_seconds)
    return decided(images_per_worker=min(room for _, room in results))


def with_workers(config: RunConfig, run: Run | None) -> tuple[RunConfig, str]:
    """The configuration with a fixed number of workers, and the reason if the number is automatic.

    A run keeps the number of its first start. If a cluster was requested, its resources decide. The number is at most
    that of the microbatches in a step.
    """
    placement = config.placement
    if placement.num_workers != "auto":
        return config, ""
    number: int | tuple[int, int]
    if run and run.training.num_workers is not None:
        number, why = run.training.num_workers, "as at the first start"
    else:
        if cluster_asked_for(placement):
            with uninterrupted():
                from ray_yolo.runtime import cluster  # here: Ray takes seconds

            gpus = cluster.connect(placement)
            number, why = workers_on(cluster.free_nodes(placement), gpus, placement.cpus)
        else:
            number, why = workers_here(torch.cuda.device_count(), placement.gpus_per_worker)
        recipe = run.training.recipe if run else config.recipe
        room = number
        while number > 1 and not _can_share(recipe, number):
            number -= 1
        if number < room:
            why += f"; a step of this recipe cannot be shared by more than {number}"
    fixed = placement.model_copy(update={"num_workers": number})
    return config.model_copy(update={"placement": fixed}), f"--num-workers auto: {number}, {why}"


def cluster_asked_for(placement: Placement) -> bool:
    """Whether a cluster was requested: by flag, by environment (as in a job), or by an existing connection."""
    ray = sys.modules.get("ray")
    return bool(placement.address or os.environ.get("RAY_ADDRESS") or (ray and ray.is_initialized()))


def _can_share(recipe: Recipe, num_workers: int) -> bool:
    try:
        resolve(recipe, num_workers, gpu=False)
    except ConfigError:
        return False
    return True


def slower_precision(run: Run, gpus: float) -> str:
    """A warning if this machine's processor is slower in the run's precision than in fp32; '': no warning."""
    if run.training.recipe.precision != "bf16" or gpus or is_bf16_faster():
        return ""
    return (f"{run.folder} trains in bf16, in which this processor is slower than in fp32; a new run "
            "(--name, --precision fp32) has fp32")


def planned_recipe(asked: Recipe, placement: Placement, train: AnnotationIndex, gpus: float | None) -> Recipe:
    """The result of `resolve_recipe` as far as it is known without workers; settings that depend on GPUs stay open.

    `gpus` of each worker are None if unknown. With `auto` workers the batch stays open, too.
    """
    asked = fine_tuned(asked, len(train), len(train.names))
    recipe = resolve(asked, placement.max_workers, gpu=bool(gpus), bf16=is_bf16_faster())
    left_open: list[str] = []
    is_measured = asked.batch_size == AUTO_BATCH and not asked.microbatch and gpus != 0  # AutoBatch will, on a worker
    if is_measured or placement.num_workers == "auto":
        left_open += ["batch_size", "microbatch"]
    # The workers of a cluster may have other processors than this one, which is faster in bf16.
    on_other_processors = not gpus and placement.num_workers != 0 and cluster_asked_for(placement)
    if gpus is None or (on_other_processors and is_bf16_faster()):
        left_open.append("precision")
    return recipe.model_copy(update={name: getattr(asked, name) for name in left_open})


def _room_here(recipe: Recipe, num_classes: int, labels_per_image: int, gpus: float, held: int) -> int:
    """The largest microbatch, in images, that fits on this process's GPU, or on its part of one."""
    name, architecture = read_model(recipe.model)
    device = torch.device("cuda" if gpus else "cpu")
    return auto_batch(recipe, architecture or name, num_classes, labels_per_image, device, gpus, held)


def _room_on_worker(question: tuple[Recipe, int, int, float, int], worker: int) -> int:
    """`_room_here` on a worker."""
    return _room_here(*question)


def check_cluster(placement: Placement, run: Run | None, *indices: AnnotationIndex) -> list[str]:
    """`node_checks.check_nodes` for the storage of a run, or of a new one."""
    from ray_yolo.runtime import node_checks

    at = run and run.location
    with nullcontext(at) if at else storage_probe(placement) as place:
        return node_checks.check_nodes(place, *indices)


def first_record(config: RunConfig, train: AnnotationIndex, gpus: float, command: Sequence[str],
                 transfer: TransferRecord | None = None, origins: Mapping[str, str] = MappingProxyType({})
                 ) -> RunRecord:
    """The record of a new run: the requested settings, and the decisions about open ones.

    Args:
        transfer: the result of `compare_initial_weights`.
        origins: of all settings by path, as of `resolve_config`.
    """
    asked = config.recipe
    given = {path: origins[path] for path in config_fields(Recipe) if origins.get(path, DEFAULT) != DEFAULT}
    name, architecture = read_model(asked.model)
    resolved = resolve_recipe(asked, config.placement, train, gpus).model_copy(update={"model": name})
    model, family = build_model(architecture or name, len(train.names)), find_family(architecture or name)
    if resolved.weights:  # its anchors are used, if the head has as many
        load_weights(model, read_weights(local_file(resolved.weights)).tensors)
    sizes = label_sizes(train, resolved.imgsz)
    anchors = family.fit(model.head, sizes, resolved.loss, resolved.seed) if resolved.autoanchor else None
    return RunRecord(
        digest=recipe_digest(asked), asked=asked, recipe=resolved, architecture=architecture, anchors=anchors,
        num_parameters=count_parameters(model), names=train.names, labels=train.digest,
        command=redact(shlex.join(command)), provenance=provenance(name), transfer=transfer,
        num_workers=None if config.placement.num_workers == "auto" else config.placement.num_workers, origins=given,
        weights_licence=transfer.licence if transfer else "", forked_from=lineage_of(resolved.weights))


def spec_of_run(run: Run, num_workers: int, train: AnnotationIndex, val: AnnotationIndex, data: str = "") -> TrainSpec:
    """`spec_of` of a run that is to be trained. Without a checkpoint it starts from its initial weights.

    Raises:
        CheckpointError: if those weights have changed since the first start.
    """
    record = run.training
    if not run.has_checkpoints:
        check_lineage(record.forked_from, record.recipe.weights)
    return spec_of(record, run.folder, num_workers, train, val, data)


def spec_of(record: RunRecord, folder: Path, num_workers: int, train: AnnotationIndex, val: AnnotationIndex,
            data: str = "") -> TrainSpec:
    """The training of a run's record and folder, checked against today's data set and worker count.

    Args:
        data: the data set that was read; '': that of the record.

    Raises:
        ConfigError: if the recipe cannot be divided among `num_workers` workers.
        DatasetError: if the data set has changed since the first start, or another one was read.
    """
    check_workers(record.recipe, num_workers)
    if train.digest != record.labels:
        if data not in ("", record.recipe.data):
            raise DatasetError(f"{data}: has other training labels than {record.recipe.data}, with which {folder} was "
                               f"started ({train.digest}, and {record.labels} then); give the data set of that start, "
                               "or start a new run with --name")
        raise DatasetError(f"{record.recipe.data}: the training labels have changed since {folder} was started "
                           f"({record.labels} then, {train.digest} now); restore them, or start a new run "
                           "with --name")
    return TrainSpec(recipe=record.recipe, digest=record.digest, names=record.names, run_dir=folder,
               architecture=record.architecture, anchors=record.anchors, train=train, val=val,
               weight_classes=record.transfer.classes if record.transfer else None,
               weights_licence=record.weights_licence)


def provenance(model: str = "") -> dict[str, Any]:
    """The versions that a result depends on, and the git commit of the current folder, if any."""
    command = [shutil.which("git") or "true", "rev-parse", "HEAD"]
    commit = subprocess.run(command, capture_output=True, text=True, check=False).stdout.strip()
    return {"python": platform.python_version(), "ray_yolo": __version__, "git_commit": commit,
            **{name: version(name) for name in ("torch", "ray")},
            **({plugin.package: plugin.version} if (plugin := plugin_of(model)) else {})}
