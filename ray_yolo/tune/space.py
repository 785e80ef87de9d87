"""Reads search spaces: each entry becomes a gene, a field of the recipe with limits.

    search: {algorithm: evolve, scheduler: ladder}    how to search (`Search`); every other key is a gene:
    lr0: {low: 1e-5, high: 0.1, gain: 1}              a range; gain is how far evolution moves it
    loss.box: {type: loguniform, low: 0.02, high: 0.2}
    momentum: [0.6, 0.98]                             short for a range; [0.001, 0.1, log] for loguniform
    optimizer.name: {type: choice, values: [SGD, AdamW]}
    mosaic: {type: fixed, value: 1.0}
    with_anchors: {obj: [0.2, 4.0]}                   genes for models with anchors only; `without_anchors` likewise

A space is checked against the base recipe, so that no trial fails because of its values.
"""

from __future__ import annotations

import itertools
import math
import os
from collections.abc import Callable, Collection, Iterator, Mapping
from functools import partial
from pathlib import Path
from reprlib import repr as short
from typing import Any, Literal, NamedTuple, TypeVar

from pydantic import BaseModel, Field, ValidationError, model_validator
from pydantic_core import ErrorDetails

from ray_yolo.config.effects import DECIDING, UNKNOWN, Surroundings, without_effect
from ray_yolo.config.model_facts import facts_of
from ray_yolo.config.placement import Placement
from ray_yolo.config.recipe import Recipe
from ray_yolo.config.sections import ConfigModel
from ray_yolo.config.settings import LEGACY_GENES, canonical, config_fields, explain_unknown
from ray_yolo.config.synonyms import did_you_mean
from ray_yolo.config.yaml import load_yaml
from ray_yolo.core.errors import ConfigError, InputError
from ray_yolo.tune.evolution import Gene, GeneValue, Space, can_move, nearest, num_combinations
from ray_yolo.tune.search import SCHEDULERS, SEARCH, Ladder, Search
from ray_yolo.tune.trials import overlay, recipe_value, short_name

SHIPPED = Path(__file__).parents[1] / "tune_spaces"
_RECIPE, _PLACEMENT = config_fields(Recipe), config_fields(Placement)

_NOT_COMPARABLE = "trials with other values measure another fitness"
NOT_SEARCHED = {
    "data": _NOT_COMPARABLE, "classes": _NOT_COMPARABLE, "single_cls": _NOT_COMPARABLE,
    "epochs": "a longer training is a better one; choose --epochs for all trials",
    "patience": "it decides how long a trial trains, so that trials of other lengths would be compared",
    "noval": "it decides when fitness is measured; choose --noval for all trials",
    "seed": "a lucky seed is not a better recipe; choose --seed for all trials",
    "threads": "it decides speed and the last bits, not what is learned; choose --set threads=N for all trials",
    "strict": "it only checks the data set; choose --strict for all trials",
    "allow_names": "it only checks the classes of the weights; choose --allow-names for all trials",
    "match_classes": "it only decides which classes of the weights are kept; choose --match-classes for all trials",
    "allow_empty": "it only checks the data set; choose --allow-empty for all trials",
    "labels_with_confidence": _NOT_COMPARABLE, "keep_difficult": _NOT_COMPARABLE,
}
"""Fields of the recipe that a space must not name, and why."""
MEASURES = {
    "objective": _NOT_COMPARABLE,
    "evaluate": "it changes how fitness is measured, not what is learned; choose --set evaluate.NAME=VALUE for all "
                "trials",
}
"""Sections of the recipe that a space must not name, and why."""
ENTANGLED = ("changes", "imgsz", "batch_size", "microbatch", "optimizer.nominal_batch", "precision", "exact",
             "sync_bn", "quad", "rect", "image_weights")
"""Fields that a recipe, or its share for each worker, checks against each other: their combinations are checked."""
WITH_ANCHORS, WITHOUT_ANCHORS = "with_anchors", "without_anchors"
_UNREAD = {"gp": ("random_first", "random_share"),
           **dict.fromkeys(("random", "grid"), ("parent", "random_first", "random_share", "gain"))}
"""Settings of a search, and `gain` of a gene, that an algorithm does not read."""
_UNEVEN = ("imgsz", "batch_size", "microbatch")  # whole numbers between two valid ones may be invalid
_MAX_CHECKED = 10_000  # combinations: about a second
_MAX_WHOLE = 2.0**53  # above it, not every integer is a float, and limits are floats
Config = TypeVar("Config", bound=BaseModel)
Where = Callable[..., str]  # keys of a value -> 'file:line', for error messages


