"""Validation of trained weights: in this process, or shared out over Ray workers, with the same numbers."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import ray
import ray.train
import ray.train.torch
import torch

from ray_yolo.data.cache import ImageStore
from ray_yolo.data.description import read_description
from ray_yolo.data.index import read_index
from ray_yolo.engine.build import ALONE, Host, val_loader
from ray_yolo.engine.checkpoint import write_durably
from ray_yolo.engine.evaluate import Evaluation, evaluate, per_class
from ray_yolo.engine.replicas import Replicas
from ray_yolo.engine.runs import output_folder
from ray_yolo.engine.trained import Trained, load_trained
from ray_yolo.errors import DatasetError
from ray_yolo.ops.coco_metrics import Detected, Labelled, coco_metrics
from ray_yolo.ops.memory import keep_freed_memory
from ray_yolo.runtime import cluster
from ray_yolo.runtime.aside import run_aside
from ray_yolo.runtime.narrator import CLASS_HEADER, class_row
from ray_yolo.structures import AnnotationIndex
from ray_yolo.val_config import ValConfig


@dataclass(frozen=True)
class ValResult:
    """What a validation found."""

    folder: Path
    metrics: dict[str, float]  # precision, recall, mAP50, mAP50-95
    losses: dict[str, float]  # box, obj, cls
    per_class: list[dict[str, Any]]
    coco: dict[str, float]  # the twelve numbers of the COCO protocol, where asked for


def validate(config: ValConfig, *, quiet: bool = False) -> ValResult:
    """Validate as configured; the numbers do not depend on the number of workers.

    Raises:
        CheckpointError: if the weights cannot be used.
        DatasetError: if the data set cannot be read, or names other classes than the weights know.
    """
    trained = load_trained(Path(config.weights).absolute())
    data = config.data or trained.recipe.data
    index = read_index(read_description(data), config.split, single_cls=config.single_cls)
    if len(index.names) != trained.model.num_classes and not config.single_cls:
        raise DatasetError(f"{data}: names {len(index.names)} classes, but {config.weights} was trained on "
                           f"{trained.model.num_classes} ({', '.join(trained.names)})")
    folder = output_folder(config.placement)
    local = config.placement.num_workers == 0
    found = _evaluate(trained, config, index) if local else _on_ray(config, index, folder)
    result = ValResult(folder, found.summary, dict(zip(("box", "obj", "cls"), found.losses, strict=True)),
                       per_class(found, index), twelve_numbers(found, index) if config.coco else {})
    text = json.dumps({**result.__dict__, "folder": str(folder), "weights": config.weights, "data": data}, indent=1)
    write_durably(folder / "results.json", text.encode())
    if not quiet:
        print(table(result, len(index), len(index.classes)))
    return result


def twelve_numbers(found: Evaluation, index: AnnotationIndex) -> dict[str, float]:
    """The COCO protocol's numbers of a validation, by name."""
    rows = found.detections
    owners = np.repeat(np.arange(len(index)), np.diff(index.offsets))
    sides = (index.boxes[:, 2:] - index.boxes[:, :2]).astype(np.float64)
    truth = Labelled(owners, index.classes, index.boxes.astype(np.float64), sides.prod(1), np.zeros(len(owners), bool))
    numbers = coco_metrics(Detected(rows[:, 0].astype(np.int64), rows[:, 6].astype(np.int64),
                                    rows[:, 5].astype(np.float64), rows[:, 1:5].astype(np.float64)), truth)
    return numbers._asdict()


def table(result: ValResult, num_images: int, num_labels: int) -> str:
    """What the command prints: a row for all classes and one for each, the COCO numbers, and where it all is."""
    everything = {"name": "all", "images": num_images, "labels": num_labels, **result.metrics}
    lines = [CLASS_HEADER, *(class_row(row) for row in (everything, *result.per_class))]
    lines += [f"{name:>22}{value:11.4f}" for name, value in result.coco.items()]
    return "\n".join([*lines, f"results in {result.folder}"])


def _evaluate(trained: Trained, config: ValConfig, index: AnnotationIndex, replicas: Replicas = ALONE,
              device: torch.device | None = None) -> Evaluation:
    """One worker's part of a validation, combined with the others'. Collective."""
    keep_freed_memory()
    recipe, placement = trained.recipe, config.placement
    device = device or torch.device("cuda" if torch.cuda.is_available() and placement.gpus_per_worker != 0 else "cpu")
    imgsz = config.imgsz or recipe.imgsz
    host = Host(replicas=replicas, device=device, loader_processes=placement.loader_processes)
    loader = val_loader(index, ImageStore(index, imgsz, smooth=True), imgsz, config.evaluate.batch_size, host)
    model = trained.model.to(device).to(memory_format=torch.channels_last)
    loss = trained.family.build_loss(model.head, recipe.loss, model.num_classes, imgsz)
    precision = config.precision if config.precision != "auto" else recipe.precision
    return evaluate(model, trained.family, loss, loader, index, config.evaluate,
                    "fp32" if precision == "auto" else precision, replicas, device)


def _on_ray(config: ValConfig, index: AnnotationIndex, folder: Path) -> Evaluation:
    """The same, shared out over Ray Train workers."""
    gpus = cluster.connect(config.placement)
    cluster.wait_for_room(config.placement, gpus)
    wire = {"config": config.model_dump(mode="json"), "weights": str(Path(config.weights).absolute()),
            "index": [ray.put(index)]}
    trainer = cluster.build_trainer(_worker, wire, config.placement, gpus, folder)
    return run_aside(trainer.fit).return_value


def _worker(wire: dict[str, Any]) -> Evaluation:
    """Ray Train's train function of a validation."""
    config = ValConfig.model_validate(wire["config"])
    context = ray.train.get_context()
    trained = load_trained(Path(wire["weights"]))
    [index] = ray.get(wire["index"])
    torch.set_num_threads(max(1, int(config.placement.cpus_per_worker)))
    replicas = Replicas(context.get_world_rank(), context.get_world_size())
    return _evaluate(trained, config, index, replicas, ray.train.torch.get_device())
