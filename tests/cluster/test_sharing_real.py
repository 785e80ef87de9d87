"""Two trainings share a cluster of two machines: `make cluster-test`."""

from __future__ import annotations

import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from ray_yolo.core.events import WorkerEvent
from ray_yolo.runs.event_log import read_events
from tests.support import machines
from tests.support.machines import Machines, wait_for
from tests.support.run_log import messages, only
from tests.support.shared_jobs import Job, Node, assert_bits_of_a_lone_run, job

pytestmark = [pytest.mark.root, pytest.mark.ray, pytest.mark.timeout(1800),
              pytest.mark.skipif(bool(machines.missing()), reason=machines.missing() or "-")]

HEAD = "10.77.0.1:6379"
RAY = f"{sys.executable} -m ray.scripts.scripts start --num-cpus=2 --object-store-memory=100000000 --block"
SCRIPTS = {"n1": f"{RAY} --head --node-ip-address=10.77.0.1 --include-dashboard=false > n1.log 2>&1",
           "n2": f"until {RAY} --address={HEAD} --node-ip-address=10.77.0.2 >> n2.log 2>&1; do sleep 1; done"}


@pytest.fixture
def nodes() -> Iterator[tuple[Machines, Path]]:
    """Two machines with two CPUs each, and a folder that both see."""
    with tempfile.TemporaryDirectory(dir="/var/tmp", ignore_cleanup_errors=True) as name:  # /tmp is each node's own
        folder = Path(name)
        (folder / "home").mkdir()
        environment = {
            "PATH": "/usr/sbin:/usr/bin:/sbin:/bin", "HOME": f"{name}/home", "RAY_YOLO_CACHE": f"{name}/cache",
            "RAY_ADDRESS": HEAD, "OMP_NUM_THREADS": "1", "RAY_USAGE_STATS_ENABLED": "0", **machines.PATIENCE}
        with Machines(folder, SCRIPTS, environment) as both:
            alive = ("import ray, sys; ray.init('auto', log_to_driver=False, logging_level='ERROR'); "
                     "sys.exit(sum(node['Alive'] for node in ray.nodes()) != 2)")
            wait_for(lambda: both.run("n1", sys.executable, "-c", alive).returncode == 0)
            yield both, folder


def hosts(job: Job) -> set[str]:
    """The machines on which its workers have trained."""
    return {event.node for event in only(WorkerEvent, read_events(job.run_dir / "events.jsonl"))}


def test_a_training_of_one_node_gives_places_to_a_training_of_the_other_one(nodes: tuple[Machines, Path]) -> None:
    """Both drivers read the same table, and both trainings have the bits of a lone run."""
    both, folder = nodes
    with job(folder / "first", node=Node(both, "n1")) as first:
        first.wait(lambda: first.workers() == 4)
        time.sleep(30)
        with job(folder / "second", node=Node(both, "n2")) as second:
            second.wait(lambda: second.first_step() < float("inf"))
            second.wait(lambda: first.workers() == second.workers() == 2)
            second.stop()
        first.wait(lambda: first.workers() == 4)
        first.stop()
    said = [text for text in messages(first.run_dir) if "is given to" in text]
    assert len(said) == 2
    assert all("on 10.77.0.2" in text for text in said)
    assert len(hosts(first)) == 2
    assert_bits_of_a_lone_run((first, second), folder / "lone")
    print(f"the second one's first step after {second.first_step():.1f} s")