class TuneSpace(NamedTuple):
    """A space with its search settings."""

    space: Space
    search: Search
    left_out: Mapping[str, str] = {}  # genes of a shipped space that have no effect here -> why


class _Range(ConfigModel):
    type: Literal["uniform", "loguniform", "int"]
    low: float
    high: float
    gain: float = Field(1.0, ge=0.0)

    @model_validator(mode="after")
    def _check_limits(self) -> _Range:
        if self.low > self.high:
            raise ValueError(f"low {self.low:g} is above high {self.high:g}; swap them")
        if self.type == "loguniform" and self.low <= 0:
            raise ValueError(f"loguniform needs a low above 0, not {self.low:g}; raise it, or use uniform")
        if self.type == "int" and not (self.low.is_integer() and self.high.is_integer()):
            raise ValueError(f"a whole number needs whole limits, not {self.low:g} and {self.high:g}")
        if self.type == "int" and max(abs(self.low), abs(self.high)) > _MAX_WHOLE:
            raise ValueError(f"whole limits go up to {_MAX_WHOLE:.0f}; lower them")
        return self

    def gene(self, name: str) -> Gene:
        return Gene(name, "int" if self.type == "int" else "float", self.low, self.high,
                    log=self.type == "loguniform", gain=self.gain)


class _Choice(ConfigModel):
    type: Literal["choice"]
    values: tuple[GeneValue, ...] = Field(min_length=1)
    gain: float = Field(1.0, ge=0.0)

    def gene(self, name: str) -> Gene:
        return Gene(name, "choice", gain=self.gain, values=self.values)


class _Fixed(ConfigModel):
    type: Literal["fixed"]
    value: GeneValue

    def gene(self, name: str) -> Gene:
        return Gene(name, "choice", gain=0.0, values=(self.value,))


_FORMS: dict[str, type[_Range | _Choice | _Fixed]] = {
    "uniform": _Range, "loguniform": _Range, "int": _Range, "choice": _Choice, "fixed": _Fixed}


def load_space(path: str | Path, recipe: Recipe, around: Surroundings = UNKNOWN) -> TuneSpace:
    """The space of a YAML file, or a shipped one by its name, checked against the recipe; see `read_space`.

    Shipped spaces are for all models and data sets: they lose genes that have no effect here.

    Raises:
        InputError: also if the file cannot be read as YAML.
    """
    shipped = {file.stem: file for file in sorted(SHIPPED.glob("*.yaml"))}
    is_shipped = str(path) in shipped
    path = shipped.get(str(path), Path(path))
    if not os.path.exists(path):
        raise InputError(f"space: {path}: no such file; give a YAML file, or one of {', '.join(shipped)}")
    file = load_yaml(path)

    def where(*keys: str | int) -> str:
        """The line of the key, or of the nearest enclosing one (a short list has no key `low`)."""
        return file.where(*next(keys[:n] for n in range(len(keys), -1, -1) if keys[:n] in file.lines or n == 0))

    return read_space(file.data, recipe, where, around, drops_unused=is_shipped)


def read_space(data: Mapping[Any, Any], recipe: Recipe, where: Where = lambda *_: "space",
               around: Surroundings = UNKNOWN, *, drops_unused: bool = False) -> TuneSpace:
    """The space of a mapping in the form shown at the top of this module.

    Trial 0 is the base recipe, with each gene set to the nearest value that the space allows.

    Args:
        around: of the trainings, as far as it is known.
        drops_unused: leave out genes without effect instead of refusing them.

    Raises:
        ConfigError: for the first invalid entry, with its file and line; also for a gene without effect.
    """
    search = _read_search(data.get(SEARCH) or {}, recipe, partial(where, SEARCH))
    genes: dict[str, Gene] = {}
    places: dict[str, str] = {}  # where each gene stands, for messages
    for key, entry, where_entry in _entries(data, recipe, where):
        gene = _read_gene(key, entry, where_entry)
        _check_is_read(search, entry, where_entry, key)
        if gene.name in genes:
            raise ConfigError(f"{where_entry()}: {key}: {gene.name} is in this space already; remove one of the two")
        for value in _ends(gene):
            _check_overlay(recipe, {gene.name: value}, where_entry())
        _check_between(recipe, gene, where_entry())
        _check_distinct(recipe, gene, where_entry)
        genes[gene.name] = gene
        places[gene.name] = where_entry()
    unused = unused_under(genes.values(), recipe, around)
    left_out = {name: unused[canonical(name)] for name in genes if canonical(name) in unused}
    for name, reason in left_out.items():
        if not drops_unused:
            raise ConfigError(f"{places[name]}: {name} has no effect: {reason}; remove it")
        del genes[name]
    if not genes:
        raise ConfigError(f"{where()}: the space names no gene; write for example lr0: [0.001, 0.1, log]")
    if num_combinations(list(genes.values())) == 1:
        name = next(iter(genes))
        raise ConfigError(f"{places[name]}: {name}: no gene of the space varies, so every trial is the same; give at "
                          "least one of them a range or several values")
    _check_models(data, genes, where)
    _check_together(recipe, genes.values(), where)
    start = {gene.name: nearest(gene, recipe_value(recipe, gene.name)) for gene in genes.values()}
    space = Space(tuple(genes.values()), (start,), search.algorithm, search.parent, search.random_first,
                  search.random_share)
    _check_algorithm(space, where())
    return TuneSpace(space, search, left_out)


