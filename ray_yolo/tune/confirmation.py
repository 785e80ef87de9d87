"""The end of a sweep: its best trials and the default train on fresh seeds, and a claim follows.

The default's training of the exploration was not chosen for its result, so it also counts as one of its runs.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from ray_yolo.tune.claim import LAW, Claim, Law, judge
from ray_yolo.tune.surrogate import Surrogate

TRAININGS_PER_RUN = 9.0  # the exploration has this many for each training on a fresh seed
MOST_RUNS = 16
MOST_FINALISTS = 3
RUNS_PER_FINALIST = 3  # runs on fresh seeds, the default's included, for each finalist


def number_of_runs(explored: float, slots: int) -> int:
    """Trainings on fresh seeds after an exploration in the work of so many trainings.

    At least as many as train at the same time, because this is the last stage of a sweep: with fewer, real slots would
    be idle. How many of the virtual `slots` are real is not known here: `tuner.trials_ahead` adds as many where there
    are one or two, and about two to more. With a fixed `--max-concurrent` all are real, and some are idle.
    """
    at_once = max(slots // 2, slots - 2, 1)
    return min(max(round(explored / TRAININGS_PER_RUN), at_once), MOST_RUNS)


class ConfirmationPlan(NamedTuple):
    """How many trials are confirmed, and on how many fresh seeds each of them and the default train."""

    finalists: int
    seeds: int
    default_seeds: int


def plan_confirmation(runs: int) -> ConfirmationPlan:
    """The plan for a number of runs: as many for each finalist as for the default, which has one already."""
    finalists = min(MOST_FINALISTS, max(1, runs // RUNS_PER_FINALIST))
    seeds = max(1, (runs + 1) // (finalists + 1))
    return ConfirmationPlan(finalists, seeds, runs - finalists * seeds)


class Finalist(NamedTuple):
    """A finalist beside the default."""

    trial: int
    claim: Claim


def compare_finalists(runs: Mapping[int, Sequence[float]], default: Sequence[float], process: Surrogate | None,
                      places: Mapping[int, Sequence[float]], law: Law = LAW, first: float = 0.0
                      ) -> list[Finalist]:
    """Each finalist's claim against the default (trial 0), the highest expected gain first.

    Args:
        runs: fitness of each finalist on its fresh seeds, in the order of the finalists.
        default: fitness of the default on all its seeds.
        process: of the exploration.
        places: of the finalists and the default, see `surrogate.encode`.
        first: fitness of the default at its first rung; 0: unknown.
    """
    comparisons = []
    for trial, fitness in runs.items():
        expected = process.gain(places[trial], places[0]) if process else None
        noise = process.noise if process else 0.0
        comparisons.append(Finalist(trial, judge(fitness, default, noise, expected, len(runs), law, first)))
    return sorted(comparisons, key=lambda each: -each.claim.gain if each.claim.runs else math.inf)
