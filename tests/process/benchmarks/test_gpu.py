"""What `make gpu-test` runs, tried on a CPU with tiny sizes."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import torch

from tests.benchmarks import gpu

ROOT = Path(__file__).parents[3]
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
    assert [row[1] for row in rows] == ["ok"] * 24


def test_without_a_gpu_it_says_so() -> None:
    done = run("--device", "cuda")
    assert (done.returncode, done.stdout) == (2, "")
    assert "torch sees no GPU here" in done.stderr


def test_the_speed_row_runs_on_a_cpu() -> None:
    """The rows of speed are the first that a renamed field breaks: nothing else calls them outside a GPU machine."""
    found = gpu.measure_speed("yolov5n", "fp32", 64, batch=2, steps=1, device=torch.device("cpu"))
    assert " images/s (repeats within " in found
