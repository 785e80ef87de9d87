"""Searches on a virtual clock: trainings on slots, and the truth about the choice at the end of the budget."""

from __future__ import annotations

import heapq
import math
from collections.abc import Mapping
from typing import NamedTuple, Protocol

from ray_yolo.config.recipe import Recipe
from ray_yolo.tune.budget import Budget
from ray_yolo.tune.evolution import Genes, GeneValue, Space
from ray_yolo.tune.ledger_events import ChosenEvent, ClaimedEvent, LedgerEvent
from ray_yolo.tune.schedule import Outcome, Task, rungs_of
from ray_yolo.tune.search import MOST_TRIALS, Search
from ray_yolo.tune.study import SweepEvent
from ray_yolo.tune.tuner import trials_ahead
from tests.benchmarks.search_costs import Costly
from tests.benchmarks.search_landscapes import Landscape, noise_key

START_SECONDS = 0.5  # of each training, also of one that continues
LATE = 0.01  # share of the budget by which a sweep of ours may end late


def epoch_seconds(land: Landscape, genes: Mapping[str, GeneValue]) -> float:
    """Seconds of an epoch of a training."""
    return land.epoch_seconds * (land.cost(genes) if isinstance(land, Costly) else 1.0)


class Rival(Protocol):
    """Any other search: trainings that report at each epoch and may be stopped. Times and slots are the race's."""

    def suggest(self, trial: int) -> tuple[Genes, int]:
        """Genes of a new trial, and the epochs of its training."""

    def report(self, trial: int, epoch: int, fitness: float) -> bool:
        """Receive an epoch; returns whether the trial continues."""

    def end(self, trial: int, epoch: int, fitness: float | None) -> None:
        """Receive the end of a trial: completed, stopped, or failed (None)."""


class Result(NamedTuple):
    """The end of one search."""

    truth: float  # of the chosen genes
    default: float  # truth of the default
    over: ClaimedEvent | None = None  # what ours says
    chosen: float = 0.0  # truth of the genes that ours compared with the default
    trials: int = 0
    late: float = 0.0  # share of the budget by which it ended late


def race(land: Landscape, rival: Rival, slots: int, trainings: float, seed: int) -> Result:
    """A search of so many trainings' time. It chooses the genes of the best number after the most epochs."""
    budget = trainings * land.epochs * land.epoch_seconds
    queue: list[tuple[float, int, int]] = []  # (time, trial, epoch)
    running: dict[int, tuple[Genes, int]] = {}
    best, count = (-1, -math.inf, dict(land.start)), 0

    def start(now: float) -> None:
        nonlocal count
        running[count] = rival.suggest(count)
        seconds = epoch_seconds(land, running[count][0])
        heapq.heappush(queue, (now + START_SECONDS + seconds, count, 1))
        count += 1

    for _ in range(slots):
        start(0.0)
    while queue:
        now, trial, epoch = heapq.heappop(queue)
        if now > budget:
            break
        genes, until = running[trial]
        fitness = land.observe(genes, noise_key(seed, trial, 0), epoch)
        if fitness is not None and epoch < until and rival.report(trial, epoch, fitness):
            heapq.heappush(queue, (now + epoch_seconds(land, genes), trial, epoch + 1))
            continue
        rival.end(trial, epoch, fitness)
        if fitness is not None and (epoch, fitness) > best[:2]:
            best = (epoch, fitness, genes)
        start(now)
    return Result(land.truth(best[2]), land.truth(land.start), trials=count)


def race_ours(land: Landscape, space: Space, slots: int, trainings: float, seed: int) -> Result:
    """The product's schedule and budget on the same clock, with its own number of virtual slots, and a search seed for
    each sweep. The claim is part of the budget: a sweep that ends later than by `LATE` has found nothing, and its
    choice is the default."""
    seconds = trainings * land.epochs * land.epoch_seconds
    now = 0.0
    virtual = slots + trials_ahead(slots)
    recipe = Recipe(epochs=land.epochs, seed=seed, microbatch=4, imgsz=int(land.start.get("imgsz", 640)))
    begun = SweepEvent(identity={}, space=space, search=Search(), recipe=recipe, rungs=rungs_of(land.epochs),
                       virtual_slots=virtual)
    budget = Budget(begun, MOST_TRIALS, seconds / 3600, 0.0, None, lambda: slots, lambda: now)
    events: list[LedgerEvent] = []
    budget.schedule = schedule = begun.schedule(write=events.append)
    ends: list[tuple[float, Task, int, float]] = []  # (time, task, its epochs, its seconds)
    free, trained = [0.0] * slots, dict[tuple[int, int], int]()
    while True:
        reply = schedule.next(budget.explores, budget.ending)
        if isinstance(reply, ClaimedEvent):
            break
        if isinstance(reply, Task):
            start = max(now, heapq.heappop(free))
            epochs = reply.until - trained.get((reply.trial, reply.seed), 0)
            trained[reply.trial, reply.seed] = reply.until
            end = start + START_SECONDS + epochs * epoch_seconds(land, reply.genes)
            heapq.heappush(free, end)
            heapq.heappush(ends, (end, reply, epochs, end - start))
        else:
            now, task, epochs, took = heapq.heappop(ends)
            budget.measure(task.genes, epochs, took)
            fitness = land.observe(task.genes, noise_key(seed, task.trial, task.seed), task.until)
            schedule.finish(task, Outcome(fitness=fitness))
    chosen = next(event.trial for event in reversed(events) if isinstance(event, ChosenEvent))
    winner = reply.winner if now <= seconds * (1 + LATE) else 0
    return Result(land.truth(schedule.genes[winner]), land.truth(land.start), reply,
                  land.truth(schedule.genes[chosen]), len(schedule.genes), now / seconds - 1)
