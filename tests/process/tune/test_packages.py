"""Sides of a comparison that another ray_yolo trains: what is run, what is said of it, and how it fails."""

from __future__ import annotations

import os
import shutil
import stat
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import ray

import ray_yolo
from ray_yolo import cli
from ray_yolo.config.placement import Placement
from ray_yolo.core.errors import InputError, RayYoloError, ResourcesError, TrainingError
from ray_yolo.tune.packages import CommandTraining, Package, describe_packages, find_package

SOURCES = Path(ray_yolo.__file__).parent
FLAGS = ("--data", "shapes8", "--model", "yolov5n", "--imgsz", "64", "--epochs", "2", "--batch-size", "8", "--pairs",
         "3", "--workers-per-training", "0", "--mlflow-uri", "off", "--set", "optimizer.nominal_batch=8",
         "--set", "schedule.warmup_epochs=0")


def checkout(folder: Path) -> Path:
    """A folder with a copy of this package."""
    shutil.copytree(SOURCES, folder / "ray_yolo", ignore=shutil.ignore_patterns("__pycache__"))
    return folder


def executable(path: Path, lines: str) -> str:
    """A program that takes the place of a side's Python."""
    path.write_text(f"#!/bin/sh\n{lines}\n")
    path.chmod(path.stat().st_mode | stat.S_IXUSR)
    return str(path)


def stand_in(python: str) -> Package:
    return Package(python, "", "", "", "", {})


