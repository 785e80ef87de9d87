"""What the words of a comparison's sides mean, and which sides are refused."""

from __future__ import annotations

from pathlib import Path

import pytest

from ray_yolo.cli import parse_compare
from ray_yolo.config.recipe import Recipe
from ray_yolo.runs.run_record import RunRecord, SweepRecord, write_record
from ray_yolo.tune.sides import Recipes, read_sides
from ray_yolo.tune.trials import overlay


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The working folder: settings, a data set, weights, a run and a sweep."""
    monkeypatch.chdir(tmp_path)
    Path("mine.yaml").write_text("lr0: 0.02\naugment: {mosaic: 0.5}\n")
    Path("data.yaml").write_text("train: images/train\nval: images/val\nnames: [cat]\n")
    Path("grown").mkdir()
    Path("best.pt").touch()
    asked = overlay(Recipe(epochs=9, batch_size=8, seed=5, model="yolov8n", weights="/old.pt"), {"lr0": 0.03})
    recipe = asked.model_copy(update={"microbatch": 4})
    Path("run").mkdir()
    write_record(Path("run"), RunRecord(digest="ab", asked=asked, recipe=recipe, architecture=None, anchors=None,
                                        num_parameters=7, names=("cat",), labels="cd", command="x", provenance={}))
    Path("sweep").mkdir()
    write_record(Path("sweep"), SweepRecord(digest="ab", space="quick", trials=2))
    return tmp_path


def sides(*words: str) -> Recipes:
    config, origins, *_ = parse_compare(words)
    return read_sides(config, origins)


def test_a_side_without_settings_of_its_own_has_those_of_the_flags() -> None:
    a, b = sides("base", "base", "--epochs", "4", "--model", "yolov8n", "--set", "lr0=0.02")
    assert a == b == overlay(Recipe(epochs=4, model="yolov8n"), {"lr0": 0.02})
    assert a.optimizer == overlay(Recipe(), {"model": "yolov8n", "lr0": 0.02}).optimizer


@pytest.mark.parametrize(("word", "settings"), [
    ("lr0=0.1", {"lr0": 0.1}),
    ("optimizer.name=AdamW", {"optimizer.name": "AdamW"}),
    ("mine.yaml", {"lr0": 0.02, "mosaic": 0.5}),
    ("data.yaml", {"data": "data.yaml"}),
    ("grown", {"data": "grown"}),
    ("best.pt", {"weights": "best.pt"}),
    ("weights=s3://bucket/best.pt", {"weights": "s3://bucket/best.pt"}),
    ("model=yolov8n", {"model": "yolov8n"}),
    ("data=data.yaml", {"data": "data.yaml"}),
    ("weights=best.pt", {"weights": "best.pt"}),
])
def test_a_word_is_read_as_what_it_names(word: str, settings: dict[str, float | str]) -> None:
    a, b = sides("base", word, "--epochs", "4")
    assert a == Recipe(epochs=4)
    assert b == overlay(Recipe(epochs=4), settings)
    assert sides(word, "base", "--epochs", "4") == (b, a)


def test_a_single_setting_overrides_flags_which_override_a_whole_recipe() -> None:
    a, b = sides("run", "scratch-high", "--epochs", "4", "--set", "mixup=0.3", "--set-b", "mixup=0.7",
                 "loss.cls=0.25")
    assert (a.model, a.optimizer.lr0, a.batch_size, a.microbatch) == ("yolov8n", 0.03, 8, 4)
    assert (a.epochs, a.augment.mixup, a.seed) == (4, 0.3, 0)  # not the run's 9 epochs, nor its seed
    assert (b.schedule.lrf, b.epochs, b.augment.mixup, b.augment.copy_paste, b.loss.cls) == (0.1, 4, 0.7, 0.1, 0.25)


def test_the_recipe_of_a_run_keeps_its_initial_weights_and_a_batch_size_decides_its_microbatch_anew() -> None:
    a, b = sides("run", "run", "--set-b", "batch_size=6")
    assert (a.microbatch, b.batch_size, b.microbatch) == (4, 6, None)
    assert a.weights == b.weights == "/old.pt"


def test_the_differences_are_named_and_the_seed_is_none() -> None:
    assert sides("base", "lr0=0.1", "--set-b", "model=yolov5n").differences == [
        "model: 'yolov5s' in A, 'yolov5n' in B", "optimizer.lr0: 0.01 in A, 0.1 in B"]
    differences = sides("base", "run", "--seed", "3").differences
    assert {"epochs: 100 in A, 9 in B", "batch_size: None in A, 8 in B"} <= set(differences)
    assert not any(line.startswith("seed") for line in differences)
