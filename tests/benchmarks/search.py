"""Speed of search: the true fitness of the genes that a search chooses at the end of its time.

    python tests/benchmarks/run.py search [--lands FILE.py] [--claims]

Searches run on a virtual clock over landscapes (`search_landscapes.py`): curves of recorded trainings, and formulas, or
those of a file. Each training takes its epochs and 0.5 s to start; its noise depends on the trial and its seed. `ours`
is the product's schedule with the shipped default space's settings, fresh seeds and claim included in its time. The
others choose the best number of their longest trainings. Most start at the default.

    asha.yaml     what `ours` was before: children of the mean of the best five, random draws, ASHA
    random+asha   random draws, ASHA (first rung a ninth, one in four continues)
    optuna        Optuna's multivariate TPE (constant liar) and its HyperbandPruner
    cmaes         CMA-ES of the package `cmaes`, whole trainings
    gp            our Gaussian process alone: eight random draws, then its choices, whole trainings
    dehb          differential evolution and Hyperband of the package `dehb`
    evolution     the evolution of YOLOv5 and Ultralytics: one child of the best five after the other, whole trainings
    tune+asha     Ultralytics with Ray Tune: random draws, ASHA (first rung a tenth, one in three continues)
    smac          SMAC3's multi-fidelity facade, by --contestants smac

The packages: pip install --no-deps -r tests/benchmarks/searches.txt
"""

from __future__ import annotations

import argparse
import json
import logging
import math
import os
import time
import warnings
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from ray_yolo.config.recipe import Recipe
from ray_yolo.tune.evolution import Genes, Space, TrialRow, draw, propose
from ray_yolo.tune.space import load_space
from ray_yolo.tune.surrogate import Observation, decode, encode, fit_surrogate, propose_place
from tests.benchmarks.harness import machine
from tests.benchmarks.search_landscapes import Landscape, load_landscapes
from tests.benchmarks.search_race import Result, Rival, race, race_ours

BUDGETS = ((1, 10), (1, 30), (8, 4), (8, 10))  # slots, trainings' time
SEEDS = 30
CLAIMED_ON = ("good", "fragile", "hill", "level")
DEFAULT = "ladder"  # the shipped space whose settings `ours` has


def default_space(land: Landscape) -> Space:
    """The genes of a landscape, searched with the settings and gains of the shipped default space."""
    shipped = load_space(DEFAULT, Recipe()).space
    gains = {gene.name: gene.gain for gene in shipped.genes}
    genes = tuple(replace(gene, gain=gains.get(gene.name, 4 * gene.gain)) for gene in land.genes)
    return replace(shipped, genes=genes, starts=(dict(land.start),))


class Halving:
    """ASHA: at each rung, a trial continues if it is among the best share of those that reached it."""

    def __init__(self, epochs: int, first: int, reduction: int) -> None:
        self._rungs = [first * reduction**n for n in range(9) if first * reduction**n < epochs]
        self._reduction, self._seen = reduction, {rung: list[float]() for rung in self._rungs}

    def report(self, trial: int, epoch: int, fitness: float) -> bool:
        if epoch not in self._seen:
            return True
        seen = self._seen[epoch]
        seen.append(fitness)
        return len(seen) < self._reduction or fitness >= np.percentile(seen, 100 * (1 - 1 / self._reduction))


class Proposals:
    """Proposals of a space by `tune.evolution`, whole trainings or stopped by ASHA."""

    def __init__(self, land: Landscape, space: Space, seed: int, halving: Halving | None = None) -> None:
        self._land, self._space, self._seed, self._halving = land, space, seed, halving
        self._rows: list[TrialRow] = []
        self._genes: list[Genes] = []

    def suggest(self, trial: int) -> tuple[Genes, int]:
        self._genes.append(propose(self._space, self._seed, trial, self._rows)[0])
        return self._genes[-1], self._land.epochs

    def report(self, trial: int, epoch: int, fitness: float) -> bool:
        return self._halving is None or self._halving.report(trial, epoch, fitness)

    def end(self, trial: int, epoch: int, fitness: float | None) -> None:
        self._rows.append(TrialRow(trial, self._genes[trial], fitness, epoch))


