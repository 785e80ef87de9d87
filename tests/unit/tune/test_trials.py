"""The recipe that genes make, and the command that trains a row again."""

import shlex

import pytest
from pydantic import ValidationError

from ray_yolo.cli import parse_train
from ray_yolo.config.recipe import Recipe
from ray_yolo.tune.trials import overlay, recipe_arguments, recipe_value, replay_command, short_name

BASE = Recipe(data="my data/coco.yaml", model="yolov5n", epochs=3, batch_size=16, microbatch=8, precision="fp32",
              autoanchor=False)


class TestOverlay:
    def test_it_changes_the_genes_and_nothing_else(self):
        base = Recipe(epochs=7)
        trial = overlay(base, {"lr0": 0.02, "augment.close_mosaic": 3, "imgsz": 320})
        assert (trial.optimizer.lr0, trial.augment.close_mosaic, trial.imgsz, trial.epochs) == (0.02, 3, 320, 7)
        assert overlay(trial, {"lr0": 0.01, "augment.close_mosaic": 0, "imgsz": 640}) == base
        assert base == Recipe(epochs=7)

    def test_no_genes_no_change(self):
        base = Recipe(freeze=(1, 2), imgsz=96)
        assert overlay(base, {}) == base

    def test_values_outside_are_refused(self):
        with pytest.raises(ValidationError):
            overlay(Recipe(), {"lr0": 5.0})

    def test_short_names_are_yolov5s(self):
        assert [short_name(name) for name in ("optimizer.lr0", "lr0", "epochs")] == ["lr0", "lr0", "epochs"]
        assert recipe_value(Recipe(), "lr0") == 0.01


@pytest.mark.parametrize("genes", [{}, {"lr0": 0.02345, "mosaic": 0.5}, {"optimizer.name": "AdamW"}])
def test_the_command_trains_the_rows_recipe(genes):
    words = shlex.split(replay_command(BASE, genes))
    assert words[:3] == ["python", "-m", "ray_yolo.train"]
    assert parse_train(words[3:]).config.recipe == overlay(BASE, genes)


def test_arguments_give_the_recipe_back():
    for recipe in [
        Recipe(), BASE, Recipe(freeze=(0, 1, 2)), Recipe(freeze=1),
        Recipe(freeze=(3, 7)), Recipe(freeze=(5,)), Recipe(exact=True, threads=2, strict=True),
        Recipe.model_validate({"schedule": {"cos_lr": True}, "optimizer": {"name": "AdamW", "lr0": 1e-6}}),
        Recipe.model_validate({"changes": "2: lr0=1e-5 schedule.cos_lr=true"}),
        Recipe(weights="a b's.pt", noval=True, seed=7), Recipe(weights="yolov5n"),
        Recipe(model="yolov8n"), Recipe.model_validate({"model": "yolov8n", "augment": {"close_mosaic": 0}}),
        Recipe.model_validate({"model": "yolo11n", "loss": {"box": 0.05}}),
    ]:
        assert parse_train(recipe_arguments(recipe)).config.recipe == recipe, recipe


def test_defaults_need_no_arguments():
    assert recipe_arguments(Recipe()) == []


def test_a_gene_of_the_model_brings_the_defaults_of_its_family():
    base = Recipe.model_validate({"model": "yolov5n", "loss": {"cls": 0.3}})
    other = overlay(base, {"model": "yolov8n"})
    assert (other.loss.box, other.loss.cls, other.augment.close_mosaic) == (7.5, 0.3, 10)
    assert overlay(other, {"model": "yolov5n"}) == base
    asked = Recipe.model_validate({"model": "yolov8n", "loss": {"box": 5.0}, "augment": {"close_mosaic": 3}})
    kept = overlay(asked, {"model": "yolov5n"})
    assert (kept.loss.box, kept.augment.close_mosaic) == (5.0, 3)
    assert overlay(base, {"model": "yolov8n", "box": 2.0}).loss.box == 2.0
