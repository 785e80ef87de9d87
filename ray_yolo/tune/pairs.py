"""The order of a comparison's trainings, and its claim: pair after pair, both sides on the pair's fresh seed.

The seed of a pair follows from the base seed and the pair's number. The claim looks at the pairs in the order of their
numbers, whatever the order in which trainings end: it does not depend on workers, interruptions and speed.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from ray_yolo.config.recipe import Recipe
from ray_yolo.config.settings import config_fields
from ray_yolo.core.errors import NOT_FINITE
from ray_yolo.ops.seeding import Stream, generator
from ray_yolo.ops.statistics import mean_of
from ray_yolo.runs.event_log import EVENTS_FILE, best_row, epoch_rows, read_events, surviving
from ray_yolo.tune.claim import PairsClaim, difference_error, judge_pairs
from ray_yolo.tune.compare_ledger import Results, Side, TrainedEvent
from ray_yolo.tune.dispatch import Dispatcher
from ray_yolo.tune.schedule import Outcome, Task
from ray_yolo.tune.sides import Recipes

_ORDER: tuple[Side, Side] = ("A", "B")


def pair_seed(base: int, pair: int) -> int:
    """The seed of a pair, from 0 to 2^32 - 1."""
    return int(generator(Stream.PAIRS, base, pair).integers(2**32))


def training_number(pair: int, side: Side) -> int:
    """The number of a training: 0 and 1 are A and B of pair 1."""
    return 2 * (pair - 1) + _ORDER.index(side)


def pair_of(number: int) -> tuple[int, Side]:
    """Pair and side of a training's number."""
    return number // 2 + 1, _ORDER[number % 2]


def training_folder(pair: int, side: Side) -> str:
    """The name of a training's run folder: pair1-a."""
    return f"pair{pair}-{side.lower()}"


def all_settings(recipe: Recipe) -> dict[str, Any]:
    """Every setting of a recipe by path, as plain JSON."""
    tree = recipe.model_dump(mode="json")
    settings = {}
    for path in config_fields(Recipe):
        section, _, name = path.rpartition(".")
        settings[path] = tree[section][name] if section else tree[name]
    return settings


def claim_from(results: Results, most: int | None = None) -> PairsClaim:
    """The claim of the pairs that have ended on both sides: the first one that is significant, else the last one.

    Args:
        most: pairs to look at; None: all.
    """
    fitness: dict[Side, list[float]] = {"A": [], "B": []}
    failed = [0, 0]
    claim = judge_pairs([], [])
    pair = 1
    while all((pair, side) in results for side in _ORDER) and (most is None or pair <= most) and not claim.better:
        for number, side in enumerate(_ORDER):
            result = results[pair, side]
            fitness[side].append(result.fitness or 0.0)
            failed[number] += result.fitness is None
        claim = judge_pairs(fitness["A"], fitness["B"], (failed[0], failed[1]))
        pair += 1
    return claim


