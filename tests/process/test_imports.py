"""What each command imports: seconds of every start, and what fails where a library is broken."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from ray_yolo.runtime.trainer import fit
from tests.support import run_log
from tests.support.jobs import make_config, make_dataset
from tests.support.pictures import smooth_picture, write_image
from tests.support.weights import make_weights

HEAVY = ("torch", "ray", "mlflow", "pandas", "matplotlib")
CHECK = """
import sys
from ray_yolo import cli
status = getattr(cli, sys.argv[1])(sys.argv[2:])
sys.exit(status or print("imported", *(m for m in {heavy} if m in sys.modules)))
"""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Weights, a data set, a picture, the log of a run, and a trained run."""
    folder = tmp_path_factory.mktemp("imports")
    (folder / "trained").mkdir()
    make_weights(folder / "made", data=str(make_dataset(folder / "data"))).rename(folder / "best.pt")
    write_image(folder / "a.png", smooth_picture(48, 64))
    fit(make_config(folder / "trained", 0, epochs=1), quiet=True)
    run = folder / "runs" / "train" / "exp"
    run.mkdir(parents=True)
    (run / "run.json").write_text("{}")
    run_log.write(run / "events.jsonl", [run_log.run(), run_log.start(), *run_log.trained_epoch(0)])
    return folder


def imported(folder: Path, command: str, *words: str) -> set[str]:
    """The heavy libraries that a command has imported when it ends."""
    done = subprocess.run([sys.executable, "-c", CHECK.format(heavy=HEAVY), command, *words], cwd=folder, check=False,
                          capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return set(done.stdout.splitlines()[-1].split()[1:])


@pytest.mark.parametrize(("command", "words", "libraries"), [
    ("status", "runs/train/exp", set()),
    ("list_runs", "runs/train", set()),
    ("val", "--weights best.pt --noplots", {"torch"}),
    ("predict", "--weights best.pt --source a.png --nosave", {"torch"}),
    ("export", "--weights best.pt --format torchscript", {"torch"}),
    ("replay", "trained/runs/train/exp --step 1 --noplots", {"torch"}),
])
def test_a_command_imports_what_it_needs(folder: Path, command: str, words: str, libraries: set[str]) -> None:
    assert imported(folder, command, *words.split()) == libraries


REFUSED = """
import sys
from ray_yolo import cli
from ray_yolo.core.errors import InputError
for command in sys.argv[1:]:
    name, *words = command.split()
    try:
        getattr(cli, name)(words)
    except InputError as error:
        print(error, *(m for m in {heavy} if m in sys.modules), sep=" | ")
"""


def test_paths_that_do_not_exist_are_refused_before_what_reads_them_is_imported(tmp_path: Path) -> None:
    data, weights = "no.yaml: no such file", f"{tmp_path}/no.pt: no such weights file"
    refusals = {
        "train --data no.yaml": data, "tune --data no.yaml": data, "compare base lr0=0.1 --data no.yaml": data,
        "checks --data no.yaml": data, "train --weights no.pt --data shapes8": weights, "val --weights no.pt": weights,
        "predict --weights no.pt --source 0": weights, "export --weights no.pt": weights,
        "train --model no.yaml --data shapes8": "no.yaml: cannot be read", "train --resume no": "resume: no is neither",
        f"predict --weights {__file__} --source no": "source: no: no such file or folder"}
    done = subprocess.run([sys.executable, "-c", REFUSED.format(heavy=HEAVY), *refusals], cwd=tmp_path, check=True,
                          capture_output=True, text=True)
    lines = done.stdout.splitlines()
    assert len(lines) == len(refusals)
    for line, text in zip(lines, refusals.values(), strict=True):
        assert line.startswith(text)
        assert " | " not in line


def test_an_unfinished_run_needs_its_initial_weights_no_more(tmp_path: Path) -> None:
    """What it has saved contains them."""
    run = tmp_path / "runs" / "train" / "exp"
    run.mkdir(parents=True)
    (run / "run.json").write_text("{}")
    command = "train --weights no.pt --data shapes8"
    done = subprocess.run([sys.executable, "-c", REFUSED.format(heavy=HEAVY), command], cwd=tmp_path, check=False,
                          capture_output=True, text=True)
    assert "torch" in done.stdout or done.returncode  # it goes on to look at the run
