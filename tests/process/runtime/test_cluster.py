"""Which cluster a command uses."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path

import pytest
import ray
import ray.exceptions
import ray.util

from ray_yolo.config.placement import Placement
from ray_yolo.data.image_cache import node_room
from ray_yolo.runtime import cluster
from ray_yolo.runtime.node_checks import least_room
from ray_yolo.runtime.resources import NodeResources
from ray_yolo.runtime.sharing import Bundle, Group, Places, group_name

KNOCK = """
import os, subprocess, sys
import ray
from ray_yolo.config.placement import Placement
from ray_yolo.core.system import cores
from ray_yolo.runtime import cluster
from ray_yolo.runtime.workers.rendezvous import own_address

cluster.connect(Placement(address="local"))
print(ray.get(ray.remote(own_address).remote()), own_address() == "127.0.0.1")
print(ray._private.worker.get_dashboard_url(), ray.cluster_resources()["CPU"] == cores())
here = ray.get_runtime_context().gcs_address
for token in (os.environ["RAY_AUTH_TOKEN"], "0" * 64):
    os.environ["RAY_AUTH_TOKEN"] = token
    print(subprocess.run([sys.executable, "-c", f"import ray; ray.init(address='{here}')"],
                         stderr=subprocess.DEVNULL).returncode)
"""


@pytest.mark.ray
def test_a_local_cluster_denies_access_and_leaves_no_token(tmp_path: Path) -> None:
    environment = {"PATH": os.environ["PATH"], "HOME": str(tmp_path)}
    done = subprocess.run([sys.executable, "-c", KNOCK], cwd=Path(__file__).parents[3], env=environment,
                          capture_output=True, text=True, timeout=300)
    assert done.stdout.split() == ["127.0.0.1", "False", "True", "0", "1"], done.stderr
    assert not (tmp_path / ".ray").exists()


@pytest.mark.ray
@pytest.mark.usefixtures("ray_session")
def test_groups_have_nodes_resources_and_label_selectors() -> None:
    """Those that wait, too; those that were removed are left out."""
    placed = ray.util.placement_group([{"CPU": 1}], name=group_name("extra", -3, 7))
    huge = ray.util.placement_group([{"CPU": 1, "memory": 1e13}], strategy="SPREAD")
    elsewhere = ray.util.placement_group([{"CPU": 1}], bundle_label_selector=[{"zone": "in(a,b)"}])
    gone = ray.util.placement_group([{"CPU": 1}])
    try:
        assert placed.wait(30)
        ray.util.remove_placement_group(gone)
        found = {group.id: group for group in cluster.placement_groups()}
        (node,) = cluster.nodes_with_places()
        assert found[placed.id.hex()] == Group(
            placed.id.hex(), cluster.own_job(), (Bundle({"CPU": 1.0}, node.id),), "PACK", "extra", -3, 7)
        assert found[huge.id.hex()].bundles == (Bundle({"CPU": 1.0, "memory": 1e13}),)
        assert found[huge.id.hex()].strategy == "SPREAD"
        assert found[elsewhere.id.hex()].bundles == (Bundle({"CPU": 1.0}, labels={"zone": "in(a,b)"}),)
        assert gone.id.hex() not in found
        assert node.free["CPU"] <= 3
        assert Places(list(found.values()), [node], list(found)).offer is None  # no node could hold them
    finally:
        for group in (placed, huge, elsewhere):
            ray.util.remove_placement_group(group)


@pytest.mark.ray
@pytest.mark.usefixtures("ray_session")
def test_free_resources_of_nodes_are_those_that_are_not_reserved() -> None:
    deadline = time.monotonic() + 30
    while cluster.free_nodes(Placement()) != [NodeResources(4, 0, is_shared=True)]:  # earlier tests' come back soon
        assert time.monotonic() < deadline, cluster.free_nodes(Placement())
        time.sleep(0.2)
    assert cluster.free_nodes(Placement(accelerator_type="A100")) == []
    assert least_room() == pytest.approx(node_room(), rel=0.2)
    group = ray.util.placement_group([{"CPU": 3}])
    try:
        assert group.wait(30)
        while cluster.free_nodes(Placement()) != [NodeResources(1, 0, is_shared=True)]:
            assert time.monotonic() < deadline, cluster.free_nodes(Placement())
            time.sleep(0.2)
    finally:
        ray.util.remove_placement_group(group)