class PairSchedule:
    """Decides what to train next. It reads no clock. Not thread-safe.

    Args:
        recipes: of both sides, resolved. The seed of A is the base seed.
        pairs: the most.
        write: called with each new result, before it takes effect.
        results: of earlier commands.
        class_precision: returns the mAP50-95 by class of the training in a run folder of this name.
    """

    def __init__(self, recipes: Recipes, pairs: int, write: Callable[[TrainedEvent], None], results: Results,
                 class_precision: Callable[[str], Mapping[str, float | None]] = lambda name: {}) -> None:
        self._settings = {"A": all_settings(recipes.a), "B": all_settings(recipes.b)}
        self._epochs = {"A": recipes.a.epochs, "B": recipes.b.epochs}
        self._seed, self._pairs, self._write = recipes.a.seed, pairs, write
        self._class_precision = class_precision
        self.results = dict(results)
        self._started = set(results)  # pair and side of trainings that were handed out, or have a result
        self.error = ""
        """Why a training failed, if its recipe is not the cause: no claim follows."""

    def next(self, explore: Callable[[], bool], finishing: Callable[[], float] = lambda: math.inf
             ) -> Task | PairsClaim | None:
        """The next training; None if the decision needs a result that is missing; the claim at the end.

        Args:
            explore: whether another pair may start.
            finishing: not used, for no training pauses.
        """
        claim = claim_from(self.results, self._pairs)
        if claim.better or claim.pairs >= self._pairs:
            return claim
        task = None if self.error else self._next_task(explore)
        if task is None:
            is_waiting = self._started != set(self.results)
            return None if is_waiting and not self.error else claim
        self._started.add(pair_of(task.trial))
        return task

    def finish(self, task: Task, outcome: Outcome) -> None:
        """Write the outcome of a training. One that failed without having diverged has no result."""
        pair, side = pair_of(task.trial)
        if outcome.fitness is None and NOT_FINITE not in outcome.reason:
            self._started.discard((pair, side))
            self.error = self.error or f"{training_folder(pair, side)}: {outcome.reason}"
            return
        result = TrainedEvent(
            pair=pair, side=side, seed=task.seed, fitness=outcome.fitness, metrics=outcome.metrics,
            classes=self._class_precision(training_folder(pair, side)), weights=outcome.weights, reason=outcome.reason)
        self._write(result)
        self.results[pair, side] = result

    def _next_task(self, explore: Callable[[], bool]) -> Task | None:
        for pair in range(1, self._pairs + 1):
            missing = [side for side in _ORDER if (pair, side) not in self._started]
            if not missing:
                continue
            is_new = len(missing) == len(_ORDER)
            if is_new and not explore():
                return None
            side = missing[0]
            return Task(trial=training_number(pair, side), genes=self._settings[side], seed=pair_seed(self._seed, pair),
                        until=self._epochs[side], start=float(pair), end=float(pair))
        return None


class PairDispatcher(Dispatcher):
    """The trainings that are ready or running, by the names of their run folders."""

    def name(self, task: Task) -> str:
        """The name of the run folder in which a task trains."""
        return training_folder(*pair_of(task.trial))


def class_precision(folder: Path) -> dict[str, float | None]:
    """mAP50-95 by class of the best epoch of a run, with that of all classes; empty without a validation."""
    best = best_row(epoch_rows(surviving(read_events(folder / EVENTS_FILE))))
    return {result.name: result.map50_95 for result in best.per_class} if best else {}


class ClassRow(NamedTuple):
    """One class in the table."""

    name: str
    a: float  # mean mAP50-95 of A
    b: float
    difference: float  # b - a
    error: float | None  # standard error of the difference; None with a single pair
    pairs: int  # in which both sides have a value


def class_rows(results: Results, pairs: int) -> list[ClassRow]:
    """Mean AP of each class over the first pairs, in the order of the first result. A training that diverged has an AP
    of 0. A class that only one side knows is left out.
    """
    counted = [result for (pair, _), result in sorted(results.items()) if pair <= pairs]
    names = list(dict.fromkeys(name for result in counted for name in result.classes))
    rows = []
    for name in names:
        a, b = _values(results, pairs, name)
        if a:
            error = difference_error(a, b)
            rows.append(ClassRow(name, mean_of(a), mean_of(b), mean_of(b) - mean_of(a), error, len(a)))
    return rows


def _values(results: Results, pairs: int, name: str) -> tuple[Sequence[float], Sequence[float]]:
    """The AP of a class in the pairs where both sides have one."""
    a, b = list[float](), list[float]()
    for pair in range(1, pairs + 1):
        first, second = (_value(results[pair, side], name) for side in _ORDER)
        if first is not None and second is not None:
            a.append(first)
            b.append(second)
    return a, b


def _value(result: TrainedEvent, name: str) -> float | None:
    return 0.0 if result.fitness is None else result.classes.get(name)
