"""The optimiser of a short training that starts from weights."""

from __future__ import annotations

import shlex

import pytest

from ray_yolo.cli import parse_train
from ray_yolo.config.fine_tuning import MOST_STEPS, fine_tuned
from ray_yolo.config.recipe import Recipe
from ray_yolo.tune.trials import overlay, recipe_arguments

FROM_WEIGHTS = "--weights yolov5n.pt --epochs 10"


def chosen(words: str, num_images: int = 205, num_classes: int = 3) -> tuple[object, ...]:
    """Optimiser, learning rate, momentum and the biases' first rate of a command."""
    recipe = fine_tuned(parse_train(shlex.split(words)).config.recipe, num_images, num_classes)
    optimizer = recipe.optimizer
    return optimizer.name, optimizer.lr0, optimizer.momentum, recipe.schedule.warmup_bias_lr


def test_a_short_training_from_weights_has_ultralytics_rule() -> None:
    assert chosen(FROM_WEIGHTS) == ("AdamW", 0.001429, 0.9, 0.0)
    assert chosen(FROM_WEIGHTS, num_classes=80) == ("AdamW", 0.000119, 0.9, 0.0)
    assert chosen("--epochs 10") == ("SGD", 0.01, 0.937, 0.1)


@pytest.mark.parametrize(("images", "epochs", "batch", "name"), [
    (64 * 1000, 10, "", "AdamW"),  # 10,000 steps of 64 images
    (64 * 1000 + 1, 10, "", "SGD"),  # 10,010
    (128 * 1000, 10, "--batch-size 128", "AdamW"),  # of 128 images
    (128 * 1000, 10, "--batch-size 16", "SGD"),  # 16 are accumulated to 64
    (1, MOST_STEPS + 1, "", "SGD"),
])
def test_a_long_training_has_the_defaults(images: int, epochs: int, batch: str, name: str) -> None:
    assert chosen(f"--weights yolov5n.pt --epochs {epochs} {batch}", images)[0] == name


@pytest.mark.parametrize(("words", "expected"), [
    ("--set lr0=0.01", ("SGD", 0.01, 0.937, 0.1)),  # the default, but given
    ("--optimizer SGD", ("SGD", 0.01, 0.937, 0.1)),
    ("--optimizer Adam", ("Adam", 0.01, 0.937, 0.1)),
    ("--set momentum=0.8", ("SGD", 0.01, 0.8, 0.1)),
    ("--recipe scratch-low", ("SGD", 0.01, 0.937, 0.1)),
    ("--recipe fine-tune", ("SGD", 0.00334, 0.74832, 0.18657)),
    ("--set weight_decay=0.001 --cos-lr", ("AdamW", 0.001429, 0.9, 0.0)),  # these do not depend on the optimiser
])
def test_who_gives_a_part_of_the_optimiser_decides_about_all_of_it(words: str, expected: tuple[object, ...]) -> None:
    assert chosen(f"{FROM_WEIGHTS} {words}") == expected


def test_a_decided_recipe_is_not_decided_again() -> None:
    asked = parse_train(shlex.split(FROM_WEIGHTS)).config.recipe
    decided = fine_tuned(asked, 205, 3)
    assert fine_tuned(decided, 205, 80) == decided
    assert fine_tuned(Recipe.model_validate_json(asked.model_dump_json()), 205, 3) == asked  # read from a record
    trial = overlay(decided, {"lr0": 0.01})
    assert fine_tuned(trial, 205, 3) == trial


@pytest.mark.parametrize("words", ["--optimizer SGD", "--recipe scratch-low", ""])
def test_the_command_of_a_recipe_with_weights_trains_the_same(words: str) -> None:
    decided = fine_tuned(parse_train(shlex.split(f"{FROM_WEIGHTS} {words}")).config.recipe, 205, 3)
    repeated = parse_train(recipe_arguments(decided)).config.recipe
    assert fine_tuned(repeated, 205, 3) == decided
