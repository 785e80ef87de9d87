"""Families of other packages: a toy one end to end, and what is refused."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from ray_yolo.core.cache_folder import cache_folder
from tests.unit.models.test_plugins import install

TRAIN = ["train", "--data", "shapes8", "--model", "toy", "--imgsz", "64", "--epochs", "40", "--batch-size", "4",
         "--microbatch", "2", "--num-workers", "0", "--noplots", "--mlflow-uri", "off", "--name", "mine"]


def start(folder: Path, *words: str, site: Path | None = None) -> subprocess.Popen[str]:
    """A command in a process that has the packages in `site`."""
    program = (f"import sys; sys.path[:0] = {[str(site)] * bool(site)!r}; sys.argv = ['ray_yolo', *{list(words)!r}]\n"
               "from ray_yolo.cli import console\nsys.exit(console())")
    return subprocess.Popen([sys.executable, "-c", program], cwd=folder, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
                            text=True)


def run(folder: Path, *words: str, site: Path | None = None) -> tuple[int, str]:
    """The exit status of a command and what it printed."""
    process = start(folder, *words, site=site)
    output = "".join(process.communicate())
    return process.returncode, output


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_a_plugin_family_works_in_every_command_and_is_refused_where_missing(
        tmp_path: Path) -> None:
    site, run_dir = install(tmp_path / "site"), tmp_path / "runs" / "train" / "mine"
    training = start(tmp_path, *TRAIN, site=site)
    while training.poll() is None and not list(run_dir.glob("checkpoints/step-*/MANIFEST.json")):
        time.sleep(0.05)
    training.send_signal(signal.SIGINT)
    training.communicate()
    assert training.returncode == 130
    status, output = run(tmp_path, *TRAIN, site=site)
    assert status == 0, output
    assert json.loads((run_dir / "run.json").read_text())["provenance"]["toy_family"] == "1.5"
    weights, pictures = str(run_dir / "weights" / "best.pt"), cache_folder() / "shapes8-v2" / "images" / "val"
    for words in (["val", "--noplots"], ["predict", "--source", str(pictures)], ["export", "--format", "torchscript"]):
        status, output = run(tmp_path, *words, "--weights", weights, site=site)
        assert status == 0, output
    assert "toy_family 1.5: toy" in run(tmp_path, "checks", site=site)[1]
    status, output = run(tmp_path, "val", "--weights", weights)
    assert status == 2
    assert "is of the package toy_family (version 1.5), which is not installed here" in output
