"""What sharing costs a driver and Ray's head: the processor's time of one look, while Ray keeps many removed groups."""

from __future__ import annotations

import argparse
import json
import os
import time
from collections.abc import Sequence
from pathlib import Path

import ray
from ray.util.placement_group import placement_group, remove_placement_group

from ray_yolo.runtime import cluster
from ray_yolo.runtime.sharing import LATE_SECONDS, SOON_SECONDS, Bundle, Sharing, group_name
from tests.support.faults import ray_nodes

PLACE = {"CPU": 0.001}
IDLE_SECONDS = 10.0


def seconds_of(process: int) -> float:
    """The processor's time that a process has used."""
    user, system = Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[11:13]
    return (int(user) + int(system)) / os.sysconf("SC_CLK_TCK")


def measure(head: int, looks: int) -> tuple[float, float]:
    """Milliseconds of driver and head for one look, beyond what the head (a process) needs without it."""
    sharing = Sharing(cluster.own_job(), Bundle(PLACE), time.monotonic)
    began, before = time.monotonic(), seconds_of(head)
    time.sleep(IDLE_SECONDS)
    idle = (seconds_of(head) - before) / (time.monotonic() - began)
    began, before, own_before = time.monotonic(), seconds_of(head), time.process_time()
    for _ in range(looks):
        sharing.decide(cluster.placement_groups(), cluster.nodes_with_places())
    used = seconds_of(head) - before - idle * (time.monotonic() - began)
    return 1000 * (time.process_time() - own_before) / looks, 1000 * used / looks


def main(argv: Sequence[str]) -> None:
    parser = argparse.ArgumentParser(prog="looks")
    parser.add_argument("--removed", type=int, default=12_000, help="groups that Ray has removed")
    parser.add_argument("--waiting", type=int, default=32, help="groups that wait")
    parser.add_argument("--looks", type=int, default=50)
    given = parser.parse_args(argv)
    results: dict[str, object] = {"removed": given.removed, "waiting": given.waiting}
    with ray_nodes(2) as nodes:
        head = nodes.head_node.all_processes["gcs_server"][0].process.pid
        results["ms (driver, head), none removed"] = measure(head, given.looks)
        for _ in range(given.removed):
            remove_placement_group(placement_group([PLACE], name=group_name("extra", 0, 1)))
        deadline = time.monotonic() + 300
        while cluster.placement_groups():
            assert time.monotonic() < deadline
            time.sleep(1)
        quiet = results["ms (driver, head), nothing waits"] = measure(head, given.looks)
        for number in range(given.waiting):
            placement_group([{"CPU": 1000.0}], name=group_name("extra", 0, number))
        busy = results["ms (driver, head), groups wait"] = measure(head, given.looks)
        results["kept by Ray"] = len(ray.util.placement_group_table())
    for what, each, seconds in (("nothing waits", quiet, LATE_SECONDS), ("a new group waits", busy, SOON_SECONDS)):
        results[f"s an hour, {what}"] = [ms / 1000 * 3600 / seconds for ms in each]
    print(json.dumps(results))
