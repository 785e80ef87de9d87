import csv
import math

import pytest
import yaml
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from ray_yolo.config.hyp import GENES
from ray_yolo.config.placement import Placement
from ray_yolo.config.recipe import Recipe
from ray_yolo.runlog.event_log import EVENTS_FILE
from ray_yolo.runlog.results_files import ResultsCsv, format_results, number_at, replace_text, write_options, write_results_csv
from ray_yolo.runlog.tensorboard import TensorBoard
from tests.support import run_log

HEADER = (
    "               epoch,      train/box_loss,      train/obj_loss,      train/cls_loss,   metrics/precision,"
    "      metrics/recall,     metrics/mAP_0.5,metrics/mAP_0.5:0.95,        val/box_loss,        val/obj_loss,"
    "        val/cls_loss,               x/lr0,               x/lr1,               x/lr2"
)


class TestCsv:
    def test_the_header_is_yolov5s(self):
        assert format_results([]) == HEADER + "\n"

    def test_a_row_is_padded_and_has_five_digits(self):
        events = run_log.numbered([run_log.epoch(0, train={"box": 0.111934567, "obj": 0.0310871, "cls": 12345.678})])
        row = format_results(events).splitlines()[1]
        assert row.startswith("                   0,             0.11193,            0.031087,               12346,"
                              "                 0.5,")
        assert len(row) == len(HEADER)

    def test_every_number_stands_under_its_name(self, tmp_path):
        write_results_csv(run_log.numbered([run_log.epoch(2)]), tmp_path / "results.csv")
        with (tmp_path / "results.csv").open() as file:
            (row,) = csv.DictReader(file, skipinitialspace=True)
        assert {name: float(value) for name, value in row.items()} == {
            "epoch": 2, "train/box_loss": 0.5, "train/obj_loss": 0.25, "train/cls_loss": 0.125,
            "metrics/precision": 0.5, "metrics/recall": 0.25, "metrics/mAP_0.5": 2.125, "metrics/mAP_0.5:0.95": 0.0625,
            "val/box_loss": 0.4, "val/obj_loss": 0.2, "val/cls_loss": 0.1, "x/lr0": 0.1, "x/lr1": 0.01, "x/lr2": 0.001}

    def test_an_epoch_without_validation_has_nan(self):
        row = format_results(run_log.numbered([run_log.epoch(0, metrics=None, val=None)])).splitlines()[1]
        assert row.split(",")[4:11] == [f"{'nan':>20}"] * 7

    def test_epochs_taken_back_are_gone(self):
        events = run_log.numbered([run_log.start(), run_log.epoch(0), run_log.checkpoint(10), run_log.epoch(1),
                                   run_log.start(10)])
        assert [line.split(",")[0].strip() for line in format_results(events).splitlines()] == ["epoch", "0"]

    def test_a_table_made_again_is_the_same(self, tmp_path):
        events = run_log.numbered([run_log.epoch(0), run_log.epoch(1)])
        write_results_csv(events, tmp_path / "a.csv")
        write_results_csv(events, tmp_path / "b.csv")
        write_results_csv(events, tmp_path / "b.csv")
        assert (tmp_path / "a.csv").read_bytes() == (tmp_path / "b.csv").read_bytes()
        assert sorted(path.name for path in tmp_path.iterdir()) == ["a.csv", "b.csv"]


def test_a_text_that_cannot_be_replaced_leaves_the_old_one_and_nothing_else(tmp_path):
    (tmp_path / "results.csv").write_text("old")
    with pytest.raises(UnicodeEncodeError):
        replace_text(tmp_path / "results.csv", "new \udc80")
    assert (tmp_path / "results.csv").read_text() == "old"
    assert len(list(tmp_path.iterdir())) == 1


@pytest.mark.parametrize(("path", "number"), [(("a", "b"), 1.5), (("l", 1), 4.0), (("a", "x"), None),
                                              (("none", "b"), None), (("a", "null"), None)])
def test_a_number_that_is_not_there_is_none(path, number):
    assert number_at({"a": {"b": 1.5, "null": None}, "l": [3, 4], "none": None}, path) == number


class TestOptions:
    def test_hyp_yaml_has_yolov5s_flat_names(self, tmp_path):
        recipe = Recipe.model_validate({"optimizer": {"lr0": 0.02}, "loss": {"box": 0.07}, "augment": {"scale": 0.9}})
        write_options(recipe, Placement(), tmp_path)
        hyp = yaml.safe_load((tmp_path / "hyp.yaml").read_text())
        assert list(hyp) == list(GENES)
        assert (hyp["lr0"], hyp["box"], hyp["scale"]) == (0.02, 0.07, 0.9)

    def test_opt_yaml_reads_back_as_the_same_run(self, tmp_path):
        recipe, placement = Recipe(epochs=7), Placement.model_validate({"num_workers": "2-8"})
        write_options(recipe, placement, tmp_path)
        options = yaml.safe_load((tmp_path / "opt.yaml").read_text())
        assert Recipe.model_validate(options["recipe"]) == recipe
        assert Placement.model_validate(options["placement"]) == placement

    def test_options_hold_no_secrets(self, tmp_path):
        write_options(Recipe(), Placement(mlflow_uri="https://ann:s3cr3t@host"), tmp_path)
        assert "s3cr3t" not in (tmp_path / "opt.yaml").read_text()


