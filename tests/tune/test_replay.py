"""The command that trains a row again."""

import shlex

import pytest

from ray_yolo.cli import parse_train
from ray_yolo.config.recipe import Recipe
from ray_yolo.tune.replay import Stage, recipe_arguments, replay_command, trained_recipe
from ray_yolo.tune.space import overlay

BASE = Recipe(data="my data/coco.yaml", model="yolov5n", epochs=3, batch_size=16, microbatch=8, precision="fp32",
              autoanchor=False)


@pytest.mark.parametrize("genes", [{}, {"lr0": 0.02345, "mosaic": 0.5}, {"optimizer.name": "AdamW"}])
def test_the_command_trains_the_rows_recipe(genes):
    words = shlex.split(replay_command(BASE, [Stage(0, genes)]))
    assert words[:3] == ["python", "-m", "ray_yolo.train"]
    assert parse_train(words[3:]).config.recipe == overlay(BASE, genes)


def test_the_command_of_weights_with_a_past_names_each_change():
    past = [Stage(0, {"lr0": 0.02, "mosaic": 0.5}), Stage(1, {"lr0": 0.02, "mosaic": 0.25}),
            Stage(2, {"lr0": 0.01, "mosaic": 0.25})]
    recipe = parse_train(shlex.split(replay_command(BASE, past))[3:]).config.recipe
    assert recipe == trained_recipe(BASE, past)
    assert [change.model_dump() for change in recipe.changes] == ["1: augment.mosaic=0.25", "2: optimizer.lr0=0.01"]
    for stage in past:
        assert recipe.at(stage.epoch) == overlay(BASE, stage.genes)


@pytest.mark.parametrize("recipe", [
    Recipe(), BASE, Recipe(freeze=(0, 1, 2)), Recipe(freeze=1),
    Recipe(freeze=(3, 7)), Recipe(freeze=(5,)), Recipe(exact=True, threads=2, strict=True),
    Recipe.model_validate({"schedule": {"cos_lr": True}, "optimizer": {"name": "AdamW", "lr0": 1e-6}}),
    Recipe.model_validate({"changes": "2: lr0=1e-5 schedule.cos_lr=true"}),
    Recipe(weights="a b's.pt", noval=True, seed=7),
])
def test_arguments_give_the_recipe_back(recipe):
    assert parse_train(recipe_arguments(recipe)).config.recipe == recipe


def test_defaults_need_no_arguments():
    assert recipe_arguments(Recipe()) == []
