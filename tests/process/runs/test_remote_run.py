"""The driver's side of runs in a store: who continues which, from which machine, with what."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
from pathlib import Path
from socket import gethostname

import pytest

from ray_yolo.runs.remote_run import worker_copy
from ray_yolo.storage.store import FolderStore
from tests.support.run_log import messages
from tests.unit.runs.test_remote_run import Start, bucket, copies, die, notify, quick, remote, start

__all__ = ["bucket", "quick", "start"]  # fixtures


def test_a_run_whose_driver_died_is_continued_when_its_lease_has_expired(start: Start) -> None:
    die(start())
    assert remote(start(machine="two")).attempt == 2


def test_files_not_stored_are_dropped_after_another_machine_has_trained(start: Start) -> None:
    run = start()
    notify(run, "a")
    remote(run).flush_log()
    notify(run, "b")
    die(run)
    second = start(machine="two")
    notify(second, "c")
    second.release()
    assert messages(start().folder) == ["a", "c"]


def test_an_old_attempt_that_comes_back_is_not_read(start: Start, bucket: FolderStore) -> None:
    first = start()
    notify(first, "a")
    remote(first).flush_log()
    die(first)
    second = start(machine="two")
    notify(second, "b")
    remote(second).flush_log()
    notify(first, "late")
    remote(first).flush_log()
    second.release()
    first.release()
    assert messages(start(machine="three").folder) == ["a", "b"]


def test_a_worker_removes_only_the_copies_of_dead_workers_on_its_node(
        start: Start, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    payload = remote(start()).payload
    node = tmp_path / "node"
    monkeypatch.setenv("RAY_YOLO_CACHE", str(node))
    code = ("import json, os, signal, sys\n"
            "from ray_yolo.runs.remote_run import worker_copy\n"
            "with worker_copy(json.loads(sys.argv[1])) as (folder, _):\n"
            "    (folder / 'checkpoints').mkdir()\n"
            "    (folder / 'checkpoints' / 'state.pt').write_bytes(b'x')\n"
            "    os.kill(os.getpid(), signal.SIGKILL)")
    killed = subprocess.run([sys.executable, "-c", code, json.dumps(payload)], check=False)
    assert killed.returncode == -signal.SIGKILL
    (dead,) = copies(node)
    others = [".copy-another.host@exp-1", f".copy-{gethostname()}-2@exp-1"]  # their locks may not be seen here
    for name in others:
        ((node / payload["folder"]).parent / name).mkdir()
    with worker_copy(payload) as (first, _), worker_copy(payload) as (second, _):
        assert copies(node) == {first.name, second.name, *others}
        assert dead not in copies(node)
    assert copies(node) == set(others)
