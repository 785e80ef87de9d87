"""The commands: what each loads, and that it is there."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from tests.support.jobs import make_config
from tests.unit.test_cli import ROOT

pytestmark = pytest.mark.usefixtures("own_signal_handlers")


HEAVY = """
import sys
from ray_yolo import cli
for command in (cli.train, cli.val, cli.predict, cli.export):
    try:
        command(["--help"])
    except SystemExit:
        pass
print(sorted({"torch", "ray", "numpy", "mlflow", "cv2", "matplotlib"} & set(sys.modules)), file=sys.stderr)
"""


def test_help_is_fast_and_loads_no_library() -> None:
    before = os.times()
    done = subprocess.run([sys.executable, "-c", HEAVY], capture_output=True, text=True, cwd=ROOT, check=True)
    after = os.times()
    assert done.stderr == "[]\n"
    assert "--batch-size" in done.stdout
    cpu_seconds = after.children_user + after.children_system - before.children_user - before.children_system
    assert cpu_seconds < 1.0


WITHOUT_RAY = """
import os, sys
from ray_yolo import cli
status = cli.train(["--config", sys.argv[1]])
print(status, sorted({"ray", "torchvision", "torch._dynamo", "mlflow", "matplotlib"} & set(sys.modules)))
"""


def test_a_training_in_this_process_loads_neither_ray_nor_torchvision_nor_torchs_compiler(tmp_path: Path) -> None:
    config = make_config(tmp_path, 0, epochs=1, noval=False)
    (tmp_path / "config.yaml").write_text(yaml.safe_dump(config.model_dump(mode="json", exclude_defaults=True)))
    done = subprocess.run([sys.executable, "-c", WITHOUT_RAY, tmp_path / "config.yaml"], capture_output=True, text=True,
                          cwd=ROOT, check=True)
    assert done.stdout.splitlines()[-1] == "0 []"


def test_a_trials_process_does_not_load_torchs_compiler() -> None:
    """`import torchvision` would, and take as long as all the rest."""
    program = "import sys, ray_yolo.tune.trainable; print('torch' in sys.modules, 'torch._dynamo' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, cwd=ROOT, check=True)
    assert done.stdout == "True False\n"


def test_a_wrong_flag_ends_the_real_command_with_2() -> None:
    done = subprocess.run([sys.executable, "-m", "ray_yolo.train", "--epoch", "3"], capture_output=True, text=True,
                          cwd=ROOT, check=False)
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr == "InputError: unknown flag --epoch; did you mean --epochs?\n"
