import json
from pathlib import Path

import pytest

from ray_yolo.config.recipe import Recipe, recipe_digest
from ray_yolo.core.events import ANCHOR_TERMS
from ray_yolo.sinks.metric_names import metrics
from ray_yolo.sinks.mlflow_plan import plan_run, plan_validation
from tests.support import run_log


def plan(*events):
    return plan_run(run_log.numbered([run_log.run(), *events]))


def test_without_a_run_event_there_is_no_plan():
    assert plan_run([]) is None


def test_experiment_is_the_project_folder_and_the_run_keeps_its_name():
    made = plan_run(run_log.numbered([run_log.run(placement={"project": "runs/cards"}, name="exp7")]))
    assert (made.experiment, made.name) == ("cards", "exp7")


def test_params_are_the_recipe_and_the_placement_by_path():
    params = plan().params
    assert params["optimizer.lr0"] == "0.01"
    assert params["epochs"] == "3"
    assert params["placement.num_workers"] == "auto"
    assert all(isinstance(value, str) for value in params.values())


def test_a_param_is_never_longer_than_mlflow_takes():
    recipe = Recipe().model_dump(mode="json") | {"freeze": list(range(5000))}
    assert len(plan_run(run_log.numbered([run_log.run(recipe=recipe)])).params["freeze"]) == 6000


def test_tags_say_where_the_run_comes_from():
    tags = plan(run_log.start(), run_log.start(num_workers=4)).tags
    recipe = Recipe.model_validate(run_log.run().recipe)
    assert tags | {
        "ray_yolo.run_id": "train/exp-1", "ray_yolo.recipe_digest": recipe_digest(recipe), "ray_yolo.attempts": "2",
        "ray_yolo.workers": "4", "mlflow.source.git.commit": "abc123", "mlflow.source.name": "python -m ray_yolo.train",
    } == tags


def test_the_description_is_the_best_epoch_and_at_the_end_the_page():
    story = [run_log.start(), *run_log.trained_epoch(0), run_log.epoch(1, best=False), run_log.checkpoint(20)]
    note = plan(*story).tags["mlflow.note.content"]
    assert note == "Best epoch 1 of 2: mAP50-95 0.0625, mAP50 0.125, recall 0.25, precision 0.5."
    ended = plan(*story, run_log.end(20))
    page = "[report.html](artifacts:report.html): all of it on one page."
    assert ended.tags["mlflow.note.content"] == f"{note}\n\n{page}"
    assert "report.html" in ended.artifacts
    assert "mlflow.note.content" not in plan(run_log.start()).tags


def test_without_git_no_tag_names_a_commit():
    run = run_log.run(provenance={"git_commit": "", "python": "3.12"})
    tags = plan_run(run_log.numbered([run])).tags
    assert tags["ray_yolo.python"] == "3.12"
    assert not {"ray_yolo.git_commit", "mlflow.source.git.commit"} & tags.keys()


def test_data_sets_are_those_of_the_last_start():
    names = {"bccd": "bccd", "/there/bccd.yaml": "bccd", "sets/bccd/data.yaml": "bccd", "data.yaml": "data",
             "s3://bucket/bccd/data.yaml": "bccd"}
    for path, name in names.items():
        recipe = {**run_log.run().recipe, "data": path}
        events = [run_log.run(recipe=recipe), run_log.dataset(train="old", val="old"),
                  run_log.dataset(train="a1", val="b2")]
        found = plan_run(run_log.numbered(events)).data
        assert [(each.name, each.digest, each.context) for each in found] == [
            (name, "a1", "training"), (name, "b2", "validation")], path
        assert json.loads(found[0].source) == {"uri": path}, path
        assert json.loads(found[0].profile) == {"images": 80, "boxes": 99}, path


def test_an_older_log_says_nothing_of_data_sets():
    assert plan().data == plan(run_log.dataset(train="")).data == []