class Tpe:
    """Optuna's multivariate TPE and Hyperband."""

    def __init__(self, land: Landscape, seed: int) -> None:
        import optuna

        optuna.logging.set_verbosity(optuna.logging.ERROR)
        self._land, self._states, self._first = land, optuna.trial.TrialState, math.ceil(land.epochs / 9)
        self._study = optuna.create_study(
            direction="maximize", study_name=f"{land.name}{seed}",  # Hyperband draws brackets by the name
            sampler=optuna.samplers.TPESampler(seed=seed, multivariate=True, constant_liar=True),
            pruner=optuna.pruners.HyperbandPruner(self._first, land.epochs, 3))
        self._study.enqueue_trial(dict(land.start))
        self._space = {gene.name: optuna.distributions.CategoricalDistribution(gene.values) if gene.kind == "choice"
                       else optuna.distributions.FloatDistribution(gene.low, gene.high, log=gene.log)
                       for gene in land.genes}
        self._trials: list[Any] = []

    def suggest(self, trial: int) -> tuple[Genes, int]:
        self._trials.append(self._study.ask(self._space))
        return dict(self._trials[-1].params), self._land.epochs

    def report(self, trial: int, epoch: int, fitness: float) -> bool:
        if epoch % self._first:
            return True
        self._trials[trial].report(fitness, epoch)
        return not self._trials[trial].should_prune()

    def end(self, trial: int, epoch: int, fitness: float | None) -> None:
        state = (self._states.FAIL if fitness is None else
                 self._states.COMPLETE if epoch == self._land.epochs else self._states.PRUNED)
        self._study.tell(self._trials[trial], fitness if state == self._states.COMPLETE else None, state)


class Whole:
    """Base of searches that train every trial to its end."""

    def __init__(self, land: Landscape) -> None:
        self._land = land

    def report(self, trial: int, epoch: int, fitness: float) -> bool:
        return True


class CmaEs(Whole):
    """CMA-ES from the default in the unit cube; a generation follows when so many have ended."""

    def __init__(self, land: Landscape, seed: int) -> None:
        from cmaes import CMA

        super().__init__(land)
        start = np.array(encode(land.genes, land.start))
        self._search = CMA(start, 0.2, np.array([[0.0, 1.0]] * len(start)), seed=seed)
        self._places, self._ended = [start], list[tuple[np.ndarray, float]]()

    def suggest(self, trial: int) -> tuple[Genes, int]:
        if trial:
            self._places.append(self._search.ask())
        return decode(self._land.genes, self._places[trial]), self._land.epochs

    def end(self, trial: int, epoch: int, fitness: float | None) -> None:
        if trial:
            self._ended.append((self._places[trial], -(fitness or 0.0)))
        if len(self._ended) == self._search.population_size:
            self._search.tell(self._ended)
            self._ended = []


class PlainProcess(Whole):
    """Our Gaussian process over whole trainings, after eight random ones."""

    def __init__(self, land: Landscape, seed: int) -> None:
        super().__init__(land)
        self._seed, self._seen, self._places = seed, list[Observation](), list[tuple[float, ...]]()
        self._running: set[int] = set()

    def suggest(self, trial: int) -> tuple[Genes, int]:
        rng, genes = np.random.default_rng([41, self._seed, trial]), dict(self._land.start)
        if trial and (trial < 8 or len(self._seen) < 2):
            genes = {gene.name: draw(gene, rng.random()) for gene in self._land.genes}
        elif trial:
            tops = np.array([row.place for row in sorted(self._seen, key=lambda row: -(row.fitness or 0.0))[:5]])
            running = [Observation(self._places[other], 0, None) for other in sorted(self._running)]
            genes = propose_place(fit_surrogate(self._seen, 1), self._land.genes, tops, running, rng)
        self._places.append(encode(self._land.genes, genes))
        self._running.add(trial)
        return genes, self._land.epochs

    def end(self, trial: int, epoch: int, fitness: float | None) -> None:
        self._running.discard(trial)
        self._seen.append(Observation(self._places[trial], 0, fitness))


