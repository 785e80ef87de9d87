"""The genes of trial k by any algorithm: a pure function of the space, the seed and the rows that finished before it.

It reads no clock and keeps no state; rows are ranked by rung, fitness and trial number. A proposal can therefore be
recomputed from a sweep's ledger, and a free slot never waits for the end of a generation.

Source: YOLOv5's evolution as published up to v7.0 (one parent of the best five, multiplicative mutation).
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple

import numpy as np

from ray_yolo.ops.seeding import Stream, generator

GeneValue = float | int | str | bool
Genes = dict[str, GeneValue]

NUM_PARENTS = 5
MUTATION_PROBABILITY = 0.8  # each gene mutates with it
MUTATION_SIGMA = 0.2  # standard deviation of a factor of gain 1, before the child's common u
FACTOR_LOW, FACTOR_HIGH = 0.3, 3.0
CHOICE_PROBABILITY = 0.1  # a choice has no scale to mutate on: with gain 1, one child in ten changes it
WEIGHT_FLOOR = 1e-6  # the worst parent keeps a probability, and equal fitness gives equal weights
DECIMALS = 5
COARSE = 1e-4  # below it, so many decimals leave one digit or none, so digits are counted instead
MAX_DRAWS = 1000  # after this many draws without a changed gene, none can change


@dataclass(frozen=True)
class Gene:
    """One searched field: a range from `low` to `high`, the integers in such a range, or `values` to choose from.

    `log` spreads random proposals evenly over the logarithm of a range; `gain` is how far evolution moves the gene
    (0: never).
    """

    name: str
    kind: Literal["float", "int", "choice"] = "float"
    low: float = 0.0
    high: float = 0.0
    log: bool = False
    gain: float = 1.0
    values: tuple[GeneValue, ...] = ()


@dataclass(frozen=True)
class Space:
    """The genes of a search. Its first trials are the `starts` (a grid has none).

    Evolution mutates a `parent`: one of the five best rows, drawn by fitness, or their mean, weighted by fitness. The
    first `random_first` proposals are random, and later each one with probability `random_share`. Children stay near
    their parents, but a good region may be far from the start. Without `is_fine`, as up to ray_yolo 0.2.0, small values
    of children are rounded to 5 decimals, too.
    """

    genes: tuple[Gene, ...]
    starts: tuple[Mapping[str, GeneValue], ...]
    algorithm: Literal["evolve", "random", "grid", "gp"] = "evolve"
    parent: Literal["single", "mean"] = "single"
    random_first: int = 0
    random_share: float = 0.0
    is_fine: bool = True


class TrialRow(NamedTuple):
    """A trial that has ended. Without a finite fitness, it failed and is never a parent."""

    trial: int
    genes: Mapping[str, GeneValue]
    fitness: float | None
    rung: int = 0  # how far it was trained; fitness is comparable only within a rung


def propose(space: Space, seed: int, k: int, rows: Iterable[TrialRow]) -> tuple[Genes, tuple[int, ...]]:
    """Genes and parents of trial `k` (from 0), from the rows that finished before it, in any order. Starts come first.

    The parents are one trial, the five best if it is a child of their mean, or none.

    Raises:
        IndexError: if a grid has no point k.
    """
    if space.algorithm == "grid":
        return _grid_point(space, k), ()
    if k < len(space.starts):
        return dict(space.starts[k]), ()
    rng = generator(Stream.TRIALS, seed, k)
    is_random = space.algorithm == "random" or k < len(space.starts) + space.random_first
    if not is_random and space.random_share > 0:  # without a share nothing is drawn, so that the later draws stay
        is_random = space.random_share > rng.random()
    if is_random:
        return {gene.name: draw(gene, rng.random()) for gene in space.genes}, ()
    best = best_rows(rows, NUM_PARENTS)
    if not best:
        return mutate(space.genes, space.starts[0], rng, is_fine=space.is_fine), ()
    weights = parent_weights(best)
    parent = best[int(rng.choice(len(best), p=weights))]
    if space.parent == "single":
        return mutate(space.genes, parent.genes, rng, is_fine=space.is_fine), (parent.trial,)
    mean = dict(parent.genes)  # choices have no mean: they are those of the drawn parent
    for gene in space.genes:
        if gene.kind != "choice":
            values = [float(row.genes[gene.name]) for row in best]
            mean[gene.name] = nearest(gene, float(weights @ values))
    return mutate(space.genes, mean, rng, is_fine=space.is_fine), tuple(row.trial for row in best)


def best_rows(rows: Iterable[TrialRow], count: int) -> list[TrialRow]:
    """The `count` best rows, best first: by rung, then fitness, then trial number. Failed rows are excluded."""
    alive = [row for row in rows if row.fitness is not None and math.isfinite(row.fitness)]
    return sorted(alive, key=lambda row: (-row.rung, -(row.fitness or 0.0), row.trial))[:count]


def parent_weights(parents: Sequence[TrialRow]) -> np.ndarray:
    """(parents,) probabilities in proportion to fitness - worst fitness + 1e-6, for rows in the order of `best_rows`.

    A row of a lower rung has at most the weight of each row of a higher one.
    """
    fitness = np.minimum.accumulate([row.fitness or 0.0 for row in parents])
    weights = fitness - fitness.min() + WEIGHT_FLOOR
    return weights / weights.sum()


def mutate(genes: Sequence[Gene], parent: Mapping[str, GeneValue], rng: np.random.Generator, *, is_fine: bool = True
           ) -> Genes:
    """A child of `parent` that differs from it, inside the genes' limits.

    A range's value is multiplied by clip(1 + gain x b x z x u x 0.2, 0.3, 3.0), then rounded to 5 decimals and clipped.
    Below 1e-4 it keeps 5 significant digits instead, if `is_fine`: else it would be 0, or equal to its parent. Per
    gene, b is Bernoulli(0.8) and z standard normal. Per child, u is uniform(0, 1). A value of 0 therefore stays 0.
    Integers are rounded up or down at random, without bias; otherwise small ones would never move. Draws are repeated
    until a gene changes. If no gene can move, the child equals the parent.
    """
    gains = np.array([gene.gain for gene in genes])
    child = dict(parent)
    for _ in range(MAX_DRAWS):
        u = rng.random()
        mutates = rng.random(len(genes)) < MUTATION_PROBABILITY
        normal = rng.standard_normal(len(genes))
        chances = rng.random(len(genes)).tolist()
        moves = gains * mutates * normal * u * MUTATION_SIGMA
        factors = np.clip(1 + moves, FACTOR_LOW, FACTOR_HIGH).tolist()
        child = {}
        for gene, factor, chance in zip(genes, factors, chances, strict=True):
            child[gene.name] = _mutated(gene, parent[gene.name], factor, chance, is_fine)
        if child != parent:
            break
    return child


def can_move(gene: Gene, value: GeneValue) -> bool:
    """Whether mutation ever changes this value."""
    has_others = len(gene.values) > 1 if gene.kind == "choice" else gene.low < gene.high and value != 0
    return gene.gain > 0 and has_others


def nearest(gene: Gene, value: object) -> GeneValue:
    """The nearest value that a gene allows: the value clipped to the range, an equal choice, or the first choice.

    For a range, a value that is not a number becomes the low end.
    """
    if gene.kind == "choice":
        return next((choice for choice in gene.values if choice == value), gene.values[0])
    number = _clip(float(value) if isinstance(value, (int, float)) else gene.low, gene)
    return round(number) if gene.kind == "int" else number


def grid_size(genes: Sequence[Gene]) -> int:
    """The number of points of the grid over choices and integer ranges."""
    return math.prod(len(_grid_values(gene)) for gene in genes)


def num_combinations(genes: Sequence[Gene]) -> float:
    """The number of different combinations of values; infinite with a continuous range."""
    return math.prod(map(_num_values, genes))


def _num_values(gene: Gene) -> float:
    if gene.kind == "choice":
        return len({(type(value), value) for value in gene.values})
    if gene.kind == "float" and gene.low < gene.high:
        return math.inf
    return int(gene.high) - int(gene.low) + 1


def _grid_point(space: Space, k: int) -> Genes:
    """Point k of the grid; the last gene changes fastest. The recipe's own point, if the grid has it, comes first: the
    first trial is the default."""
    genes = space.genes
    if k >= grid_size(genes):
        raise IndexError(f"point {k} of a grid of {grid_size(genes)}")
    own = _place_on_grid(genes, space.starts[0]) if space.starts else None
    if own is not None and k <= own:
        k = own if k == 0 else k - 1
    point: Genes = {}
    for gene in reversed(genes):
        values = _grid_values(gene)
        k, index = divmod(k, len(values))
        point = {gene.name: values[index], **point}
    return point


def _place_on_grid(genes: Sequence[Gene], values: Mapping[str, GeneValue]) -> int | None:
    """The number of the grid's point with these values, in the order of the genes; None if it has none."""
    place = 0
    for gene in genes:
        own = list(_grid_values(gene))
        if values.get(gene.name) not in own:
            return None
        place = place * len(own) + own.index(values[gene.name])
    return place


