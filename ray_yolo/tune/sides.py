"""The settings of a comparison, and the recipes of its sides A and B. It imports neither torch nor Ray."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, NamedTuple

from pydantic import BeforeValidator, Field

from ray_yolo.config.placement import Placement
from ray_yolo.config.recipe import Recipe
from ray_yolo.config.sections import ConfigModel
from ray_yolo.config.settings import (
    SourcedValue,
    canonical,
    config_fields,
    explain_unknown,
    read_config_file,
    resolve_config,
)
from ray_yolo.core.errors import ConfigError, InputError
from ray_yolo.core.formatting import format_count
from ray_yolo.runs.record import RECORD_FILE
from ray_yolo.tune.claim import FEWEST_PAIRS
from ray_yolo.tune.trials import changed_defaults, recipe_value

SIDES = ("A", "B")
COMMON = "common setting"
_SUFFIXES = (".yaml", ".yml")

Words = Annotated[tuple[str, ...], BeforeValidator(lambda value: (value,) if isinstance(value, str) else value)]


class ComparePlacement(Placement):
    """Where each training of a comparison runs."""

    project: str = "runs/compare"
    """Folder of comparisons."""
    num_workers: int | tuple[int, int] | str = 1
    """Ray workers of each training; as many trainings run at once as fit on the cluster. 0: no Ray, one training after
    the other in this process."""
    noplots: bool = True
    """Draw no plots for single trainings (the comparison's own are always drawn)."""


class PairsConfig(ConfigModel):
    """The two sides, and when their comparison ends."""

    a: Words = ()
    """Settings of side A: YAML files and PATH=VALUE, over the common settings; none: the common settings. Or a folder
    of finished runs, if B is one, too."""
    b: Words = ()
    """The same of side B."""
    pairs: int = Field(10, ge=FEWEST_PAIRS, le=1000)
    """Most pairs; a pair trains A and B on one fresh seed."""
    hours: float = Field(0.0, ge=0.0)
    """Hours after which no new pair starts if it could not end in them, over all starts; 0: no limit."""


class CompareConfig(ConfigModel):
    """One comparison: both sides are the recipe with settings of their own."""

    recipe: Recipe = Recipe()
    placement: ComparePlacement = ComparePlacement()
    comparison: PairsConfig = PairsConfig()


class Recipes(NamedTuple):
    """The recipes of both sides."""

    a: Recipe
    b: Recipe

    @property
    def differences(self) -> list[str]:
        """The settings in which the sides differ, a line each."""
        lines = []
        for path in config_fields(Recipe):
            first, second = recipe_value(self.a, path), recipe_value(self.b, path)
            if first != second:
                lines.append(f"{path}: {_shown(first)} in A, {_shown(second)} in B")
        return lines


def read_sides(config: CompareConfig) -> Recipes:
    """The recipes of both sides.

    Raises:
        ConfigError: for a setting that is unknown, illegal, or would measure the sides differently.
        InputError: for a file that cannot be read.
    """
    recipes = [_read_side(config, side) for side in SIDES]
    for section in ("objective", "evaluate"):
        if getattr(recipes[0], section) != getattr(recipes[1], section):
            raise ConfigError(f"{section}: A and B have different ones, so their fitness would be measured differently; "
                              f"set {section} for both, outside of --a and --b")
    return Recipes(*recipes)


def words_of(config: CompareConfig, side: str) -> tuple[str, ...]:
    """The words of side A or B."""
    return config.comparison.a if side == "A" else config.comparison.b


def run_folders(config: CompareConfig) -> tuple[Path, Path] | None:
    """The folders of finished runs, if the sides are these; None if they are settings.

    Raises:
        InputError: if only one side is a folder of runs, or a folder has none.
    """
    folders = [_folder_of_runs(side, words_of(config, side)) for side in SIDES]
    a, b = folders
    if a and b:
        return a, b
    for side, other, folder in (("A", "B", a), ("B", "A", b)):
        if folder:
            raise InputError(f"{side}: {folder} is a folder of finished runs, but {other} is not; give such a folder "
                             "for both, or settings for both")
    return None


def _folder_of_runs(side: str, words: tuple[str, ...]) -> Path | None:
    if len(words) != 1 or "=" in words[0] or not Path(words[0]).is_dir():
        return None
    folder = Path(words[0])
    if not run_records(folder):
        raise InputError(f"{side}: {folder}: has no runs; give a folder of runs, such as runs/train, or write "
                         f"data={folder} for a data set")
    return folder


def run_records(folder: Path) -> list[Path]:
    """The run folders in a project's folder, or in that of a comparison, by name."""
    records = [*folder.glob(f"*/{RECORD_FILE}"), *folder.glob(f"trials/*/{RECORD_FILE}")]
    return sorted(path.parent for path in records)


def _read_side(config: CompareConfig, side: str) -> Recipe:
    given: dict[str, SourcedValue] = {}
    for word in words_of(config, side):
        given |= _read_word(side, word)
    fields = config_fields(Recipe)
    for path, item in given.items():
        if path in fields or path not in config_fields(CompareConfig):
            continue
        raise ConfigError(f"{item.origin}: {path} is no setting of a recipe; both sides are trained in the same way, so "
                          "give it as a flag")
    if "seed" in given:
        raise ConfigError(f"{given['seed'].origin}: seed: each pair trains both sides on a fresh seed; leave it out, "
                          "or give --seed, from which they follow")
    values = _common(config.recipe, given) | given
    recipe, _ = resolve_config(Recipe, values)
    return recipe


def _common(recipe: Recipe, given: Mapping[str, SourcedValue]) -> dict[str, SourcedValue]:
    """The settings that a side starts from, by path."""
    values = {path: recipe_value(recipe, path) for path in config_fields(Recipe)}
    if "model" in given:
        values |= changed_defaults(recipe, str(given["model"].value))
    return {path: SourcedValue(value, COMMON) for path, value in values.items()}


def _read_word(side: str, word: str) -> dict[str, SourcedValue]:
    key, equals, value = word.partition("=")
    if equals and not Path(word).is_file():
        path = canonical(key)
        if path not in config_fields(CompareConfig):
            raise ConfigError(f"{side}: {explain_unknown(path, config_fields(Recipe))}")
        return {path: SourcedValue(None if value == "null" else value, f"{side}: {key}")}
    if Path(word).suffix not in _SUFFIXES:
        kind = "weights" if Path(word).suffix in (".pt", ".safetensors") else "data"
        raise InputError(f"{side}: {word}: give a YAML file of settings, PATH=VALUE, or a folder of finished runs; a data "
                         f"set is data=PATH, weights are weights=FILE{f' (write {kind}={word})' if word else ''}")
    values = read_config_file(word)
    if "train" in values and "train" not in config_fields(CompareConfig):
        raise InputError(f"{side}: {word}: describes a data set, not settings; write data={word}")
    return values


def _shown(value: object) -> str:
    if isinstance(value, tuple):
        return format_count(len(value), "value") if len(value) > 8 else str([str(each) for each in value])
    return repr(value) if isinstance(value, str) else str(value)
