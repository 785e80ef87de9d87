"""A comparison of two sides: pairs of trainings on fresh seeds, until one is shown to be better. `tune.runner` runs it.

    <project>/<name>/trials/pairN-a/     the run folder of each training, as of any training
    <project>/<name>/*.png, classes.csv  computed from ledger and logs

With more --pairs or --hours, a finished comparison with this --name continues.
"""

from __future__ import annotations

import csv
import hashlib
import io
import logging
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple, TextIO

from ray_yolo.config.effects import (
    Surroundings,
    describe_unused,
    effective_settings,
    given_settings,
    without_effect,
)
from ray_yolo.config.placement import RunConfig
from ray_yolo.config.recipe import Recipe, recipe_digest
from ray_yolo.core import deadline
from ray_yolo.core.errors import ConfigError, DatasetError
from ray_yolo.core.files import atomic_write
from ray_yolo.core.formatting import format_count
from ray_yolo.core.structures import AnnotationIndex
from ray_yolo.engine.devices import local_device
from ray_yolo.runs.location import location
from ray_yolo.runs.run_dir import Run, begin_run, find_run
from ray_yolo.runs.run_record import LEDGER_FILE, SweepRecord, read_record
from ray_yolo.runtime import cluster
from ray_yolo.runtime.preflight import (
    check_cluster,
    check_early,
    compare_initial_weights,
    planned_recipe,
    read_dataset,
    resolve_recipe,
    surroundings,
)
from ray_yolo.sinks.report import settings_line
from ray_yolo.storage.store import is_address
from ray_yolo.tune.claim import PairsClaim
from ray_yolo.tune.compare_settings import CompareConfig
from ray_yolo.tune.compared import ComparedRow, compared_classes, compared_metrics, comparison_table, result_text
from ray_yolo.tune.dispatch import Dispatcher
from ray_yolo.tune.evolution import Space
from ray_yolo.tune.identity import identity_of, versions
from ray_yolo.tune.ledger import Ledger, read_ledger
from ray_yolo.tune.ledger_events import ClaimedEvent, CountedEvent, FailedEvent
from ray_yolo.tune.page import write_page
from ray_yolo.tune.pair_plots import draw_comparison
from ray_yolo.tune.pairs import PairResults, PairSchedule, claim_from, results_of
from ray_yolo.tune.runner import Study, seconds_spent
from ray_yolo.tune.search import check_placement
from ray_yolo.tune.sides import Recipes
from ray_yolo.tune.study import ComparisonEvent
from ray_yolo.tune.task import with_absolute_paths

_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class ComparisonResult:
    """The result of a comparison."""

    folder: Path
    claim: PairsClaim

    @property
    def metrics(self) -> list[ComparedRow]:
        """Fitness and metrics of both sides, from the ledger."""
        return compared_metrics(results_of(read_ledger(self.folder / LEDGER_FILE)), self.claim.pairs)

    @property
    def classes(self) -> list[ComparedRow]:
        """The mAP50-95 of each class on both sides, from the ledger."""
        return compared_classes(results_of(read_ledger(self.folder / LEDGER_FILE)), self.claim.pairs)


class _CheckedComparison(NamedTuple):
    """A comparison after all checks that need no cluster."""

    config: CompareConfig  # the placement has the workers of each training
    asked: Recipes
    train: tuple[AnnotationIndex, AnnotationIndex]  # A has the first, B the second
    val: AnnotationIndex


def compare(config: CompareConfig, sides: Recipes, *, quiet: bool = False) -> ComparisonResult:
    """Run a comparison, or continue the one that the same configuration started.

    Args:
        sides: of `read_sides`.

    Raises:
        InputError: for bad input, before any cluster work.
        TrainingError: if a training fails for another reason than that its loss has diverged.
    """
    checked = _check(config, sides)
    config, digest = checked.config, _digest(checked)
    run = find_run(sides.a, config.placement, lambda folder: _has_more(folder, config), digest=digest)
    try:
        gpus, slots = _connect(checked, run)
        recipes = _resolve_sides(checked, gpus)
        run = run or begin_run(config.placement, SweepRecord(
            digest=digest, space="", trials=2 * config.comparison.pairs, is_comparison=True))
        begun = ComparisonEvent(identity=_identity(checked), a=recipes.a, b=recipes.b)
        ledger = Ledger(run.folder / LEDGER_FILE, begun)
        stream = io.StringIO() if quiet else sys.stdout
        return Comparison(config, ledger, run, recipes, slots, gpus, stream).run_to_end()
    finally:
        deadline.end(run.release if run else None)


