"""The worker pool: bundles, launches, and replacements."""

from __future__ import annotations

import time
from typing import Any

import pytest
import ray.exceptions

from ray_yolo.config.placement import Placement
from ray_yolo.core.errors import LostWorkersError, ResourcesError
from ray_yolo.runtime.workers.pool import WorkerPool
from tests.unit.runtime.workers.test_pool import Desk, desk, work

__all__ = ["desk"]  # fixtures


@pytest.mark.ray
@pytest.mark.usefixtures("ray_session")
def test_each_bundle_has_one_worker_and_the_minimum_shares_a_group() -> None:
    given = Placement(num_workers=(2, 3), cpus_per_worker=1.0, workers=0, accelerator_type="")
    with WorkerPool(work, {"answer": 42}, given, 0.0) as found:
        assert [group.bundle_count for group in found.groups] == [2, 1]
        returned: dict[int, Any] = {}
        failed: dict[int, Exception] = {}
        for number in range(len(found)):
            found.launch(number)
        deadline = time.monotonic() + 180
        while len(returned) + len(failed) < 3:
            some, others = found.ended(1.0)
            returned, failed = returned | some, failed | others
            assert time.monotonic() < deadline
        assert returned == {0: (42, "1")}
        assert isinstance(failed[1], ray.exceptions.WorkerCrashedError)
        assert type(failed[2]) is ValueError
        assert [list(found.grow(size)) for size in (2, 4, 4)] == [[], [3], []]
        found.launch(3)
        while not found.wait(1.0):
            assert time.monotonic() < deadline
        assert found.ended(1.0) == ({3: (42, "1")}, {})
    with pytest.raises(LostWorkersError, match="was removed"):
        found.launch(0)


def test_without_workers_and_without_room_for_any_training_ends(desk: Desk) -> None:
    desk.missing = "1 workers need 1 CPU, the cluster has 0"
    desk.supervisor.poll()
    time.sleep(0.3)
    desk.supervisor.poll()  # some train still
    desk.present = 0
    desk.supervisor.poll()
    time.sleep(0.3)
    with pytest.raises(ResourcesError, match=r"no workers left: 1 workers need 1 CPU, .*the same command"):
        desk.supervisor.poll()
