"""A training as metrics: what they say of a log, that a Ray node hands them out, and the dashboard that draws them."""

from __future__ import annotations

import json
import re
import time
import urllib.request
from pathlib import Path

import pytest
import ray
import yaml

from ray_yolo.core.events import ShardEvent
from ray_yolo.core.structures import WorkerStatus
from ray_yolo.runs.status import write_members
from ray_yolo.runtime.prometheus import RUN_METRICS, WORKER_METRICS, RayMetrics, run_numbers
from tests.support import run_log

ALERTS = Path(__file__).parents[3] / "cluster" / "alerts.yaml"
DASHBOARD = Path(__file__).parents[3] / "cluster" / "grafana.json"
SHARD = ShardEvent(epoch=0, step=10, worker=1, images=40, wait_seconds=0.5, seconds=2.0, node="n2", pid=7)
MEMBER = WorkerStatus(worker=1, node="n2", pid=7, phase="loading", step=2, seconds=3.0, waits=False)
LOG = [run_log.run(), run_log.start(), run_log.step(1), run_log.step(2), *run_log.trained_epoch(0)]


def test_what_a_log_says() -> None:
    assert run_numbers(LOG) == {
        "yolo_workers": 2, "yolo_step": 2, "yolo_epochs": 1, "yolo_images_per_second": 100.0,
        "yolo_data_wait_share": 0.125, "yolo_best_fitness": 0.07, "yolo_restarts": 0, "yolo_regroupings": 0,
        "yolo_goodput": 1.0}
    again = run_numbers([*LOG, run_log.start(10, regrouped=True, num_workers=1), run_log.start(10)])
    assert (again["yolo_workers"], again["yolo_regroupings"], again["yolo_restarts"]) == (2, 1, 1)


def test_what_a_log_does_not_have_yet_is_not_exported() -> None:
    numbers = run_numbers([run_log.run()])
    assert [name for name, number in numbers.items() if number is None] == [
        "yolo_workers", "yolo_step", "yolo_images_per_second", "yolo_data_wait_share", "yolo_best_fitness"]
    assert numbers.keys() == RUN_METRICS.keys()


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


def test_the_dashboard_asks_for_metrics_that_are_there() -> None:
    board = json.loads(DASHBOARD.read_text())
    asked = [target["expr"] for panel in board["panels"] for target in panel.get("targets", [])]
    named = [set(re.findall(r"\bray_(\w+)", expression)) for expression in asked]
    assert all(named)
    assert set.union(*named) == RUN_METRICS.keys() | WORKER_METRICS.keys()
    assert all('{run=~"$run"' in expression for expression in asked)


def test_the_alerts_are_rules_of_prometheus_over_metrics_that_are_there() -> None:
    """Fields as in Prometheus' documentation of recording rules; each label of a message is one of the expression."""
    [group] = yaml.safe_load(ALERTS.read_text())["groups"]
    assert group.keys() == {"name", "rules"}
    names = [rule["alert"] for rule in group["rules"]]
    assert len(set(names)) == len(names) >= 5
    for rule in group["rules"]:
        assert rule.keys() - {"for"} == {"alert", "expr", "labels", "annotations"}
        assert re.fullmatch(r"\d+[mh]", rule.get("for", "1m"))
        assert rule["labels"]["severity"] in {"info", "warning", "critical"}
        assert rule["annotations"].keys() == {"summary", "description"}
        metrics = set(re.findall(r"\bray_(yolo_\w+)", rule["expr"]))
        assert metrics
        assert metrics <= RUN_METRICS.keys() | WORKER_METRICS.keys()
        assert rule["expr"].count("(") == rule["expr"].count(")")
        assert re.search(r" (>|<|==) [\d.]+$", rule["expr"])
        kept = re.findall(r"by \(([^)]*)\)", rule["expr"])
        labels = set(kept[0].split(", ")) if kept else {"run"}
        assert all(set(each.split(", ")) == labels for each in kept)
        assert labels <= ({"run", "worker", "node"} if metrics <= WORKER_METRICS.keys() else {"run"})
        assert set(re.findall(r"\$labels\.(\w+)", rule["annotations"]["summary"])) <= labels
        assert "{{ $labels.run }}" in rule["annotations"]["summary"]
