"""The pages: they build without a warning, their commands are accepted, and the notebook runs."""

from __future__ import annotations

import json
import re
import shlex
from pathlib import Path

import pytest

from ray_yolo.cli import COMMANDS, COMPARE, EXPORT, PREDICT, REPLAY, SERVE, TRAIN, TUNE, VAL
from ray_yolo.config.flags import parse

ROOT = Path(__file__).parents[2]
DOCS = ROOT / "docs"
PAGES = {path.stem: path.read_text() for path in DOCS.glob("*.md")}
PARSED = {"train": TRAIN, "val": VAL, "predict": PREDICT, "export": EXPORT, "serve": SERVE, "tune": TUNE,
          "replay": REPLAY, "compare": COMPARE}
OTHERS = {"--address", "--head", "--dashboard-agent-listen-port", "--working-dir", "--temp-dir",  # Ray's
          "--entrypoint-num-cpus",
          "--index-url", "--no-deps", "--backend-store-uri", "--logdir"}  # pytest, pip, ...
UNPARSED = ("--against", "--runs", "--exit-code", "--price")  # of checks, verify and status: parsers of their own
FOREIGN = re.compile(r"(?:(?:python tests/benchmarks/)?run\.py|trtexec|curl|torchrun) [^\n`]*")  # other programs
COMMAND = re.compile(r"^(?:    )?(?:python -m ray_yolo\.|ray_yolo )(\w+) (.*)$", re.MULTILINE)
IN_TABLES = ("coming_from_ultralytics",)  # tests/process/test_coming_from_ultralytics.py reads it
MIGRATION = "coming_from_yolov5"  # may also name flags of YOLOv5 that are answered with what to use instead
FLAG = re.compile(r"(?<![\w-])--[a-z][\w-]+")


@pytest.mark.parametrize("name", sorted(PAGES.keys() - {*IN_TABLES}))
def test_commands_and_flags_of_a_page_are_ours(name: str) -> None:
    text = FOREIGN.sub("", PAGES[name].replace("\\\n", " "))
    for command, words in COMMAND.findall(text):
        if command in PARSED:
            known_run = PARSED[command]._replace(inherit=lambda source, given: {})  # of --from
            parse(known_run, shlex.split(words, comments=True))
        else:
            assert command in COMMANDS
    ours = {flag for command in PARSED.values() for flag in command.flags} | {"--mlflow-uri", *UNPARSED}
    known = {flag for command in PARSED.values() for flag in command.unsupported} if name == MIGRATION else set()
    assert set(FLAG.findall(text)) - ours - known - OTHERS == set()


@pytest.mark.parametrize("name", sorted(PAGES))
def test_a_page_stands_alone(name: str) -> None:
    """It includes nothing of the README, and names only files of the clone that exist."""
    assert "README.md\n" not in "".join(re.findall(r"\{include\}.*\n", PAGES[name]))
    paths = re.findall(r"`((?:cluster|docs|ray_yolo|tests|tune_spaces)/[\w./-]+)`", PAGES[name])
    assert [path for path in paths if not (ROOT / path).exists()] == []


def test_the_notebook_holds_no_outputs() -> None:
    cells = json.loads((DOCS / "first_training.ipynb").read_text())["cells"]
    assert [cell for cell in cells if cell.get("outputs")] == []
