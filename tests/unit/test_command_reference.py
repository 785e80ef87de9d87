"""The site's command reference asks each command for its parser."""

import importlib.util
from pathlib import Path

from ray_yolo.cli import COMMANDS

FILE = Path(__file__).parents[2] / "docs/command_reference.py"


def test_each_command_has_a_parser():
    spec = importlib.util.spec_from_file_location("command_reference", FILE)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    assert len(module.parsers()) == len(COMMANDS)
