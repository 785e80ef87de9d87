"""Trainings with recorded numbers. A commit that changes the computation changes tests/golden/ too and says why in its
message; no other commit does. To record the numbers again:

    RAY_YOLO_RENEW_GOLDEN=1 .venv/bin/python -m pytest tests/process/engine/test_golden.py
"""

from __future__ import annotations

import copy
import json
import math
import os
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from ray_yolo.config.model_facts import MODELS as MODEL_FACTS
from ray_yolo.config.placement import Placement
from ray_yolo.config.recipe import Recipe, recipe_digest, resolve
from ray_yolo.data.dataset_yaml import read_description
from ray_yolo.data.index import read_index
from ray_yolo.engine.collectives import Collectives
from ray_yolo.engine.loop import train
from ray_yolo.engine.membership import Rendezvous
from ray_yolo.engine.session import Session
from ray_yolo.engine.spec import TrainSpec, WorkerContext
from ray_yolo.engine.team import Team

GOLDEN = Path(__file__).parents[2] / "golden"
MODELS = ("yolov5n", "yolov5nu", "yolov5n6", "yolo11n", "yolo26n")  # one of each family
# Small steps, because processor types differ in the last bits of a sum: at YOLOv5's own rates these bits dominate the
# gradient ten steps later (measured: nearly all of its norm).
RECIPE = {"data": "shapes8", "imgsz": 64, "batch_size": 8, "microbatch": 4, "epochs": 20,
          "precision": "fp32", "threads": 1, "noval": True,
          "optimizer": {"nominal_batch": 8, "lr0": 3e-4, "clip_norm": 0.3},
          "augment": {"close_mosaic": 0},
          "schedule": {"warmup_epochs": 6, "warmup_min_batches": 0, "warmup_bias_lr": 1e-3, "ema_ramp": 10}}
# Relative; processors differ by 1e-6 in a loss and, in the norm of a gradient, by 3e-4. Weights that are moved by 1e-7
# of themselves move the losses by 5e-6, a norm by 4e-4, and what the biases of yolov5nu travel by 4e-4.
SAME, SAME_NORM = 1e-4, 2e-3


def trained(model: str, folder: Path) -> dict[str, Any]:
    """The results of each step, the distances of weights and statistics, and the validation losses of the average."""
    recipe = resolve(
        Recipe.model_validate({**RECIPE, "model": model, "imgsz": 2 * MODEL_FACTS[model].grid}), 1, gpu=False
    )
    description = read_description(recipe.data)
    indices = [read_index(description, split) for split in ("train", "val")]
    spec = TrainSpec(recipe, recipe_digest(recipe), description.names, None, None, *indices, run_dir=folder)
    session = Session(spec, WorkerContext(), Placement(nosave=True), lambda event: None, Rendezvous(Collectives()))
    learner, steps = session.learner, list[dict[str, Any]]()
    models = {"model": learner.model, "average": learner.ema.model}
    start = copy.deepcopy(learner.model.state_dict())
    with session.join() as team:
        assert isinstance(team, Team)
        train(learner, team, lambda step, rates, result: steps.append(
            {"loss": result.losses.tolist(), "gradient_norm": result.gradient_norm}),
            lambda _: not learner.state.close_epoch())
        validated = session.validate(team)
    return {"steps": steps, "validation": list(validated.losses.values()),
            "travelled": {f"{name}'s {kind}": distance(model.state_dict(), start, kind)
                          for name, model in models.items() for kind in ("weight", "bias", "running")}}


def distance(state: dict[str, Tensor], start: dict[str, Tensor], kind: str) -> float:
    """The distance of the tensors of a kind from their start."""
    return math.hypot(*((value - start[name]).norm().item() for name, value in state.items() if kind in name))


def flat(tree: Any, path: str = "") -> dict[str, float]:
    """Every number of a tree by its path."""
    if isinstance(tree, (dict, list)):
        items = tree.items() if isinstance(tree, dict) else enumerate(tree)
        return {name: number for key, value in items for name, number in flat(value, f"{path}/{key}").items()}
    return {path: tree}


@pytest.mark.parametrize("model", MODELS)
def test_twenty_steps_give_the_recorded_numbers(
        tmp_path: Path, monkeypatch: pytest.MonkeyPatch, model: str) -> None:
    monkeypatch.setenv("RAY_YOLO_CACHE", str(tmp_path / "cache"))
    threads = torch.get_num_threads()
    try:
        now = trained(model, tmp_path / "run")
    finally:
        torch.set_num_threads(threads)
    path = GOLDEN / f"{model}_shapes8.json"
    if os.environ.get("RAY_YOLO_RENEW_GOLDEN"):
        path.write_text(json.dumps(now, indent=1) + "\n")
    golden = flat(json.loads(path.read_text()))
    assert len(golden) == 20 * 4 + 3 + 6
    assert flat(now) == {path: pytest.approx(number, rel=SAME if "loss" in path or "valid" in path else SAME_NORM)
                         for path, number in golden.items()}
