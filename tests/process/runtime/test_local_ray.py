"""The folder and the process groups of a Ray of our own."""

from __future__ import annotations

import os
import signal
import stat
import subprocess
import sys
import time
from pathlib import Path

import pytest
import ray

from ray_yolo.config.placement import Placement
from ray_yolo.runtime import cluster
from ray_yolo.runtime.local_ray import in_own_groups, session_folder
from tests.support.train_command import command, start, steps
from tests.unit.runtime.test_local_ray import base

__all__ = ["base"]  # fixtures


def test_what_a_killed_process_has_left_is_removed_and_nothing_else(base: Path) -> None:
    code = ("from ray_yolo.runtime.local_ray import session_folder; import os; "
            "print(session_folder().parent, flush=True); os.kill(os.getpid(), {})")
    ended, killed = (Path(subprocess.run([sys.executable, "-c", code.format(number)], capture_output=True, text=True,
                                         check=False).stdout.strip()) for number in (0, 9))
    assert (ended.exists(), killed.exists()) == (False, True)
    live = session_folder().parent
    (base / "ray_yolo-link").symlink_to(live)
    (base / "ray_yolo-other").mkdir()  # has no lock: is just being made
    assert session_folder().parent.exists()
    assert (killed.exists(), live.exists(), (base / "ray_yolo-other").exists()) == (False, True, True)


def test_what_is_left_of_the_ray_of_a_killed_process_is_ended_and_nothing_else(base: Path) -> None:
    code = ("from ray_yolo.runtime.local_ray import session_folder; import os; "
            "print(session_folder(), flush=True); os.kill(os.getpid(), 9)")
    live = session_folder()
    stale = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False).stdout.strip()
    sleep = [sys.executable, "-c", "import time; time.sleep(60)"]
    with subprocess.Popen([*sleep, f"--temp-dir={stale}"]) as left, subprocess.Popen([*sleep, str(live)]) as other:
        session_folder()
        assert left.wait(10) == -signal.SIGKILL
        assert other.poll() is None
        other.kill()


def group_of_a_child() -> tuple[int, int]:
    """(process group, process) of what is started as Ray starts its processes."""
    with subprocess.Popen(["sleep", "60"], preexec_fn=lambda: None) as child:
        try:
            return os.getpgid(child.pid), child.pid
        finally:
            child.kill()


def test_what_ray_starts_is_in_a_process_group_of_its_own() -> None:
    with in_own_groups():
        group, child = group_of_a_child()
    assert group == child
    assert group_of_a_child()[0] == os.getpgrp()


def test_a_ray_that_a_command_starts_has_both(base: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    seen = list[tuple[str, bool, list[Path]]]()

    def init(address: str, _temp_dir: str = "", **_: object) -> None:
        group, child = group_of_a_child()
        seen.append((address, group == child, [folder for folder in base.iterdir() if folder / "r" == Path(_temp_dir)]))

    monkeypatch.setattr(ray, "init", init)
    monkeypatch.setattr(ray, "is_initialized", lambda: False)
    monkeypatch.setenv("RAY_AUTH_TOKEN", "0" * 64)
    cluster.connect(Placement(address="local", gpus_per_worker=0.0))
    [(address, has_group, [folder])] = seen
    assert (address, has_group, stat.S_IMODE(folder.stat().st_mode)) == ("local", True, 0o700)


@pytest.mark.ray
@pytest.mark.root
def test_another_user_cannot_enter_the_session_of_a_training(tmp_path: Path, base: Path) -> None:
    base.chmod(0o755)
    process = start([*command(tmp_path, tmp_path, 1), "--mlflow-uri", "off"], tmp_path)
    try:
        look_in(process, tmp_path, base)
    finally:
        process.send_signal(signal.SIGTERM)
        process.communicate(timeout=100)
    assert not list(base.iterdir())


def look_in(process: subprocess.Popen[bytes], storage: Path, base: Path) -> None:
    """As another user, while a training runs."""
    while 2 not in steps(storage):
        assert process.poll() is None, process.stderr.read().decode()
        time.sleep(0.05)
    [folder] = base.glob("ray_yolo-*/r")
    assert list(folder.glob("session_*/sockets/plasma_store"))
    other_user = ["setpriv", "--reuid=65534", "--regid=65534", "--clear-groups"]
    for words in (["ls", folder], ["mv", folder / "session_latest", folder / "mine"], ["mv", folder, base / "mine"],
                  ["touch", folder / "session_latest" / "sockets" / "mine"]):
        assert subprocess.run([*other_user, *words], capture_output=True, check=False).returncode != 0, words
