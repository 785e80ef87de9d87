"""Prediction with trained weights: in this process, or by Ray Data actors, with the same files as a result."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from ray_yolo.config.commands import PredictConfig
from ray_yolo.data.media import Media, find_media
from ray_yolo.engine.build import local_device
from ray_yolo.engine.checkpoint import write_durably
from ray_yolo.engine.predict import build_predictor, check_classes
from ray_yolo.engine.predict_files import detect_files
from ray_yolo.engine.predictions import Prediction, label_rows, to_json
from ray_yolo.engine.trained import Trained, load_trained
from ray_yolo.ops.memory import keep_freed_memory
from ray_yolo.redact import printable
from ray_yolo.runlog.run_dir import output_folder

Found = Iterator[tuple[Media, list[Prediction]]]


@dataclass(frozen=True)
class PredictResult:
    """What was found, and where its files are."""

    folder: Path
    names: tuple[str, ...]  # of the classes
    predictions: tuple[Prediction, ...]  # of pictures and frames, by path


def predict(config: PredictConfig, *, quiet: bool = False) -> PredictResult:
    """Detect in everything that the source names; what is found does not depend on the number of workers.

    Raises:
        InputError: if the source names nothing, or the weights cannot be used (CheckpointError).
        ResourcesError: if the cluster can never hold the workers.
    """
    config, trained, media = check(config)
    placement, sources = config.placement, (str(Path(config.weights).absolute()), *(one.path for one in media))
    if placement.num_workers == 0:
        keep_freed_memory()
        predictor = build_predictor(trained, config, imgsz=config.imgsz, precision=config.precision,
                                    device=local_device(placement.gpus_per_worker))
        folder = output_folder(placement, sources)
        found = detect_files(predictor, media, None if placement.nosave else folder,
                             threads=len(os.sched_getaffinity(0)))
    else:
        from ray_yolo.runtime import cluster, predict_workers  # here, because importing Ray takes seconds

        gpus = cluster.connect(placement)
        cluster.wait_for_room(placement, gpus)
        folder = output_folder(placement, sources)
        found = predict_workers.detect_on_ray(config, media, None if placement.nosave else folder, gpus)
    predictions = _collect(found, media, trained.names, config, folder, quiet=quiet)
    if config.save_json:
        write_durably(folder / "predictions.json", to_json(predictions, trained.names).encode())
    if not quiet:
        print(f"results in {folder}")
    return PredictResult(folder, trained.names, tuple(predictions))


def check(config: PredictConfig) -> tuple[PredictConfig, Trained, list[Media]]:
    """The configuration with what the weights decide, the weights and the files; nothing is started or made.

    Raises:
        InputError, ResourcesError: as `predict` does.
    """
    media = find_media(config.source)
    trained = load_trained(Path(config.weights).absolute())
    check_classes(config.classes, trained.names)
    if config.placement.num_workers == 0:
        local_device(config.placement.gpus_per_worker)
    return config.model_copy(update={"imgsz": config.imgsz or trained.recipe.imgsz}), trained, media


def _collect(found: Found, media: Sequence[Media], names: Sequence[str], config: PredictConfig, folder: Path, *,
             quiet: bool) -> list[Prediction]:
    """All predictions in the order of the files, whoever was first; their text files are written on the way."""
    of_file: dict[str, list[Prediction]] = {}
    for done, (one, predictions) in enumerate(found, 1):
        of_file[one.path] = predictions
        if config.save_txt:
            _write_labels(one, predictions, folder / "labels", scores=config.save_conf)
        if not quiet and done * 100 // len(media) > (done - 1) * 100 // len(media):  # every file, or every percent
            print(printable(f"{done}/{len(media)} {one.name}: {summary(predictions, names)}"))
    return [prediction for one in media for prediction in of_file[one.path]]


def summary(predictions: Sequence[Prediction], names: Sequence[str]) -> str:
    """One line for a file: how many of each class, over all frames; or why it was left out."""
    if predictions[0].error:
        return f"left out, it {predictions[0].error}"
    counts = Counter(int(row[5]) for prediction in predictions for row in prediction.detections)
    frames = f"{len(predictions)} frames, " if predictions[0].frame else ""
    return frames + (", ".join(f"{counts[kind]} {names[kind]}" for kind in sorted(counts)) or "nothing found")


def _write_labels(media: Media, predictions: Sequence[Prediction], folder: Path, *, scores: bool) -> None:
    """labels/STEM.txt, or STEM_FRAME.txt for each frame; none where nothing was found."""
    for prediction in predictions:
        if len(prediction.detections):
            frame = "" if prediction.frame is None else f"_{prediction.frame}"
            path = folder / f"{media.stem}{frame}.txt"
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(label_rows(prediction, scores=scores))
