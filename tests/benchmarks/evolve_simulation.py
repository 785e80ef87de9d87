"""Speed of search on a virtual clock: trainings are replayed from a table without waiting.

    python tests/benchmarks/run.py evolve

Contestants, all from the same start, on the same noisy curves:
    sequential    YOLOv5's rules: one child after the other, each trained to its end
    random        random search on all slots, trained to the end
    random+asha   the same, and Ray Tune's ASHAScheduler
    optuna+asha   Ray Tune's own OptunaSearch and the same ASHAScheduler, unchanged
    ours          `tune.evolution` with the settings of `tune_spaces/asha.yaml`, and the same ASHAScheduler

Measured: virtual hours until the search's best row reaches 75 % (or another share) of the best fitness of the surface,
both without noise: a lucky training of mediocre genes does not count, although it may hide a better row. A row is a
trial that completed or was stopped, with the fitness of its last epoch; those that were trained further rank higher. A
search that misses the target within its budget counts as infinite. Each trial has a start-up time, longer on Ray than
in the one process of `sequential`.
"""

from __future__ import annotations

import argparse
import heapq
import json
import logging
import math
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple, Protocol

import numpy as np

from ray_yolo.config.recipe import Recipe
from ray_yolo.tune.evolution import Genes, Space, TrialRow, best_rows, propose
from ray_yolo.tune.space import load_space
from tests.benchmarks.evolve_table import Surface, read_table

TABLE = Path(__file__).with_name("yolo_curves.json")
TARGET = 0.75  # of the best fitness; with the table's noise, no search recognises 95 %
SLOTS = (1, 8, 64)
MAX_TRAININGS = 300  # budget, in full trainings over all slots (YOLOv5's default number of generations)
MAX_TRIALS = 1000
RAY_START_SECONDS = 11.0  # from a trial's start to its first step: its processes, their imports, their group




class Proposer(Protocol):
    """Proposes trials and receives their results."""

    def suggest(self, trial: int) -> Genes: ...

    def finished(self, row: TrialRow) -> None: ...


class Stopper(Protocol):
    """Receives every epoch of a trial (from 1) and decides whether it continues."""

    def goes_on(self, trial: int, epoch: int, fitness: float) -> bool: ...


class Contestant(NamedTuple):
    """A search method, built from a surface and a seed."""

    proposer: Callable[[Surface, int], Proposer]
    stopper: Callable[[Surface], Stopper] | None = None
    sequential: bool = False  # uses one slot only


class Outcome(NamedTuple):
    """The result of a search, in virtual seconds."""

    seconds: float  # until the target; infinite if never
    trials: int  # started until then


@dataclass
class Evolution:
    """Our proposals, with the rows that have finished so far."""

    space: Space
    seed: int

    def __post_init__(self) -> None:
        self.rows: list[TrialRow] = []

    def suggest(self, trial: int) -> Genes:
        return propose(self.space, self.seed, trial, self.rows)

    def finished(self, row: TrialRow) -> None:
        self.rows.append(row)


class Optuna:
    """Ray Tune's OptunaSearch (TPE)."""

    def __init__(self, space: Space, seed: int) -> None:
        import optuna
        from ray.tune.search.optuna import OptunaSearch

        optuna.logging.set_verbosity(optuna.logging.ERROR)
        kinds: dict[str, Callable[..., Any]] = {
            "float": lambda gene: optuna.distributions.FloatDistribution(gene.low, gene.high, log=gene.log),
            "int": lambda gene: optuna.distributions.IntDistribution(int(gene.low), int(gene.high)),
            "choice": lambda gene: optuna.distributions.CategoricalDistribution(gene.values)}
        self._search = OptunaSearch({gene.name: kinds[gene.kind](gene) for gene in space.genes}, metric="fitness",
                                    mode="max", points_to_evaluate=[dict(space.starts[0])],
                                    sampler=optuna.samplers.TPESampler(seed=seed))

    def suggest(self, trial: int) -> Genes:
        genes = self._search.suggest(str(trial))
        assert genes is not None
        return genes

    def finished(self, row: TrialRow) -> None:
        self._search.on_trial_complete(str(row.trial), {"fitness": row.fitness})


class Asha:
    """Ray Tune's ASHAScheduler, with its own reduction (4) and the first rung at a ninth of the training."""

    def __init__(self, epochs: int) -> None:
        from ray.tune.schedulers import ASHAScheduler, TrialScheduler

        self._stop = TrialScheduler.STOP
        self._scheduler = ASHAScheduler("epoch", "fitness", "max", max_t=epochs, grace_period=math.ceil(epochs / 9))
        self._trials: dict[int, Any] = {}

    def goes_on(self, trial: int, epoch: int, fitness: float) -> bool:
        if trial not in self._trials:
            self._trials[trial] = SimpleNamespace(trial_id=str(trial))
            self._scheduler.on_trial_add(None, self._trials[trial])
        result = {"epoch": epoch, "fitness": fitness}
        return self._scheduler.on_trial_result(None, self._trials[trial], result) != self._stop


def as_asha_yaml(space: Space) -> Space:
    """The space searched as `tune_spaces/asha.yaml` searches: with that file's gains and settings."""
    file = load_space(Path(__file__).parents[2] / "tune_spaces" / "asha.yaml", Recipe())
    gains = {gene.name: gene.gain for gene in file.space.genes}
    return replace(file.space, starts=space.starts,
                   genes=tuple(replace(gene, gain=gains[gene.name]) for gene in space.genes))


