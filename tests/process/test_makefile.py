"""What `make` installs with, shown by programs that only write down how they were called."""

import os
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
FAKE_VENV = """#!/bin/sh
mkdir -p "$3/bin" && cp "{programs}"/* "$3/bin"
"""


@pytest.mark.parametrize("uv_works", [True, False])
def test_uv_installs_from_pips_index_under_the_constraints_and_pip_where_uv_cannot(uv_works: bool,
                                                                                   tmp_path: Path) -> None:
    programs, calls = tmp_path / "programs", tmp_path / "calls"
    programs.mkdir()
    bodies = {"uv": f'echo "uv $UV_DEFAULT_INDEX $*" >> {calls}; exit {0 if uv_works else 1}',
              "pip": f'[ "$1" = config ] && echo https://index.test/simple || echo "pip $*" >> {calls}',
              "python": "true"}
    for name, body in {**bodies, "make_venv": FAKE_VENV.format(programs=programs)}.items():
        (programs / name).write_text(f"#!/bin/sh\n{body}\n")
        (programs / name).chmod(0o755)
    venv = tmp_path / "venv"
    environment = {"PATH": os.environ["PATH"]}
    subprocess.run(["make", f"VENV={venv}", f"PYTHON={programs}/make_venv", f"{venv}/.dev"], cwd=ROOT, check=True,
                   env=environment, capture_output=True, timeout=60)

    called = calls.read_text().splitlines()
    assert called[0] == "pip install --quiet uv"
    by_uv = [line for line in called if line.startswith("uv https://index.test/simple pip install ")]
    by_pip = [line for line in called[1:] if line.startswith("pip install ")]
    assert [line.split(" -c ")[1] for line in by_uv] == ["constraints.txt -e .", "constraints.txt -e .[dev]"]
    assert [line.split(" -c ")[1] for line in by_pip] == (
        [] if uv_works else ["constraints.txt -e .", "constraints.txt -e .[dev]"])
