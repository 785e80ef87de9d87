"""What `status` says of a sweep and of a training: of real ones, made by 0.1.0 and left under way."""

from __future__ import annotations

from pathlib import Path

import pytest

from ray_yolo.cli import status
from ray_yolo.tune.status import describe_sweep

OLD = Path(__file__).parents[1] / "fixtures" / "0.1.0" / "runs"


def test_a_sweep_is_told_with_its_trials_and_left_as_it_is() -> None:
    sweep, before = OLD / "evolve" / "exp", sorted(OLD.rglob("*"))
    assert describe_sweep(sweep) == [
        f"{sweep}: interrupted: the same command continues it; 1/2 trials ended; best 0.0006 (trial 0)",
        f"  {sweep}/trials/trial1: interrupted: nobody trains it; the same command continues it"]
    assert sorted(OLD.rglob("*")) == before


def test_the_command_tells_a_training_too(capsys: pytest.CaptureFixture[str]) -> None:
    assert status([str(OLD / "train" / "exp")]) == 0
    first, progress = capsys.readouterr().out.splitlines()
    assert first == f"{OLD / 'train' / 'exp'}: stopped (interrupted); the same command continues it"
    assert progress.startswith("epoch 3 of 4, step 5, 152.4 images/s, ")
