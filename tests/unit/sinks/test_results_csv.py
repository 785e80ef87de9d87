import csv

import pytest
import yaml

from ray_yolo.config.placement import Placement
from ray_yolo.config.recipe import Recipe
from ray_yolo.config.settings import GENES
from ray_yolo.sinks.results_csv import ResultsCsv, edited_options, format_results, write_options
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

    def test_every_number_stands_under_its_name(self):
        table = format_results(run_log.numbered([run_log.epoch(2)]))
        (row,) = csv.DictReader(table.splitlines(), skipinitialspace=True)
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

    def test_edited_files_are_noticed(self, tmp_path):
        recipe = Recipe(data="/data/a.yaml", epochs=7, freeze=[1, 2], weights="https://ann:s3cr3t@host/a.pt")
        assert edited_options(recipe, tmp_path) == []
        write_options(recipe, Placement(), tmp_path)
        assert edited_options(recipe, tmp_path) == []
        assert edited_options(recipe.model_copy(update={"data": "/moved/a.yaml"}), tmp_path) == []
        for name, old, new in (("hyp.yaml", "lr0: 0.01", "lr0: 0.2"), ("opt.yaml", "epochs: 7", "epochs: 300"),
                               ("opt.yaml", "lr0: 0.01", "lr0: 0.2")):
            path = tmp_path / name
            assert old in path.read_text()
            path.write_text(path.read_text().replace(old, new))
        assert edited_options(recipe, tmp_path) == ["optimizer.lr0: 0.2", "epochs: 300"]
        (tmp_path / "hyp.yaml").write_text("lr0: [")
        (tmp_path / "opt.yaml").write_text("recipe: {lr0: 2024-13-45}")
        assert edited_options(recipe, tmp_path) == []

    def test_options_hold_no_secrets(self, tmp_path):
        write_options(Recipe(), Placement(mlflow_uri="https://ann:s3cr3t@host"), tmp_path)
        assert "s3cr3t" not in (tmp_path / "opt.yaml").read_text()


def notify(results, *events):
    results.update(run_log.numbered(events), ended=False)


class TestResultsCsv:
    def test_the_file_follows_the_log(self, tmp_path):
        results, path = ResultsCsv(tmp_path), tmp_path / "results.csv"
        notify(results)
        assert not path.exists()
        story = [run_log.run(), run_log.start(), run_log.step(1), *run_log.trained_epoch(0)]
        notify(results, *story)
        assert len(path.read_text().splitlines()) == 2
        notify(results, *story, *run_log.trained_epoch(1))
        assert len(path.read_text().splitlines()) == 3

    def test_it_is_not_rewritten_for_steps(self, tmp_path):
        results, path = ResultsCsv(tmp_path), tmp_path / "results.csv"
        notify(results, run_log.start(), run_log.epoch(0))
        before = path.stat()
        notify(results, run_log.start(), run_log.epoch(0), run_log.step(11))
        assert path.stat() == before

    def test_a_table_that_someone_has_changed_is_made_so_again(self, tmp_path):
        results, path = ResultsCsv(tmp_path), tmp_path / "results.csv"
        notify(results, run_log.epoch(0))
        whole = path.read_bytes()
        path.write_bytes(whole[:40])
        notify(results, run_log.epoch(0))
        assert path.read_bytes() == whole

    def test_what_could_not_be_written_is_written_later(self, tmp_path):
        results, path = ResultsCsv(tmp_path), tmp_path / "results.csv"
        path.mkdir()
        with pytest.raises(IsADirectoryError):
            notify(results, run_log.run(), *run_log.trained_epoch(0))
        path.rmdir()
        notify(results, run_log.run(), *run_log.trained_epoch(0))
        assert path.is_file()
