"""Parts of work on Ray workers: every part once, errors as one line, lost workers replaced."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import ray
from ray.util.placement_group import placement_group_table

from ray_yolo.config.placement import Placement
from ray_yolo.core.errors import CheckpointError, LostWorkersError, ResourcesError, TrainingError
from ray_yolo.runtime import cluster
from ray_yolo.runtime.map_on_workers import map_on_workers

pytestmark = [pytest.mark.ray, pytest.mark.usefixtures("ray_session")]

TWO = Placement(num_workers=2, cpus_per_worker=1, gpus_per_worker=0)


@pytest.fixture(autouse=True)
def _connected() -> Iterator[None]:
    cluster.connect(TWO)
    yield
    assert [group for group in placement_group_table().values() if group["state"] == "CREATED"] == []


def test_every_part_is_done_once_with_its_number() -> None:
    def add(shared: np.ndarray, part: int) -> int:
        assert not shared.flags.writeable
        return int(shared.sum()) + part

    results = list(map_on_workers(add, np.arange(4), [10, 20, 30, 40, 50], TWO, 0.0))
    assert sorted(results) == [(0, 16), (1, 26), (2, 36), (3, 46), (4, 56)]


def test_parts_run_at_the_same_time_each_on_a_worker_of_its_own(tmp_path: Path) -> None:
    def wait_for_all(folder: Path, number: int) -> tuple[int, bool]:
        (folder / str(os.getpid())).touch()
        deadline = time.monotonic() + 60
        while len(list(folder.iterdir())) < 3 and time.monotonic() < deadline:
            time.sleep(0.05)
        return os.getpid(), len(list(folder.iterdir())) == 3

    three = TWO.model_copy(update={"num_workers": 3})
    results = [result for _, result in map_on_workers(wait_for_all, tmp_path, range(3), three, 0.0)]
    assert len({process for process, _ in results}) == 3
    assert all(complete for _, complete in results)


@pytest.mark.parametrize(("kind", "raised"), [(CheckpointError, CheckpointError), (ValueError, TrainingError)])
def test_an_error_is_one_line_with_its_worker(kind: type[Exception], raised: type[Exception]) -> None:
    def fail(_: None, part: int) -> None:
        raise kind("no such file")

    with pytest.raises(raised) as caught:
        list(map_on_workers(fail, None, [0], TWO, 0.0, retries=3))
    name = "" if kind is CheckpointError else "ValueError: "
    assert str(caught.value) == f"worker 0: {name}no such file"


def test_a_lost_worker_computes_its_part_again_as_often_as_allowed(tmp_path: Path) -> None:
    def die_once(folder: Path, part: int) -> int:
        try:
            (folder / str(part)).touch(exist_ok=False)
        except FileExistsError:
            return part
        os._exit(1)

    assert sorted(map_on_workers(die_once, tmp_path, [7, 8, 9], TWO, 0.0, retries=1)) == [(0, 7), (1, 8), (2, 9)]

    def die(_: Path, part: int) -> None:
        os._exit(1)

    with pytest.raises(LostWorkersError, match=r"^worker 0: .*; given up after 1 restarts$"):
        list(map_on_workers(die, tmp_path, [7], TWO, 0.0, retries=1))


def test_a_part_that_takes_too_long_and_workers_that_are_not_free_are_refused() -> None:
    with pytest.raises(ResourcesError, match=r"^1 workers did not all answer within 0.5 seconds"):
        list(map_on_workers(lambda _, part: time.sleep(part), None, [30], TWO, 0.0, timeout=0.5))
    busy = ray.util.placement_group([{"CPU": ray.cluster_resources()["CPU"]}])
    assert busy.wait(60)
    try:
        hurried = TWO.model_copy(update={"timeout_seconds": 0.5})
        with pytest.raises(ResourcesError, match=r"^2 workers were not free at once for 0.5 seconds"):
            list(map_on_workers(lambda _, part: part, None, [1, 2], hurried, 0.0))
    finally:
        ray.util.remove_placement_group(busy)