def test_a_version_with_another_default_is_another_side(
        tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    changed = checkout(tmp_path / "changed") / "ray_yolo/config/sections.py"
    text = changed.read_text()
    assert text.count("    lr0: float = Field(0.01,") == 1
    changed.write_text(text.replace("lr0: float = Field(0.01,", "lr0: float = Field(0.03,"))
    folder = tmp_path / "work"
    folder.mkdir()
    monkeypatch.chdir(folder)
    checkout(folder)  # the current folder is no package of a side
    assert cli.compare(["base", "base", "--package-b", "../changed", "--seed", "3", *FLAGS]) == 0
    said = capsys.readouterr().out
    assert f"A is trained by ray_yolo {ray_yolo.__version__} in {SOURCES} (sources " in said
    assert f"B is trained by ray_yolo {ray_yolo.__version__} in {tmp_path}/changed/ray_yolo (sources " in said
    assert "weights of A and B: equal, bit for bit, in 0 of 3 pairs\n" in said
    assert "trained with optimizer.lr0: 0.01 in A, 0.03 in B\n" in said
    assert "settings that only" not in said
    assert cli.status(["runs/compare/exp"]) == cli.verify(["runs/compare/exp"]) == 0
    assert "trained with optimizer.lr0: 0.01 in A, 0.03 in B" in capsys.readouterr().out
    assert "trained with optimizer.lr0" in Path("runs/compare/exp/report.html").read_text()


def test_commands_with_workers_need_no_ray_in_the_comparison_itself(
        tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each command starts its own."""
    monkeypatch.chdir(tmp_path)
    lines = f"""case "$*" in *ray_yolo.train*) echo "ConfigError: $*"; exit 2;; esac; exec "{sys.executable}" "$@" """
    python = executable(tmp_path / "python", lines)
    flags = ["--package-a", python, *FLAGS, "--workers-per-training", "1"]
    with pytest.raises(InputError, match=r"pair1-a: ConfigError: .*--num-workers[ =]1"):
        cli.compare(["base", "lr0=0.02", *flags])
    assert not ray.is_initialized()


def test_equal_packages_are_said_to_be_equal(tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
                                             capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.chdir(tmp_path)
    checkout(tmp_path / "same")
    assert cli.compare(["base", "base", "--package-b", "same", "--dry-run", *FLAGS]) == 0
    said = capsys.readouterr().out
    assert "# A and B have equal packages: ray_yolo" in said
    assert "# A and B have equal settings, so both trainings of a pair are the same" in said
    assert not Path("runs").exists()


def test_a_package_is_a_checkout_an_environment_or_a_python(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    own = find_package("", "--package-a")
    assert (own.python, own.folder, own.version) == (sys.executable, str(SOURCES), ray_yolo.__version__)
    assert find_package(sys.executable, "--package-a").identity == own.identity
    checkout(tmp_path / "one")
    one = find_package("one", "--package-a")
    assert one.folder == str(tmp_path / "one/ray_yolo")
    assert one.identity == own.identity
    (tmp_path / "one/ray_yolo/__init__.py").write_text('"""Another."""\n__version__ = "9"\n')
    assert find_package("one", "--package-a").version == "9"
    (tmp_path / "env/bin").mkdir(parents=True)
    executable(tmp_path / "env/bin/python", f'exec "{sys.executable}" "$@"')
    assert find_package("env", "--package-a").python == str(tmp_path / "env/bin/python")


@pytest.mark.parametrize(("make", "message"), [
    (lambda folder: folder, r"--package-b: .*: is no checkout of ray_yolo"),
    (lambda folder: folder / "absent", r"--package-b: .*absent: is no checkout"),
    (lambda folder: executable(folder / "python", "echo 'ModuleNotFoundError: No module named ray_yolo' >&2; exit 1"),
     r"cannot import ray_yolo \(ModuleNotFoundError: No module named ray_yolo\); give the folder"),
])
def test_what_is_no_package_is_refused(tmp_path: Path, make: Callable[[Path], object], message: str) -> None:
    with pytest.raises(InputError, match=message):
        find_package(str(make(tmp_path)), "--package-b")


@pytest.mark.parametrize(("exit_code", "error"), [(2, InputError), (4, ResourcesError), (7, TrainingError)])
def test_a_command_that_fails_ends_the_comparison(tmp_path: Path, exit_code: int, error: type[RayYoloError]) -> None:
    python = executable(tmp_path / "python", f"echo 'ConfigError: b.yaml:1: unknown'; echo bye; exit {exit_code}")
    packages = stand_in(sys.executable), stand_in(python)
    trainings = CommandTraining(tmp_path, packages, ({}, {}), Placement(), lambda: None)
    with pytest.raises(error, match=r"pair1-b: ConfigError: b.yaml:1: unknown \(all output: .*/output/pair1-b.txt\)"):
        trainings.train("pair1-b", 1, 3, 2)


def test_a_comparison_that_fails_ends_its_command(tmp_path: Path) -> None:
    """Otherwise the training would hold its run and its GPU."""
    python = executable(tmp_path / "python", f"echo $$ > {tmp_path}/pid; exec sleep 300")

    def full_disk() -> None:
        if (tmp_path / "pid").exists():
            raise OSError("no space left")

    trainings = CommandTraining(tmp_path, (stand_in(python), stand_in("")), ({}, {}), Placement(), full_disk)
    with pytest.raises(OSError, match="no space left"):
        trainings.train("pair1-a", 0, 3, 2)
    pid = int((tmp_path / "pid").read_text())
    with pytest.raises(ProcessLookupError):
        os.kill(pid, 0)


def test_a_training_that_diverges_has_a_reason(tmp_path: Path) -> None:
    python = executable(tmp_path / "python", "echo 'TrainingError: the loss is not finite' >&2; exit 3")
    trainings = CommandTraining(tmp_path, (stand_in(python), stand_in("")), ({}, {}), Placement(), lambda: None)
    outcome = trainings.train("pair1-a", 0, 3, 2)
    assert (outcome.fitness, outcome.reason) == (None, "TrainingError: the loss is not finite")


def test_a_command_gets_the_settings_of_its_side_and_those_of_the_placement_that_were_given(tmp_path: Path) -> None:
    python = executable(tmp_path / "python", f'for word; do echo "$word"; done > "{tmp_path}/words"; exit 3')
    placement = Placement(num_workers=2, noplots=True, cpus_per_worker=1.5, storage_path="/shared",
                          mlflow_uri="http://x")
    settings = {"optimizer.lr0": 0.1, "classes": [0, 2], "imgsz": 64}
    trainings = CommandTraining(tmp_path, (stand_in(""), stand_in(python)), ({}, settings), placement, lambda: None)
    trainings.train("pair2-b", 1, 7, 2)
    words = (tmp_path / "words").read_text().split("\n")[:-1]
    assert words == [
        "-m", "ray_yolo.train", "--hyp", f"{tmp_path}/b.yaml", "--seed", "7", "--num-workers", "2", "--cpus-per-worker",
        "1.5", "--project", f"{tmp_path}/trials", "--name", "pair2-b", "--mlflow-uri", "off", "--keep-checkpoints", "1",
        "--noplots"]
    assert (tmp_path / "b.yaml").read_text() == "optimizer.lr0: 0.1\nclasses: [0, 2]\nimgsz: 64\n"


def test_packages_are_described() -> None:
    one = Package("python", "", "/one", "1.0", "ab", {"Python": "3.12", "torch": "2.9"})
    other = one._replace(folder="/other", libraries={"Python": "3.12", "torch": "2.10"})
    assert describe_packages((one, other)) == [
        "A is trained by ray_yolo 1.0 in /one (sources ab), Python 3.12, torch 2.9",
        "B is trained by ray_yolo 1.0 in /other (sources ab), Python 3.12, torch 2.10"]
    assert describe_packages((one, one._replace(folder="/other"))) == [
        "A and B have equal packages: ray_yolo 1.0 in /one (sources ab), Python 3.12, torch 2.9"]