def _grid_values(gene: Gene) -> Sequence[GeneValue]:
    assert gene.kind != "float", f"{gene.name}: a grid has no points on a continuous range"
    return gene.values if gene.kind == "choice" else range(int(gene.low), int(gene.high) + 1)


def _mutated(gene: Gene, value: GeneValue, factor: float, chance: float, is_fine: bool) -> GeneValue:
    """One gene of a child; `chance` is uniform in [0, 1)."""
    if gene.kind == "choice":
        probability = min(1.0, CHOICE_PROBABILITY * gene.gain)
        others = [other for other in gene.values if other != value]
        if not others or chance >= probability:
            return value
        share = chance / probability  # uniform in [0, 1), too: one draw decides whether and which
        return others[int(share * len(others))]
    if factor == 1:
        return value  # not rounded: a child must not differ by rounding alone
    scaled = float(value) * factor
    if gene.kind == "int":
        return int(_clip(math.floor(scaled + chance), gene))  # rounded up with the probability of its fraction
    if is_fine and abs(scaled) < COARSE:
        return _clip(_significant(scaled), gene)
    return _clip(round(scaled, DECIMALS), gene)


def draw(gene: Gene, chance: float) -> GeneValue:
    """A random value of one gene; `chance` is uniform in [0, 1). Floats keep 5 significant digits."""
    if gene.kind == "choice":
        return gene.values[int(chance * len(gene.values))]
    if gene.kind == "int":
        return int(gene.low) + int(chance * (gene.high - gene.low + 1))
    return _clip(_significant(at_share(gene, chance)), gene)


def at_share(gene: Gene, share: float) -> float:
    """The value at a share of a range, from 0, the low end, to 1; of a `log` range by its logarithm."""
    if gene.log:
        return gene.low * (gene.high / gene.low) ** share
    return gene.low + (gene.high - gene.low) * share


def _significant(value: float) -> float:
    """The value rounded to five significant digits."""
    return float(f"{value:.{DECIMALS}g}")


def _clip(value: float, gene: Gene) -> float:
    return min(max(value, gene.low), gene.high)
