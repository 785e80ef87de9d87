"""One training from start to end: Placement -> Ray -> workers, with the run's records kept on the driver.

`fit` is what `python -m ray_yolo.train` and `YOLO.train` call. With `num_workers` 0 the same session runs in this
process, without Ray, and keeps the same records and checkpoints.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ray_yolo.config import Placement, RunConfig
from ray_yolo.engine.build import Host, Job
from ray_yolo.engine.runs import Run, open_run
from ray_yolo.engine.session import run_session
from ray_yolo.errors import RayYoloError, ResourcesError, TrainingError
from ray_yolo.runtime.prepare import first_start, job_of, read_dataset


@dataclass(frozen=True)
class TrainResult:
    """What a training leaves behind."""

    run_dir: Path
    best: Path  # weights of the best epoch
    last: Path  # weights of the last epoch
    epochs: int  # epochs trained in all
    best_epoch: int
    fitness: float  # of the best epoch: 0.1 mAP50 + 0.9 mAP50-95
    metrics: dict[str, float]  # precision, recall, mAP50, mAP50-95 of the last epoch
