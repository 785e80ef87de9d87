"""Searches on a virtual clock: trainings on slots, and the truth about the choice at the end of the budget."""

from __future__ import annotations

import heapq
import math
from collections.abc import Callable, Sequence
from typing import NamedTuple, Protocol

from ray_yolo.tune.evolution import Genes, Space
from ray_yolo.tune.schedule import Chosen, Claimed, Line, Outcome, Schedule, Task, rungs_of
from tests.benchmarks.search_landscapes import Landscape, noise_key

START_SECONDS = 0.5  # of each training, also of one that continues


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
    over: Claimed | None = None  # what ours says
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
        heapq.heappush(queue, (now + START_SECONDS + land.epoch_seconds, count, 1))
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
            heapq.heappush(queue, (now + land.epoch_seconds, trial, epoch + 1))
            continue
        rival.end(trial, epoch, fitness)
        if fitness is not None and (epoch, fitness) > best[:2]:
            best = (epoch, fitness, genes)
        start(now)
    return Result(land.truth(best[2]), land.truth(land.start), trials=count)


def race_ours(land: Landscape, space: Space, slots: int, trainings: float, seed: int,
              make: Callable[..., Schedule] = Schedule, warmup: float | None = None) -> Result:
    """The product's schedule on the same clock; its fresh seeds are part of the budget."""
    budget = trainings * land.epochs * land.epoch_seconds
    if warmup is None:
        warmup = max((gene.high for gene in land.genes if gene.name == "warmup_epochs"), default=0.0)
    rungs = rungs_of(land.epochs, warmup, short=trainings * slots < 10)
    lines: list[Line] = []
    schedule = make(space, 0, rungs, slots, write=lines.append)
    ends: list[tuple[float, Task]] = []
    free, trained, now = [0.0] * slots, dict[tuple[int, int], int](), 0.0
    while True:
        one_more = rungs[0] * land.epoch_seconds
        state = schedule.next(now + one_more + time_to_close(schedule.closing_work, slots, land) <= budget)
        if isinstance(state, Claimed):
            break
        if isinstance(state, Task):
            begin = max(now, heapq.heappop(free))
            epochs = state.until - trained.get((state.trial, state.seed), 0)
            trained[state.trial, state.seed] = state.until
            end = begin + START_SECONDS + epochs * land.epoch_seconds
            heapq.heappush(free, end)
            heapq.heappush(ends, (end, state))
        else:
            now, task = heapq.heappop(ends)
            fitness = land.observe(task.genes, noise_key(seed, task.trial, task.seed), task.until)
            schedule.finish(task, Outcome(fitness=fitness))
    chosen = next(line.trial for line in reversed(lines) if isinstance(line, Chosen))
    return Result(land.truth(schedule.genes[state.winner]), land.truth(land.start), state,
                  land.truth(schedule.genes[chosen]), len(schedule.genes), now / budget - 1)


def time_to_close(work: Sequence[float], slots: int, land: Landscape) -> float:
    """Seconds to the end of a sweep whose exploration is closed now; stages cannot overlap."""
    running, competing, claiming = work
    rounds = [math.ceil(stage / land.epochs / slots - 1e-9) for stage in (competing, claiming)]
    return ((running / slots + sum(rounds) * land.epochs) * land.epoch_seconds
            + START_SECONDS * (1 + math.ceil(running / land.epochs) + sum(rounds)))
