"""The two commands of README that check "the same weights": read from the page, run, and compared bit by bit."""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from ray_yolo.checkpoints.state_file import read_state, tensors
from ray_yolo.cli import parse_train
from ray_yolo.config.recipe import recipe_digest, resolved_batch

ROOT = Path(__file__).parents[2]


def commands() -> list[list[str]]:
    """The words of each command below the heading, without `python`."""
    section = (ROOT / "README.md").read_text().partition("### The same weights\n")[2]
    block = re.search(r"```bash\n(.*?)```", section, re.DOTALL)
    assert block is not None
    return [shlex.split(line)[1:] for line in block[1].splitlines()]


def test_the_commands_differ_in_the_workers_alone() -> None:
    one, two, check = commands()
    first, second = (parse_train(words[2:]).config for words in (one, two))
    assert recipe_digest(first.recipe) == recipe_digest(second.recipe)
    batch, micro = resolved_batch(first.recipe)
    assert batch // micro >= 2  # each of two workers has a share
    assert first.placement.num_workers != second.placement.num_workers
    assert check[1] == "ray_yolo.verify"


@pytest.mark.ray
@pytest.mark.slow
@pytest.mark.timeout(900)
def test_the_commands_of_readme_end_with_the_same_bits(tmp_path: Path) -> None:
    environment = {**os.environ, "RAY_YOLO_CACHE": str(tmp_path / "cache"), "MLFLOW_TRACKING_URI": ""}
    for words in commands():
        done = subprocess.run([sys.executable, *words], cwd=tmp_path, env=environment, capture_output=True, text=True)
        assert done.returncode == 0, done.stdout + done.stderr
    one, two = (read_state(tmp_path / "runs" / "train" / name / "weights" / "last.pt") for name in ("one", "two"))
    pairs = list(zip(tensors(one), tensors(two), strict=True))
    assert len(pairs) > 100
    for (name, left), (other, right) in pairs:
        assert name == other
        assert torch.equal(left, right), name
