"""One table of the numbers of an epoch."""

from __future__ import annotations

from ray_yolo.core.events import ANCHOR_TERMS, METRICS
from ray_yolo.sinks.metric_names import metrics, terms_of
from tests.support import run_log

HEADER = ("train/box_loss", "train/obj_loss", "train/cls_loss", "metrics/precision", "metrics/recall",
          "metrics/mAP_0.5", "metrics/mAP_0.5:0.95", "val/box_loss", "val/obj_loss", "val/cls_loss", "x/lr0", "x/lr1",
          "x/lr2")


def test_results_csv_has_yolov5s_names_in_its_order() -> None:
    assert tuple(metric.column for metric in metrics(ANCHOR_TERMS) if metric.column) == HEADER


def test_no_name_stands_twice() -> None:
    names = [metric.name for metric in metrics(ANCHOR_TERMS)]
    assert len(set(names)) == len(names) == len(HEADER) + 4


def test_groups_of_metrics_and_losses_come_first() -> None:
    """MLflow and TensorBoard show the groups in the order of the alphabet."""
    groups = {metric.name.partition("/")[0] for metric in metrics(ANCHOR_TERMS)}
    assert sorted(groups) == ["metrics", "train", "val", "x"]


def test_the_familys_terms_name_its_losses() -> None:
    row = run_log.epoch(0, train={"box": 1.0, "cls": 2.0, "dfl": 3.0}, val={"box": 4.0, "cls": 5.0, "dfl": 6.0})
    losses = {metric.column: metric.of(row) for metric in metrics(terms_of([row])) if "loss" in metric.name}
    assert losses == {"train/box_loss": 1.0, "train/cls_loss": 2.0, "train/dfl_loss": 3.0, "val/box_loss": 4.0,
                      "val/cls_loss": 5.0, "val/dfl_loss": 6.0}


def test_before_the_first_epoch_the_terms_are_those_of_models_with_anchors() -> None:
    assert terms_of([]) == ("box", "obj", "cls")


def test_a_number_that_is_not_there_is_none() -> None:
    for changes, nones in [
        ({}, set()), ({"val": None}, {"val/box_loss", "val/obj_loss", "val/cls_loss"}),
        ({"val": {"box": None, "obj": 0.5}}, {"val/box_loss", "val/cls_loss"}),
        ({"metrics": None}, {f"metrics/{name}" for name in METRICS}),
        ({"metrics": {"precision": 0.5, "recall": 0.5}}, {"metrics/mAP50", "metrics/mAP50-95"}),
        ({"images_per_second": None}, {"x/images_per_second"}),
    ]:
        row = run_log.epoch(0, **changes)
        assert {metric.name for metric in metrics(ANCHOR_TERMS) if metric.of(row) is None} == nones, changes
