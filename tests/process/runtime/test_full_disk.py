"""What a full disk refuses reaches the user: the log, from which messages are shown, cannot take it."""

from __future__ import annotations

import signal
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from ray_yolo.runs.event_log import EVENTS_FILE, check_log, read_events
from tests.support import run_log
from tests.support.train_command import command, start

pytestmark = pytest.mark.root
MEGABYTES = 40


@pytest.fixture
def disk(tmp_path: Path) -> Iterator[Path]:
    """A small disk of its own, for the runs."""
    folder = tmp_path / "disk"
    folder.mkdir()
    subprocess.run(["mount", "-t", "tmpfs", "-o", f"size={MEGABYTES}m", "tmpfs", str(folder)], check=True)
    yield folder
    subprocess.run(["umount", "--lazy", str(folder)], check=True)


def fill(disk: Path) -> Path:
    """Fill a disk to the last byte. Returns the file that does."""
    ballast = disk / "ballast"
    subprocess.run(["dd", "if=/dev/zero", f"of={ballast}", "bs=4k"], check=False, capture_output=True)
    return ballast


@pytest.fixture
def training(tmp_path: Path, disk: Path) -> Iterator[tuple[subprocess.Popen[bytes], Path]]:
    """A training whose first checkpoint is on the disk, and its run folder."""
    argv = command(tmp_path, disk, 0)
    argv[argv.index("--epochs") + 1] = "400"
    process = start([*argv, "--noval", "--mlflow-uri", "off"], tmp_path)
    run = disk / "runs" / "train" / "exp"
    end = time.monotonic() + 200
    while not (run / "weights" / "last.json").exists():
        assert process.poll() is None
        assert time.monotonic() < end
        time.sleep(0.02)
    yield process, run
    process.kill()
    process.communicate()


def read_until_reported(process: subprocess.Popen[bytes]) -> str:
    """What a training writes to stderr, up to the warning that its log cannot be written."""
    assert process.stderr
    lines = []
    for line in process.stderr:
        lines.append(line.decode())
        if "events.jsonl cannot be written" in lines[-1]:
            break
    return "".join(lines)


def test_an_interruption_reports_the_save_a_full_disk_refuses(
        training: tuple[subprocess.Popen[bytes], Path], disk: Path) -> None:
    process, run = training
    fill(disk)
    errors = read_until_reported(process)
    process.send_signal(signal.SIGINT)
    errors += process.communicate(timeout=100)[1].decode()
    assert process.returncode == 130, errors
    assert f"{run / EVENTS_FILE} cannot be written (" in errors  # no space, or a part of a line was accepted
    assert "WARNING: the checkpoint at step" in errors
    assert "could not be written ([Errno 28] No space left on device" in errors


def test_a_disk_full_for_seconds_is_reported(training: tuple[subprocess.Popen[bytes], Path], disk: Path) -> None:
    process, run = training
    ballast = fill(disk)
    reported = read_until_reported(process)
    ballast.unlink()
    time.sleep(2)
    process.send_signal(signal.SIGINT)
    errors = reported + process.communicate(timeout=100)[1].decode()
    assert process.returncode == 130, errors
    assert f"WARNING: {run / EVENTS_FILE} cannot be written (" in errors
    assert any("cannot be written" in message for message in run_log.messages(run))
    seqs = [event.seq for event in read_events(run / EVENTS_FILE)]
    assert seqs == list(range(len(seqs)))
    assert check_log(run / EVENTS_FILE) is None
