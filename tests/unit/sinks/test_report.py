import json
import shlex
from typing import Any

import pytest

from ray_yolo.config.placement import Placement
from ray_yolo.config.recipe import Recipe
from ray_yolo.core.events import (
    BalanceEvent,
    DatasetEvent,
    Event,
    ResourcesEvent,
    ShardEvent,
    SplitCounts,
    WarningEvent,
)
from ray_yolo.sinks.report import (
    CLASS_HEADER,
    TrainingReport,
    closing_message,
    dataset_table,
    settings_line,
    tf32_line,
    train_header,
    workers_line,
)
from tests.support import run_log

HEADER = train_header(("box", "obj", "cls"))


def lines(events, *, live):
    report = TrainingReport(live=live)
    return [line for event in run_log.numbered(events) for line in report.observe(event)], report


BEGIN = [run_log.run(), run_log.start()]


class TestEpochLines:
    def test_the_run_is_introduced(self):
        (first, second, third), _ = lines(BEGIN, live=False)
        assert first == "exp: yolov5s (7,000,000 parameters) on shapes (80 images, 16 for validation, 2 classes)"
        assert second == ("batch 8, microbatch 4, accumulation 8 (64 images per step), precision fp32, "
                          "learning rate 0.01 (SGD)")
        assert third == "training on 2 workers"

    def test_what_is_not_decided_yet_says_what_decides_it(self):
        assert settings_line(Recipe(batch_size=-1, precision="bf16")) == (
            "batch as large as the GPUs' memory holds, precision bf16, learning rate 0.01 (SGD)")
        assert settings_line(Recipe(batch_size=96, microbatch=48)) == (
            "batch 96, microbatch 48, accumulation 1 (96 images per step), precision auto (bf16 where it is fast, else "
            "fp32), learning rate 0.01 (SGD)")

    @pytest.mark.parametrize(("fields", "gpus", "is_said"), [
        ({"precision": "fp32"}, 1.0, True), ({"precision": "fp32"}, 0.0, False), ({"precision": "fp32"}, None, False),
        ({"precision": "bf16"}, 1.0, False), ({"precision": "fp32", "no_tf32": True}, 1.0, False)])
    def test_fp32_on_a_gpu_is_said_to_round(self, fields: dict[str, Any], gpus: float | None, is_said: bool) -> None:
        assert ("TF32" in tf32_line(Recipe(**fields), gpus)) == is_said

    def test_an_epoch_is_one_row_under_a_header(self):
        (*_, header, line), _ = lines([*BEGIN, run_log.epoch(0)], live=False)
        assert header == ("      Epoch    GPU_mem   box_loss   obj_loss   cls_loss          P          R      mAP50   "
                          "mAP50-95   images/s       time")
        assert line == ("        1/3       1.5G     0.5000     0.2500     0.1250     0.5000     0.2500     0.1250     "
                        "0.0625      100.0    0:01:00  best")

    def test_the_points_of_all_rows_are_below_each_other(self):
        odd = {"box": 0.1257, "obj": 0.01207, "cls": 0.0}
        output, _ = lines([*BEGIN, run_log.epoch(0), run_log.epoch(1, train=odd), run_log.epoch(2)], live=False)
        rows = [line.removesuffix("  best") for line in output[-3:]]
        assert len({len(row) for row in rows}) == 1
        points = [[at for at, letter in enumerate(row) if letter == "."][-8:] for row in rows]
        assert points[0] == points[1] == points[2]
        assert "0.1257     0.0121     0.0000" in rows[1]

    def test_the_header_is_repeated_for_those_who_scroll(self):
        story = [run_log.run(), run_log.start(epochs=70), *(run_log.epoch(number) for number in range(70))]
        output, _ = lines(story, live=False)
        heads = [at for at, line in enumerate(output) if line.lstrip().startswith("Epoch")]
        assert [at - heads[0] for at in heads] == [0, 31, 62]

    def test_what_was_not_measured_is_a_dash(self):
        epoch = run_log.epoch(0, metrics=None, val=None, best=False, memory_gb=0.0,
                              train={"box": None, "obj": 0.25, "cls": 0.125})
        (*_, line), _ = lines([*BEGIN, epoch], live=False)
        assert line.split() == ["1/3", "-", "-", "0.2500", "0.1250", "-", "-", "-", "-", "100.0", "0:01:00"]

    def test_a_restart_says_where_it_goes_on(self):
        output, _ = lines([run_log.run(), run_log.start(10, num_workers=1)], live=False)
        assert output[-1] == "continuing with 1 worker from step 10, epoch 2"

    def test_an_epoch_reported_again_after_a_restart_is_not_news(self):
        output, _ = lines([*BEGIN, run_log.epoch(0), run_log.start(10), run_log.epoch(0)], live=False)
        assert sum(line.lstrip().startswith("1/3") for line in output) == 1

    def test_warnings_are_passed_on(self):
        output, _ = lines([WarningEvent(message="MLflow is away")], live=False)
        assert output == ["WARNING: MLflow is away"]

    def test_new_shards_of_the_workers_are_one_line(self):
        balance = BalanceEvent(step=5, from_step=8, microbatches=(3, 1), seconds=(0.04, 0.125))
        output, _ = lines([balance], live=True)
        assert output == ["from step 8 on, workers compute 3, 1 microbatches per step (seconds each: 0.04, 0.125)"]

    def test_a_warning_of_several_workers_is_shown_once_with_the_number_of_the_first(self):
        output, _ = lines([WarningEvent(message="slow kernel", worker=worker) for worker in (3, 0, 3)],
                        live=False)
        assert output == ["WARNING: worker 3: slow kernel"]

    def test_steps_shards_and_unknown_events_are_no_lines(self):
        shard = ShardEvent(worker=0, epoch=0, step=1, images=8, wait_seconds=0.0, seconds=1.0, node="a", pid=1)
        output, _ = lines([*BEGIN, run_log.step(1), shard, Event(type="weather")], live=False)
        assert output == lines(BEGIN, live=False)[0]


