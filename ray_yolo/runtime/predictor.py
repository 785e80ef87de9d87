"""Prediction with trained weights: in this process, or on Ray workers, with the same result.

The driver sends paths; workers return predictions and write pictures. As in training, every node must see the sources
and the output folder. Ray is imported only where it is used, because the import takes seconds.
"""

from __future__ import annotations

import math
import os
import shutil
import tempfile
from collections import Counter
from collections.abc import Generator, Iterable, Sequence
from contextlib import closing, nullcontext
from dataclasses import dataclass
from functools import lru_cache, partial
from pathlib import Path
from typing import NamedTuple

import torch

from ray_yolo.checkpoints.weights_file import absolute_weights, local_file
from ray_yolo.config.commands import PredictConfig
from ray_yolo.core.errors import InputError
from ray_yolo.core.formatting import format_count
from ray_yolo.core.redact import printable
from ray_yolo.core.signals import uninterrupted
from ray_yolo.core.system import keep_freed_memory
from ray_yolo.data.sources import Media, find_media
from ray_yolo.engine.devices import local_device
from ray_yolo.inference.exported import Exported
from ray_yolo.inference.output import Output, Prediction, detect_files, write_tables
from ray_yolo.inference.predictor import (
    Opened,
    Predictor,
    build_predictor,
    check_classes,
    input_size,
    open_weights,
    warn_of_classes,
    warn_of_iou,
)
from ray_yolo.runs.folders import output_folder
from ray_yolo.runs.location import location, publish
from ray_yolo.runs.remote_run import put_results
from ray_yolo.runs.working_copy import address_of
from ray_yolo.runtime.resources import share_out

_PARTS_PER_WORKER = 32  # lists of files; many, so that a worker with long videos does not delay the others


@dataclass(frozen=True)
class PredictResult:
    """Predictions, and the folder of their files."""

    folder: Path  # it is on this machine
    names: tuple[str, ...]  # those of the classes
    predictions: tuple[Prediction, ...]  # pictures and frames are sorted by path


def predict(config: PredictConfig, *, quiet: bool = False) -> PredictResult:
    """Detect objects in all files of the source; the result does not depend on the number of workers.

    Raises:
        InputError: if the source has no files, or the weights cannot be used (CheckpointError).
        ResourcesError: if the cluster can never hold the workers.
    """
    config, trained, media = check(config)
    placement = config.placement
    if placement.num_workers == 0:
        keep_freed_memory()
        predictor = build_predictor(trained, config, local_device(placement.gpus_per_worker))
        has_stream = any(each.is_stream for each in media)
        detect = partial(detect_files, predictor, media, threads=0 if has_stream else len(os.sched_getaffinity(0)))
    else:
        with uninterrupted():
            from ray_yolo.runtime import cluster

        gpus = cluster.connect_and_wait(placement)
        shared, _ = share_out(placement, gpus, cluster.free_nodes(placement))
        detect = partial(_detect_on_workers, config.model_copy(update={"placement": shared}), media, gpus=gpus)
    folder = output_folder(placement, (absolute_weights(config.weights), *(one.path for one in media)))
    output = Output(folder, config)
    try:
        with closing(detect(output=output)) as results:
            predictions = _collect(results, media, trained.names, quiet=quiet)
        if all(one.error for one in predictions):
            shutil.rmtree(folder)  # bad input creates nothing
            raise InputError(f"source: none of {len(media)} files could be read; the first, {media[0].name}, "
                             f"{predictions[0].error}")
        write_tables(output, predictions, trained.names)
    finally:  # also the results of an interrupted prediction
        publish(folder)
    if not quiet:
        print(printable(total(predictions, trained.names)))
        print(f"results in {location(folder)}")
    return PredictResult(folder, trained.names, tuple(predictions))


def check(config: PredictConfig) -> tuple[PredictConfig, Opened, list[Media]]:
    """The configuration with the weights' settings, the weights, and the files. Starts and writes nothing.

    Raises the same errors as `predict`.
    """
    media = find_media(config.source)
    if config.placement.num_workers and any(one.is_stream for one in media):
        raise InputError(f"source: {media[0].name} is a stream, which one process reads; leave out --num-workers")
    trained = open_weights(local_file(config.weights))
    check_classes(config.classes, trained.names)
    warn_of_iou(trained, config)
    warn_of_classes(trained, config.classes)
    if isinstance(trained, Exported):
        trained.check_precision(config.precision)
    if config.placement.num_workers == 0:
        local_device(config.placement.gpus_per_worker)
    return config.model_copy(update={"imgsz": input_size(trained, config.imgsz)}), trained, media


