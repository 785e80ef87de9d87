"""Loader processes whose shared memory is full or read-only, or that the system kills: a reason, and never a wait."""

from __future__ import annotations

import multiprocessing
import os
import signal
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest

from ray_yolo.config.placement import Placement
from ray_yolo.core.errors import DatasetError, LoaderError
from ray_yolo.core.events import Event, StepEvent
from ray_yolo.engine.session import run_session
from ray_yolo.engine.spec import WorkerContext
from tests.support.jobs import make_config, make_spec

LARGE = {"imgsz": 320, "batch_size": 16, "microbatch": 16, "epochs": 1, "noval": False}  # 5 MB a batch
SMALL_MEMORY = "mount -t tmpfs -o size=2m tmpfs /dev/shm"
READ_ONLY = "mount -t tmpfs -o ro tmpfs /dev/shm"
SESSION = """
import sys
from dataclasses import replace
from pathlib import Path

from ray_yolo.config.placement import Placement
from ray_yolo.data.image_cache import ImageStore
from ray_yolo.engine.spec import WorkerContext
from ray_yolo.engine.collectives import Collectives
from ray_yolo.engine.team import val_loader
from ray_yolo.engine.session import run_session
from tests.process.runtime.test_shared_memory import LARGE
from tests.support.jobs import make_spec

if __name__ == "__main__":
    spec, context = make_spec(Path(sys.argv[2]), **LARGE), WorkerContext(loader_processes=2)
    try:
        if sys.argv[1] == "train":
            run_session(spec, context, Placement(), lambda event: None)
        else:
            list(val_loader(spec.val, ImageStore(spec.val, 320), 320, 32, 16, context, Collectives()))
    except Exception as error:
        print(f"{type(error).__name__}: {error}")
"""


def run_with(mount: str, arguments: Sequence[str], folder: Path) -> str:
    """What a program prints, in a mount namespace of its own whose /dev/shm `mount` provides."""
    program = [sys.executable, *arguments]
    done = subprocess.run(["unshare", "-m", "bash", "-c", f'{mount} && exec "$@"', "bash", *program], timeout=200,
                          stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, cwd=Path(__file__).parents[3],
                          env={**os.environ, "RAY_YOLO_CACHE": str(folder / "cache")}, check=False)
    return f"{done.stdout}\nexit code {done.returncode}"


@pytest.mark.root
@pytest.mark.parametrize("work", ["train", "val"])
def test_full_shared_memory_is_an_error_of_the_training(work: str, tmp_path: Path) -> None:
    text = run_with(SMALL_MEMORY, ["-c", SESSION, work, str(tmp_path)], tmp_path)
    assert "LoaderError: a loader process cannot pass on a batch of " in text
    assert "No space left on device" in text
    assert "`--shm-size` of a container" in text


@pytest.mark.root
@pytest.mark.parametrize(("mount", "state"), [(SMALL_MEMORY, "has only 2.1 MB free"), (READ_ONLY, "cannot be written")])
def test_commands_use_the_loaders_that_fit_shared_memory(mount: str, state: str, tmp_path: Path) -> None:
    recipe = make_config(tmp_path, 0).recipe
    options = ["--imgsz", "320", "--batch-size", "16", "--workers", "2", "--storage-path", str(tmp_path),
               "--mlflow-uri", "off", "--noplots"]
    train = run_with(mount, ["-m", "ray_yolo.train", "--data", recipe.data, "--model", recipe.model, "--epochs", "1",
                             *options], tmp_path)
    assert f"0 loader processes instead of 2: /dev/shm {state}" in train
    assert train.endswith("exit code 0")
    weights = tmp_path / "runs" / "train" / "exp" / "weights" / "last.pt"
    val = run_with(mount, ["-m", "ray_yolo.val", "--weights", str(weights), *options], tmp_path)
    assert f"WARNING: 0 loader processes instead of 2: /dev/shm {state}" in val
    assert val.endswith("exit code 0")


def test_a_killed_loader_is_an_error_with_a_remedy(tmp_path: Path) -> None:
    spec = make_spec(tmp_path, epochs=50)

    def kill_loader(event: Event) -> None:
        if isinstance(event, StepEvent) and event.step == 2:
            os.kill(max(child.pid or 0 for child in multiprocessing.active_children()), signal.SIGKILL)

    with pytest.raises(LoaderError, match=r"a loader process was killed \(SIGKILL\), as by the system if memory"):
        run_session(spec, WorkerContext(loader_processes=1), Placement(), kill_loader)


def test_pictures_lost_during_a_training_end_it(tmp_path: Path) -> None:
    """Also where loader processes notice it: the error is theirs, without torch's traceback."""
    spec = make_spec(tmp_path, epochs=50)

    def lose_pictures(event: Event) -> None:
        if isinstance(event, StepEvent) and event.step == 2:
            for path in spec.train.paths:
                Path(path).unlink(missing_ok=True)

    with pytest.raises(DatasetError, match=r"^\d+ of \d+ images, more than 10%, cannot be read any more; the last one"):
        run_session(spec, WorkerContext(loader_processes=1), Placement(), lose_pictures)
