"""Checkpoints of a few numbers, in the place of a training's."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch

from ray_yolo.checkpoints import local as checkpoint
from ray_yolo.checkpoints import state_file


def state(value: float) -> dict[str, Any]:
    return {"meta": json.dumps({"value": value}), "model": {"w": torch.full((100,), float(value))}}


def save(run_dir: Path, step: int, *kinds: str, value: float | None = None) -> Path:
    """Save a value, by default the step."""
    run_dir.mkdir(parents=True, exist_ok=True)
    return checkpoint.save_checkpoint(run_dir, state(step if value is None else value), step, "digest", kinds)


def newest(run_dir: Path) -> dict[str, Any]:
    """The whole state of a training's newest checkpoint."""
    return state_file.read_state(next(checkpoint.newest_first(run_dir)) / "state.pt")


def value(file: Path) -> float:
    """What a file holds, verified."""
    return json.loads(state_file.read_state(file)["meta"])["value"]


def begin(run_dir: Path) -> Path:
    """Two saved epochs, of which checkpoints/ has kept the second."""
    save(run_dir, 1, "last", "best", "epoch0")
    save(run_dir, 2, "last")
    checkpoint.prune(run_dir, keep=1)
    return run_dir


def shown(run_dir: Path) -> dict[str, float]:
    """What each file of weights/ holds, all of them verified, with nothing half done beside them."""
    checkpoint.check_weights(run_dir, checkpoint.steps_of_weights(run_dir)["last"])
    assert list(run_dir.rglob(".*")) == []
    return {file.stem: value(file) for file in (run_dir / "weights").glob("*.pt")}
