"""Commands that read runs write nothing into them and take no lock: they need no right, and hinder no training."""

from __future__ import annotations

import shutil
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path

import pytest

from ray_yolo import cli
from ray_yolo.runs.folders import is_held, lock_file
from ray_yolo.runs.run_state import read_state
from ray_yolo.runtime.trainer import fit
from ray_yolo.sinks.run_page import run_page
from tests.support.audit import watched
from tests.support.jobs import make_config


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run with checkpoints, weights and one permanent epoch."""
    folder = tmp_path_factory.mktemp("readers")
    return fit(make_config(folder, 0, {"mlflow_uri": "off"}, epochs=1, noval=False), quiet=True).run_dir


def fork(run: Path, place: Path) -> object:
    return cli.train(["--from", str(run), "--storage-path", str(place), "--dry-run"])


def replay(run: Path, place: Path) -> object:
    return cli.replay([str(run), "--step", "2", "--storage-path", str(place)])


@pytest.mark.parametrize("read", [
    lambda run, _: cli.status([str(run)]),
    lambda run, _: cli.list_runs([str(run.parent)]),
    lambda run, _: cli.verify([str(run), str(run)]),
    lambda run, _: cli.verify([str(run / "weights" / "last.pt")]),
    lambda run, _: run_page(run, read_state(run)),
    fork, replay,
], ids=["status", "list", "verify", "verify a file", "report", "from", "replay"])
def test_readers_neither_write_nor_lock(run: Path, tmp_path: Path, read: Callable[[Path, Path], object],
                                        monkeypatch: pytest.MonkeyPatch) -> None:
    copy = tmp_path / "project" / "exp"
    shutil.copytree(run, copy)
    (copy / "finished").unlink()
    monkeypatch.chdir(tmp_path)
    before = {path: path.stat().st_mtime_ns for path in copy.rglob("*")}
    with watched() as deeds:
        read(copy, tmp_path / "elsewhere")
    assert [path for path in (*deeds.changed, *deeds.locked) if path.is_relative_to(copy.parent)] == []
    assert {path: path.stat().st_mtime_ns for path in copy.rglob("*")} == before


def test_a_held_folder_is_seen_without_a_right_to_write(tmp_path: Path) -> None:
    assert not is_held(tmp_path)
    (tmp_path / ".lock").touch(mode=0o444)
    assert not is_held(tmp_path)
    with (tmp_path / ".lock").open("r+") as lock:
        assert lock_file(lock)
        with watched() as deeds:
            assert is_held(tmp_path)
        assert (deeds.changed, deeds.locked) == ([], [])
        code = ("from ray_yolo.runs.folders import is_held; from pathlib import Path\n"
                f"print(is_held(Path('{tmp_path}')))")
        assert subprocess.check_output([sys.executable, "-c", code], text=True) == "True\n"
    assert not is_held(tmp_path)


def test_a_busy_reader_never_keeps_a_driver_from_its_run(tmp_path: Path) -> None:
    (tmp_path / ".lock").touch()
    code = (f"from ray_yolo.runs.folders import is_held; from pathlib import Path\n"
            f"print('reads', flush=True)\nwhile True: is_held(Path('{tmp_path}'))")
    reader = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE)
    try:
        assert reader.stdout is not None
        assert reader.stdout.readline() == b"reads\n"
        refused = 0
        for _ in range(3000):
            with (tmp_path / ".lock").open("a") as lock:
                refused += not lock_file(lock)
        assert refused == 0
    finally:
        reader.kill()
        reader.communicate()


def test_a_driver_waits_for_one_that_looks_at_the_run(tmp_path: Path) -> None:
    with (tmp_path / ".lock").open("a") as looking, (tmp_path / ".lock").open("a") as driver:
        assert lock_file(looking)
        assert not lock_file(driver)
        threading.Timer(0.1, looking.close).start()
        assert lock_file(driver, wait_seconds=20.0)
