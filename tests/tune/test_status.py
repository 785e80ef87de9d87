"""What `status` says of a sweep and of a training that were interrupted."""

from __future__ import annotations

from pathlib import Path

import pytest

from ray_yolo.cli import status
from ray_yolo.config.recipe import Recipe
from ray_yolo.tune.status import describe_sweep

RECIPE = Recipe(epochs=3, batch_size=8, microbatch=4, precision="fp32")


def test_a_sweep_is_described_with_its_trials_and_left_as_it_is(sweep: Path) -> None:
    before = sorted(sweep.rglob("*"))
    first, header, best, second, *_ = describe_sweep(sweep)
    assert first == (f"{sweep}: interrupted: the same command continues it; 2 trials, 1 trained to the end; "
                     "best 0.2500 (trial 0)")
    assert (header.split(), best.split()) == (["trial", "epochs", "fitness"], ["0", "3", "0.2500"])
    assert second == f"  {sweep}/trials/trial1: stopped (interrupted); the same command continues it"
    assert sorted(sweep.rglob("*")) == before


def test_the_command_tells_a_training_too(training: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert status([str(training)]) == 0
    first, progress = capsys.readouterr().out.splitlines()
    assert first == f"{training}: stopped (interrupted); the same command continues it"
    assert progress.startswith("epoch 2 of 3, step 15, 100 images/s, ")