def dry_run(config: CompareConfig, sides: Recipes) -> list[str]:
    """What a comparison would train, line by line, after all checks. It starts and writes nothing.

    Raises:
        InputError: as `compare` does.
    """
    checked = _check(config, sides)
    placement = checked.config.placement
    gpus = cluster.planned_gpus(placement) if placement.num_workers else 0.0
    planned = Recipes(*(planned_recipe(recipe, placement, train, gpus)
                        for recipe, train in zip(sides, checked.train, strict=True)))
    return [f"both sides, except for the differences: {settings_line(planned.a)}", *planned.differences,
            f"at most {format_count(config.comparison.pairs, 'pair')}"]


def _check(config: CompareConfig, sides: Recipes) -> _CheckedComparison:
    """Check everything that needs no cluster.

    Raises:
        InputError: for sides that cannot be trained, or whose fitness cannot be compared.
    """
    workers = config.comparison.workers_per_training
    check_placement(config.placement, "comparison", "workers_per_training", workers)
    placement = config.placement.model_copy(update={"num_workers": workers})
    config = config.model_copy(update={"placement": placement})
    if placement.registered_name:
        raise ConfigError("registered_name: a comparison registers no model; train the better side, or register one of "
                          "its trainings")
    if is_address(placement.storage_path) or is_address(placement.project):
        raise ConfigError("storage_path: a comparison is kept in a folder; give one that all nodes mount")
    train, val, around = [], [], []
    for recipe in sides:
        check_early(RunConfig(recipe=recipe, placement=placement))
        description, train_labels, val_labels = read_dataset(recipe)
        compare_initial_weights(recipe, train_labels.names)
        train.append(train_labels)
        val.append(val_labels)
        around.append(surroundings(recipe, description, train_labels, val_labels))
    if val[0].digest != val[1].digest:
        described = [f"{side} ({recipe.data}: {format_count(len(labels), 'image')}, "
                     f"{format_count(len(labels.classes), 'label')})"
                     for side, recipe, labels in zip("AB", sides, val, strict=True)]
        raise DatasetError(f"data: the validation sets of {' and '.join(described)} differ in images, labels or class "
                           "names, so their fitness cannot be compared; give the data set of B the `val` of A")
    checked = _CheckedComparison(config, sides, (train[0], train[1]), val[0])
    _check_effects(checked, around)
    return checked


def _check_effects(checked: _CheckedComparison, around: Sequence[Surroundings]) -> None:
    """Warn of given settings without effect, and refuse sides that would train the same weights.

    Raises:
        ConfigError: naming the settings that differ without effect.
    """
    planned = Recipes(*(planned_recipe(recipe, checked.config.placement, train, None)
                        for recipe, train in zip(checked.asked, checked.train, strict=True)))
    lines = []
    for side, asked, recipe, about in zip("AB", checked.asked, planned, around, strict=True):
        for line in describe_unused(given_settings(asked), without_effect(recipe, about)):
            lines.append(f"{side}: {line}")
    a, b = (effective_settings(recipe, about) for recipe, about in zip(planned, around, strict=True))
    if a == b:
        reasons = "; ".join([*planned.differences, *lines]) if planned.differences else "their settings are equal"
        raise ConfigError(f"A and B train the same weights, so no difference can be shown: {reasons}; give sides that "
                          "differ in a setting that has an effect")
    for line in lines:
        _log.warning("%s", line)


def _digest(checked: _CheckedComparison) -> str:
    """The identity of a comparison: of both recipes, as requested."""
    parts = [recipe_digest(recipe) for recipe in checked.asked]
    return hashlib.sha256("\0".join(parts).encode()).hexdigest()[:16]


def _identity(checked: _CheckedComparison) -> dict[str, str]:
    """Digests of everything that the settings of both sides only name, and the versions that train them."""
    identity = versions()
    for side, recipe, train in zip("AB", checked.asked, checked.train, strict=True):
        for part, digest in identity_of(recipe, Space((), ()), train, checked.val).items():
            identity[f"{part} of {side}"] = digest
    return identity


def _connect(checked: _CheckedComparison, run: Run | None) -> tuple[float, int]:
    """The GPUs of each worker, and the number of trainings that run at once."""
    placement = checked.config.placement
    workers = checked.config.comparison.workers_per_training
    if not workers:
        return float(local_device(placement.gpus_per_worker).type == "cuda"), 1
    gpus = cluster.connect(placement)
    slots = cluster.parallel_trainings(placement, workers, gpus)
    if not slots:
        raise cluster.no_room("workers_per_training", placement, workers, gpus)
    for warning in check_cluster(placement, run, *checked.train):
        print(f"warning: {warning}", file=sys.stderr)
    return gpus, slots


