"""Validation of trained weights: in this process, or divided among Ray workers, with the same numbers.

Ray is imported only where workers are requested, because the import takes seconds.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from operator import itemgetter
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch

from ray_yolo.checkpoints.weights_file import absolute_weights, local_file
from ray_yolo.config.class_names import match_classes
from ray_yolo.config.commands import ValConfig
from ray_yolo.core.documents import RESULTS_FILE
from ray_yolo.core.errors import InputError
from ray_yolo.core.events import METRICS
from ray_yolo.core.files import atomic_write
from ray_yolo.core.redact import redact
from ray_yolo.core.signals import uninterrupted
from ray_yolo.core.structures import AnnotationIndex
from ray_yolo.core.system import keep_freed_memory
from ray_yolo.data.dataset_yaml import read_description
from ray_yolo.data.image_cache import ImageStore, room_in_shared_memory
from ray_yolo.data.index import (
    only_classes,
    read_index,
    refuse_count_from_one,
    require_boxes,
    require_chosen,
    survey,
    with_single_class,
)
from ray_yolo.data.remote import localize
from ray_yolo.engine.collectives import Collectives
from ray_yolo.engine.devices import local_device
from ray_yolo.engine.evaluate import (
    EvaluatedBatches,
    Evaluation,
    autocast,
    combine,
    evaluate_batches,
    per_class,
    twelve_numbers,
)
from ray_yolo.engine.loading import val_memory
from ray_yolo.engine.spec import WorkerContext
from ray_yolo.engine.team import val_loader
from ray_yolo.inference.output import CocoIds, coco_ids, coco_results, write_label_files
from ray_yolo.inference.predictor import Trained, check_classes, input_size, load_trained, select_classes, warn_of_iou
from ray_yolo.labels import LabelOptions, LabelSources
from ray_yolo.models.blocks import avoid_slow_convolutions
from ray_yolo.models.criterion import Criterion
from ray_yolo.plots.page import Section, notebook_html, read_picture
from ray_yolo.runs.folders import output_folder, storage_folder
from ray_yolo.runs.location import location, publish
from ray_yolo.runtime.resources import LoaderRoom, share_out
from ray_yolo.runtime.worst import write_worst
from ray_yolo.sinks.mlflow_client import tracking_uri
from ray_yolo.sinks.mlflow_errors import explain
from ray_yolo.sinks.mlflow_plan import plan_validation
from ray_yolo.sinks.mlflow_run import Delivery
from ray_yolo.sinks.pictures import Failed, draw_detections
from ray_yolo.sinks.report import class_table, dataset_table
from ray_yolo.sinks.run_logger import write_findings

_AS_TRAINED = ("single_cls", "labels_with_confidence", "keep_difficult")  # as in training, unless given
_ID_0 = ("{} has an annotation with the id 0: here it counts like any other, but pycocotools takes a detection of it "
         "for a false one, because there 0 marks a detection without an object; count ids from 1 to compare both")


@dataclass(frozen=True)
class ValResult:
    """The results of a validation."""

    folder: Path  #: the folder of the results on this machine
    metrics: dict[str, float]  #: precision, recall, mAP50, mAP50-95
    losses: dict[str, float]  #: the terms are the keys
    per_class: list[dict[str, Any]]
    coco: dict[str, float]  #: the twelve numbers of the COCO protocol, if requested
    speed: dict[str, float]  #: mean ms per image: preprocess (reading included), inference, postprocess

    def _repr_html_(self) -> str:
        """For a notebook: the metrics of all classes and of each, and the first labels beside detections."""
        header = ("class", "labels", *METRICS)
        rows = [("all", sum(row["labels"] for row in self.per_class), *(self.metrics[name] for name in METRICS)),
                *((row["name"], row["labels"], *(row[name] for name in METRICS)) for row in self.per_class)]
        return notebook_html(Section(str(self.folder), table=[header, *rows]),
                             read_picture(self.folder / "val_batch0_pred.jpg"))


def validate(config: ValConfig, *, quiet: bool = False) -> ValResult:
    """Validate as configured; the numbers do not depend on the number of workers.

    Raises:
        CheckpointError: if the weights cannot be used.
        DatasetError: if the data set cannot be read, or has other classes than the weights.
        ResourcesError: if there is no such GPU, or the cluster can never hold the workers.
        TrainingError: if a worker fails.
    """
    config, trained, ids, index, note = check(config)
    placement, gpus = config.placement, 0.0
    if placement.num_workers:
        with uninterrupted():
            from ray_yolo.runtime import cluster
            from ray_yolo.runtime.node_checks import least_room, make_snapshots

        gpus = cluster.connect_and_wait(placement)
        make_snapshots(index)
        room = _loader_room(config, trained, index, least_room().shared)
        shared, _ = share_out(placement, gpus, cluster.free_nodes(placement), room=room)
        config = config.model_copy(update={"placement": shared})
    folder = output_folder(placement, (absolute_weights(config.weights), *index.paths))
    report: Callable[[str], None] = (lambda text: None) if quiet else print
    report("\n".join(dataset_table({config.split: survey(index)}, index.names)))
    if note:
        report(note)
    if findings := write_findings({config.split: index}, folder):
        report(f"WARNING: {findings}")
    if placement.num_workers:
        parts = _evaluate_on_workers(config, index, gpus)
    else:
        device = local_device(placement.gpus_per_worker)
        room = _loader_room(config, trained, index, room_in_shared_memory())
        loaders, reason = room.limit(placement.loader_processes)
        if reason:
            report(f"WARNING: {reason}")
            config = config.model_copy(update={"placement": placement.model_copy(update={"workers": loaders})})
        parts = [_evaluate_share(trained, config, index, 0, 1, device)]
    evaluation = combine(parts, _build_loss(trained, config), index)
    if config.classes is not None and not config.single_cls:  # under single_cls all detections are of one class
        kept = np.isin(evaluation.detections[:, 6], config.classes)
        evaluation = replace(evaluation, detections=evaluation.detections[kept])
    classes = per_class(evaluation, index)
    rows = [row.model_dump() for row in classes]
    coco = twelve_numbers(evaluation, index) if config.coco else {}
    result = ValResult(folder, evaluation.summary, evaluation.losses, rows, coco, evaluation.speed)
    failed, worst = _write(config, evaluation, ids, index, folder)
    if failed:
        report(f"WARNING: pictures that could not be drawn: {', '.join(failed)}")
    where = location(folder)
    record = {**result.__dict__, "folder": where, "weights": config.weights, "data": config.data}
    atomic_write(folder / RESULTS_FILE, json.dumps(record, indent=1))
    publish(folder)
    report("\n".join([*class_table(result.metrics, classes, len(index)), *_rest(result, where, worst)]))
    if uri := tracking_uri(placement.mlflow_uri, storage_folder(placement)):
        report(_track(config, result, uri))
    return result


def _loader_room(config: ValConfig, trained: Trained, index: AnnotationIndex, free: int) -> LoaderRoom:
    need = val_memory(config.imgsz or trained.recipe.imgsz, config.evaluate.batch_size, len(index), trained.model.grid)
    return LoaderRoom(free, need.per_loader, need.in_use)


def _write(config: ValConfig, evaluation: Evaluation, ids: Sequence[CocoIds], index: AnnotationIndex, folder: Path
           ) -> tuple[list[str], str]:
    """Write the requested files and the same pictures as in training. Returns the pictures that could not be drawn, and
    a sentence about the worst images and labels, if they were requested."""
    failed: Failed = {}
    worst = ""
    if config.save_txt:
        write_label_files(evaluation.detections, index, folder, scores=config.save_conf)
    if config.save_json:
        rows = coco_results(evaluation.detections, ids)
        atomic_write(folder / "detections.json", json.dumps(rows))
    assert config.imgsz, "the configuration is decided"
    if config.worst:
        worst = write_worst(evaluation, index, config.worst, config.imgsz, folder, failed,
                            draw=not config.placement.noplots)
    if not config.placement.noplots:
        draw_detections(evaluation.detections, index, config.imgsz, folder, failed)
    return [f"{name} ({reason})" for name, reason in failed.items()], worst


class Checked(NamedTuple):
    """What a validation needs, read and checked."""

    config: ValConfig  # the settings of the weights are filled in
    trained: Trained  # its classes are those of the data set
    ids: Sequence[CocoIds]  # `save_json` needs one for each image; else there is none
    labels: AnnotationIndex
    note: str  # it says how classes of other names were matched, and what ids are; '' for neither


def check(config: ValConfig) -> Checked:
    """The configuration with the weights' settings, the weights, the data set and its labels. Starts nothing.

    Raises the same errors as `validate`.
    """
    tracking_uri(config.placement.mlflow_uri, ".")  # refuses an address that is no server's
    trained = load_trained(local_file(config.weights))
    warn_of_iou(trained, config.evaluate)
    recipe = trained.recipe
    evaluate = recipe.evaluate.model_copy(update=config.evaluate.model_dump(exclude_unset=True))
    taken = [f"--set evaluate.{name}={value}" for name, value in evaluate if value != getattr(config.evaluate, name)]
    inherited = {name: getattr(recipe, name) for name in _AS_TRAINED if name not in config.model_fields_set}
    taken += [f"--{name.replace('_', '-')}" for name, value in inherited.items() if value]
    if not config.data and "data" not in recipe.model_fields_set:  # a file of another program
        raise InputError(f"data: {config.weights} does not say which data set it was trained on; give --data")
    precision = config.precision if config.precision != "auto" else recipe.precision
    decided = config.model_copy(update={
        "data": config.data or recipe.data,
        "imgsz": input_size(trained, config.imgsz),
        "precision": precision if precision != "auto" else "fp32",  # the training, too, left the choice to its device
        "evaluate": evaluate,
        **inherited,
    })
    description = read_description(decided.data)
    options = LabelOptions(decided.labels_with_confidence, decided.keep_difficult)
    index = read_index(description, config.split, options=options)
    refuse_count_from_one(index, description)
    index = replace(index, findings=(*description.findings, *index.findings),
                    pixel_range={**index.pixel_range, **trained.pixel_range})
    check_classes(config.classes, index.names)
    trains_alike = recipe.single_cls or not config.single_cls  # else all detections are to count as one class
    if config.classes is None and recipe.classes is not None and trains_alike:
        classes = _trained_classes(trained, decided, index.names)
        taken.append(f"--classes {' '.join(map(str, classes))}")
        decided = decided.model_copy(update={"classes": classes})
    if not config.allow_empty:
        require_boxes(index, description, config.split)
    if decided.classes is not None:
        index = only_classes(index, decided.classes)
    if decided.single_cls:
        index = with_single_class(index)
    if not config.allow_empty:
        require_chosen(index, description, config.split, decided.classes)
    trained, note = _with_classes_of(trained, decided, index.names)
    ids: Sequence[CocoIds] = []
    if config.coco or config.save_json:
        sources = LabelSources(description, config.split)
        ids = coco_ids(index, sources) if config.save_json else []
        if sources.counted_from_0:
            note += "\n" * bool(note) + _ID_0.format(sources.counted_from_0)
    if config.placement.num_workers == 0:
        local_device(config.placement.gpus_per_worker)  # refuses a GPU that is not there
    if taken:
        note = f"{note}\n" * bool(note) + f"as the weights were trained: {' '.join(taken)} (flags here override it)"
    return Checked(decided, trained, ids, index, note)


def _trained_classes(trained: Trained, config: ValConfig, names: Sequence[str]) -> tuple[int, ...]:
    """The numbers in the data set, whose classes have these names, of the classes that the weights were trained on.

    Raises:
        DatasetError: if the weights lack a class of the data set.
        InputError: if their classes cannot be found in another data set.
    """
    recipe = trained.recipe
    assert recipe.classes is not None
    if not recipe.single_cls:
        rows = match_classes(names, trained.names, data_file=config.data, weights_file=config.weights,
                             allow_names=config.allow_names).rows
        return tuple(number for number, row in enumerate(rows) if row in recipe.classes)
    if config.data != recipe.data:  # the weights have one name for all of them
        raise InputError(f"classes: {config.weights} was trained on classes {', '.join(map(str, recipe.classes))} of "
                         f"{recipe.data} as one; say with --classes which ones of {config.data} these are")
    return recipe.classes


def _with_classes_of(trained: Trained, config: ValConfig, names: Sequence[str]) -> tuple[Trained, str]:
    """The weights with the classes of the data set, in its order, and a note on them. Under `single_cls`, all classes
    are one, and the weights stay as they are.

    Raises:
        DatasetError: if the weights lack a class of the data set.
    """
    if config.single_cls:
        if config.classes is not None and trained.model.num_classes > 1:
            raise InputError(f"classes: {config.weights} has {trained.model.num_classes} classes, whose detections all "
                             "count as one under --single-cls; leave one of the two out")
        return trained, ""
    match = match_classes(names, trained.names, data_file=config.data, weights_file=config.weights,
                          allow_names=config.allow_names)
    if match.rows != tuple(range(trained.model.num_classes)):
        trained = select_classes(trained, match.rows)
    return trained, match.note


def _rest(result: ValResult, where: str, worst: str) -> list[str]:
    """The lines below the table of classes: the COCO numbers, the time, the worst images, and the results' folder."""
    speed = ", ".join(f"{name} {each:.2f}" for name, each in result.speed.items())
    coco = [f"{name:>22}{value:11.4f}" for name, value in result.coco.items()]
    return [*coco, f"ms per image: {speed}", *([worst] if worst else []), f"results in {where}"]