def split(**changes):
    return SplitCounts.model_validate({
        "images": 20, "boxes": 9, "per_class": [7, 2], "empty_file": 3, "no_file": 4, "images_left_out": 1,
        "rows_left_out": 2, "looked_for": ["/d/labels/train/*.txt"]} | changes)


class TestDataset:
    @pytest.mark.parametrize("live", [True, False])
    def test_both_splits_are_shown_in_columns(self, live):
        val = split(images=5, boxes=6, per_class=[6, 0], looked_for=["/d/val.json"])
        event = DatasetEvent(names=("circle", "square"), splits={"train": split(), "val": val})
        assert lines([event], live=live)[0] == [
            "       Data     images      boxes empty file    no file images out   rows out",
            "      train         20          9          3          4          1          2",
            "        val          5          6          3          4          1          2",
            "              boxes of      train        val",
            "                circle          7          6",
            "                square          2          0",
            "labels of train: looked for in /d/labels/train/*.txt",
            "no box in val: 1 of 2 classes (square)",
            "labels of val: looked for in /d/val.json"]

    def test_what_each_worker_is_given_is_one_line_with_its_reasons(self):
        chosen = ResourcesEvent(cpus=2, threads=2, loader_processes=0, cache="ram", reasons=("2 free", "they fit"))
        assert lines([chosen], live=True)[0] == [
            "each worker: 2 CPUs, 2 threads, 0 loader processes, cache ram (2 free; they fit; flags: --cpus-per-worker "
            "--workers --cache)"]
        asked = ResourcesEvent(cpus=1, threads=1, loader_processes=1, cache="none", reasons=())
        assert lines([asked], live=False)[0] == [
            "each worker: 1 CPU, 1 thread, 1 loader process, cache none (as asked)"]

    def test_of_many_classes_the_most_frequent_are_listed(self):
        counts = [number % 50 for number in range(80)]
        output = dataset_table({"val": split(per_class=counts)}, [f"c{number}" for number in range(80)])
        rows = [line.split() for line in output[3:23]]
        assert rows == [[f"c{number}", str(number)] for number in range(30, 50)]
        assert output[23].split() == ["60", "more", "classes"]
        assert output[24] == "no box in val: 2 of 80 classes (c0, c50)"


class TestTables:
    def test_columns_stand_under_their_names(self):
        output, _ = lines([*BEGIN, run_log.epoch(0)], live=True)
        at = output.index(HEADER)
        assert output[at + 1: at + 4] == [
            "        1/3       1.5G     0.5000     0.2500     0.1250      100.0    0:01:00",
            CLASS_HEADER,
            "                   all         16         14     0.5000     0.2500     0.1250     0.0625"]

    def test_the_next_epoch_has_a_header_and_after_the_last_there_is_none(self):
        output, _ = lines([*BEGIN, run_log.epoch(0), run_log.epoch(1), run_log.epoch(2)], live=True)
        assert output.count(HEADER) == 3
        assert output[-1].lstrip().startswith("all")