def unused_under(genes: Collection[Gene], recipe: Recipe, around: Surroundings = UNKNOWN) -> dict[str, str]:
    """The settings that have no effect in any trial, as `without_effect` says it: genes may switch others on. The
    reasons are those for the recipe itself, where it has them."""
    deciding = [gene for gene in genes if canonical(gene.name) in DECIDING]
    unused: dict[str, str] | None = None
    for values in itertools.product(*map(_ends, deciding)):
        try:
            trial = overlay(recipe, {gene.name: value for gene, value in zip(deciding, values, strict=True)})
        except ValidationError:  # genes that exclude each other are refused elsewhere
            continue
        found = without_effect(trial, around)
        unused = found if unused is None else {path: reason for path, reason in unused.items() if path in found}
    reasons = without_effect(recipe, around)
    return {path: reasons.get(path, reason) for path, reason in (unused or {}).items()}


def _entries(data: Mapping[Any, Any], recipe: Recipe, where: Where) -> Iterator[tuple[str, Any, Where]]:
    """The name, the content and the place of each gene for the recipe's model."""
    facts = facts_of(recipe.model)
    section_of_model = WITH_ANCHORS if facts is None or facts.has_anchors else WITHOUT_ANCHORS
    for key, entry in data.items():
        if key == SEARCH:
            continue
        if key not in (WITH_ANCHORS, WITHOUT_ANCHORS):
            yield str(key), entry, partial(where, key)
            continue
        if not isinstance(entry, Mapping):
            raise ConfigError(f"{where(key)}: {key}: got {short(entry)}; write genes, as in {key}: {{box: [1, 20]}}")
        for name, content in entry.items():
            where_entry = partial(where, key, name)
            if key == section_of_model:
                yield str(name), content, where_entry
            else:
                _read_gene(str(name), content, where_entry)  # a mistake is one for any model


def _check_models(data: Mapping[Any, Any], genes: Mapping[str, Gene], where: Where) -> None:
    """Refuse sections for one kind of models in a search among models of both kinds."""
    models = genes["model"].values if "model" in genes else ()
    kinds = {facts.has_anchors for model in models if (facts := facts_of(str(model)))}
    sections = [key for key in (WITH_ANCHORS, WITHOUT_ANCHORS) if key in data]
    if len(kinds) > 1 and sections:
        raise ConfigError(f"{where(sections[0])}: {sections[0]}: the space has models with anchors and without, and a "
                          "trial's genes do not depend on its model; search one kind")


def warnings(space: Space, recipe: Recipe, trials: int) -> Iterator[str]:
    """Where trial 0 is not the recipe, and what evolution of so many trials does not search."""
    for gene in space.genes:
        ours, start = recipe_value(recipe, gene.name), space.starts[0][gene.name]
        is_fixed = gene.kind == "choice" and len(gene.values) == 1
        if start != ours and not is_fixed:
            yield (f"{gene.name}: the recipe has {short(ours)}, which this space does not allow; trial 0 has "
                   f"{short(start)}")
    zeros = [gene.name for gene in space.genes
             if gene.kind != "choice" and gene.gain > 0 and space.starts[0][gene.name] == 0]
    if space.algorithm == "evolve" and zeros:
        yield (f"evolve: {', '.join(zeros)} start at 0 and stay at 0, because mutation multiplies; to search them, "
               "give them another start (--hyp, --set)")
    if space.algorithm == "evolve" and 0 < trials - len(space.starts) <= space.random_first:
        yield (f"evolve: all {trials} trials are starts or drawn at random, and none is a child of a better one; "
               f"give more --trials, or a random_first below {space.random_first}")