def _track(config: ValConfig, result: ValResult, uri: str) -> str:
    """Log the result to MLflow; an unreachable server is a warning, since the validation is done."""
    settings = {name: str(value) for name, value in config.model_dump(exclude={"placement"}).items()}
    try:
        plan = plan_validation(result.folder, settings, {
            "metrics": result.metrics, "losses": result.losses, "coco": result.coco, "ms_per_image": result.speed})
        run_id = Delivery(result.folder, uri, fresh=True).deliver(plan)
    except Exception as error:  # MLflow raises many kinds
        return f"WARNING: not logged: {explain(error, uri)}"
    return f"mlflow run {run_id} at {redact(uri)}"


def _build_loss(trained: Trained, config: ValConfig) -> Criterion:
    """The loss of the weights' training, on the device of their model."""
    imgsz = config.imgsz or trained.recipe.imgsz
    return trained.family.build_loss(trained.model.head, trained.recipe.loss, trained.model.num_classes, imgsz)


def _evaluate_share(trained: Trained, config: ValConfig, index: AnnotationIndex, worker: int, num_workers: int,
                    device: torch.device) -> EvaluatedBatches:
    """The results of one worker's share of the batches."""
    keep_freed_memory()
    torch.backends.cudnn.allow_tf32 = not trained.recipe.no_tf32  # as in training
    imgsz = config.imgsz or trained.recipe.imgsz
    context = WorkerContext(device=device, loader_processes=config.placement.loader_processes)
    loader = val_loader(index, ImageStore(index, imgsz, smooth=True), imgsz, trained.model.grid,
                        config.evaluate.batch_size, context, Collectives(worker, num_workers))
    model = trained.model.to(device).to(memory_format=torch.channels_last)
    if device.type == "cpu":
        avoid_slow_convolutions(model)  # as in training: those kernels round differently
    blank = torch.zeros(min(config.evaluate.batch_size, len(index)), 3, imgsz, imgsz, device=device)
    with torch.no_grad(), autocast(device, config.precision):  # the first pass takes longer; its time counts nowhere
        model.eval()(blank.to(memory_format=torch.channels_last))
    return evaluate_batches(model, trained.family, _build_loss(trained, config), loader, index, config.evaluate,
                            config.precision, device, per_image=config.worst > 0)


def _evaluate_on_workers(config: ValConfig, index: AnnotationIndex, gpus: float) -> list[EvaluatedBatches]:
    from ray_yolo.runtime.map_on_workers import map_on_workers

    placement = config.placement
    absolute = config.model_copy(update={"weights": absolute_weights(config.weights)})
    shares = map_on_workers(_evaluate_on_worker, (absolute, index, gpus), range(placement.max_workers), placement, gpus,
                            retries=placement.max_failures)
    return [result for _, result in sorted(shares, key=itemgetter(0))]


def _evaluate_on_worker(shared: tuple[ValConfig, AnnotationIndex, float], worker: int) -> EvaluatedBatches:
    """The share of one worker, on that worker."""
    config, index, gpus = shared
    torch.set_num_threads(config.placement.threads)
    trained, _ = _with_classes_of(load_trained(local_file(config.weights)), config, index.names)
    device = torch.device("cuda" if gpus else "cpu")
    return _evaluate_share(trained, config, localize(index), worker, config.placement.max_workers, device)
