"""The order of a comparison's trainings, and its claim: pair after pair, both sides on the pair's fresh seed.

The seed of a pair follows from the base seed and the pair's number. The claim looks at the pairs in the order of their
numbers, whatever the order in which trainings end: it does not depend on workers, interruptions and speed.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import NamedTuple

import numpy as np

from ray_yolo.core.errors import NOT_FINITE
from ray_yolo.core.events import METRICS
from ray_yolo.ops.seeding import Stream, generator
from ray_yolo.runs.event_log import EVENTS_FILE, best_row, epoch_rows, read_events, surviving
from ray_yolo.tune.claim import PairsClaim, difference_error, judge_pairs
from ray_yolo.tune.compare_ledger import PairResults, Side, TrainedEvent
from ray_yolo.tune.dispatch import Dispatcher
from ray_yolo.tune.schedule import Outcome, Task
from ray_yolo.tune.sides import Recipes, all_settings

SIDES: tuple[Side, Side] = ("A", "B")


def pair_seed(base: int, pair: int) -> int:
    """The seed of a pair, from 0 to 2^32 - 1."""
    return int(generator(Stream.PAIRS, base, pair).integers(2**32))


def training_number(pair: int, side: Side) -> int:
    """The number of a training: 0 and 1 are A and B of pair 1."""
    return 2 * (pair - 1) + SIDES.index(side)


def pair_of(number: int) -> tuple[int, Side]:
    """Pair and side of a training's number."""
    return number // 2 + 1, SIDES[number % 2]


def training_folder(pair: int, side: Side) -> str:
    """The name of a training's run folder: pair1-a."""
    return f"pair{pair}-{side.lower()}"


def claim_from(results: PairResults, most: int | None = None) -> PairsClaim:
    """The claim of the pairs that have ended on both sides: the first one that is significant, else the last one.

    Args:
        most: pairs to look at; None: all.
    """
    fitness: dict[Side, list[float]] = {"A": [], "B": []}
    failed = [0, 0]
    claim = judge_pairs([], [])
    pair = 1
    while all((pair, side) in results for side in SIDES) and (most is None or pair <= most) and not claim.better:
        for number, side in enumerate(SIDES):
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
        limit: returns the most trainings at once. More are not handed out, for a result may end the comparison.
    """

    def __init__(self, recipes: Recipes, pairs: int, write: Callable[[TrainedEvent], None], results: PairResults,
                 class_precision: Callable[[str], Mapping[str, float | None]] = lambda name: {},
                 limit: Callable[[], int] = lambda: 1) -> None:
        self._settings = {"A": all_settings(recipes.a), "B": all_settings(recipes.b)}
        self._epochs = {"A": recipes.a.epochs, "B": recipes.b.epochs}
        self._seed, self._pairs, self._write = recipes.a.seed, pairs, write
        self._class_precision, self._limit = class_precision, limit
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
        if self.error:
            return claim
        num_running = len(self._started - self.results.keys())
        if num_running >= self._limit():
            return None
        task = self._next_task(explore)
        if task is None:
            return None if num_running else claim
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
            missing = [side for side in SIDES if (pair, side) not in self._started]
            if not missing:
                continue
            is_new = len(missing) == len(SIDES)
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
    """mAP50-95 by class of the best epoch of a run; empty without a validation."""
    best = best_row(epoch_rows(surviving(read_events(folder / EVENTS_FILE))))
    return {result.name: result.map50_95 for result in best.per_class} if best else {}


class ComparedRow(NamedTuple):
    """A number of both sides in the table: fitness, a metric, or the AP of a class."""

    name: str
    a: float  # mean of A
    b: float
    error: float | None  # standard error of the difference; None with a single pair
    pairs: int  # in which both sides have a value

    @property
    def difference(self) -> float:
        """B less A."""
        return self.b - self.a


def compared_metrics(results: PairResults, pairs: int) -> list[ComparedRow]:
    """The mean fitness and metrics of both sides over the first pairs. A training that diverged counts with 0."""
    rows = [_row("fitness", {key: result.fitness for key, result in results.items()}, results, pairs)]
    for name in METRICS:
        rows.append(_row(name, {key: result.metrics.get(name) for key, result in results.items()}, results, pairs))
    return [row for row in rows if row]


def compared_classes(results: PairResults, pairs: int) -> list[ComparedRow]:
    """The mean AP (mAP50-95) of each class over the first pairs, in the order of the data set.

    A class without labels in the validation set has no AP and no row.
    """
    names: dict[str, None] = {}  # a set that keeps the order
    for (pair, _), result in sorted(results.items()):
        if pair <= pairs:
            names.update(dict.fromkeys(result.classes))
    rows = []
    for name in names:
        values = {key: result.classes.get(name) for key, result in results.items()}
        row = _row(name, values, results, pairs)
        if row:
            rows.append(row)
    return rows


def _row(name: str, values: Mapping[tuple[int, Side], float | None], results: PairResults, pairs: int
         ) -> ComparedRow | None:
    """The row of one number, from its value in each training; None if no pair has it on both sides."""
    a, b = list[float](), list[float]()
    for pair in range(1, pairs + 1):
        first, second = (0.0 if results[pair, side].fitness is None else values[pair, side] for side in SIDES)
        if first is not None and second is not None:
            a.append(first)
            b.append(second)
    if not a:
        return None
    return ComparedRow(name, float(np.mean(a)), float(np.mean(b)), difference_error(a, b), len(a))