def combinations(genes: Collection[Gene]) -> Iterator[dict[str, GeneValue]]:
    """Every combination of the entangled genes' values; one empty combination if there are no such genes."""
    entangled = [gene for gene in genes if canonical(gene.name) in ENTANGLED]
    for values in itertools.product(*map(_checked_values, entangled)):
        yield dict(zip((gene.name for gene in entangled), values, strict=True))


def _read_search(data: Any, recipe: Recipe, where: Where) -> Search:
    """The settings of the search of a space. Those that are given and have no effect are refused."""
    search = _read_settings(Search, data, where, SEARCH)
    _check_is_read(search, data, where, SEARCH)
    first = search.scheduler.first_epochs if isinstance(search.scheduler, Ladder) else 0
    if first >= recipe.epochs:
        raise ConfigError(f"{where('scheduler', 'first_epochs')}: search.scheduler.first_epochs: {first} is not below "
                          f"the {recipe.epochs} epochs of a training, so no trial would pause; lower it, or write "
                          "scheduler: none")
    return search


def _check_is_read(search: Search, given: Any, where: Where, owner: str) -> None:
    """Refuse a setting of the search or of a gene that the algorithm does not read."""
    unread = [name for name in _UNREAD.get(search.algorithm, ()) if isinstance(given, Mapping) and name in given]
    if unread:
        name = unread[0]
        raise ConfigError(f"{where(name)}: {owner}.{name} has no effect: the algorithm {search.algorithm} does not "
                          "read it; remove it, or write algorithm: evolve")


def _read_gene(key: str, raw: Any, where: Where) -> Gene:
    path = canonical(key)
    if path in _PLACEMENT or key.partition(".")[0] == "placement":
        raise ConfigError(f"{where()}: {key} decides where a trial is trained, not what is trained; a space names "
                          "fields of the recipe only (all trials have the placement of the command line)")
    if key in LEGACY_GENES:
        raise ConfigError(f"{where()}: {key} cannot be searched: {LEGACY_GENES[key]}; remove it")
    if path not in _RECIPE:
        raise ConfigError(f"{where()}: {explain_unknown(key, _RECIPE)}")
    if reason := MEASURES.get(path.partition(".")[0]) or NOT_SEARCHED.get(path):
        raise ConfigError(f"{where()}: {key} cannot be searched: {reason}; remove it")
    whole = _RECIPE[path].types == (int,)
    entry = raw
    match raw:  # short forms
        case [low, high]:
            entry = {"low": low, "high": high}
        case [low, high, "log"]:
            entry = {"type": "loguniform", "low": low, "high": high}
    if not isinstance(entry, Mapping):
        raise ConfigError(f"{where()}: {key}: got {short(raw)}; write {{low: 0.1, high: 0.9}}, [0.1, 0.9], "
                          "[0.001, 0.1, log], or a mapping with a type")
    entry = {"type": "int" if whole else "uniform", **entry}
    if (kind := entry["type"]) not in _FORMS:
        raise ConfigError(f"{where('type')}: {key}: unknown type {short(kind)}; the types are {', '.join(_FORMS)}")
    gene = _read_settings(_FORMS[kind], entry, where, key).gene(short_name(key))
    if gene.kind != "choice" and _RECIPE[path].types == (bool,):
        raise ConfigError(f"{where()}: {key}: is true or false; write {{type: choice, values: [true, false]}}")
    if whole and gene.kind == "float":
        raise ConfigError(f"{where('type')}: {key}: the field takes whole numbers; write type: int")
    return gene


def _read_settings(model: type[Config], data: Any, where: Where, name: str) -> Config:
    """A mapping as a model; its first error as a ConfigError."""
    try:
        return model.model_validate(data)
    except ValidationError as error:
        detail = error.errors(include_url=False)[0]
    # Pydantic adds the scheduler's name to the keys of an error in its settings.
    keys = [str(key) for key in detail["loc"] if key not in SCHEDULERS]
    owner = next((SCHEDULERS[str(key)] for key in detail["loc"] if key in SCHEDULERS), model)
    if detail["type"] == "extra_forbidden":
        text = "unknown key" + did_you_mean(keys[-1], {field: field for field in owner.model_fields})
    elif detail["type"] == "missing":
        text = "is missing"
    elif detail["type"] == "value_error":
        text = str(detail["ctx"]["error"])
    else:
        text = f"got {short(detail['input'])}: {detail['msg']}"
    raise ConfigError(f"{where(*keys)}: {'.'.join((name, *keys))}: {text}")


def _ends(gene: Gene) -> tuple[GeneValue, ...]:
    """The extreme values of a range, all values of a choice."""
    if gene.kind == "choice":
        return gene.values
    return (int(gene.low), int(gene.high)) if gene.kind == "int" else (gene.low, gene.high)


