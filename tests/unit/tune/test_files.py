"""What a sweep leaves for people: YOLOv5's evolve.csv, hyp_evolve.yaml, and warm starts from them."""

import csv
from dataclasses import replace

import pytest

from ray_yolo.cli import parse_train
from ray_yolo.config.fine_tuning import fine_tuned
from ray_yolo.config.placement import Placement
from ray_yolo.config.recipe import Recipe
from ray_yolo.config.settings import GENES
from ray_yolo.sinks.results_csv import write_options
from ray_yolo.tune.claim import Claim
from ray_yolo.tune.files import (
    drop_weights,
    format_evolve_csv,
    format_hyp_evolve,
    keep_best,
    read_warm_start,
    used_bytes,
    write_sweep_files,
)
from ray_yolo.tune.ledger_events import ClaimedEvent
from ray_yolo.tune.search import Search
from ray_yolo.tune.space import read_space
from ray_yolo.tune.trials import Trial, best_trial, overlay, recipe_arguments

BASE = Recipe(data="my data/coco.yaml", model="yolov5n", epochs=3, batch_size=16, microbatch=8, precision="fp32",
              autoanchor=False)
SPACE = read_space({"lr0": [0.001, 0.1], "mosaic": [0.0, 1.0], "augment.close_mosaic": [0, 5],
                    "optimizer.name": {"type": "choice", "values": ["SGD", "AdamW"]}}, BASE).space

METRICS = "metrics/precision,metrics/recall,metrics/mAP_0.5,metrics/mAP_0.5:0.95"


def trial(number, fitness, state="finished", **genes):
    genes = {"lr0": 0.01, "mosaic": 1.0, "augment.close_mosaic": 0, "optimizer.name": "SGD", **genes}
    metrics = {"precision": 0.5, "recall": 0.25, "mAP50": fitness, "mAP50-95": fitness} if fitness else {}
    losses = {"box": 0.1, "obj": 0.2, "cls": 0.3}
    return replace(Trial(number, genes), state=state, fitness=fitness, metrics=metrics, losses=losses, epochs=3)


TRIALS = [trial(0, 0.3), trial(1, 0.5, lr0=0.02345, mosaic=0.5), trial(2, None, "failed", lr0=0.05),
          trial(3, 0.4, **{"optimizer.name": "AdamW"}), trial(4, None, "running")]


def table(text):
    return list(csv.DictReader(text.replace(" ", "").splitlines()))


class TestEvolveCsv:
    def test_its_columns_are_yolov5s(self):
        header = [cell.strip() for cell in format_evolve_csv(BASE, TRIALS).splitlines()[0].split(",")]
        assert header == ["metrics/precision", "metrics/recall", "metrics/mAP_0.5", "metrics/mAP_0.5:0.95",
                          "val/box_loss", "val/obj_loss", "val/cls_loss",
                          *GENES, "augment.close_mosaic", "optimizer.name"]

    def test_a_row_for_each_finished_trial_with_exact_numbers(self):
        rows = table(format_evolve_csv(BASE, TRIALS))
        assert [float(row["metrics/mAP_0.5"]) for row in rows] == [0.3, 0.5, 0.4]
        assert float(rows[1]["lr0"]) == 0.02345
        assert float(rows[1]["momentum"]) == 0.937  # not searched: the base recipe's
        assert rows[2]["optimizer.name"] == "AdamW"
        assert float(rows[0]["val/cls_loss"]) == 0.3

    def test_where_some_are_paused_a_last_column_has_the_epochs_of_each(self):
        rows = table(format_evolve_csv(BASE, [TRIALS[0], replace(TRIALS[1], state="paused", epochs=1)]))
        assert [list(row)[-1] for row in rows] == ["rung"] * 2
        assert [row["rung"] for row in rows] == ["3", "1"]

    def test_without_rows_it_is_a_header(self):
        assert len(format_evolve_csv(BASE, []).splitlines()) == 1


