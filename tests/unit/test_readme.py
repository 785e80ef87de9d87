"""Runs every block of the README as a new user would: from the installed wheel, in an empty folder, with an empty
environment. A block that needs more states it; then at least its flags must be ours.
"""

from __future__ import annotations

import re
import shlex
from pathlib import Path
from typing import NamedTuple

import pytest

from ray_yolo.cli import COMPARE, EXPORT, PREDICT, REPLAY, SERVE, TRAIN, TUNE, VAL
from ray_yolo.config.flags import parse

ROOT = Path(__file__).parents[2]
BLOCK = re.compile(r"(?:<!-- needs: (?P<needs>[^>]*) -->\n)?```(?P<language>bash|python)\n(?P<code>.*?)```", re.DOTALL)
EXTRA, SERVING, HEAD = "pip install '.[export]'", "pip install '.[serve]'", "ray start --head"
MINUTES, DEMO = "minutes", "make demo"
PARSED = {"train": TRAIN, "val": VAL, "predict": PREDICT, "export": EXPORT, "serve": SERVE, "tune": TUNE,
          "replay": REPLAY, "compare": COMPARE}
LINK = re.compile(r"\]\((?!https?:)([^)#]+)\)")


class Block(NamedTuple):
    needs: str | None
    language: str
    code: str


TEXT = (ROOT / "README.md").read_text()
BLOCKS = [Block(*match.group("needs", "language", "code")) for match in BLOCK.finditer(TEXT)]


def test_every_block_is_found() -> None:
    assert TEXT.count("```bash") + TEXT.count("```python") == len(BLOCKS)


@pytest.mark.parametrize("needs", [EXTRA, SERVING, HEAD, DEMO])
def test_the_line_above_a_block_states_its_needs(needs: str) -> None:
    before = TEXT.partition(f"<!-- needs: {needs} -->")[0].splitlines()[-2]
    assert f"`{needs}`" in before


def test_the_files_that_the_readme_names_exist() -> None:
    paths = [*LINK.findall(TEXT), *re.findall(r"`(ray_yolo/[\w/]+\.py)`", TEXT)]
    assert len(paths) > 15
    assert [path for path in paths if not (ROOT / path).exists()] == []


def test_commands_of_the_other_blocks_are_accepted() -> None:
    code = "".join(block.code for block in BLOCKS if block.needs).replace("\\\n", " ")
    commands = re.findall(r"python -m ray_yolo\.(\w+) (.*)", code)
    assert {name for name, _ in commands} >= {"train", "tune", "export", "serve"}
    for name, flags in commands:
        parse(PARSED[name], shlex.split(flags, comments=True))
