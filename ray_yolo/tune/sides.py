"""The recipes of a comparison's sides A and B. It imports neither torch nor Ray."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

from ray_yolo.config.effects import refuse_unread_loss
from ray_yolo.config.model_facts import facts_of
from ray_yolo.config.named_recipes import RECIPES, named_recipe
from ray_yolo.config.recipe import Recipe
from ray_yolo.config.settings import (
    DEFAULT,
    SourcedValue,
    canonical,
    config_fields,
    explain_unknown,
    read_config_file,
    resolve_config,
)
from ray_yolo.config.yaml import load_text_yaml
from ray_yolo.core.errors import ConfigError, InputError
from ray_yolo.core.formatting import format_count
from ray_yolo.runs.fork import recipe_settings
from ray_yolo.runs.run_record import RECORD_FILE, RunRecord, read_record
from ray_yolo.storage.store import is_address
from ray_yolo.tune.compare_settings import CompareConfig
from ray_yolo.tune.trials import recipe_value

BASE = "base"
"""The word for a side with the common settings alone."""

_DATA_KEY = "train"  # every description of a data set has it, and no file of settings
_LONGEST_VALUE = 8  # items of a list that are printed


class Recipes(NamedTuple):
    """The recipes of both sides."""

    a: Recipe
    b: Recipe

    @property
    def differences(self) -> list[str]:
        """The settings in which the sides differ, a line each; the seed of B is not used."""
        lines = []
        for path in config_fields(Recipe):
            first, second = recipe_value(self.a, path), recipe_value(self.b, path)
            if first != second and path != "seed":
                lines.append(f"{path}: {_shown(first)} in A, {_shown(second)} in B")
        return lines


class _Word(NamedTuple):
    """The meaning of a side's word: settings by path, below and above those of the flags."""

    below: Mapping[str, SourcedValue] = {}  # a whole recipe's: the flags override them, as they do after --recipe
    above: Mapping[str, SourcedValue] = {}


def all_settings(recipe: Recipe) -> dict[str, Any]:
    """Every setting of a recipe by path, as plain JSON."""
    tree = recipe.model_dump(mode="json")
    settings = {}
    for path in config_fields(Recipe):
        section, _, name = path.rpartition(".")
        settings[path] = tree[section][name] if section else tree[name]
    return settings


def read_sides(config: CompareConfig, origins: Mapping[str, str]) -> Recipes:
    """The recipes of both sides.

    A side is: defaults <- its run or named recipe <- the settings of the command <- its other settings. So a flag
    overrides a whole recipe, and a single setting of a side overrides a flag.

    Args:
        origins: of the settings by path; those with the origin `DEFAULT` were not given.

    Raises:
        ConfigError: for a setting that is unknown, illegal, or would measure the sides differently.
        InputError: for a word that means nothing, or a file that cannot be read.
    """
    settings = settings_of_sides(config, origins)
    a, b = (resolve_config(Recipe, each)[0] for each in settings)
    for recipe, own in zip((a, b), settings, strict=True):
        refuse_unread_loss(own, recipe)
    for section in ("objective", "evaluate"):
        if getattr(a, section) != getattr(b, section):
            raise ConfigError(f"{section}: A has {getattr(a, section)}, B has {getattr(b, section)}, so their fitness "
                              f"would be measured differently; give the settings of {section} once, for both sides")
    return Recipes(a, b)


def settings_of_sides(config: CompareConfig, origins: Mapping[str, str]) -> tuple[dict[str, SourcedValue], ...]:
    """The settings of A and of B that were given, by path; see `read_sides`."""
    common = {}
    for path, value in all_settings(config.recipe).items():
        if origins[path] != DEFAULT:
            common[path] = SourcedValue(value, origins[path])
    pairs = config.comparison
    return _settings_of("A", pairs.a, pairs.set_a, common), _settings_of("B", pairs.b, pairs.set_b, common)