class TestBest:
    def test_its_weights_come_from_the_first_of_its_runs_that_has_them(self, tmp_path):
        runs = [tmp_path / name for name in ("dropped", "kept", "other")]
        for run in runs[1:]:
            (run / "weights").mkdir(parents=True)
            (run / "weights" / "best.pt").write_text(run.name)
        assert keep_best(tmp_path, runs)
        assert (tmp_path / "weights" / "best.pt").read_text() == "kept"
        assert not keep_best(tmp_path, runs[:1])

    def test_the_best_is_the_finished_trial_of_highest_fitness(self):
        assert best_trial(TRIALS).number == 1
        assert best_trial(TRIALS[2:3]) is None

    def test_a_paused_row_is_never_the_best_beside_one_that_was_trained_longer(self):
        rows = [TRIALS[0], replace(TRIALS[1], state="paused", epochs=1)]
        assert (rows[0].fitness, rows[1].fitness) == (0.3, 0.5)
        assert best_trial(rows).number == 0
        assert "# Best of 2 trials: trial 0, fitness 0.3" in format_hyp_evolve(BASE, rows)

    def test_the_winner_is_the_one_of_the_claim_which_the_header_states(self):
        claim = ClaimedEvent(winner=0, claim=Claim(better=False, gain=0.01, margin=0.1, runs=3, detectable=0.1))
        text = format_hyp_evolve(BASE, TRIALS, claim)
        assert text.startswith("# Best of 5 trials: trial 0, fitness 0.3 after 3 epochs\n"
                               "# not better than the default; 3 fresh seeds could have shown 0.1; "
                               "the default (trial 0) is kept\n")

    def test_hyp_evolve_gives_the_best_recipe_back(self, tmp_path):
        write_sweep_files(tmp_path, BASE, TRIALS)
        hyp = str(tmp_path / "hyp_evolve.yaml")
        arguments = [*recipe_arguments(BASE), "--hyp", hyp]
        assert parse_train(arguments).config.recipe == overlay(BASE, TRIALS[1].genes)

    def test_hyp_evolve_has_the_optimiser_if_the_trials_start_from_weights(self, tmp_path):
        adamw = BASE.optimizer.model_copy(update={"name": "AdamW"})  # as `fine_tuned` has decided
        base = BASE.model_copy(update={"weights": "yolov5n.pt", "optimizer": adamw})
        genes = {name: value for name, value in TRIALS[1].genes.items() if name != "optimizer.name"}
        write_sweep_files(tmp_path, base, [replace(TRIALS[1], genes=genes)])
        hyp = str(tmp_path / "hyp_evolve.yaml")
        recipe = parse_train(["--data", base.data, "--model", base.model, "--weights", base.weights, "--hyp", hyp])
        assert fine_tuned(recipe.config.recipe, 205, 3).optimizer == overlay(base, genes).optimizer

    def test_hyp_evolve_has_the_changes_of_the_base_recipe(self, tmp_path):
        base = Recipe.model_validate({**BASE.model_dump(), "changes": "1: lr0=0.5 mosaic=0.25"})
        write_sweep_files(tmp_path, base, TRIALS[:2])
        recipe = parse_train([*recipe_arguments(BASE), "--hyp", str(tmp_path / "hyp_evolve.yaml")]).config.recipe
        assert recipe == overlay(base, TRIALS[1].genes)
        assert [recipe.at(epoch).optimizer.lr0 for epoch in range(2)] == [0.02345, 0.5]

    def test_hyp_evolve_says_where_it_comes_from(self):
        text = format_hyp_evolve(BASE, TRIALS)
        assert text.startswith("# Best of 5 trials: trial 1, fitness 0.5 after 3 epochs\n# precision 0.5, recall 0.25")
        assert "# python -m ray_yolo.train --data" in text
        assert format_hyp_evolve(BASE, TRIALS[2:]) is not None
        assert format_hyp_evolve(BASE, TRIALS[2:3]) is None

    def test_files_without_a_result_are_a_header_alone(self, tmp_path):
        write_sweep_files(tmp_path, BASE, TRIALS[2:3])
        assert [path.name for path in tmp_path.iterdir()] == ["evolve.csv"]


def test_a_file_with_two_names_takes_its_place_on_the_disk_once(tmp_path):
    for name in ("checkpoints", "weights"):
        (tmp_path / name / "step-3").mkdir(parents=True)
    (tmp_path / "checkpoints/step-3/best.pt").write_bytes(bytes(500))
    (tmp_path / "weights/best.pt").hardlink_to(tmp_path / "checkpoints/step-3/best.pt")
    assert used_bytes(tmp_path / "checkpoints", tmp_path / "weights") == used_bytes(tmp_path) == 500
    assert used_bytes(tmp_path / "none") == used_bytes() == 0