class Dehb:
    """DEHB by ask and tell; each rung trains anew, as the package does."""

    def __init__(self, land: Landscape, seed: int) -> None:
        from ConfigSpace import Categorical, ConfigurationSpace, Float
        from dehb import DEHB
        from loguru import logger

        logger.remove()
        self._land, self._jobs = land, list[Any]()
        space = ConfigurationSpace(seed=seed)
        space.add([Categorical(gene.name, gene.values) if gene.kind == "choice" else
                   Float(gene.name, (gene.low, gene.high), log=gene.log) for gene in land.genes])
        self._search = DEHB(cs=space, min_fidelity=math.ceil(land.epochs / 9), max_fidelity=land.epochs, eta=3,
                            n_workers=1, seed=seed, output_path=os.environ.get("TMPDIR", "/tmp") + "/dehb",
                            save_freq="end")

    def suggest(self, trial: int) -> tuple[Genes, int]:
        if trial == 0:
            self._jobs.append(None)
            return dict(self._land.start), self._land.epochs
        self._jobs.append(self._search.ask())
        job = self._jobs[trial]
        return dict(job["config"]), max(1, round(job["fidelity"]))

    def report(self, trial: int, epoch: int, fitness: float) -> bool:
        return True

    def end(self, trial: int, epoch: int, fitness: float | None) -> None:
        if job := self._jobs[trial]:
            self._search.tell(job, {"fitness": -(fitness or 0.0), "cost": float(epoch)})


class Smac:
    """SMAC3's multi-fidelity facade by ask and tell."""

    def __init__(self, land: Landscape, seed: int) -> None:
        from ConfigSpace import ConfigurationSpace, Float
        from smac import MultiFidelityFacade, Scenario

        self._land, self._infos = land, list[Any]()
        space = ConfigurationSpace(seed=seed)
        space.add([Float(gene.name, (gene.low, gene.high), default=float(land.start[gene.name]), log=gene.log)
                   for gene in land.genes])
        folder = Path(os.environ.get("TMPDIR", "/tmp")) / "smac"
        scenario = Scenario(space, deterministic=True, n_trials=10_000, seed=seed, output_directory=folder,
                            min_budget=math.ceil(land.epochs / 9), max_budget=land.epochs)
        initial = MultiFidelityFacade.get_initial_design(scenario, n_configs=8,
                                                         additional_configs=[space.get_default_configuration()])
        self._search = MultiFidelityFacade(scenario, lambda config, seed=0, budget=0.0: 0.0, initial_design=initial,
                                           overwrite=True, logging_level=logging.ERROR)

    def suggest(self, trial: int) -> tuple[Genes, int]:
        self._infos.append(self._search.ask())
        return dict(self._infos[trial].config), max(1, round(self._infos[trial].budget))

    def report(self, trial: int, epoch: int, fitness: float) -> bool:
        return True

    def end(self, trial: int, epoch: int, fitness: float | None) -> None:
        from smac.runhistory import TrialValue

        self._search.tell(self._infos[trial], TrialValue(cost=-(fitness or 0.0)))


def _evolution(land: Landscape, seed: int) -> Rival:
    return Proposals(land, Space(land.genes, (dict(land.start),)), seed)


def _before(land: Landscape, seed: int) -> Rival:
    genes = tuple(replace(gene, gain=4 * gene.gain) for gene in land.genes)
    space = Space(genes, (dict(land.start),), "evolve", "mean", 20, 0.3)
    return Proposals(land, space, seed, Halving(land.epochs, math.ceil(land.epochs / 9), 4))


def _random(land: Landscape, seed: int) -> Rival:
    return Proposals(land, Space(land.genes, (dict(land.start),), "random"), seed,
                     Halving(land.epochs, math.ceil(land.epochs / 9), 4))


def _ray_tune(land: Landscape, seed: int) -> Rival:
    return Proposals(land, Space(land.genes, (), "random"), seed, Halving(land.epochs, math.ceil(land.epochs / 10), 3))


RIVALS: dict[str, Callable[[Landscape, int], Rival]] = {
    "asha.yaml": _before, "random+asha": _random, "optuna": Tpe, "cmaes": CmaEs, "gp": PlainProcess, "dehb": Dehb,
    "evolution": _evolution, "tune+asha": _ray_tune, "smac": Smac}


def compete(name: str, land: Landscape, slots: int, trainings: float, seed: int) -> Result:
    """One search of a contestant."""
    if name == "ours":
        return race_ours(land, default_space(land), slots, trainings, seed)
    return race(land, RIVALS[name](land, seed), slots, trainings, seed)


