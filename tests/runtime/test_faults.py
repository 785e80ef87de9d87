"""What breaks while a training goes on, and what it costs: `python -m pytest -m faults`; table: docs/faults.md."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from ray.cluster_utils import Cluster

from ray_yolo.runtime import worker
from tests.support.faults import Training, calm_run, check, ray_nodes, slow_worker

pytestmark = [pytest.mark.faults, pytest.mark.ray]


@pytest.fixture(scope="module")
def calm(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return calm_run(tmp_path_factory.mktemp("calm"))


@pytest.fixture(scope="module")
def nodes() -> Iterator[Cluster]:
    with ray_nodes(3) as found:
        yield found


@pytest.fixture(autouse=True)
def slowly(monkeypatch: pytest.MonkeyPatch, nodes: Cluster) -> None:
    monkeypatch.setattr(worker, "train_in_place", slow_worker)


def test_a_killed_worker(calm: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    training = Training(tmp_path, 3)
    training.wait_for_workers(3)
    fault = training.hit(1)
    training.wait_for_workers(2)
    training.wait_for_workers(3)
    print(training.cost(fault))
    training.stop()
    check(training, calm)
