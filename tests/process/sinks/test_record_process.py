"""The process that makes the records of a training, and the command that waits for it."""

from __future__ import annotations

import json
import math
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from ray_yolo import cli
from ray_yolo.core.events import WarningEvent
from ray_yolo.core.system import set_priority
from ray_yolo.engine.evaluate import DETECTIONS_FILE
from ray_yolo.runs.event_log import EVENTS_FILE
from ray_yolo.runtime.trainer import fit
from ray_yolo.sinks import record_process
from ray_yolo.sinks.record_process import (
    RecordProcess,
)
from ray_yolo.sinks.records import LOCK_FILE, is_complete, note_incomplete
from tests.support import run_log
from tests.support.jobs import make_config

MODULE = "ray_yolo.sinks.records"
STORY = [run_log.run(), run_log.start(), run_log.step(1), *run_log.trained_epoch(0)]
PICTURES = {"labels.jpg", "results.png", "train_batch0.jpg", "train_batch1.jpg", "train_batch2.jpg",
            "val_batch0_pred.jpg", "val_batch1_pred.jpg", "confusion_matrix.png", "confusion_matrix_normalized.png",
            "F1_curve.png", "P_curve.png", "R_curve.png", "PR_curve.png"}


def wait_until(condition: Callable[[], object], seconds: float = 100.0) -> None:
    deadline = time.monotonic() + seconds
    while not condition() and time.monotonic() < deadline:
        time.sleep(0.02)
    assert condition()


def begin(folder: Path) -> Path:
    """The folder of a run that is trained, without pictures."""
    folder.mkdir(parents=True)
    run_log.write(folder / EVENTS_FILE, STORY)
    (folder / "opt.yaml").write_text(json.dumps({"placement": {"noplots": True}}))
    return folder


def pid_of(process: RecordProcess) -> int:
    assert process._process is not None
    return process._process.pid


def start(process: RecordProcess) -> None:
    """Start it at normal priority: a busy machine would leave it no time."""
    process.keep_running()
    set_priority(pid_of(process), "SCHED_OTHER", 0)


