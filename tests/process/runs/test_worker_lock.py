"""No second training starts in a folder in which workers of a killed driver still train."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from ray_yolo.core.errors import InputError
from ray_yolo.runs.worker_lock import await_former_workers

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
        threading.Timer(1.5, second.kill).start()
        await_former_workers(tmp_path, notices.append)
        assert second.wait() < 0
    assert len(notices) == 1
    assert f"(process {second.pid} on {os.uname().nodename})" in notices[0]


def test_a_start_is_refused_if_they_do_not_end(tmp_path: Path) -> None:
    with worker(tmp_path) as process:
        with pytest.raises(InputError, match=rf"process {process.pid} on .*end them, then run the same command again"):
            await_former_workers(tmp_path, lambda text: None, wait_seconds=0.2)
        process.kill()
