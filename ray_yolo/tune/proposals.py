"""What a sweep tries next, by any of its algorithms: `ops.evolution`, and Optuna's estimator where Optuna is installed.

A proposal is a function of the space, the seed, its number and the rows finished before it, whatever the algorithm:
Optuna is given those rows anew each time and asked once.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

from ray_yolo.errors import ConfigError
from ray_yolo.ops.seeding import Stream, generator
from ray_yolo.tune import evolution
from ray_yolo.tune.evolution import Gene, Genes, Row, Space

if TYPE_CHECKING:
    from optuna.distributions import BaseDistribution


def propose(space: Space, seed: int, k: int, rows: Iterable[Row]) -> Genes:
    """Genes of trial `k` (from 0), given the rows that finished before it, in any order; starts come first."""
    if space.algorithm != "tpe" or k < len(space.starts):
        return evolution.propose(space, seed, k, rows)
    return _estimate(space, seed, k, rows)


def check_algorithm(space: Space) -> None:
    """Refuse an algorithm whose library is missing.

    Raises:
        ConfigError: with the command that installs it.
    """
    if space.algorithm == "tpe" and importlib.util.find_spec("optuna") is None:
        raise ConfigError("search.algorithm: tpe needs Optuna; install ray_yolo[optuna], or use evolve or random")


def _estimate(space: Space, seed: int, k: int, rows: Iterable[Row]) -> Genes:
    """One draw of Optuna's tree-structured Parzen estimator (Bergstra et al. 2011) fitted to the rows."""
    import optuna

    optuna.logging.set_verbosity(optuna.logging.WARNING)
    sampler = optuna.samplers.TPESampler(seed=int(generator(Stream.TRIALS, seed, k).integers(2**31)))
    study = optuna.create_study(direction="maximize", sampler=sampler)
    distributions = {gene.name: _distribution(gene) for gene in space.genes}
    told = sorted((row for row in rows if row.fitness is not None), key=lambda row: row.trial)
    highest = max((row.rung for row in told), default=0)
    for row in told:  # Optuna, too, ranks what was pruned below what was not, by step and then by value
        stopped: dict[str, Any] = {"state": optuna.trial.TrialState.PRUNED,
                                   "intermediate_values": {row.rung: row.fitness}}
        study.add_trial(optuna.create_trial(params=dict(row.genes), distributions=distributions, value=row.fitness,
                                            **(stopped if row.rung < highest else {})))
    return dict(study.ask(distributions).params)


def _distribution(gene: Gene) -> BaseDistribution:
    from optuna.distributions import CategoricalDistribution, FloatDistribution, IntDistribution

    if gene.kind == "choice":
        return CategoricalDistribution(gene.values)
    if gene.kind == "int":
        return IntDistribution(int(gene.low), int(gene.high), log=gene.log)
    return FloatDistribution(gene.low, gene.high, log=gene.log)