class TestProcess:
    def test_a_users_module_in_the_current_folder_is_not_imported(
            self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        run = begin(tmp_path / "exp")
        for name in ("yaml", "queue"):
            (tmp_path / f"{name}.py").write_text("raise SystemExit(9)")
        monkeypatch.chdir(tmp_path)
        monkeypatch.setattr(sys, "path", [path for path in sys.path if path])  # as of an installed command
        process = RecordProcess(MODULE, run, None, pytest.fail, own_session=False)
        start(process)
        wait_until((run / "results.csv").exists)
        run_log.write(run / EVENTS_FILE, [*STORY, run_log.end(10)])
        process.finish(100.0)
        assert process.describe_rest() == ""

    @pytest.mark.parametrize("own_session", [False, True])
    def test_it_follows_the_log_at_idle_priority_and_ends_with_it(self, own_session: bool, tmp_path: Path) -> None:
        run, warnings = begin(tmp_path / "exp"), list[str]()
        ours = Path("/proc/self/autogroup")
        before = ours.read_text() if ours.exists() else ""  # a kernel may be built without
        process = RecordProcess(MODULE, run, None, warnings.append, own_session=own_session)
        process.keep_running()
        pid = pid_of(process)
        assert os.sched_getscheduler(pid) == os.SCHED_IDLE
        assert os.getpgid(pid) == pid != os.getpgid(0)  # a terminal's Ctrl-C does not reach it
        assert os.getsid(pid) == (pid if own_session else os.getsid(0))
        if before:
            assert ours.read_text() == before
            theirs = Path(f"/proc/{pid}/autogroup").read_text()
            assert theirs.endswith(" nice 19\n") if own_session else theirs == before
        start(process)
        wait_until((run / "results.csv").exists)
        run_log.write(run / EVENTS_FILE, [*run_log.trained_epoch(1), run_log.end(20)])
        process.finish(100.0)
        assert not process.is_running
        assert process.describe_rest() == ""
        assert len((run / "results.csv").read_text().splitlines()) == 3
        assert is_complete(run, None)
        assert warnings == []

    def test_it_is_started_again_if_it_is_killed(self, tmp_path: Path) -> None:
        run = begin(tmp_path / "exp")
        process = RecordProcess(MODULE, run, None, pytest.fail, own_session=False)
        start(process)
        os.kill(pid_of(process), signal.SIGKILL)
        wait_until(lambda: not process.is_running)
        run_log.write(run / EVENTS_FILE, [run_log.end(10)])
        process.finish(100.0)
        assert is_complete(run, None)

    def test_after_a_command_that_was_killed_it_completes_what_there_is(self, tmp_path: Path) -> None:
        run = begin(tmp_path / "exp")
        process = RecordProcess(MODULE, run, None, pytest.fail, own_session=False)
        start(process)
        wait_until((run / "results.csv").exists)
        assert process._process is not None
        assert process._process.stdin is not None
        process._process.stdin.close()  # as the kernel does
        wait_until(lambda: is_complete(run, None))
        process.finish(60.0)

    @pytest.mark.parametrize("is_moved", [True, False])
    def test_an_old_place_is_not_made_again(self, tmp_path: Path, is_moved: bool) -> None:
        run = begin(tmp_path / "exp")
        process = RecordProcess(MODULE, run, None, pytest.fail, own_session=False)
        start(process)
        wait_until((run / "results.csv").exists)
        run_log.write(run / EVENTS_FILE, [*run_log.trained_epoch(1), run_log.end(20)])
        moved = tmp_path / "moved"
        run.rename(moved)
        if not is_moved:
            shutil.rmtree(moved)
        process.finish(100.0)
        assert not run.exists()
        assert moved.exists() == is_moved
        assert not is_moved or len((moved / "results.csv").read_text().splitlines()) == 3

    def test_a_command_leaves_it_and_says_so(self, tmp_path: Path) -> None:
        run = begin(tmp_path / "exp")
        process = RecordProcess(MODULE, run, None, pytest.fail, own_session=False)
        start(process)
        os.kill(pid_of(process), signal.SIGSTOP)
        began = time.monotonic()
        process.finish(0.3)
        assert time.monotonic() - began < 5
        rest = process.describe_rest()
        assert "still being written in the background" in rest
        assert f"python -m ray_yolo.sync {run}" in rest
        os.kill(pid_of(process), signal.SIGCONT)
        wait_until(lambda: is_complete(run, None))
        record_process._left[-1].wait(60)

    def test_records_that_only_fail_are_not_waited_for(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(record_process, "FAILING_SECONDS", 0.2)
        run, warnings = begin(tmp_path / "exp"), list[str]()
        (run / "results.csv").mkdir()
        process = RecordProcess(MODULE, run, None, warnings.append, own_session=False)
        process.finish(math.inf)
        assert process.pending == ["results.csv"]
        assert [text.partition(". ")[0] for text in warnings] == ["results.csv: IsADirectoryError: [Errno 21] Is a "
                                                                  "directory"] or warnings
        (run / "results.csv").rmdir()
        wait_until(lambda: is_complete(run, None))
        record_process._left[-1].wait(60)


@pytest.mark.slow
@pytest.mark.record_process
@pytest.mark.timeout(900)  # it gives way to whatever else the machine does
def test_pictures_of_a_background_that_was_killed_are_drawn_by_sync(
        tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def kill(process: RecordProcess, limit_seconds: float) -> None:
        if process.is_running:
            os.kill(pid_of(process), signal.SIGKILL)
            wait_until(lambda: not process.is_running)
            record_process._close_pipes(process._process)

    monkeypatch.setattr(RecordProcess, "finish", kill)
    run = fit(make_config(tmp_path, 0, {"noplots": False}, epochs=2, noval=False), quiet=True).run_dir
    assert (run / LOCK_FILE).read_text() == ""
    assert (run / "results.csv").exists()
    assert np.load(run / DETECTIONS_FILE).size
    assert cli.sync([str(run)]) == 0
    assert {path.name for path in run.iterdir()} >= PICTURES
    cells = (re.findall(r"<td[^>]*>([^<]*)</td>", line) for line in (run / "report.html").read_text().split("<tr>"))
    labels = {row[0]: int(row[2]) for row in cells if len(row) == 7}
    assert labels["all"] == labels["dark"] + labels["bright"] > 0


@pytest.mark.slow
@pytest.mark.record_process
def test_warnings_of_the_process_are_in_the_log_of_the_training(tmp_path: Path) -> None:
    (tmp_path / "mlflow.db").write_text("nothing of the kind, but long enough")
    config = make_config(tmp_path, 0, {"mlflow_uri": f"sqlite:///{tmp_path}/mlflow.db"}, epochs=1)
    run = fit(config, quiet=True).run_dir
    [warning] = run_log.events_of(run, WarningEvent)
    assert warning.message.startswith(f"MLflow: {tmp_path}/mlflow.db: is no SQLite database; move it away")


PROBE = """
import sys
from pathlib import Path
from ray_yolo.sinks.record_process import ends_with_command
Path(sys.argv[1]).write_text(str(ends_with_command()))
"""


@pytest.mark.root
@pytest.mark.parametrize(("ends", "entry"), [
    ("True", "{probe}; true"),
    ("True", "timeout 6h {probe}; true"),
    ("True", "setsid -w {probe}; true"),
    ("True", "set -m; {probe} & wait; true"),
    ("True", "set -m; timeout 6h setsid -w {probe} & wait; true"),
    ("False", "echo '{probe}; exit' | script -qec 'bash --norc' /dev/null"),  # a user types it
], ids=["script", "timeout", "setsid", "set -m", "all", "typed"])
def test_a_launcher_in_a_container_is_no_user(tmp_path: Path, ends: str, entry: str) -> None:
    (tmp_path / "probe.py").write_text(PROBE)
    probe = f"{sys.executable} {tmp_path}/probe.py {tmp_path}/answer"
    (tmp_path / "entry.sh").write_text(entry.format(probe=probe))
    subprocess.run(["unshare", "--pid", "--fork", "--mount-proc", "--kill-child", "sh", str(tmp_path / "entry.sh")],
                   check=True, timeout=100, env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)})
    assert (tmp_path / "answer").read_text() == ends


def test_an_earlier_run_is_not_waited_for(tmp_path: Path) -> None:
    """Its server accepts connections and never answers."""
    with socket.create_server(("127.0.0.1", 0)) as silent:
        earlier = begin(tmp_path / "earlier")
        run_log.write(earlier / EVENTS_FILE, [run_log.end(10)])
        address = f"http://127.0.0.1:{silent.getsockname()[1]}"
        (earlier / "opt.yaml").write_text(json.dumps({"placement": {"noplots": True, "mlflow_uri": address}}))
        note_incomplete(earlier)
        run = begin(tmp_path / "exp")
        process = RecordProcess(MODULE, run, None, pytest.fail, own_session=False)
        start(process)
        other = record_process._left[-1]
        assert other.stdin.closed
        assert other.stdout.closed
        set_priority(other.pid, "SCHED_OTHER", 0)
        connection, _ = silent.accept()
        with connection:
            run_log.write(run / EVENTS_FILE, [run_log.end(10)])
            process.finish(math.inf)
            assert is_complete(run, None)
            assert process.describe_rest() == ""
            assert other.poll() is None
        other.kill()
        other.wait(60)
    assert not is_complete(earlier, address)


@pytest.mark.root
@pytest.mark.slow
def test_in_a_container_the_command_waits_until_all_is_made(tmp_path: Path) -> None:
    """The command is process 1: the kernel kills what it has started when it ends."""
    config = make_config(tmp_path, 0)
    train = ["python", "-m", "ray_yolo.train", "--data", config.recipe.data, "--model", config.recipe.model, "--imgsz",
             "64", "--batch-size", "8", "--epochs", "1", "--storage-path", str(tmp_path)]
    subprocess.run(["unshare", "--pid", "--fork", "--mount-proc", "--kill-child", "script", "-qec",
                    " ".join(train), "/dev/null"], check=True, timeout=500)
    run = tmp_path / "runs" / "train" / "exp"
    assert {path.name for path in run.iterdir()} >= PICTURES
    assert is_complete(run, f"sqlite:///{tmp_path}/mlflow.db")