def _collect(results: Iterable[tuple[Media, list[Prediction]]], media: Sequence[Media], names: Sequence[str], *,
             quiet: bool) -> list[Prediction]:
    """All predictions in the order of the files; results come in any order."""
    of_file: dict[str, list[Prediction]] = {}
    for done, (one, predictions) in enumerate(results, 1):
        of_file[one.path] = predictions
        if not quiet and done * 100 // len(media) > (done - 1) * 100 // len(media):  # every file, or every percent
            print(printable(f"{done}/{len(media)} {one.name}: {summary(predictions, names)}"))
    return [prediction for one in media for prediction in of_file[one.path]]


def summary(predictions: Sequence[Prediction], names: Sequence[str]) -> str:
    """One line about a file: the number of objects of each class over all frames, or why the file was skipped."""
    if predictions[0].error:
        return f"left out, it {predictions[0].error}"
    counts: Counter[int] = Counter()
    for prediction in predictions:
        counts.update(int(row[5]) for row in prediction.detections)
    found = ", ".join(f"{counts[kind]} {names[kind]}" for kind in sorted(counts))
    frames = f"{len(predictions)} frames, " if predictions[0].frame else ""
    return frames + (found or "nothing found")


def total(predictions: Sequence[Prediction], names: Sequence[str]) -> str:
    """One line about all files: the pictures and frames, the objects of each class, and the mean time of one."""
    read = [one for one in predictions if not one.error]
    counts = Counter(int(row[5]) for one in read for row in one.detections)
    found = ", ".join(f"{counts[kind]} {names[kind]}" for kind in sorted(counts))
    stages = {name: math.fsum(one.speed[name] for one in read) / len(read) for name in read[0].speed}
    times = ", ".join(f"{name} {ms:.1f}" for name, ms in stages.items())
    return (f"{format_count(len(read), 'picture')}: {format_count(counts.total(), 'object')}"
            f"{f' ({found})' if found else ''}, {math.fsum(stages.values()):.1f} ms each ({times})")


def _detect_on_workers(config: PredictConfig, media: Sequence[Media], output: Output, gpus: float
                       ) -> Generator[tuple[Media, list[Prediction]]]:
    """`detect_files` on Ray workers with `gpus` GPUs each. Files are yielded in any order, each one complete.

    Raises:
        RayYoloError: why a worker has failed for good.
    """
    from ray_yolo.runtime.map_on_workers import map_on_workers

    placement = config.placement
    absolute = config.model_copy(update={"weights": absolute_weights(config.weights)})
    work = _Work(absolute, str(output.folder), address_of(output.folder), gpus)
    num_parts = min(len(media), _PARTS_PER_WORKER * placement.max_workers)
    parts = [media[number::num_parts] for number in range(num_parts)]
    with closing(map_on_workers(_detect_part, work, parts, placement, gpus, retries=placement.max_failures)) as results:
        for number, predictions in results:
            yield from zip(parts[number], predictions, strict=True)


class _Work(NamedTuple):
    """What all parts of a prediction have in common."""

    settings: PredictConfig
    folder: str
    address: str
    gpus: float


def _detect_part(work: _Work, media: Sequence[Media]) -> list[list[Prediction]]:
    """The predictions of each file of a part, on a worker. Its pictures are written."""
    predictor = _worker_predictor(work.settings, "cuda" if work.gpus else "cpu")
    with tempfile.TemporaryDirectory() if work.address else nullcontext(work.folder) as folder:
        output = Output(Path(folder), work.settings)
        results = detect_files(predictor, media, output, threads=work.settings.placement.threads)
        found = [predictions for _, predictions in results]
        put_results(Path(folder), work.address)  # no other node sees this folder
    return found


@lru_cache(maxsize=1)
def _worker_predictor(settings: PredictConfig, device: str) -> Predictor:
    """The model of a worker process, loaded for its first part."""
    keep_freed_memory()
    return build_predictor(open_weights(local_file(settings.weights)), settings, torch.device(device))
