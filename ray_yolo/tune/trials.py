"""The trials of a sweep: their genes and lineage, the recipes that follow from these, and the commands that repeat
them."""

from __future__ import annotations

import functools
import shlex
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal, NamedTuple

from ray_yolo.config.effects import unread_by_loss
from ray_yolo.config.fine_tuning import OPTIMIZER_SETTINGS
from ray_yolo.config.recipe import Change, Recipe, family_defaults
from ray_yolo.config.sections import SECTIONS
from ray_yolo.config.settings import GENES, canonical, config_fields
from ray_yolo.tune.evolution import Genes, GeneValue, TrialRow, best_rows

State = Literal["proposed", "running", "paused", "finished", "failed"]

_SHORT_NAMES = {path: gene for gene, path in GENES.items()}


class Segment(NamedTuple):
    """The genes that trained weights from an epoch on."""

    epoch: int
    genes: Genes


Lineage = tuple[Segment, ...]
"""All genes with which weights were trained, in any trial; the first segment starts at epoch 0."""


@dataclass(frozen=True)
class Origin:
    """The checkpoint from which a trial continues under population based training."""

    trial: int  # that saved it
    epoch: int  # trained epochs
    state: str  # absolute path of its file
    sha256: str  # of the file

    @property
    def folder_name(self) -> str:
        """The run folder that contains the file."""
        return Path(self.state).parent.parent.name


@dataclass(frozen=True)
class Trial:
    """One row of a sweep in its current state."""

    number: int
    lineages: Mapping[str, Lineage]  # of the weights in each of its run folders
    parents: tuple[int, ...] = ()
    state: State = "proposed"
    fitness: float | None = None  # of its best epoch, whose weights are best.pt
    metrics: Mapping[str, float | None] = field(default_factory=dict)
    losses: Mapping[str, float | None] = field(default_factory=dict)
    epochs: int = 0  # trained; fitness is comparable only after equally many
    weights: str = ""  # digest of the weights after them
    seeds: Mapping[int, float] = field(default_factory=dict)  # fitness of whole trainings on fresh seeds
    reason: str = ""
    origins: tuple[Origin, ...] = ()

    @property
    def folder_name(self) -> str:
        """The name of its run folder; each exploit creates another one."""
        return trial_folder(self.number, len(self.origins))

    @property
    def lineage(self) -> Lineage:
        """The genes that trained the trial's weights, from the first epoch on."""
        return self.lineages[self.folder_name]

    @property
    def ancestors(self) -> tuple[int, ...]:
        """The trials from which its genes or its weights came."""
        return (*self.parents, *(origin.trial for origin in self.origins))

    @property
    def genes(self) -> Genes:
        """Its current genes."""
        return self.lineage[-1].genes

    @property
    def has_ended(self) -> bool:
        """Whether it finished or failed."""
        return self.state in ("finished", "failed")

    @property
    def row(self) -> TrialRow:
        """The part of the trial from which proposals are made."""
        return TrialRow(self.number, self.genes, self.fitness, self.epochs)


def new_trial(number: int, genes: Genes, parents: tuple[int, ...] = ()) -> Trial:
    """A proposed row."""
    return Trial(number, {trial_folder(number): (Segment(0, genes),)}, parents)


def fork_trial(trials: Mapping[int, Trial], trial: Trial, genes: Genes, origin: Origin) -> Trial:
    """The row after an exploit: in a new folder, with the donor's lineage up to the origin."""
    lineage = (*trials[origin.trial].lineages[origin.folder_name], Segment(origin.epoch, genes))
    new = trial_folder(trial.number, len(trial.origins) + 1)
    return replace(trial, lineages={**trial.lineages, new: lineage}, origins=(*trial.origins, origin))


def trial_folder(number: int, num_exploits: int = 0, seed: int | None = None) -> str:
    """The name of a trial's run folder: trial3, trial3-2 after its first exploit, trial3-seed7 on a fresh seed."""
    fresh = f"-seed{seed}" if seed is not None else ""
    return f"trial{number}" + (f"-{num_exploits + 1}" if num_exploits else fresh)


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
    """The defaults of another model's family, by path, where the recipe has those of its own model's family."""
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


def trained_recipe(recipe: Recipe, lineage: Sequence[Segment]) -> Recipe:
    """The recipe of weights with this lineage, in a sweep over `recipe`."""
    first, *later = lineage
    return functools.reduce(lambda trained, segment: changed_recipe(trained, *segment), later,
                            overlay(recipe, first.genes))


def changed_recipe(recipe: Recipe, epoch: int, genes: Mapping[str, GeneValue]) -> Recipe:
    """The recipe that continues with these genes from an epoch on; the epoch must be after its last change."""
    before = recipe.at(epoch)
    new = {name: value for name, value in genes.items() if recipe_value(before, name) != value}
    changes = (*recipe.changes, Change(epoch=epoch, settings=new))
    return Recipe.model_validate({**recipe.model_dump(), "changes": changes})


def replay_command(recipe: Recipe, lineage: Sequence[Segment]) -> str:
    """The command that trains a row of a sweep over `recipe` again, on any number of workers (`--num-workers`).

    The training has the row's fitness at the row's best epoch, even if the row was stopped early.
    """
    return shlex.join(train_command(trained_recipe(recipe, lineage)))


def train_command(recipe: Recipe) -> list[str]:
    """The arguments of the command that trains a recipe."""
    return ["python", "-m", "ray_yolo.train", *recipe_arguments(recipe)]


def recipe_arguments(recipe: Recipe) -> list[str]:
    """Command-line arguments for this recipe: one for every field that is not at the default of its model's family, and
    with weights for the optimiser in any case, because its defaults differ then."""
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
        depends_on_weights = bool(recipe.weights) and path in OPTIMIZER_SETTINGS
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