def _settings_of(side: str, word: str, extra: tuple[str, ...], common: Mapping[str, SourcedValue]
                 ) -> dict[str, SourcedValue]:
    """The settings of a side. Precedence, lowest first: what a named recipe or a run has, the common flags, what the
    side's word gives itself, and its --set-a or --set-b."""
    added: dict[str, SourcedValue] = {}
    for text in extra:
        added |= _assignment(f"--set-{side.lower()}", text)
    meaning = _read_word(side, word, common, added)  # a whole recipe stands below the flags, single settings above them
    own = {**meaning.above, **added}
    _check_settings(own)
    below = {path: value for path, value in meaning.below.items() if path != "seed"}
    return {**below, **common, **own}


def _check_settings(own: Mapping[str, SourcedValue]) -> None:
    """Refuse settings that a side cannot have of its own. An unknown one is left to `resolve_config`."""
    for path, item in own.items():
        if path == "seed":
            raise ConfigError(f"{item.origin}: seed: each pair trains both sides on a fresh seed; leave it out, or "
                              "give --seed, from which they follow")
        if path in config_fields(CompareConfig) and path not in config_fields(Recipe):
            raise ConfigError(f"{item.origin}: {path} is no setting of a recipe; both sides are trained in the same "
                              "way, so give it as a flag")


def _read_word(side: str, word: str, common: Mapping[str, SourcedValue], own: Mapping[str, SourcedValue]) -> _Word:
    path = Path(word)
    if word == BASE:
        return _Word()
    if _is_assignment(word) and not path.exists():  # before the suffixes: data=FILE.yaml
        return _Word(above=_assignment(side, word))
    if (path / RECORD_FILE).is_file():
        return _Word(below=_settings_of_run(side, path, {**common, **own}))
    if path.is_dir():
        return _Word(above={"data": SourcedValue(word, side)})
    if path.suffix in (".yaml", ".yml"):
        if _DATA_KEY in load_text_yaml(word).data:
            return _Word(above={"data": SourcedValue(word, side)})
        return _Word(above=read_config_file(word))
    if path.suffix in (".pt", ".safetensors"):
        return _Word(above={"weights": SourcedValue(word, side)})
    if "=" in word:
        return _Word(above=_assignment(side, word))
    if word in RECIPES:
        model = {**common, **own}.get("model", SourcedValue(Recipe.model_fields["model"].default, DEFAULT))
        facts = facts_of(str(model.value))
        named = named_recipe(word, has_anchors=facts is None or facts.has_anchors)  # None: a YAML file, not read here
        return _Word(below={name: SourcedValue(item.value, f"{side}: {word}") for name, item in named.items()})
    if is_address(word):
        raise InputError(f"{side}: {word}: a run or data set in a bucket cannot be a side; weights are weights=ADDRESS")
    raise InputError(f"{side}: {word}: no such file, folder or recipe; give {BASE}, a YAML file of settings, a recipe "
                     f"({', '.join(RECIPES)}), the folder of a run, a data set, weights, or PATH=VALUE, such as "
                     "model=yolov5n or data=shapes")


def _is_assignment(word: str) -> bool:
    """Whether a word is a setting and its value, and not the name of a file with an equals sign."""
    name, equals, _ = word.partition("=")
    return bool(equals) and canonical(name) in config_fields(CompareConfig)


def _settings_of_run(side: str, folder: Path, given: Mapping[str, SourcedValue]) -> dict[str, SourcedValue]:
    record = read_record(folder)
    if not isinstance(record, RunRecord):
        raise InputError(f"{side}: {folder}: is a sweep or a comparison; give one of its trainings, such as "
                         f"{folder}/trials/NAME")
    return recipe_settings(record, f"{side}: {folder}", given)


def _assignment(origin: str, text: str) -> dict[str, SourcedValue]:
    key, equals, value = text.partition("=")
    if not equals:
        raise InputError(f"{origin}: {text}: write PATH=VALUE, e.g. optimizer.lr0=0.02")
    path = canonical(key)
    if path not in config_fields(CompareConfig):
        raise ConfigError(f"{origin}: {explain_unknown(path, config_fields(Recipe))}")
    return {path: SourcedValue(None if value == "null" else value, origin, alone=True)}


def _shown(value: object) -> str:
    if isinstance(value, tuple):
        return format_count(len(value), "value") if len(value) > _LONGEST_VALUE else str([str(each) for each in value])
    return repr(value) if isinstance(value, str) else str(value)
