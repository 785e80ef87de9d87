"""The command that trains a recipe, for whoever wants to see a row of a sweep again."""

from __future__ import annotations

import shlex
from collections.abc import Mapping
from typing import Any

from ray_yolo.config import Recipe
from ray_yolo.config_fields import config_fields
from ray_yolo.ops.evolution import GeneValue
from ray_yolo.tune_space import overlay, recipe_value


def replay_command(recipe: Recipe, genes: Mapping[str, GeneValue]) -> str:
    """The command that trains a row of a sweep over `recipe` again, on any number of workers (`--num-workers`).

    A row that was stopped early has its fitness at its own last epoch of that training.
    """
    return shlex.join(train_command(overlay(recipe, genes)))


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
    if isinstance(value, tuple):
        if value == tuple(range(len(value))):
            return [str(len(value))]
        return [str(item) for item in (value if len(value) > 1 else value * 2)]
    return [_text(value)]
