"""The genes of a new trial: a function of the space, the seed, the number of the trial, and the results counted so far.

The algorithm `mixed` (gp) lets three methods take turns. Each covers a weakness of the others:

random    draws from the whole space, which leaves a false hill
evolve    a child of the mean of the best five, which needs no model and few results
gp        the choice of a Gaussian process, which uses every result at every rung

A short training of a trial from `random` or `evolve` sorts out the bad ones. What the process proposes is good already:
it trains at once to a rung that says enough of the whole training.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import NamedTuple

import numpy as np

from ray_yolo.ops.seeding import Stream, generator
from ray_yolo.tune.evolution import NUM_PARENTS, Gene, Genes, Space, TrialRow, draw, propose
from ray_yolo.tune.surrogate import Observation, Surrogate, encode, fit_surrogate, propose_place

RANDOM_FIRST = 8  # proposals after the starts that are drawn from the whole space
RANDOM_SHARE = 0.3  # this share of the later ones is random
PROCESS_SHARE = 0.5  # the process makes this share of the others
ENOUGH_CORRELATION = 0.75  # of a rung's fitness with that of the whole training; the process assumes 0.76 at first


class Proposal(NamedTuple):
    """Genes, the method that chose them, the trials from which they come, and the rung to which they train first."""

    genes: Genes
    how: str
    parents: tuple[int, ...] = ()
    level: int = 0


class CountedResults(NamedTuple):
    """What a proposal may use: the results counted by then, and the trainings that run."""

    rows: Sequence[TrialRow]
    observations: Sequence[Observation]  # they are sorted by the time at which they were counted
    running: Sequence[Observation]
    levels: int  # rungs, with the whole training


def next_proposal(space: Space, seed: int, number: int, results: CountedResults) -> Proposal:
    """The proposal of trial `number`."""
    if space.algorithm != "gp":
        genes, parents = propose(space, seed, number, results.rows)
        is_start = number < len(space.starts) and space.algorithm != "grid"
        return Proposal(genes, "start" if is_start else space.algorithm, parents)
    if number < len(space.starts):
        return Proposal(dict(space.starts[number]), "start")
    rng = generator(Stream.TRIALS, seed, number, 1)
    chance, turn = rng.random(2)
    if number < len(space.starts) + RANDOM_FIRST or chance < RANDOM_SHARE:
        return Proposal(draw_anywhere(space.genes, rng), "random")
    process = fit_process(results.observations, results.levels) if turn < PROCESS_SHARE else None
    if process:
        genes = choose_by_process(process, space.genes, results, rng)
        return Proposal(genes, "gp", level=first_level(process, results.levels))
    child = replace(space, algorithm="evolve", random_first=0, random_share=0.0)
    genes, parents = propose(child, seed, number, results.rows)
    return Proposal(genes, "evolve", parents)


def draw_anywhere(genes: Sequence[Gene], rng: np.random.Generator) -> Genes:
    """Genes drawn from the whole space."""
    return {gene.name: draw(gene, rng.random()) for gene in genes}


def fit_process(observations: Sequence[Observation], levels: int) -> Surrogate | None:
    """The process of all results; None if there are fewer than two."""
    successes = sum(each.fitness is not None for each in observations)
    return fit_surrogate(observations, levels) if successes > 1 else None


def first_level(process: Surrogate, levels: int) -> int:
    """The lowest rung whose correlation with the whole training is `ENOUGH_CORRELATION`; at most the last one before
    the whole training."""
    last = max(0, levels - 2)
    return next((level for level in range(last) if process.correlation(level) >= ENOUGH_CORRELATION), last)


def choose_by_process(process: Surrogate, genes: Sequence[Gene], results: CountedResults, rng: np.random.Generator
                      ) -> Genes:
    """The genes from which the process expects the most improvement, near the best trials by its expectation."""
    places = np.unique([encode(genes, row.genes) for row in results.rows if row.fitness is not None], axis=0)
    best_first = np.argsort(-process.predict(places)[0], kind="stable")
    return propose_place(process, genes, places[best_first[:NUM_PARENTS]], results.running, rng)
