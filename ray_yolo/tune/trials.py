"""The trials of a sweep: their genes, the recipes that follow from these, and the commands that repeat them."""

from __future__ import annotations

import functools
import shlex
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from ray_yolo.config.effects import unread_by_loss
from ray_yolo.config.fine_tuning import OPTIMIZER_SETTINGS
from ray_yolo.config.recipe import Change, Recipe, family_defaults
from ray_yolo.config.sections import SECTIONS
from ray_yolo.config.settings import GENES, canonical, config_fields
from ray_yolo.tune.evolution import Genes, GeneValue, TrialRow, best_rows

State = Literal["proposed", "running", "paused", "finished", "failed"]

_SHORT_NAMES = {path: gene for gene, path in GENES.items()}


@dataclass(frozen=True)
class Trial:
    """One row of a sweep in its current state."""

    number: int
    genes: Genes
    parents: tuple[int, ...] = ()
    state: State = "proposed"
    fitness: float | None = None  # its best epoch has it; best.pt holds the weights of that epoch
    metrics: Mapping[str, float | None] = field(default_factory=dict)
    losses: Mapping[str, float | None] = field(default_factory=dict)
    epochs: int = 0  # trained; fitness is comparable only after equally many
    weights: str = ""  # digest of the weights after them
    seeds: Mapping[int, float] = field(default_factory=dict)  # fitness of whole trainings on fresh seeds
    reason: str = ""

    @property
    def folder_name(self) -> str:
        """The name of its run folder."""
        return trial_folder(self.number)

    @property
    def has_ended(self) -> bool:
        """Whether it finished or failed."""
        return self.state in ("finished", "failed")

    @property
    def row(self) -> TrialRow:
        """The part of the trial from which proposals are made."""
        return TrialRow(self.number, self.genes, self.fitness, self.epochs)


def trial_folder(number: int, seed: int | None = None) -> str:
    """The name of a trial's run folder: trial3, or trial3-seed7 on a fresh seed."""
    return f"trial{number}" if seed is None else f"trial{number}-seed{seed}"


def best_trials(trials: Iterable[Trial], count: int) -> list[Trial]:
    """The best trials, best first: by epochs trained, then fitness, then number. Trials without a fitness are
    excluded."""
    by_number = {trial.number: trial for trial in trials if trial.state != "failed"}
    return [by_number[row.trial] for row in best_rows((trial.row for trial in by_number.values()), count)]


def best_trial(trials: Iterable[Trial]) -> Trial | None:
    """The first of `best_trials`."""
    return next(iter(best_trials(trials, 1)), None)


def short_name(key: str) -> str:
    """The name of a gene in spaces, ledgers and tables: YOLOv5's if it has one, else its path."""
    return _SHORT_NAMES.get(canonical(key), canonical(key))


def short_value(value: GeneValue) -> str:
    """A gene's value for tables."""
    return f"{value:.4g}" if isinstance(value, float) else str(value)


def recipe_value(recipe: Recipe, name: str) -> Any:
    """The recipe's value of a gene."""
    return functools.reduce(getattr, canonical(name).split("."), recipe)


def overlay(recipe: Recipe, genes: Mapping[str, GeneValue]) -> Recipe:
    """The recipe with the values of the genes (YOLOv5's names or dotted paths).

    A gene `model` brings the defaults of its family, where the recipe has those of its own model's family.

    Raises:
        ValidationError: pydantic's, if the result is invalid.
    """
    tree = recipe.model_dump()
    if "model" in genes:
        for path, value in changed_defaults(recipe, str(genes["model"])).items():
            section, field = path.split(".")
            tree[section][field] = value
    for name, value in genes.items():
        *sections, last = canonical(name).split(".")
        functools.reduce(dict.__getitem__, sections, tree)[last] = value
    return Recipe.model_validate(tree)


def changed_defaults(recipe: Recipe, model: str) -> dict[str, GeneValue]:
    """Of each setting that the recipe leaves at its family's default, the default of `model`'s family, by path, where
    either family has one of its own."""
    before, after = family_defaults(recipe.model), family_defaults(model)
    changed: dict[str, GeneValue] = {}
    for path in sorted(before.keys() | after.keys()):
        section, field = path.split(".")
        plain = SECTIONS[section].model_fields[field].default
        if recipe_value(recipe, path) == before.get(path, plain):
            changed[path] = after.get(path, plain)
    return changed


def network_name(recipe: Recipe) -> str:
    """The name of a recipe's network, which determines the latency."""
    return f"{recipe.model} at {recipe.imgsz} px"


def replay_command(recipe: Recipe, genes: Mapping[str, GeneValue]) -> str:
    """The command that trains a row of a sweep over `recipe` again, on any number of workers (`--num-workers`).

    The training has the row's fitness at the row's best epoch, even if the row was stopped early.
    """
    return shlex.join(train_command(overlay(recipe, genes)))


def train_command(recipe: Recipe) -> list[str]:
    """The arguments of the command that trains a recipe."""
    return ["python", "-m", "ray_yolo.train", *recipe_arguments(recipe)]


def recipe_arguments(recipe: Recipe) -> list[str]:
    """Command-line arguments for this recipe: one for every field that is not at the default of its model's family.

    With weights the model and the optimiser are written in any case: their defaults follow from the weights then.
    """
    default = Recipe(model=recipe.model)
    words: list[str] = []
    unread = unread_by_loss(recipe.model)  # the command would refuse these
    changes = []
    for change in recipe.changes:
        settings = {path: value for path, value in change.settings.items() if path not in unread}
        changes += [Change(epoch=change.epoch, settings=settings)] if settings else []
    recipe = recipe.model_copy(update={"changes": tuple(changes)})
    for path in config_fields(Recipe):
        if path in unread:
            continue
        value = recipe_value(recipe, path)
        usual = Recipe().model if path == "model" else recipe_value(default, path)
        depends_on_weights = bool(recipe.weights) and (path == "model" or path in OPTIMIZER_SETTINGS)
        if value == usual and not depends_on_weights:
            continue
        flag = f"--{path.replace('_', '-')}"
        if "." in path or value is False:
            words += ["--set", f"{path}={str(value).lower() if isinstance(value, bool) else value}"]
        else:
            words += [flag] if value is True else [flag, *_words(value)]
    return words


def _words(value: Any) -> list[str]:
    """A value as its flag reads it. `--freeze n` means the first n layers, so a single layer is given twice."""
    if not isinstance(value, tuple):
        return [str(value)]
    if isinstance(value[0], Change):
        return [change.model_dump() for change in value]
    if value == tuple(range(len(value))):
        return [str(len(value))]
    items = value if len(value) > 1 else value * 2
    return [str(item) for item in items]
