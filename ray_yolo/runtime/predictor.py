"""Prediction with trained weights: in this process, or on a pool of Ray Data actors, with the same result.

The driver sends paths; actors return predictions and write pictures. As in training, every node must see the sources
and the output folder. Ray is imported only where it is used, because the import takes seconds.
"""

from __future__ import annotations

import logging
import os
import tempfile
from collections import Counter
from collections.abc import Generator, Iterable, Iterator, Sequence
from contextlib import closing, contextmanager, nullcontext
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch

from ray_yolo.checkpoints.remote import absolute_weights, local_file
from ray_yolo.config.commands import PredictConfig
from ray_yolo.config.placement import share_out
from ray_yolo.core.errors import InputError, RayYoloError
from ray_yolo.core.redact import printable
from ray_yolo.core.system import keep_freed_memory
from ray_yolo.data.sources import Media, find_media
from ray_yolo.engine.build import local_device
from ray_yolo.inference.output import Output, Prediction, detect_files, from_payload, to_payload, write_tables
from ray_yolo.inference.predictor import Trained, build_predictor, check_classes, check_iou, load_trained
from ray_yolo.runs.folders import output_folder
from ray_yolo.runs.location import location, publish
from ray_yolo.runs.remote_run import put_results
from ray_yolo.runs.working_copy import address_of

_PARTS_PER_WORKER = 32  # blocks of files; many, so that a worker with long videos does not delay the others


@dataclass(frozen=True)
class PredictResult:
    """Predictions, and the folder of their files."""

    folder: Path  # on this machine
    names: tuple[str, ...]  # of classes
    predictions: tuple[Prediction, ...]  # of pictures and frames, by path


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
        from ray_yolo.runtime import cluster

        gpus = cluster.connect_and_wait(placement)
        shared, _ = share_out(placement, gpus, cluster.free_nodes(placement))
        detect = partial(_detect_on_ray, config.model_copy(update={"placement": shared}), media, gpus=gpus)
    folder = output_folder(placement, (absolute_weights(config.weights), *(one.path for one in media)))
    output = Output(folder, config)
    try:
        with closing(detect(output=output)) as results:
            predictions = _collect(results, media, trained.names, quiet=quiet)
        write_tables(output, predictions, trained.names)
        if all(one.error for one in predictions):
            raise InputError(f"source: none of {len(media)} files could be read; the first, {media[0].name}, "
                             f"{predictions[0].error}")
    finally:  # also the results of an interrupted prediction
        publish(folder)
    if not quiet:
        print(f"results in {location(folder)}")
    return PredictResult(folder, trained.names, tuple(predictions))


def check(config: PredictConfig) -> tuple[PredictConfig, Trained, list[Media]]:
    """The configuration with the weights' settings, the weights, and the files. Starts and writes nothing.

    Raises the same errors as `predict`.
    """
    media = find_media(config.source)
    if config.placement.num_workers and any(one.is_stream for one in media):
        raise InputError(f"source: {media[0].name} is a stream, which one process reads; leave out --num-workers")
    trained = load_trained(local_file(config.weights))
    check_classes(config.classes, trained.names)
    check_iou(trained, config)
    if config.placement.num_workers == 0:
        local_device(config.placement.gpus_per_worker)
    return config.model_copy(update={"imgsz": config.imgsz or trained.recipe.imgsz}), trained, media


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
    counts = Counter(int(row[5]) for prediction in predictions for row in prediction.detections)
    frames = f"{len(predictions)} frames, " if predictions[0].frame else ""
    return frames + (", ".join(f"{counts[kind]} {names[kind]}" for kind in sorted(counts)) or "nothing found")


def _detect_on_ray(config: PredictConfig, media: Sequence[Media], output: Output, gpus: float
                   ) -> Generator[tuple[Media, list[Prediction]]]:
    """`detect_files` on Ray Data actors with `gpus` GPUs each. Files are yielded in any order, each one complete.

    Raises:
        RayYoloError: why an actor has failed for good.
    """
    import ray.data
    import ray.exceptions

    placement = config.placement
    absolute = config.model_copy(update={"weights": absolute_weights(config.weights)})
    with _quiet():
        # As bytes, because Arrow has no text for names that are not UTF-8.
        rows = [{"number": number, **{field: os.fsencode(text) for field, text in one._asdict().items()}}
                for number, one in enumerate(media)]
        files = ray.data.from_items(rows,
                                    override_num_blocks=min(len(media), _PARTS_PER_WORKER * placement.max_workers))
        results = files.map_batches(
            _Actor, batch_size=None,
            fn_constructor_args=(absolute, str(output.folder), address_of(output.folder)),
            num_cpus=placement.cpus, num_gpus=gpus,
            compute=ray.data.ActorPoolStrategy(min_size=placement.min_workers, max_size=placement.max_workers))
        try:
            for row in results.iter_rows():
                yield media[row["number"]], from_payload(row["found"])
        except ray.exceptions.RayError as error:  # for an actor that could not start, it contains only the text
            raise RayYoloError(f"a worker failed: {str(error).strip().splitlines()[-1]}") from error


class _Actor:
    """Detects objects in one block of files after another."""

    def __init__(self, settings: PredictConfig, folder: str, address: str) -> None:
        import ray

        keep_freed_memory()
        device = torch.device("cuda" if ray.get_gpu_ids() else "cpu")
        self._settings, self._folder, self._address = settings, folder, address
        self._predictor = build_predictor(load_trained(local_file(settings.weights)), settings, device)

    def __call__(self, part: dict[str, Any]) -> dict[str, list[Any]]:
        media = [Media(*map(os.fsdecode, row)) for row in zip(part["path"], part["name"], part["stem"], strict=True)]
        with tempfile.TemporaryDirectory() if self._address else nullcontext(self._folder) as folder:
            payloads = [to_payload(predictions) for _, predictions in detect_files(
                self._predictor, media, Output(Path(folder), self._settings), threads=self._settings.placement.threads)]
            put_results(Path(folder), self._address)  # no other node sees this folder
        return {"number": list(part["number"]), "found": payloads}


@contextmanager
def _quiet() -> Iterator[None]:
    """Context in which Ray Data prints no progress bars and no execution messages."""
    import ray.data

    context, logger = ray.data.DataContext.get_current(), logging.getLogger("ray.data")
    bars, level = context.enable_progress_bars, logger.level
    context.enable_progress_bars = False
    logger.setLevel(logging.ERROR)
    try:
        yield
    finally:
        context.enable_progress_bars = bars
        logger.setLevel(level)