def _is_uneven(gene: Gene) -> bool:
    return gene.kind == "int" and canonical(gene.name) in _UNEVEN


def _checked_values(gene: Gene) -> Collection[GeneValue]:
    """The values of a gene to check: the ends of a range, or every whole number if some between may be invalid."""
    return range(int(gene.low), int(gene.high) + 1) if _is_uneven(gene) else _ends(gene)


def _check_between(recipe: Recipe, gene: Gene, where: str) -> None:
    """Refuse a range in which some whole numbers are invalid, and suggest a choice of the valid ones."""
    if not _is_uneven(gene):
        return
    _check_count([gene], where)
    valid = [value for value in _checked_values(gene) if not _fault(recipe, {gene.name: value})]
    if len(valid) < len(_checked_values(gene)):
        values = ", ".join(map(str, valid if len(valid) < 20 else (*valid[:2], "...", valid[-1])))
        raise ConfigError(f"{where}: {gene.name}: a range includes every whole number from {gene.low:g} to "
                          f"{gene.high:g}, and some are invalid; write {{type: choice, values: [{values}]}}")


def _check_distinct(recipe: Recipe, gene: Gene, where: Where) -> None:
    """Refuse a choice of two values that make the same recipe: it would be trained twice."""
    seen: list[tuple[GeneValue, Any]] = []  # the value as given, and as the recipe has it
    for value in gene.values:
        own = recipe_value(overlay(recipe, {gene.name: value}), gene.name)
        for other, theirs in seen:
            if own == theirs:
                raise ConfigError(f"{where('values')}: {gene.name}.values: {short(other)} and {short(value)} make the "
                                  "same recipe; remove one of them")
        seen.append((value, own))


def _check_count(genes: Collection[Gene], where: str) -> None:
    """Refuse more values than can be checked at a start."""
    if math.prod(len(_checked_values(gene)) for gene in genes) > _MAX_CHECKED:
        raise ConfigError(f"{where}: {', '.join(gene.name for gene in genes)}: more than {_MAX_CHECKED:,} values or "
                          "combinations, too many to check; use choices of fewer values")


def _check_together(recipe: Recipe, genes: Collection[Gene], where: Where) -> None:
    """Refuse genes whose values exclude each other, or that depend on an automatic setting of the base recipe."""
    searched = sorted({gene.name for gene in genes} & {"batch_size", "microbatch", "quad"})
    for name in ("batch_size", "microbatch"):
        if searched and name not in searched and (getattr(recipe, name) or -1) < 0:
            raise ConfigError(f"{where()}: {' and '.join(searched)} can be searched only if {name} is set or searched "
                              f"too; add --{name.replace('_', '-')}")
    _check_count([gene for gene in genes if canonical(gene.name) in ENTANGLED], where())
    for values in combinations(genes):
        _check_overlay(recipe, values, where())


def _fault(recipe: Recipe, genes: Mapping[str, GeneValue]) -> ErrorDetails | None:
    """The first error of the recipe that genes make, if it is invalid."""
    try:
        overlay(recipe, genes)
    except ValidationError as error:
        return error.errors(include_url=False)[0]
    return None


def _check_overlay(recipe: Recipe, genes: Mapping[str, GeneValue], where: str) -> None:
    """Refuse genes that make an invalid recipe: a value outside its field's bounds, or values that exclude others."""
    detail = _fault(recipe, genes)
    if detail and len(genes) == 1 and detail["loc"]:
        (name, value), = genes.items()
        raise ConfigError(f"{where}: {name}: {short(value)} is outside of the recipe's bounds: {canonical(name)} is "
                          f"{_RECIPE[canonical(name)].expected}")
    if detail:
        values = ", ".join(f"{name} {value}" for name, value in genes.items())
        raise ConfigError(f"{where}: {values} make an invalid recipe: {detail['msg'].removeprefix('Value error, ')}")


def _check_algorithm(space: Space, where: str) -> None:
    ranges = [gene.name for gene in space.genes if gene.kind == "float"]
    if space.algorithm == "grid" and ranges:
        raise ConfigError(f"{where}: {ranges[0]}: a grid needs points, and this is a range; write {{type: choice, "
                          "values: [...]}")
    if space.algorithm == "evolve" and not any(can_move(gene, space.starts[0][gene.name]) for gene in space.genes):
        raise ConfigError(f"{where}: no gene can evolve: mutation multiplies, and every gene is 0, fixed, or has gain "
                          "0; start from other values (--hyp, --set) or use algorithm: random")
