"""A training as metrics: what they say of a log, that a Ray node hands them out, and the dashboard that draws them."""

from __future__ import annotations

import json
import re
from pathlib import Path

import yaml

from ray_yolo.runtime.prometheus import RUN_METRICS, WORKER_METRICS, run_numbers
from tests.support import run_log

ALERTS = Path(__file__).parents[3] / "cluster" / "alerts.yaml"
DASHBOARD = Path(__file__).parents[3] / "cluster" / "grafana.json"
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
