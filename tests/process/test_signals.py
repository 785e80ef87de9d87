"""A signal at any instant of a real start: the command ends soon, with the right status, without a traceback."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.unit.test_cli import ROOT

NUM_INSTANTS = 6


def start(folder: Path, *words: str) -> subprocess.Popen[str]:
    """A training in a folder. It is a process group of its own, and does not ignore Ctrl-C as a background job does."""
    argv = [sys.executable, "-m", "ray_yolo.train", "--data", "shapes8", "--model", "yolov5n", "--imgsz", "64",
            "--epochs", "1", "--mlflow-uri", "off", *words]
    process = subprocess.Popen(
        argv, cwd=folder, env={**os.environ, "PYTHONPATH": str(ROOT)}, text=True, stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT, start_new_session=True,
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL))
    while not handles_sigterm(process.pid):  # the interpreter's own start, before any line of the package
        time.sleep(0.01)
    return process


def handles_sigterm(pid: int) -> bool:
    fields = dict(line.split(":\t", 1) for line in Path(f"/proc/{pid}/status").read_text().splitlines())
    return bool(int(fields["SigCgt"], 16) >> (signal.SIGTERM - 1) & 1)


@pytest.mark.parametrize("workers", [0, 1])
def test_a_signal_at_any_instant_of_a_start_ends_it(tmp_path: Path, workers: int) -> None:
    """In the imports of torch and Ray, its exception was dropped (0), aborted the process (-6) or was a traceback."""
    began = time.monotonic()
    with start(tmp_path, "--num-workers", str(workers), "--name", "whole") as whole:
        while not (tmp_path / "runs" / "train" / "whole").exists():
            assert whole.poll() is None
            time.sleep(0.05)
        duration = time.monotonic() - began  # of all imports
        whole.kill()
    for instant in range(NUM_INSTANTS):
        number = (signal.SIGTERM, signal.SIGINT)[instant % 2]
        seconds = duration * instant / NUM_INSTANTS
        with start(tmp_path, "--num-workers", str(workers)) as process:
            time.sleep(seconds)
            process.send_signal(number)
            output, _ = process.communicate(timeout=60)
        assert (process.returncode, "Traceback" in output) == (128 + number, False), (seconds, duration, output)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_a_signal_before_the_work_ends_the_process_itself(number: signal.Signals) -> None:
    """Whatever would catch an exception, such as native code that is being initialised."""
    program = ("import os\nfrom ray_yolo.core.signals import end_at_once\nend_at_once()\n"
               f"try:\n    os.kill(os.getpid(), {number.value})\nexcept BaseException:\n    pass\n")
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, check=False, cwd=ROOT,
                          preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL))
    assert (done.returncode, done.stderr) == (128 + number, b"")


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_in_a_function_that_is_called_at_a_fork_of_ray_is_not_dropped(number: signal.Signals) -> None:
    """Python drops what the handler raises there, and prints it: the training ran to its end (0)."""
    program = f"""if True:
        import os, signal, time
        from ray_yolo.config.placement import Placement
        from ray_yolo.core.signals import end_at_once, exit_status_of, raise_from_now_on
        from ray_yolo.runtime import cluster
        sent = []
        def send():
            if not sent:
                sent.append(os.kill(os.getpid(), {number.value}))
                time.sleep(0.1)  # the handler is called in the main thread
        end_at_once()
        raise_from_now_on()
        os.register_at_fork(after_in_parent=send)
        try:
            cluster.connect(Placement(address="local"))
            print("dropped")
        except (KeyboardInterrupt, SystemExit) as stop:
            os._exit(exit_status_of(stop))"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False, cwd=ROOT,
                          timeout=120, preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL))
    assert (done.returncode, done.stdout, done.stderr) == (128 + number, "", "")
