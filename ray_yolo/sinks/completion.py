"""Completes the records of a finished run (MLflow, its registry, TensorBoard) in a process that survives the terminal.

A command at a prompt gives its sinks a few seconds. This process completes the deliveries that are pending after that.
"""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path

from ray_yolo.sinks.mlflow_run import deliver_pending
from ray_yolo.sinks.tensorboard import complete

_URI_VARIABLE = "RAY_YOLO_PENDING_URI"  # not an argument: it may contain secrets, and others see arguments
_FINISH_SECONDS = 60.0  # for the command to mark its run as finished


def start_detached(module: str, argument: str, *, pass_fds: Sequence[int] = (),
                   environment: Mapping[str, str] | None = None) -> subprocess.Popen[bytes]:
    """Start a module as a process that survives signals at the terminal and the end of the terminal.

    multiprocessing is not used: it would import the main module of its parent, so a user's script would train again.
    """
    return subprocess.Popen(
        [sys.executable, "-m", module, argument], pass_fds=pass_fds, start_new_session=True,
        stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path), "CUDA_VISIBLE_DEVICES": "",
             "OMP_NUM_THREADS": "1", **(environment or {})})


def start_completion(run_dir: Path, uri: str | None) -> subprocess.Popen[bytes]:
    """Start the process for a run that is about to finish, and for an MLflow server."""
    return start_detached(__name__, str(run_dir), environment={_URI_VARIABLE: uri or ""})


def complete_records(run_dir: Path, uri: str | None) -> None:
    """Complete the pending deliveries of a finished run. A failed one stays pending, because no terminal is left for a
    report."""
    if (run_dir / "finished").exists():
        with suppress(Exception):
            complete(run_dir)
        with suppress(Exception):
            if uri:
                deliver_pending(run_dir, uri)


if __name__ == "__main__":
    folder, deadline = Path(sys.argv[1]), time.monotonic() + _FINISH_SECONDS
    while not (folder / "finished").exists() and time.monotonic() < deadline:
        time.sleep(0.1)
    complete_records(folder, os.environ[_URI_VARIABLE])
