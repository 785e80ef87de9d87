"""A training of the tiny model as a command in the background, and what its run folder has."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

from ray_yolo.core.events import StepEvent
from ray_yolo.runs.event_log import read_events
from tests.support import run_log
from tests.support.checkpoints import newest
from tests.support.jobs import STEADY, TINY, make_dataset

EPOCHS = 4


def command(folder: Path, storage: Path, num_workers: int | str) -> list[str]:
    model = folder / "tiny.yaml"
    model.write_text(str(TINY).replace("'", '"'))
    settings = {"optimizer.nominal_batch": 16, "optimizer.clip_norm": 0.3, "schedule.warmup_epochs": 0}
    assert settings["optimizer.nominal_batch"] == STEADY["optimizer"]["nominal_batch"]
    return [sys.executable, "-m", "ray_yolo.train", "--data", str(make_dataset(folder / "data")), "--model", str(model),
            "--imgsz", "64", "--batch-size", "16", "--microbatch", "4", "--epochs", str(EPOCHS), "--exact",
            "--num-workers", str(num_workers), "--save-steps", "2", "--patience", "0", "--noplots",
            "--storage-path", str(storage), *(f"--set={path}={value}" for path, value in settings.items())]


def start(argv: list[str], folder: Path) -> subprocess.Popen[bytes]:
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    environment.pop("RAY_ADDRESS", None)
    ours = signal.signal(signal.SIGINT, signal.default_int_handler)  # a job in the background ignores it, as would this
    try:
        return subprocess.Popen(argv, cwd=folder, env=environment, start_new_session=True,
                                stdout=subprocess.DEVNULL, stderr=subprocess.PIPE)
    finally:
        signal.signal(signal.SIGINT, ours)


def log_of(storage: Path) -> Path:
    return storage / "runs" / "train" / "exp" / "events.jsonl"


def steps(storage: Path) -> list[int]:
    log = log_of(storage)
    return [event.step for event in run_log.only(StepEvent, read_events(log))]


def finish(process: subprocess.Popen[bytes]) -> None:
    _, errors = process.communicate(timeout=280)
    assert process.returncode == 0, errors.decode()


def tensors(storage: Path) -> dict[str, Any]:
    state = newest(storage / "runs" / "train" / "exp")
    return {f"{part}.{name}": value for part in ("model", "ema") for name, value in state[part].items()} | {
        f"optimizer.{number}": entry["momentum_buffer"] for number, entry in state["optimizer"].items()}
