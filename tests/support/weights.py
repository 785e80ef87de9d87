"""Weights that find something without a training."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import nn

from ray_yolo.checkpoints.local import save_checkpoint
from ray_yolo.engine.learner import TrainState, build_learner
from ray_yolo.engine.spec import WorkerContext
from ray_yolo.engine.state import capture
from ray_yolo.models.batch_norm import MOMENTUM, Statistics
from ray_yolo.models.detector import Detector
from tests.support.jobs import make_spec


def make_weights(folder: Path, **recipe: Any) -> Path:
    """weights/best.pt of a run below `folder`: the tiny model with random weights, made bold enough to see things.

    `folder`/val holds 11 pictures of 48 x 64 pixels.
    """
    job = make_spec(folder, 4, **recipe)
    learner = build_learner(job, WorkerContext())
    learner.state = TrainState(best_epoch=2)
    embolden(learner.ema.model)
    about = {"recipe": job.recipe.model_dump(mode="json"), "digest": job.digest, "names": list(job.names),
             "architecture": job.architecture, "anchors": job.anchors}
    save_checkpoint(job.run_dir, capture(learner, about), 1, job.digest, ["best", "last"])
    return job.run_dir / "weights" / "best.pt"


@torch.no_grad()
def embolden(model: Detector) -> None:
    """Give norms the statistics of some noise, and the head weights that let scores depend on the picture."""
    statistics = Statistics(model)
    model.train()(torch.rand(4, 3, 64, 64, generator=torch.Generator().manual_seed(0)))
    statistics.apply(statistics.recorded(0) / MOMENTUM, 200)  # 0.97^200: nothing is left of the initial ones
    for layer in statistics.layers:
        layer.scratch = None
    model.eval()
    for convolve in model.head.m:
        assert isinstance(convolve, nn.Conv2d)
        assert convolve.bias is not None
        convolve.weight *= 5
        convolve.bias.view(model.head.num_anchors, -1)[:, 4:] = torch.tensor([-1.0, 0.0, 0.0])