def _resolve_sides(checked: _CheckedComparison, gpus: float) -> Recipes:
    """The recipes of both sides with all settings decided."""
    placement = checked.config.placement
    resolved = []
    for recipe, train in zip(checked.asked, checked.train, strict=True):
        resolved.append(resolve_recipe(with_absolute_paths(recipe), placement, train, gpus))
    return Recipes(*resolved)


def _has_more(folder: Path, config: CompareConfig) -> bool:
    """Whether a finished comparison continues, because more pairs or hours are requested than it has had."""
    claim = claim_from(results_of(read_ledger(folder / LEDGER_FILE)))
    spent, hours = seconds_spent(read_record(folder)), config.comparison.hours
    return not claim.better and claim.pairs < config.comparison.pairs and (not hours or spent < 3600 * hours)


class Comparison(Study[ComparisonResult]):
    """One command's part of a comparison.

    Args:
        recipes: of both sides, resolved by this command; those of the ledger count, except for their paths.
    """

    config: CompareConfig

    def __init__(self, config: CompareConfig, ledger: Ledger, run: Run, recipes: Recipes, slots: int, gpus: float,
                 stream: TextIO) -> None:
        self.recipes = Recipes(*(_with_paths_of(there, here)
                                 for there, here in zip(ledger.begun.recipes, recipes, strict=True)))
        self.stream = stream
        self._printed = len(ledger.lines)
        """Lines of the ledger that were printed, or written by an earlier command."""
        super().__init__(config, ledger, run, slots, gpus)

    def make_dispatcher(self) -> Dispatcher:
        """Pair after pair, as many trainings at once as there are slots."""
        schedule = PairSchedule(self.recipes, write=self.ledger.append, limit=lambda: self.slots)
        schedule.restore(self.ledger.lines)

        def explores() -> bool:
            hours = self.config.comparison.hours
            has_time = not hours or self.seconds < 3600 * hours
            return has_time and schedule.num_pairs < self.config.comparison.pairs

        return Dispatcher(schedule, self.ledger.begun.folder_of, explores, lambda task: None, lambda: self.slots)

    def pool_range(self) -> tuple[int, int]:
        """One worker stays if other programs of the cluster wait."""
        return 1, self.slots * self.config.comparison.workers_per_training

    def say(self, text: str) -> None:
        """Print a line."""
        print(text, file=self.stream, flush=True)

    def describe(self) -> list[str]:
        """The comparison, and the settings in which its sides differ."""
        count = len(results_of(self.ledger.lines))
        return [f"{location(self.folder)}: {format_count(count, 'training')} so far",
                f"both sides, except for the differences: {settings_line(self.recipes.a)}",
                *self.recipes.differences]

    def show(self) -> None:
        """Print new results."""
        new, self._printed = self.ledger.lines[self._printed:], len(self.ledger.lines)
        for line in new:
            if isinstance(line, (CountedEvent, FailedEvent)):
                self.say(result_text(line))

    def finish(self, claim: ClaimedEvent) -> tuple[ComparisonResult, list[str]]:
        """Write every file of the comparison."""
        assert isinstance(claim.claim, PairsClaim)
        results = results_of(self.ledger.lines)
        atomic_write(self.folder / "classes.csv", _classes_csv(results, claim.claim.pairs), durable=False)
        draw_comparison(self.folder, results, claim.claim.pairs)
        write_page(self.folder)
        return ComparisonResult(self.folder, claim.claim), [
            *comparison_table(results, claim.claim), str(claim), f"page: {location(self.folder)}/report.html"]


def _with_paths_of(recorded: Recipe, now: Recipe) -> Recipe:
    """The recipe of the ledger, with the data set, model file and weights where this command has found them."""
    return recorded.model_copy(update={"data": now.data, "model": now.model, "weights": now.weights})


def _classes_csv(results: PairResults, pairs: int) -> str:
    """The AP of each class: means of both sides, their difference and its standard error."""
    text = io.StringIO()
    table = csv.writer(text, lineterminator="\n")
    table.writerow(["class", "A", "B", "difference", "standard error", "pairs"])
    for row in compared_classes(results, pairs):
        table.writerow([row.name, row.a, row.b, row.difference, "" if row.error is None else row.error, row.pairs])
    return text.getvalue()