def scalars(folder):
    files = EventAccumulator(str(folder), size_guidance={"scalars": 0}).Reload()
    tags = files.Tags()["scalars"]
    return {tag: [(point.step, round(point.value, 6)) for point in files.Scalars(tag)] for tag in tags}


class TestTensorBoard:
    def test_tags_are_yolov5s_and_steps_are_epochs(self, tmp_path):
        board = TensorBoard(tmp_path)
        board.update(run_log.numbered([*run_log.trained_epoch(0), *run_log.trained_epoch(1)]))
        board.close()
        found = scalars(tmp_path)
        assert list(found) == [name.strip() for name in HEADER.split(",")][1:]
        assert found["metrics/mAP_0.5"] == [(0, 0.125), (1, 1.125)]

    def test_only_durable_epochs_are_written(self, tmp_path):
        board = TensorBoard(tmp_path)
        board.update(run_log.numbered([*run_log.trained_epoch(0), run_log.epoch(1)]))
        board.close()
        assert scalars(tmp_path)["train/box_loss"] == [(0, 0.5)]

    def test_nothing_is_written_before_there_is_an_epoch(self, tmp_path):
        TensorBoard(tmp_path).update(run_log.numbered([run_log.start(), run_log.epoch(0)]))
        assert list(tmp_path.iterdir()) == []

    def test_growing_logs_and_new_starts_repeat_no_point(self, tmp_path):
        story = [*run_log.trained_epoch(0), *run_log.trained_epoch(1), *run_log.trained_epoch(2)]
        for length in (2, 2, 4, 6):
            board = TensorBoard(tmp_path)
            board.update(run_log.numbered(story[:length]))
            board.update(run_log.numbered(story[:length]))
            board.close()
        # files of one second are read in the order of their names, in which the tenth comes before the ninth
        assert sorted(step for step, _ in scalars(tmp_path)["x/lr2"]) == [0, 1, 2]

    def test_a_writer_that_fails_in_the_middle_is_made_good(self, tmp_path, monkeypatch):
        from torch.utils.tensorboard import SummaryWriter

        add = SummaryWriter.add_scalar
        left = iter(range(20))

        def fail_once(self, *args, **kwargs):
            if next(left, None) == 17:
                self.flush()
                raise OSError("no space left")
            add(self, *args, **kwargs)

        monkeypatch.setattr(SummaryWriter, "add_scalar", fail_once)
        events = run_log.numbered([*run_log.trained_epoch(0), *run_log.trained_epoch(1)])
        board = TensorBoard(tmp_path)
        with pytest.raises(OSError, match="no space"):
            board.update(events)
        board.update(events)
        board.close()
        assert all([step for step, _ in points] == [0, 1] for points in scalars(tmp_path).values())

    def test_points_that_a_failing_writer_lost_are_written_later(self, tmp_path, monkeypatch):
        from torch.utils.tensorboard import SummaryWriter

        def refuse(*_):
            raise OSError("no space left")

        events = run_log.numbered([*run_log.trained_epoch(0), *run_log.trained_epoch(1)])
        board = TensorBoard(tmp_path)
        board.update(events[:2])
        with monkeypatch.context() as patch:
            patch.setattr(SummaryWriter, "add_scalar", lambda *_, **__: None)
            patch.setattr(SummaryWriter, "flush", refuse)
            with pytest.raises(OSError, match="no space"):
                board.update(events)
        board.update(events)
        board.close()
        assert scalars(tmp_path)["train/box_loss"] == [(0, 0.5), (1, 0.5)]

    def test_what_was_not_measured_has_no_point(self, tmp_path):
        board = TensorBoard(tmp_path)
        board.update(run_log.numbered([run_log.epoch(0, metrics=None, val={"box": None, "obj": 0.5, "cls": 0.5}),
                                       run_log.checkpoint(10)]))
        board.close()
        assert "metrics/recall" not in scalars(tmp_path)
        assert not any(math.isnan(value) for points in scalars(tmp_path).values() for _, value in points)
        assert "val/box_loss" not in scalars(tmp_path)


def test_results_follow_the_log(tmp_path):
    results = Results(tmp_path)
    results.update()
    assert not (tmp_path / "results.csv").exists()
    run_log.write(tmp_path / EVENTS_FILE, [run_log.run(), run_log.start(), run_log.step(1), *run_log.trained_epoch(0)])
    results.update()
    run_log.write(tmp_path / EVENTS_FILE, run_log.trained_epoch(1))
    results.update()
    results.close()
    assert len((tmp_path / "results.csv").read_text().splitlines()) == 3
    assert [step for step, _ in scalars(tmp_path)["x/lr0"]] == [0, 1]


def test_results_that_could_not_be_written_are_written_later(tmp_path):
    run_log.write(tmp_path / EVENTS_FILE, [run_log.run(), *run_log.trained_epoch(0)])
    results = Results(tmp_path)
    (tmp_path / "results.csv").mkdir()
    with pytest.raises(OSError, match=r"results\.csv"):
        results.update()
    (tmp_path / "results.csv").rmdir()
    results.update()
    results.close()
    assert (tmp_path / "results.csv").is_file()
