"""Workers on GPUs come and go as those on CPUs do: `python -m pytest -m gpu`. Several need a GPU each, for NCCL."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import ray
import torch

from ray_yolo.core.events import WorkerEvent
from ray_yolo.runs.event_log import EVENTS_FILE, read_events
from tests.support.faults import Training, check, uninterrupted_run
from tests.support.run_log import only
from tests.support.sweeps import assert_equal_rows, pool_sweep

pytestmark = [pytest.mark.gpu, pytest.mark.ray, pytest.mark.timeout(900)]
GPUS = torch.cuda.device_count()


@pytest.fixture(scope="module", autouse=True)
def session() -> Iterator[None]:
    ray.init(num_cpus=4, num_gpus=GPUS, include_dashboard=False)
    yield
    ray.shutdown()


@pytest.fixture(scope="module")
def uninterrupted(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return uninterrupted_run(tmp_path_factory.mktemp("calm"), gpus_per_worker=1)


@pytest.mark.skipif(GPUS < 2, reason="there are not two GPUs")
@pytest.mark.parametrize("signum", [signal.SIGKILL, signal.SIGSTOP])
@pytest.mark.parametrize("num_workers", [2, "1-2"])
def test_a_lost_worker_is_left_behind_and_replaced(
        uninterrupted: Path, tmp_path: Path, num_workers: Any, signum: signal.Signals) -> None:
    """NCCL's exchanges are aborted; no finished step is lost, and the weights equal those of an uninterrupted run."""
    training = Training(tmp_path, num_workers, gpus_per_worker=1)
    training.wait_for_workers(2)
    fault = training.hit(1, signum)
    training.wait_for_workers(1, steps=1)
    training.wait_for_workers(2)
    training.stop()
    assert training.cost(fault).lost == 0
    check(training, uninterrupted)


def test_one_pool_trains_all_trials(tmp_path: Path) -> None:
    first, second = (pool_sweep(tmp_path / name, trials=3, epochs=2) for name in ("first", "second"))
    assert_equal_rows(first, second)
    messages = [event for log in first.glob(f"trials/*/{EVENTS_FILE}") for event in only(WorkerEvent, read_events(log))]
    assert len({event.pid for event in messages}) <= GPUS