CONTESTANTS = {
    "sequential": Contestant(lambda surface, seed: Evolution(surface.table.space, seed), sequential=True),
    "random": Contestant(lambda surface, seed: Evolution(replace(surface.table.space, algorithm="random"), seed)),
    "random+asha": Contestant(lambda surface, seed: Evolution(replace(surface.table.space, algorithm="random"), seed),
                              lambda surface: Asha(surface.table.epochs)),
    "optuna+asha": Contestant(lambda surface, seed: Optuna(surface.table.space, seed),
                              lambda surface: Asha(surface.table.epochs)),
    "ours": Contestant(lambda surface, seed: Evolution(as_asha_yaml(surface.table.space), seed),
                       lambda surface: Asha(surface.table.epochs)),
}


class _Search:
    """One search in progress; times are virtual seconds."""

    def __init__(self, surface: Surface, contestant: Contestant, seed: int, start_seconds: float) -> None:
        self.surface = surface
        self.seed = seed
        self.proposer = contestant.proposer(surface, seed)
        self.stopper = contestant.stopper(surface) if contestant.stopper else None
        self.ends: list[float] = (start_seconds + np.cumsum(surface.table.epoch_seconds)).tolist()
        self.queue: list[tuple[float, int, int]] = []  # (time at which an epoch ends, trial, epoch from 1)
        self.running: dict[int, tuple[float, Genes, np.ndarray]] = {}  # trial -> (started, genes, observed curve)
        self.num_trials = 0
        self.best: list[TrialRow] = []  # the one that is best by its numbers
        self.true_fitness = -math.inf  # of that one, without noise

    def start_trial(self, now: float) -> None:
        trial = self.num_trials
        self.num_trials += 1
        genes = self.proposer.suggest(trial)
        self.running[trial] = now, genes, self.surface.observe(genes, self.seed, trial)
        heapq.heappush(self.queue, (now + self.ends[0], trial, 1))

    def finish_epoch(self) -> tuple[float, bool]:
        """(time, whether a slot became free) of the next thing that happens."""
        now, trial, epoch = heapq.heappop(self.queue)
        started, genes, observed = self.running[trial]
        fitness = float(observed[epoch - 1])
        goes_on = self.stopper is None or self.stopper.goes_on(trial, epoch, fitness)
        if goes_on and epoch < len(observed):
            heapq.heappush(self.queue, (started + self.ends[epoch], trial, epoch + 1))
            return now, False
        row = TrialRow(trial, genes, fitness, epoch)
        self.best = best_rows([*self.best, row], 1)
        if self.best == [row]:
            self.true_fitness = float(self.surface.curve(genes)[epoch - 1])
        self.proposer.finished(row)
        del self.running[trial]
        return now, True


def simulate(surface: Surface, contestant: Contestant, slots: int, seed: int, start_seconds: float | None = None,
             target: float = TARGET) -> Outcome:
    """One search on so many slots, until the target or the end of its budget; a start takes as long as the table says,
    if nothing else is said.
    """
    start_seconds = surface.table.start_seconds if start_seconds is None else start_seconds
    search = _Search(surface, contestant, seed, start_seconds)
    slots = 1 if contestant.sequential else slots
    budget = MAX_TRAININGS * search.ends[-1] / slots
    for _ in range(slots):
        search.start_trial(0.0)
    while search.queue:
        now, is_free = search.finish_epoch()
        if search.true_fitness >= target * surface.best:
            return Outcome(now, search.num_trials)
        if now > budget:
            break
        if is_free and search.num_trials < MAX_TRIALS:
            search.start_trial(now)
    return Outcome(math.inf, search.num_trials)


def compare(surface: Surface, seeds: Sequence[int], names: Sequence[str] = tuple(CONTESTANTS),
            ray_start_seconds: float = RAY_START_SECONDS, target: float = TARGET) -> dict[str, Any]:
    """Median hours and trials of each contestant for each number of slots, and how many times faster than
    `sequential`, whose trainings start in one process."""
    reference = [simulate(surface, CONTESTANTS["sequential"], 1, seed, target=target) for seed in seeds]
    base = float(np.median([outcome.seconds for outcome in reference]))
    table: dict[str, Any] = {"sequential": {1: _summary(reference, base)}}
    for name in names:
        if name != "sequential":
            table[name] = {slots: _summary([simulate(surface, CONTESTANTS[name], slots, seed, ray_start_seconds, target)
                                            for seed in seeds], base) for slots in SLOTS}
    return table


def _summary(outcomes: Sequence[Outcome], base: float) -> dict[str, float | None]:
    seconds = float(np.median([outcome.seconds for outcome in outcomes]))
    return {"hours": seconds / 3600 if math.isfinite(seconds) else None,
            "trials": float(np.median([outcome.trials for outcome in outcomes])),
            "reached": sum(math.isfinite(outcome.seconds) for outcome in outcomes) / len(outcomes),
            "speedup": base / seconds if math.isfinite(seconds) else 0.0}


def main(argv: Sequence[str] | None = None) -> None:
    """Print one JSON line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--table", default=str(TABLE))
    parser.add_argument("--seeds", type=int, default=30)
    parser.add_argument("--start-seconds", type=float, default=RAY_START_SECONDS, help="of a trial on Ray")
    parser.add_argument("--target", type=float, default=TARGET, help="share of the best fitness")
    options = parser.parse_args(argv)
    warnings.simplefilter("ignore")
    logging.disable(logging.WARNING)
    surface = Surface(read_table(options.table))
    print(json.dumps({"id": "evolve", "table": Path(options.table).name, "seeds": options.seeds, "best": surface.best,
                      "start_seconds": options.start_seconds, "target": options.target,
                      "contestants": compare(surface, range(options.seeds), ray_start_seconds=options.start_seconds,
                                             target=options.target)}))


if __name__ == "__main__":
    main()
