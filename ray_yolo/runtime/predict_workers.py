"""Prediction by a pool of Ray Data actors: paths go out, predictions come back, pictures are written by the actors.

Sources and the output folder lie on storage that every node sees, as the runs of a training do.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import ray
import ray.data
import ray.exceptions
import torch

from ray_yolo.config.commands import PredictConfig
from ray_yolo.data.media import Media
from ray_yolo.engine.predict import build_predictor
from ray_yolo.engine.predict_files import detect_files
from ray_yolo.engine.predictions import Prediction, from_wire, to_wire
from ray_yolo.engine.trained import load_trained
from ray_yolo.errors import RayYoloError
from ray_yolo.ops.memory import keep_freed_memory

_PARTS_PER_WORKER = 32  # files go out in so many parts, so that a worker with long videos does not keep the others


def detect_on_ray(config: PredictConfig, media: Sequence[Media], folder: Path | None,
                  gpus: float) -> Iterator[tuple[Media, list[Prediction]]]:
    """`detect_files` shared out over actors with so many GPUs each; files come in any order, each one whole.

    Raises:
        RayYoloError: if an actor fails for good.
    """
    placement = config.placement
    low, high = placement.num_workers if isinstance(placement.num_workers, tuple) else (placement.num_workers,) * 2
    absolute = config.model_copy(update={"weights": str(Path(config.weights).absolute())})
    with _quiet():
        files = ray.data.from_items([{"number": number} | one._asdict() for number, one in enumerate(media)],
                                    override_num_blocks=min(len(media), _PARTS_PER_WORKER * high))
        found = files.map_batches(
            _Actor, fn_constructor_args=(absolute.model_dump(mode="json"), folder and str(folder)), batch_size=None,
            num_cpus=placement.cpus_per_worker, num_gpus=gpus,
            compute=ray.data.ActorPoolStrategy(min_size=low, max_size=high))
        try:
            for row in found.iter_rows():
                yield media[row["number"]], from_wire(row["found"])
        except ray.exceptions.RayError as error:  # of an actor that could not be made it holds the text alone
            raise RayYoloError(f"a worker failed: {str(error).strip().splitlines()[-1]}") from error


class _Actor:
    """Detects in the files of one part after the other."""

    def __init__(self, config: dict[str, Any], folder: str | None) -> None:
        keep_freed_memory()
        settings = PredictConfig.model_validate(config)
        device = torch.device("cuda" if ray.get_gpu_ids() else "cpu")
        self._folder = Path(folder) if folder else None
        self._threads = max(1, int(settings.placement.cpus_per_worker))
        self._predictor = build_predictor(load_trained(Path(settings.weights)), settings, imgsz=settings.imgsz,
                                          precision=settings.precision, device=device)

    def __call__(self, part: dict[str, Any]) -> dict[str, list[Any]]:
        media = [Media(*row) for row in zip(part["path"], part["name"], part["stem"], strict=True)]
        found = detect_files(self._predictor, media, self._folder, threads=self._threads)
        return {"number": list(part["number"]), "found": [to_wire(predictions) for _, predictions in found]}


@contextmanager
def _quiet() -> Iterator[None]:
    """Ray Data without its progress bars and its story of each execution."""
    context, logger = ray.data.DataContext.get_current(), logging.getLogger("ray.data")
    bars, level = context.enable_progress_bars, logger.level
    context.enable_progress_bars = False
    logger.setLevel(logging.ERROR)
    try:
        yield
    finally:
        context.enable_progress_bars = bars
        logger.setLevel(level)
