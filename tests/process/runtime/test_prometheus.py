"""A training as metrics: what they say of a log, that a Ray node hands them out, and the dashboard that draws them."""

from __future__ import annotations

import re
import time
import urllib.request
from pathlib import Path

import pytest
import ray

from ray_yolo.core.events import ShardEvent
from ray_yolo.core.structures import WorkerStatus
from ray_yolo.runs.status import write_members
from ray_yolo.runtime.prometheus import RUN_METRICS, WORKER_METRICS, RayMetrics
from tests.unit.runtime.test_prometheus import LOG

SHARD = ShardEvent(epoch=0, step=10, worker=1, images=40, wait_seconds=0.5, seconds=2.0, node="n2", pid=7)
MEMBER = WorkerStatus(worker=1, node="n2", pid=7, phase="loading", step=2, seconds=3.0, waits=False)


def collected(port: int) -> dict[tuple[str, str, str], float]:
    """(metric, run, worker) -> value, as a node tells Prometheus."""
    with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=10) as answer:
        text = answer.read().decode()
    found = {}
    for name, labels, value in re.findall(r"^(ray_yolo_\w+)\{(.*)\} (\S+)$", text, re.MULTILINE):
        tags = dict(re.findall(r'(\w+)="([^"]*)"', labels))
        found[name, tags.get("run", ""), tags.get("worker", "")] = float(value)
    return found


@pytest.mark.ray
def test_a_node_of_ray_hands_them_to_prometheus(ray_session: None, tmp_path: Path) -> None:
    metrics = RayMetrics(tmp_path / "train" / "exp")
    (tmp_path / "train" / "exp").mkdir(parents=True)
    for event in LOG:
        metrics.event(event)
    (port,) = (node["MetricsExportPort"] for node in ray.nodes() if node["Alive"])
    expected = {(f"ray_{name}", "train/exp", "") for name in RUN_METRICS} | {
        (f"ray_{name}", "train/exp", "1") for name in WORKER_METRICS}
    deadline = time.monotonic() + 60
    while not expected <= (found := collected(port)).keys():
        assert time.monotonic() < deadline, expected - found.keys()
        write_members(tmp_path / "train" / "exp", [MEMBER])
        metrics.event(SHARD)
        metrics.update()
        time.sleep(1)
    assert found["ray_yolo_step", "train/exp", ""] == 2
    assert found["ray_yolo_worker_images_per_second", "train/exp", "1"] == 20
    assert found["ray_yolo_worker_data_wait_share", "train/exp", "1"] == 0.25
    assert found["ray_yolo_worker_phase_seconds", "train/exp", "1"] == 3
