"""How a command ends: exit status and what is said, for every way there is."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
pytestmark = pytest.mark.usefixtures("own_signal_handlers")


@pytest.mark.parametrize("unbuffered", ["", "1"])
def test_output_without_a_reader_ends_the_command_quietly(unbuffered: str) -> None:
    read_end, write_end = os.pipe()
    os.close(read_end)
    with os.fdopen(write_end, "wb") as closed:
        program = "import sys; from ray_yolo.cli import run; sys.exit(run(lambda: print('text') or 0))"
        done = subprocess.run([sys.executable, "-c", program], stdout=closed, stderr=subprocess.PIPE, cwd=ROOT,
                              check=False, env=os.environ | {"PYTHONUNBUFFERED": unbuffered})
    assert (done.returncode, done.stderr) == (141, b"")
