"""Every command block of the README is run here, or says what it needs; then at least its flags must be ours."""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import sys
from pathlib import Path
from typing import NamedTuple

import pytest

from ray_yolo.cli import parse_train

ROOT = Path(__file__).parents[1]
BLOCK = re.compile(r"(?:<!-- needs: (?P<needs>[^>]*) -->\n)?```(?P<language>bash|python)\n(?P<code>.*?)```", re.DOTALL)


class Block(NamedTuple):
    needs: str
    language: str
    code: str


TEXT = (ROOT / "README.md").read_text()
BLOCKS = [Block(*match.group("needs", "language", "code")) for match in BLOCK.finditer(TEXT)]


def test_no_command_block_escapes() -> None:
    assert TEXT.count("```bash") + TEXT.count("```python") == len(BLOCKS)


@pytest.mark.ray
def test_blocks_without_needs_run_one_after_the_other(tmp_path: Path) -> None:
    folder = Path(sys.executable).parent
    environment = {**os.environ, "PATH": f"{folder}:{os.environ['PATH']}", "PYTHONPATH": str(ROOT),
                   "RAY_YOLO_CACHE": str(tmp_path / "cache"), "OMP_NUM_THREADS": "1"}
    environment.pop("RAY_ADDRESS", None)
    blocks = [block for block in BLOCKS if not block.needs]
    assert len(blocks) >= 3
    for block in blocks:
        command = ["bash", "-euc", block.code] if block.language == "bash" else [sys.executable, "-c", block.code]
        done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=280)
        assert done.returncode == 0, f"{block.code}\n{done.stdout}\n{done.stderr}"


def test_training_commands_of_other_blocks_are_accepted() -> None:
    lines = [line for block in BLOCKS if block.needs for line in block.code.replace("\\\n", " ").splitlines()]
    commands = [line.partition("python -m ray_yolo.train ")[2] for line in lines if "python -m ray_yolo.train " in line]
    assert len(commands) >= 2
    for command in commands:
        parse_train(shlex.split(command, comments=True))