class TestProgress:
    @pytest.mark.parametrize("live", [True, False])
    def test_nothing_is_claimed_before_the_first_step_and_after_the_end(self, live):
        _, report = lines(BEGIN, live=live)
        assert report.progress() == ""
        _, report = lines([*BEGIN, run_log.step(1), run_log.end(30)], live=live)
        assert report.progress() == ""

    def test_time_left_is_images_left_over_images_per_second(self):
        # 80 images an epoch, 3 epochs, 100 images/s; after step 14 of 30 128 images are left
        _, report = lines([*BEGIN, run_log.step(14)], live=False)
        assert report.progress() == "epoch 2/3  40 %  0:00:01 left  box 0.5  obj 0.25  cls 0.125  100 images/s"

    def test_between_two_epochs_the_next_one_is_at_zero(self):
        _, report = lines([*BEGIN, run_log.step(10), run_log.epoch(0)], live=False)
        assert report.progress() == "epoch 2/3  0 %  0:00:02 left  100 images/s"

    def test_after_the_last_epoch_there_is_no_progress(self):
        _, report = lines([*BEGIN, run_log.step(30), run_log.epoch(2)], live=True)
        assert report.progress() == ""

    def test_losses_are_the_mean_of_this_epochs_steps(self):
        steps = [run_log.step(10, loss=[9.0, 9.0, 9.0]), run_log.step(11, loss=[1.0, 2.0, 3.0]),
                 run_log.step(12, loss=[3.0, 4.0, 5.0]), run_log.step(13, loss=[None, 1.0, 1.0], skipped=True)]
        _, report = lines([*BEGIN, *steps], live=False)
        assert "box 2  obj 3  cls 4" in report.progress()

    def test_a_live_line_stands_under_the_header(self):
        _, report = lines([*BEGIN, run_log.epoch(0), run_log.step(14)], live=True)
        assert report.progress() == (
            "    2/3 40%       1.5G     0.5000     0.2500     0.1250      100.0   -0:00:01")

    def test_a_live_line_fits_a_terminal_of_eighty_columns(self):
        long = [run_log.run(num_images=10**6), run_log.start(epochs=300), run_log.epoch(0, memory_gb=139.25),
                run_log.step(11, loss=[1.23456e-5] * 3, images_per_second=12345.6)]
        _, report = lines(long, live=True)
        assert len(report.progress()) == 77
        assert report.progress().endswith("-6:45:00")

    @pytest.mark.parametrize(("live", "rest"), [(True, " val"), (False, "100 %  validating  ")])
    def test_after_the_last_step_no_time_is_left(self, live, rest):
        _, report = lines([*BEGIN, run_log.step(30)], live=live)
        assert rest in report.progress()
        assert "0:00:00" not in report.progress()

    def test_a_first_step_without_a_loss_is_shown_too(self):
        _, report = lines([*BEGIN, run_log.step(1, loss=[None, None, None])], live=True)
        assert report.progress().split()[2:5] == ["-", "-", "-"]


