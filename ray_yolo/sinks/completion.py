"""Completes the records of a finished run (MLflow, its registry, TensorBoard, its files in a bucket) in a process that
survives the terminal.

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

from ray_yolo.runs.location import publish
from ray_yolo.runs.working_copy import FINISHED
from ray_yolo.sinks.mlflow_run import deliver_pending
from ray_yolo.sinks.tensorboard import complete

_URI_VARIABLE = "RAY_YOLO_PENDING_URI"  # not an argument: it may contain secrets, and others see arguments
FINISH_SECONDS = 60.0  # for the command to mark its run as finished


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


def complete_records(run_dir: Path, uri: str | None, *, wait_seconds: float = 0.0) -> None:
    """Complete the pending deliveries of a finished run. A failed one stays pending, because no terminal is left for a
    report.

    Args:
        wait_seconds: for the driver to mark the run as finished. Without the mark, nothing is completed.
    """
    deadline = time.monotonic() + wait_seconds
    while not (run_dir / FINISHED).exists():
        if time.monotonic() >= deadline:
            return
        time.sleep(0.1)
    with suppress(Exception):
        complete(run_dir)
    with suppress(Exception):
        if uri:
            deliver_pending(run_dir, uri)
    with suppress(Exception):
        publish(run_dir)  # the pictures and records since the end; a finished training needs no lease


if __name__ == "__main__":
    complete_records(Path(sys.argv[1]), os.environ[_URI_VARIABLE], wait_seconds=FINISH_SECONDS)
