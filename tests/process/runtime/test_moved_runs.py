"""A run folder that is moved, removed or replaced while its training runs: the training ends, and writes nothing more.

Also what resumes from a run.json that a flipped bit has changed.
"""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from ray_yolo import cli
from ray_yolo.core.events import CheckpointEvent, StepEvent
from ray_yolo.runs.event_log import EVENTS_FILE, read_events
from ray_yolo.runs.verification import check_files
from tests.support import run_log
from tests.support.train_command import command, start

MOVED = "was moved, removed or replaced while this training ran"


def wait_for(condition: Callable[[], object], seconds: float = 200.0) -> None:
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.02)


def contents(folder: Path) -> dict[str, bytes]:
    return {path.relative_to(folder).as_posix(): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def saved_steps(run: Path) -> list[int]:
    return [event.step for event in run_log.events_of(run, CheckpointEvent)]


class LongTraining:
    """A training in the background, whose first checkpoint is saved."""

    def __init__(self, tmp_path: Path, num_workers: int) -> None:
        argv = command(tmp_path, tmp_path, num_workers)
        argv[argv.index("--epochs") + 1] = "400"
        self.run = tmp_path / "runs" / "train" / "exp"
        self.argv = [*argv, "--name", "exp", "--noval", "--mlflow-uri", "off"]
        self.process = start(self.argv, tmp_path)

    def end(self) -> str:
        """Wait for its end. Returns what it wrote to stderr."""
        return self.process.communicate(timeout=120)[1].decode()


@pytest.fixture
def begin(tmp_path: Path) -> Iterator[Callable[[int], LongTraining]]:
    """Start a training on a number of workers."""
    begun = []

    def start_one(num_workers: int) -> LongTraining:
        training = LongTraining(tmp_path, num_workers)
        begun.append(training)
        wait_for(lambda: (training.run / "weights" / "last.json").exists() or training.process.poll() is not None)
        return training

    yield start_one
    for training in begun:
        training.process.kill()
        training.process.communicate()


@pytest.mark.parametrize("num_workers", [0, pytest.param(2, marks=pytest.mark.ray)])
def test_a_moved_run_ends_and_continues_at_its_new_place(
        begin: Callable[[int], LongTraining], tmp_path: Path, num_workers: int) -> None:
    training = begin(num_workers)
    run, moved = training.run, tmp_path / "archive" / "run"
    moved.parent.mkdir()
    run.rename(moved)
    errors = training.end()
    assert training.process.returncode == 3, errors
    [line] = [line for line in errors.splitlines() if MOVED in line]
    assert str(run) in line
    assert not run.exists()
    assert not (moved / "finished").exists()
    assert [check for check in check_files(moved) if check.problem] == []
    before = saved_steps(moved)[-1]
    again = subprocess.run([*training.argv[:3], "--resume", str(moved), "--num-workers", "0", "--mlflow-uri", "off",
                            "--stop-after", "1"], cwd=tmp_path, check=False, capture_output=True, text=True)
    assert again.returncode == 0, again.stderr
    assert saved_steps(moved)[-1] >= before
    assert not run.exists()


def test_a_removed_run_ends_without_being_made_again(begin: Callable[[int], LongTraining], tmp_path: Path) -> None:
    training = begin(0)
    training.run.rename(tmp_path / "gone")  # at once, as the training writes into it
    shutil.rmtree(tmp_path / "gone")
    errors = training.end()
    assert training.process.returncode == 3, errors
    assert errors.count(MOVED) == 1
    assert "Traceback" not in errors
    assert not training.run.exists()


def test_a_training_that_takes_the_name_keeps_its_files(
        begin: Callable[[int], LongTraining], tmp_path: Path) -> None:
    training = begin(0)
    moved = tmp_path / "moved"
    training.run.rename(moved)
    other = [*training.argv, "--epochs", "1", "--seed", "5"]
    subprocess.run(other, cwd=tmp_path, check=True, capture_output=True)
    its_own = contents(training.run)
    errors = training.end()
    assert training.process.returncode == 3, errors
    assert MOVED in errors
    assert contents(training.run) == its_own
    assert all(check.problem is None for check in check_files(training.run))
    assert json.loads((training.run / "run.json").read_bytes())["recipe"]["seed"] == 5
    assert json.loads((moved / "run.json").read_bytes())["recipe"]["seed"] == 0


def test_a_flipped_bit_in_the_recipe_of_a_run_is_refused(
        tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    argv = [*command(tmp_path, tmp_path, 0), "--seed", "3", "--stop-after", "1", "--mlflow-uri", "off"]
    subprocess.run(argv, cwd=tmp_path, check=True, capture_output=True)
    run = tmp_path / "runs" / "train" / "exp"
    whole = (run / "run.json").read_text()
    content = json.loads(whole)
    content["recipe"]["seed"] = 2
    flipped = json.dumps(content, indent=1)
    earlier = json.dumps({**{name: value for name, value in content.items() if name != "checksum"}, "format": 1})
    for text in (flipped, earlier):  # run.json of an earlier version has no checksum
        (run / "run.json").write_text(text)
        before = contents(run)
        assert cli.run(lambda: cli.train(["--resume", str(run), "--num-workers", "0"])) == 2
        assert "run.json says seed=2, and step-" in (error := capsys.readouterr().err)
        assert "was trained with seed=3" in error
        assert {name: data for name, data in contents(run).items() if name != ".lock"} == {
            name: data for name, data in before.items() if name != ".lock"}
        assert cli.run(lambda: cli.verify([str(run)])) == 3
        assert "was trained with seed=3, and run.json says seed=2" in capsys.readouterr().out
    (run / "run.json").write_text(whole)
    assert cli.run(lambda: cli.verify([str(run)])) == 0
    assert not re.search("seed", capsys.readouterr().out)
    assert run_log.only(StepEvent, read_events(run / EVENTS_FILE))