class TestClosingMessage:
    STORY = (*BEGIN, *run_log.trained_epoch(0), *run_log.trained_epoch(1), *run_log.trained_epoch(2))

    def message(self, run_dir, *events):
        return closing_message(run_dir, run_log.numbered([*self.STORY, *events])).splitlines()

    def test_it_tells_the_outcome_and_the_classes_of_the_best_epoch(self, tmp_path):
        story = [*BEGIN, run_log.epoch(0), run_log.epoch(1), run_log.epoch(2, best=False), run_log.end(30)]
        output = closing_message(tmp_path, run_log.numbered(story)).splitlines()
        assert output[:4] == [
            CLASS_HEADER,
            "                   all          -         14     0.5000     0.2500     1.1250     0.0625",
            "                circle          9          7     0.5000     0.2500     1.1250     0.0625",
            "                square          9          7     0.5000     0.2500     1.1250     0.0625"]
        assert "done: 3 epochs in 0:03:00" in output
        at = output.index("best epoch   2  P 0.5  R 0.25  mAP50 1.125  mAP50-95 0.0625")
        assert output[at + 1].strip() == "(epoch 1 in results.csv, which counts from 0 as YOLOv5 does)"

    def test_it_tells_how_to_look_at_it(self, tmp_path):
        (tmp_path / "weights").mkdir()
        (tmp_path / "weights" / "best.pt").touch()
        (tmp_path / "mlflow.json").write_text(json.dumps({"run_id": "r1", "experiment_id": "7", "uri": "sqlite:////x.db"}))
        output = self.message(tmp_path, run_log.end(30))
        assert output[-5:] == [
            f"results      {tmp_path}", f"weights      {tmp_path}/weights (best.pt)",
            f"tensorboard  tensorboard --logdir {tmp_path}",
            "mlflow       mlflow ui --backend-store-uri sqlite:////x.db",
            "             (and open http://127.0.0.1:5000/#/experiments/7/runs/r1/model-metrics?workflowType=machine_learning)"]

    def test_it_names_pictures_and_page_from_the_first_epoch_on(self, tmp_path):
        story = run_log.numbered([*BEGIN, run_log.end(1, "stopped")])
        assert "plots " not in closing_message(tmp_path, story, plots=True)
        later = closing_message(tmp_path, run_log.numbered([*self.STORY, run_log.end(30)]), plots=True)
        assert f"\npage         {tmp_path}/report.html " in later
        assert "report.html" not in closing_message(tmp_path, run_log.numbered(self.STORY))

    def test_without_tensorboard_it_names_what_to_install(self, tmp_path, monkeypatch):
        monkeypatch.setattr("ray_yolo.sinks.tensorboard.find_spec", lambda name: None)
        assert self.message(tmp_path, run_log.end(30))[-1] == "tensorboard  no files: pip install tensorboard"

    def test_its_commands_can_be_copied_whatever_folders_are_called(self, tmp_path):
        folder = tmp_path / "Ann's runs"
        folder.mkdir()
        uri = f"sqlite:///{folder}/mlflow.db"
        (folder / "mlflow.json").write_text(json.dumps({"run_id": "r1", "experiment_id": "7", "uri": uri}))
        output = {line[:13].strip(): line[13:] for line in self.message(folder, run_log.end(30))}
        assert shlex.split(output["tensorboard"]) == ["tensorboard", "--logdir", str(folder)]
        assert shlex.split(output["mlflow"]) == ["mlflow", "ui", "--backend-store-uri", uri]

    def test_pictures_and_an_mlflow_run_that_are_still_made_are_named(self, tmp_path):
        """At a prompt, both may be complete some seconds later."""
        story = run_log.numbered(self.STORY)
        output = closing_message(tmp_path, story, plots=True, uri="sqlite:////x.db").splitlines()
        assert output[-5].startswith(f"plots        {tmp_path} (results.png")
        assert output[-2:] == ["mlflow       mlflow ui --backend-store-uri sqlite:////x.db",
                               "             (and open http://127.0.0.1:5000)"]
        output = closing_message(tmp_path, [], uri="https://ann:s3cr3t@host").splitlines()
        assert output[-1] == "mlflow       https://***@host"

    def test_a_served_run_is_a_link(self, tmp_path):
        (tmp_path / "mlflow.json").write_text(json.dumps({"run_id": "r1", "experiment_id": "7", "uri": "http://host/"}))
        assert self.message(tmp_path)[-1] == "mlflow       http://host/#/experiments/7/runs/r1/model-metrics?workflowType=machine_learning"

    def test_what_did_not_end_well_can_go_on(self, tmp_path):
        assert "failed: 3 epochs in 0:03:00 (disk full); the same command continues" in self.message(
            tmp_path, run_log.end(30, "failed", reason="disk full"))
        assert "interrupted after 3 epochs in 0:03:00; the same command continues" in self.message(tmp_path)

    def test_a_run_without_an_epoch_has_a_message(self, tmp_path):
        output = closing_message(tmp_path, run_log.numbered([*BEGIN, run_log.end(0, "failed")]))
        assert output.startswith("failed: 0 epochs in 0:00:00; the same command continues")


def test_a_dry_run_describes_the_workers() -> None:
    for given, gpus, line in (
        ({"num_workers": 2, "cpus_per_worker": 1.5, "accelerator_type": "A100"}, 1.0,
         "Ray: 2 workers of Ray Train, placed by PACK; each has 1.5 CPU, 1 GPU, A100"),
        ({"num_workers": (2, 4), "placement_strategy": "SPREAD"}, 0.0,
         "Ray: 2 to 4 workers of an elastic pool, placed by SPREAD; each has its share of a node's CPUs, 0 GPU"),
        ({"num_workers": 1, "cpus_per_worker": 2.0}, None,
         "Ray: 1 workers of Ray Train, placed by PACK; each has 2 CPU, 1 GPU if the cluster has any"),
    ):
        assert workers_line(Placement.model_validate(given), gpus) == line
