"""Named recipes of YOLOv5, and the defaults of each family."""

from __future__ import annotations

import pytest

from ray_yolo.cli import parse_train, parse_tune
from ray_yolo.config.named_recipes import RECIPES
from ray_yolo.config.recipe import Recipe
from ray_yolo.config.settings import GENES


def test_scratch_low_is_the_default_of_the_anchor_based_models() -> None:
    assert parse_train(["--recipe", "scratch-low"]).config.recipe == Recipe()


def test_a_recipe_has_every_gene_of_yolov5_but_label_smoothing() -> None:
    for name, values in RECIPES.items():
        assert set(values) == set(GENES) - {"label_smoothing"}, name


@pytest.mark.parametrize(("name", "expected"), [
    ("scratch-med", {"lrf": 0.1, "cls": 0.3, "obj": 0.7, "scale": 0.9, "mixup": 0.1, "copy_paste": 0.0}),
    ("scratch-high", {"lrf": 0.1, "copy_paste": 0.1, "mosaic": 1.0}),
    ("fine-tune", {"lr0": 0.00334, "momentum": 0.74832, "box": 0.02, "anchor_t": 3.3744, "mosaic": 0.85834}),
    ("Objects365", {"lr0": 0.00258, "warmup_epochs": 1.33, "hsv_s": 0.704}),
])
def test_values_are_those_of_the_publication(name: str, expected: dict[str, float]) -> None:
    recipe = parse_train(["--recipe", name]).config.recipe
    for gene, value in expected.items():
        section, field = GENES[gene].split(".")
        assert getattr(getattr(recipe, section), field) == value, gene


def test_files_and_flags_override_a_named_recipe() -> None:
    parsed = parse_train(["--recipe", "scratch-high", "--set", "lrf=0.5", "--label-smoothing", "0.1"])
    assert parsed.config.recipe.schedule.lrf == 0.5
    assert parsed.config.recipe.augment.scale == 0.9
    assert parsed.origins["augment.scale"] == "--recipe scratch-high"
    assert parsed.origins["schedule.lrf"] == "--set lrf"
    assert parse_tune(["--recipe", "fine-tune"]).config.recipe.optimizer.lr0 == 0.00334


def test_loss_settings_of_a_named_recipe_are_for_anchors() -> None:
    recipe = parse_train(["--recipe", "fine-tune", "--model", "yolo11n"]).config.recipe
    assert (recipe.loss.box, recipe.loss.cls, recipe.optimizer.lr0) == (7.5, 0.5, 0.00334)


@pytest.mark.parametrize(("model", "epochs"), [
    ("yolov3", 0), ("yolov5n", 0), ("yolov5s6", 0), ("yolov5nu", 10), ("yolov5n6u", 10), ("yolov8n", 10),
    ("yolo11n", 10), ("yolo12n", 10), ("yolo26n", 10)])
def test_each_family_closes_the_mosaic_as_its_authors_do(model: str, epochs: int) -> None:
    assert Recipe.model_validate({"model": model}).augment.close_mosaic == epochs
    assert Recipe.model_validate({"model": model, "augment": {"close_mosaic": 3}}).augment.close_mosaic == 3
    assert Recipe.model_validate({"model": model, "augment": {"mosaic": 0.5}}).augment.close_mosaic == epochs