def compare(file: str, names: Sequence[str], seeds: int, budgets: Sequence[tuple[int, int]], of: Sequence[str]
            ) -> dict[str, Any]:
    """Mean true fitness by budget, contestant and landscape, and over the landscapes. `first less it` is the difference
    from the first contestant, paired over landscape and seed, with its standard error."""
    table: dict[str, Any] = {}
    for slots, trainings in budgets:
        rows = table[f"{trainings} on {slots}"] = {}
        truths: list[np.ndarray] = []  # (landscapes, seeds) of each contestant
        for name in names:
            began, found = time.process_time(), dict[str, list[float]]()
            for seed in range(seeds):
                for land in (land for only in of or [""] for land in load_landscapes(file, seed, only)):
                    found.setdefault(land.name, []).append(compete(name, land, slots, trainings, seed).truth)
            truths.append(np.array(list(found.values())))
            less = truths[0] - truths[-1]
            error = less.std(ddof=1) / math.sqrt(less.size)
            means = {land: round(float(np.mean(each)), 3) for land, each in found.items()}
            rows[name] = {"mean": round(float(truths[-1].mean()), 3),
                          "first less it": f"{less.mean():+.3f} +- {error:.3f}", **means}
            print(f"{trainings} on {slots}, {name}: {rows[name]}, {time.process_time() - began:.0f} s", flush=True)
    return table


def claims(file: str, only: Sequence[str], sweeps: int, slots: int, trainings: int) -> dict[str, Any]:
    """What sweeps claim on landscapes, against the truth, in points (hundredths of the best fitness)."""
    table = {}
    for name in only:
        rows = []
        for seed in range(sweeps):
            land = next(load_landscapes(file, seed, name))
            rows.append(_claim(compete("ours", land, slots, trainings, seed), land.best))
        better, compared = ([row for row in rows if row[key]] for key in ("better", "pairs"))
        table[name] = {
            "sweeps": sweeps, "better": len(better) / sweeps,
            "better said wrongly": sum(row["true"] <= 0 for row in better) / sweeps,
            "compared": len(compared) / sweeps,  # the others' default failed
            "truth in the interval": float(np.mean([abs(row["gain"] - row["true"]) <= row["margin"]
                                                    for row in compared])),
            "overstatement": float(np.mean([row["gain"] - row["true"] for row in better] or [0.0])),
            "overstatement of all": float(np.mean([row["gain"] - row["true"] for row in compared])),
            "winner worse than the default": sum(row["winner"] < 0 for row in rows) / sweeps,
            "by over a point": sum(row["winner"] < -0.01 for row in rows) / sweeps,
            "margin": float(np.mean([row["margin"] for row in compared]))}
        table[name] = {key: round(value, 4) for key, value in table[name].items()}
        print(f"{name}: {table[name]}", flush=True)
    return table


def _claim(result: Result, best: float) -> dict[str, float]:
    assert result.over is not None
    claim = result.over.claim
    return {"better": claim.better, "pairs": claim.runs, "gain": 100 * claim.gain / best,
            "margin": 100 * claim.margin / best, "true": 100 * (result.chosen - result.default),
            "winner": result.truth - result.default}


def main(argv: Sequence[str] | None = None) -> None:
    """Print a line for each contestant and budget, and one JSON line at the end."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--lands", default="", help="a file with other landscapes")
    parser.add_argument("--seeds", type=int, default=SEEDS)
    parser.add_argument("--contestants", nargs="+", default=["ours", *(name for name in RIVALS if name != "smac")])
    parser.add_argument("--budgets", nargs="+", default=[f"{slots}:{trainings}" for slots, trainings in BUDGETS],
                        help="slots:trainings")
    parser.add_argument("--claims", action="store_true", help=f"200 sweeps on each of {CLAIMED_ON}, or of --of")
    parser.add_argument("--sweeps", type=int, default=200)
    parser.add_argument("--of", nargs="+", default=[], help="landscapes; default: all")
    options = parser.parse_args(argv)
    warnings.simplefilter("ignore")
    logging.disable(logging.WARNING)
    budgets = [(int(slots), int(trainings)) for slots, trainings in (text.split(":") for text in options.budgets)]
    if options.claims:
        found = claims(options.lands, options.of or CLAIMED_ON, options.sweeps, *budgets[1 % len(budgets)])
    else:
        found = compare(options.lands, options.contestants, options.seeds, budgets, options.of)
    print(json.dumps({"id": "search", "seeds": options.seeds, "found": found, "machine": machine()}))


if __name__ == "__main__":
    main()
