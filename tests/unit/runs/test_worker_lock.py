"""No second training starts in a folder in which workers of a killed driver still train."""

from __future__ import annotations

import fcntl
import os
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from ray_yolo.core.errors import InputError
from ray_yolo.runs.worker_lock import WORKERS_LOCK, await_former_workers, hold_folder

WORKER = "import sys; from pathlib import Path; from ray_yolo.runs.worker_lock import hold_folder\n" \
         "with hold_folder(Path(sys.argv[1])): print(flush=True); sys.stdin.read()"


def worker(folder: Path) -> subprocess.Popen[bytes]:
    process = subprocess.Popen([sys.executable, "-c", WORKER, str(folder)], stdin=subprocess.PIPE,
                               stdout=subprocess.PIPE)
    assert process.stdout
    process.stdout.readline()
    return process


def test_a_start_waits_for_all_workers_of_an_earlier_driver_and_says_so(tmp_path: Path) -> None:
    notices = list[str]()
    with worker(tmp_path) as first, worker(tmp_path) as second:
        assert first.stdin
        assert second.stdin
        first.stdin.close()
        first.wait()
        threading.Timer(0.5, second.kill).start()
        await_former_workers(tmp_path, notices.append)
        assert second.wait() < 0
    assert len(notices) == 1
    assert f"(process {second.pid} on {os.uname().nodename})" in notices[0]


def test_a_start_is_refused_if_they_do_not_end(tmp_path: Path) -> None:
    with worker(tmp_path) as process:
        with pytest.raises(InputError, match=rf"process {process.pid} on .*end them, then run the same command again"):
            await_former_workers(tmp_path, lambda text: None, wait_seconds=0.2)
        process.kill()


def test_workers_of_one_driver_do_not_wait_for_each_other_and_leave_nothing(tmp_path: Path) -> None:
    notices = list[str]()
    await_former_workers(tmp_path, notices.append)
    with hold_folder(tmp_path), hold_folder(tmp_path):
        pass
    await_former_workers(tmp_path, notices.append)
    assert not notices
    assert (tmp_path / WORKERS_LOCK).read_text() == ""


def test_storage_without_locks_does_not_prevent_a_training(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(file: object, kind: int) -> None:
        raise OSError(37, "No locks available")

    monkeypatch.setattr(fcntl, "flock", refuse)
    with hold_folder(tmp_path), hold_folder(tmp_path / "missing"):
        pass
