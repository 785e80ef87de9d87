"""What `make gpu-test` runs, tried on a CPU with tiny sizes."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
ABSENT = ("ray", "mlflow", "pytest", "psutil", "scipy", "matplotlib", "onnx", "onnxruntime", "optuna", "fsspec")
RUN = f"""
import runpy, sys
sys.modules.update(dict.fromkeys({ABSENT}))
sys.argv = sys.argv[1:]
runpy.run_path(sys.argv[0], run_name="__main__")
"""


def run(*flags: str | Path) -> subprocess.CompletedProcess[str]:
    script = ROOT / "tests" / "benchmarks" / "gpu.py"
    return subprocess.run([sys.executable, "-c", RUN, script, *flags], capture_output=True, text=True,
                          env={"PYTHONPATH": str(ROOT), "PATH": "/usr/bin"})


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_every_check_passes_without_ray_and_mlflow(tmp_path: Path) -> None:
    done = run("--device", "cpu", "--quick", "--write", tmp_path / "table.md")
    assert done.returncode == 0, done.stdout + done.stderr
    table = (tmp_path / "table.md").read_text()
    assert table == done.stdout
    rows = [line.split(" | ") for line in table.splitlines() if line.startswith("| ")][1:]
    assert [row[1] for row in rows] == ["ok"] * 12


def test_without_a_gpu_it_says_so() -> None:
    done = run("--device", "cuda")
    assert (done.returncode, done.stdout) == (2, "")
    assert "torch sees no GPU here" in done.stderr