def test_only_durable_epochs_are_planned():
    points = plan(*run_log.trained_epoch(0), run_log.epoch(1)).points
    assert {point.epoch for point in points} == {1}
    assert {point.key: point.value for point in points}["metrics/mAP50"] == 0.125
    assert [point.key for point in points] == [metric.name for metric in metrics(ANCHOR_TERMS)]


def test_every_metric_has_the_value_of_its_own_place():
    tracked = {point.key: point.value for point in plan(*run_log.trained_epoch(0), run_log.end(10)).points}
    assert tracked == {
        "train/box_loss": 0.5, "train/obj_loss": 0.25, "train/cls_loss": 0.125, "val/box_loss": 0.4,
        "val/obj_loss": 0.2, "val/cls_loss": 0.1, "metrics/precision": 0.5, "metrics/recall": 0.25,
        "metrics/mAP50": 0.125, "metrics/mAP50-95": 0.0625, "metrics/fitness": 0.07, "x/lr0": 0.1, "x/lr1": 0.01,
        "x/lr2": 0.001, "x/images_per_second": 100.0, "x/data_wait_share": 0.02, "x/gpu_memory_gb": 1.5}


def test_time_is_that_of_the_event_in_milliseconds():
    (point, *_) = plan(run_log.epoch(0), run_log.checkpoint(10)).points
    assert point.time_ms == 1_001_000


def test_what_was_not_measured_has_no_point():
    row = run_log.epoch(0, metrics=None, fitness=None, val=None)
    keys = {point.key for point in plan(row, run_log.checkpoint(10)).points}
    assert not any(key.startswith(("val/", "metrics/")) for key in keys)
    assert "train/box_loss" in keys


@pytest.mark.parametrize(("status", "expected"), [("done", "FINISHED"), ("failed", "FAILED"), ("stopped", "KILLED")])
def test_the_end_decides_the_status(status, expected):
    made = plan(run_log.start(), *run_log.trained_epoch(0), run_log.end(10, status))
    assert made.status == expected
    assert made.end_ms is not None


def test_a_start_after_an_end_runs_again():
    made = plan(run_log.start(), run_log.end(0, "stopped"), run_log.start())
    assert (made.status, made.end_ms) == ("RUNNING", None)


def test_the_newest_metrics_at_the_end_are_the_best():
    story = [run_log.start(), *run_log.trained_epoch(0), run_log.epoch(1, best=False), run_log.checkpoint(20)]

    def mean_precisions(*events):
        return [(point.epoch, point.value) for point in plan(*story, *events).points if point.key == "metrics/mAP50"]

    assert mean_precisions() == mean_precisions(run_log.end(20, "stopped")) == [(1, 0.125), (2, 1.125)]
    assert mean_precisions(run_log.end(20)) == [(1, 0.125), (2, 1.125), (2, 0.125)]
    ended = plan(*story, run_log.end(20))
    last = {point.key: point for point in ended.points if point.time_ms == ended.end_ms}
    assert sorted(last) == ["metrics/fitness", "metrics/mAP50", "metrics/mAP50-95", "metrics/precision",
                            "metrics/recall"]


def test_a_run_whose_last_epoch_is_its_best_has_each_point_once():
    made = plan(run_log.start(), *run_log.trained_epoch(0), run_log.end(10))
    assert len(made.points) == len(metrics(ANCHOR_TERMS))


def test_a_run_that_never_validated_has_no_metrics():
    made = plan(run_log.start(), run_log.epoch(0, metrics=None, fitness=None, best=False), run_log.end(10))
    assert not any(point.key.startswith("metrics/") for point in made.points)


def test_a_validation_of_weights_at_the_root_has_no_training(tmp_path: Path) -> None:
    plan = plan_validation(tmp_path, {"weights": "/best.pt"}, {"metrics": {"mAP50": 0.5}})
    assert "ray_yolo.training_run_id" not in plan.tags
    assert [(point.key, point.value) for point in plan.points] == [("metrics/mAP50", 0.5)]
