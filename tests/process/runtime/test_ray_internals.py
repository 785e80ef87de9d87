"""Ray's private names that we use exist and mean what we take them for. Seen with Ray 2.60.0."""

from __future__ import annotations

import re
import time

import pytest
import ray
import ray.exceptions
from ray.util.placement_group import placement_group, remove_placement_group

from ray_yolo.runtime import ray_internals
from ray_yolo.runtime.ray_internals import DRIVER_ENVIRONMENT, TRIAL_END_VARIABLE
from tests.unit.runtime.test_ray_internals import RAY, sources

__all__ = ["sources"]  # fixtures
IN_CORE = re.compile("RAY_([a-z].*)")  # read by Ray's C++ core, under their names there


def test_ray_reads_the_variables_that_are_set_for_it(sources: str) -> None:
    core = (RAY / "_raylet.so").read_bytes()
    for name in (*DRIVER_ENVIRONMENT, TRIAL_END_VARIABLE):
        if found := IN_CORE.fullmatch(name):
            assert found[1].encode() in core, name
        else:
            assert re.search(rf"\b{name}\b", sources) or re.search(rf"\b{name.removeprefix('RAY_')}\b", sources), name


@pytest.mark.ray
def test_a_cluster_answers_each_query(ray_session: None) -> None:
    here = ray.get_runtime_context().get_node_id()
    assert here in ray_internals.available_resources()
    assert ray_internals.available_resources()[here]["CPU"] > 0
    assert ray_internals.draining_nodes() == set()
    group = placement_group([{"CPU": 1}], bundle_label_selector=[ray_internals.on_node(here)])
    nowhere = placement_group([{"CPU": 1}], bundle_label_selector=[ray_internals.on_node("f" * 56)])
    assert group.wait(30)
    assert not nowhere.wait(1)
    assert not ray_internals.is_removed(group)
    assert not ray_internals.has_lost_all_nodes(group)
    for each in (group, nowhere):
        remove_placement_group(each)
    deadline = time.monotonic() + 30
    while not ray_internals.is_removed(group):
        assert time.monotonic() < deadline
        time.sleep(0.1)