def test_a_trial_whose_weights_are_dropped_keeps_its_records(tmp_path):
    kept = {"events.jsonl", "results.csv", "run.json", "finished"}
    for name in (*kept, "detections.npy", "weights/best.pt", "checkpoints/step-3/state.pt"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text("x")
    for _ in range(2):  # a second time there is nothing to do
        drop_weights(tmp_path)
        assert {path.name for path in tmp_path.iterdir()} == kept


class TestWarmStart:
    def test_what_a_start_does_not_take_over_is_said(self, tmp_path, caplog):
        path = tmp_path / "hyp.yaml"
        path.write_text("lr0: 0.5\nmosaic: 0.5\noptimizer: {name: Adam}\nmomentum: 0.9\nscale: 0.5\niou_t: 0.2\n")
        read_warm_start(str(path), SPACE, Search(), BASE)
        said = [record.getMessage().removeprefix(str(path)) for record in caplog.records]
        assert said == [": lr0 0.5 is not in the space: the start has 0.1",
                        ": optimizer.name Adam is not in the space: the start has SGD",
                        ": momentum 0.9 is not searched: all trials have 0.937 (give it by --hyp or --set)"]

    def test_an_evolve_csv_gives_its_best_rows_best_first(self, tmp_path):
        write_sweep_files(tmp_path, BASE, TRIALS)
        starts = read_warm_start(str(tmp_path / "evolve.csv"), SPACE, Search(), BASE)
        assert starts == [TRIALS[1].genes, TRIALS[3].genes, TRIALS[0].genes]

    def test_it_ranks_by_this_searchs_objective(self, tmp_path):
        rows = [trial(0, 0.3), trial(1, 0.5)]
        rows[0].metrics["recall"] = 0.9
        write_sweep_files(tmp_path, BASE, rows)
        starts = read_warm_start(str(tmp_path / "evolve.csv"), SPACE, Search(objective={"recall": 1.0}), BASE)
        assert starts[0] == rows[0].genes

    def test_rows_that_were_stopped_come_after_those_that_were_not(self, tmp_path):
        write_sweep_files(tmp_path, BASE, [TRIALS[0], replace(TRIALS[1], state="paused", epochs=1)])
        starts = read_warm_start(str(tmp_path / "evolve.csv"), SPACE, Search(), BASE)
        assert starts == [TRIALS[0].genes, TRIALS[1].genes]

    def test_at_most_five_rows(self, tmp_path):
        write_sweep_files(tmp_path, BASE, [trial(n, 0.1 + n / 100, lr0=0.01 + n / 1000) for n in range(9)])
        starts = read_warm_start(str(tmp_path / "evolve.csv"), SPACE, Search(), BASE)
        assert [start["lr0"] for start in starts] == pytest.approx([0.018, 0.017, 0.016, 0.015, 0.014])

    def test_a_file_of_yolov5_is_read(self, tmp_path):
        """Padded cells, genes that we do not have, a row of NaN."""
        path = tmp_path / "evolve.csv"
        path.write_text(
            "   metrics/precision,  metrics/recall, metrics/mAP_0.5,metrics/mAP_0.5:0.95, val/box_loss, val/obj_loss,"
            " val/cls_loss,  lr0, iou_t, mosaic\n"
            "  0.5, 0.5, 0.5, 0.25, 0.1, 0.1, 0.1, 0.5, 0.2, 0.75\n"
            "  nan, nan, nan, nan, nan, nan, nan, 0.02, 0.2, 0.1\n")
        (start,) = read_warm_start(str(path), SPACE, Search(), BASE)
        assert start == {"lr0": 0.1, "mosaic": 0.75, "augment.close_mosaic": 0, "optimizer.name": "SGD"}

    def test_two_files_one_after_the_other_are_one(self, tmp_path):
        header = METRICS + ",lr0,rung\n"
        (tmp_path / "evolve.csv").write_text(f"{header}1,1,.5,.5,0.01,3\n{header}1,1,.6,.6,0.02,3\n")
        starts = read_warm_start(str(tmp_path / "evolve.csv"), SPACE, Search(), BASE)
        assert [start["lr0"] for start in starts] == [0.02, 0.01]

    def test_a_hyp_file_is_one_start(self, tmp_path):
        path = tmp_path / "hyp.yaml"
        path.write_text("lr0: 0.02\noptimizer: {name: AdamW}\nmomentum: 0.9\n")
        assert read_warm_start(str(path), SPACE, Search(), BASE) == [
            {"lr0": 0.02, "mosaic": 1.0, "augment.close_mosaic": 0, "optimizer.name": "AdamW"}]

    def test_a_hyp_file_with_changes_and_sizes_is_a_start(self, tmp_path):
        path = tmp_path / "hyp.yaml"
        path.write_text("lr0: 0.02\nfreeze: [0, 1]\nchanges: ['1: lr0=0.01']\nanchors: 3\n")
        assert [start["lr0"] for start in read_warm_start(str(path), SPACE, Search(), BASE)] == [0.02]

    def test_a_folder_of_hyp_files_is_a_start_for_each(self, tmp_path):
        for name, lr0 in (("b.yaml", 0.03), ("a.yml", 0.02)):
            (tmp_path / name).write_text(f"lr0: {lr0}\n")
        (tmp_path / "notes.txt").write_text("lr0: 1\n")
        assert [start["lr0"] for start in read_warm_start(str(tmp_path), SPACE, Search(), BASE)] == [0.02, 0.03]

    def test_the_folder_of_a_run_is_its_hyp_file(self, tmp_path):
        write_options(BASE, Placement(), tmp_path)
        assert [start["lr0"] for start in read_warm_start(str(tmp_path), SPACE, Search(), BASE)] == [BASE.optimizer.lr0]
