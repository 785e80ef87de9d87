"""What a row of a sweep was trained by, and the command that trains it again."""

from __future__ import annotations

import shlex
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from ray_yolo.config.changes import Change
from ray_yolo.config.fields import config_fields
from ray_yolo.config.recipe import Recipe
from ray_yolo.tune.evolution import Genes, GeneValue
from ray_yolo.tune.space import overlay, recipe_value


class Stage(NamedTuple):
    """Genes that weights were trained by, from an epoch on."""

    epoch: int
    genes: Genes


Past = tuple[Stage, ...]
"""All genes that weights were ever trained by, whoever's they were; the first stage is from epoch 0."""


def trained_recipe(recipe: Recipe, past: Sequence[Stage]) -> Recipe:
    """The recipe of weights with this past, in a sweep over `recipe`."""
    first, *later = past
    trained = overlay(recipe, first.genes)
    for stage in later:
        trained = changed_recipe(trained, stage.epoch, stage.genes)
    return trained


def changed_recipe(recipe: Recipe, epoch: int, genes: Mapping[str, GeneValue]) -> Recipe:
    """The recipe that goes on with these genes from an epoch on, which is after its last change."""
    before = recipe.at(epoch)
    new = {name: value for name, value in genes.items() if recipe_value(before, name) != value}
    changes = (*recipe.changes, Change(epoch=epoch, settings=new))
    return Recipe.model_validate({**recipe.model_dump(), "changes": changes})


def replay_command(recipe: Recipe, past: Sequence[Stage]) -> str:
    """The command that trains a row of a sweep over `recipe` again, on any number of workers (`--num-workers`).

    A row that was stopped early has its fitness at its own last epoch of that training.
    """
    return shlex.join(train_command(trained_recipe(recipe, past)))


def train_command(recipe: Recipe) -> list[str]:
    """The words of the command that trains a recipe."""
    return ["python", "-m", "ray_yolo.train", *recipe_arguments(recipe)]


def recipe_arguments(recipe: Recipe) -> list[str]:
    """Command-line arguments that give this recipe: one for every field that is not at its default."""
    default = Recipe()
    words: list[str] = []
    for path in config_fields(Recipe):
        value = recipe_value(recipe, path)
        if value == recipe_value(default, path):
            continue
        flag = f"--{path.replace('_', '-')}"
        if "." in path or value is False:
            words += ["--set", f"{path}={_text(value)}"]
        elif value is True:
            words.append(flag)
        else:
            words += [flag, *_words(value)]
    return words


def _text(value: Any) -> str:
    """A value as --set reads it."""
    return str(value).lower() if isinstance(value, bool) else str(value)


def _words(value: Any) -> list[str]:
    """A value as its own flag reads it; `--freeze n` means the first n layers, so a single one is named twice."""
    if isinstance(value, tuple) and isinstance(value[0], Change):
        return [change.model_dump() for change in value]
    if isinstance(value, tuple):
        if value == tuple(range(len(value))):
            return [str(len(value))]
        return [str(item) for item in (value if len(value) > 1 else value * 2)]
    return [_text(value)]
