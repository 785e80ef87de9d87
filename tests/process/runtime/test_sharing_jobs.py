"""Trainings on a range of workers share one real cluster: they give places to each other, and get them back."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import ray
from ray.util.placement_group import placement_group, remove_placement_group

from ray_yolo.config.placement import Placement
from ray_yolo.core.events import PlacementEvent, WarningEvent
from ray_yolo.runs.event_log import read_events
from ray_yolo.runtime import cluster
from ray_yolo.runtime.sharing import CALM_SECONDS, Places, group_name
from tests.support.faults import left_over, ray_nodes
from tests.support.run_log import only
from tests.support.shared_jobs import assert_bits_of_a_lone_run, job
from tests.support.weights import make_weights

pytestmark = [pytest.mark.faults, pytest.mark.ray, pytest.mark.timeout(1800)]


def test_a_range_gives_places_to_another_and_both_end_with_the_bits_of_a_lone_run(tmp_path: Path) -> None:
    """Each place is given once, and requested again a minute after the end of the second one."""
    with ray_nodes(4), job(tmp_path / "first") as first:
        first.wait(lambda: first.workers() == 4)
        time.sleep(30)
        with job(tmp_path / "second") as second:
            second.wait(lambda: second.first_step() < float("inf"))
            second.wait(lambda: first.workers() == second.workers() == 2)
            second.stop()
            ended = time.time()
        first.wait(lambda: first.workers() == 4)
        first.stop()
        assert left_over() == ""
    given = [at for times in first.given().values() for at in times]
    asked = only(PlacementEvent, read_events(second.run_dir / "events.jsonl"))[0].time
    assert len(given) == 2
    assert min(given) - asked < 30
    back = [event.time for event in only(WarningEvent, read_events(first.run_dir / "events.jsonl"))
            if event.message.startswith("requested again")]
    assert back[-1] - ended < CALM_SECONDS + 30
    assert_bits_of_a_lone_run((first, second), tmp_path / "lone")
    print(f"the second one's first step after {second.first_step():.1f} s; a place was given after "
          f"{min(given) - asked:.1f} s, and all were requested again after {back[-1] - ended:.1f} s")


def test_a_server_gets_places_of_a_range_that_fills_the_cluster(tmp_path: Path) -> None:
    weights = make_weights(tmp_path / "served")
    with ray_nodes(4), job(tmp_path / "first") as first:
        first.wait(lambda: first.workers() == 4)
        environment = {**os.environ, "RAY_ADDRESS": ray.get_runtime_context().gcs_address}
        command = [sys.executable, "-m", "ray_yolo.serve", "--weights", str(weights), "--num-replicas", "2"]
        with (tmp_path / "log").open("w") as log:
            server = subprocess.Popen(command, cwd=tmp_path, env=environment, stdout=log, stderr=log)
        try:
            began = time.monotonic()
            first.wait(lambda: "POST picture files to" in (tmp_path / "log").read_text())
            print(f"it serves after {time.monotonic() - began:.1f} s")
            assert first.workers() == 2
        finally:
            server.send_signal(signal.SIGTERM)
            server.wait(60)
        first.wait(lambda: first.workers() == 4)
        first.stop()


def test_types_and_labels_of_real_nodes_say_who_leaves_and_what_no_node_can_hold_takes_nothing() -> None:
    """Eight extra workers hold the four GPUs of each of two nodes. No worker runs: it is the tables that count."""
    with ray_nodes(1) as nodes:
        for kind, market in (("A100", "spot"), ("L4", "on-demand")):
            nodes.add_node(num_cpus=4, num_gpus=4, resources={f"accelerator_type:{kind}": 1},
                                      labels={"market": market})
        extras = [placement_group([{"CPU": 1, "GPU": 1}], name=group_name("extra", 0, number)) for number in range(8)]
        assert all(extra.wait(60) for extra in extras)
        type_of = {node["NodeID"]: kind for node in ray.nodes() for kind in ("A100", "L4")
                   if f"accelerator_type:{kind}" in node["Resources"]}

        def leaves_for(*bundles: dict[str, float], **settings: Any) -> str | None:
            """The type of the GPU that a worker leaves for a group of another program; None: none leaves."""
            waits = placement_group([*bundles], **settings)
            groups = [group._replace(job="another") if group.id == waits.id.hex() else group
                      for group in cluster.placement_groups()]
            remove_placement_group(waits)
            offer = Places(groups, cluster.nodes_with_places(), [waits.id.hex()]).offer
            return type_of[offer.leaves.bundles[0].node] if offer else None

        def worker_on(kind: str) -> dict[str, float]:
            return cluster.resources_of(Placement(cpus_per_worker=1, accelerator_type=kind), 1.0)

        assert leaves_for(worker_on("A100")) == "A100"
        assert leaves_for(worker_on("L4")) == "L4"
        assert leaves_for(*[worker_on("L4")] * 4) == "L4"
        for condition, kind in {"spot": "A100", "!spot": "L4", "in(on-demand)": "L4", "!in(on-demand)": "A100"}.items():
            assert leaves_for({"GPU": 1}, bundle_label_selector=[{"market": condition}]) == kind
        assert leaves_for(*[worker_on("A100")] * 4, strategy="STRICT_PACK") == "A100"

        assert leaves_for(worker_on("H100")) is None
        assert leaves_for(*[worker_on("L4")] * 5) is None
        assert leaves_for({"GPU": 1}, bundle_label_selector=[{"market": "reserved"}]) is None
        assert leaves_for({"GPU": 8}) is None
        assert leaves_for({"GPU": 1, "memory": 1e13}) is None
        assert leaves_for(*[{"GPU": 1}] * 5, strategy="STRICT_PACK") is None
        assert leaves_for(*[{"GPU": 1}] * 3, strategy="STRICT_SPREAD") is None


def test_of_three_priorities_the_lower_ones_keep_their_minimum_until_the_higher_one_ends(tmp_path: Path) -> None:
    """Afterwards the middle one has its places, even if Ray gave them to the lowest one first. None was given twice in
    a minute."""
    with ray_nodes(4), job(tmp_path / "low", priority=-1) as low:
        low.wait(lambda: low.workers() == 4)
        with job(tmp_path / "middle") as middle:
            middle.wait(lambda: (low.workers(), middle.workers()) == (1, 3))
            with job(tmp_path / "high", priority=1) as high:
                high.wait(lambda: (low.workers(), middle.workers(), high.workers()) == (1, 1, 2))
                high.stop()
            middle.wait(lambda: (low.workers(), middle.workers()) == (1, 3))
            middle.stop()
        low.stop()
        assert left_over() == ""
    assert_bits_of_a_lone_run((low, middle, high), tmp_path / "lone")
    for run in (low, middle):
        for times in run.given().values():
            assert all(after - before >= CALM_SECONDS for before, after in pairwise(times))
    print(f"first steps after {low.first_step():.1f}, {middle.first_step():.1f} and {high.first_step():.1f} s")
