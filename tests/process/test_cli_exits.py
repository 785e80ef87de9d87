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


@pytest.mark.parametrize("closed", [(0, 1, 2), (1,)])
def test_closed_standard_streams_lose_what_is_printed_and_nothing_else(tmp_path: Path, closed: tuple[int, ...]) -> None:
    """`>&-`: the next file that was opened got the number of the output, and the end was a traceback."""
    program = ("import sys\nfrom ray_yolo.entry import open_standard_streams\nopen_standard_streams()\n"
               "from ray_yolo.cli import run\nwith open(sys.argv[1], 'w') as file:\n"
               "    code = run(lambda: print('text') or file.write(str(file.fileno() > 2)) and 7)\nsys.exit(code)")
    done = subprocess.run([sys.executable, "-c", program, tmp_path / "file"], cwd=ROOT, check=False,
                          preexec_fn=lambda: [os.close(number) for number in closed])
    assert (done.returncode, (tmp_path / "file").read_text()) == (7, "True")
