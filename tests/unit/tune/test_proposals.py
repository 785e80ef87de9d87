"""The three methods that take turns, and what each of them needs."""

import numpy as np
import pytest

from ray_yolo.tune.evolution import Gene, Space, TrialRow
from ray_yolo.tune.proposals import RANDOM_FIRST, CountedResults, first_level, next_proposal
from ray_yolo.tune.surrogate import Observation, Settings, Surrogate

GENES = (Gene("a", low=0.01, high=1.0, gain=4.0), Gene("b", low=0.0, high=1.0, gain=4.0))
SPACE = Space(GENES, ({"a": 0.5, "b": 0.5},), "gp", "mean")
ROWS = [TrialRow(trial, {"a": 0.4 + trial / 50, "b": 0.5}, 0.5 + trial / 100, 9) for trial in range(10)]
SEEN = CountedResults(ROWS, [Observation((row.genes["a"], row.genes["b"]), 1, row.fitness) for row in ROWS], [], 2)
NOTHING = CountedResults([], [], [], 2)


def methods(results, numbers=range(1 + RANDOM_FIRST, 400)):
    return [next_proposal(SPACE, 0, number, results) for number in numbers]


def test_the_first_trial_is_the_start_and_the_next_ones_are_drawn_from_the_whole_space():
    assert next_proposal(SPACE, 0, 0, NOTHING)[:2] == ({"a": 0.5, "b": 0.5}, "start")
    first = methods(SEEN, range(1, 1 + RANDOM_FIRST))
    assert {proposal.how for proposal in first} == {"random"}
    assert max(proposal.genes["b"] for proposal in first) - min(proposal.genes["b"] for proposal in first) > 0.5


def test_later_each_method_has_its_share():
    proposals = [proposal.how for proposal in methods(SEEN, range(9, 69))]
    assert set(proposals) == {"random", "gp", "evolve"}
    assert 8 < proposals.count("random") < 28  # three in ten of 60
    assert 12 < proposals.count("gp") < 30
    assert 12 < proposals.count("evolve") < 30


def test_without_results_evolution_replaces_the_process():
    assert {proposal.how for proposal in methods(NOTHING)} == {"random", "evolve"}


@pytest.mark.parametrize(("correlation", "levels", "first"), [
    (0.95, 3, 0),  # 0.95^2 = 0.90: the first rung says enough
    (0.87, 3, 0),  # 0.87^2 = 0.757
    (0.86, 3, 1),  # 0.86^2 = 0.740
    (0.10, 3, 1),  # it still pauses once
    (0.10, 2, 0),
    (0.10, 1, 0),
    (0.90, 4, 1),  # 0.9^3 = 0.729, 0.9^2 = 0.81
])
def test_the_process_skips_rungs_that_say_too_little_of_the_whole_training(correlation, levels, first):
    seen = [Observation((0.2, 0.3), 0, 0.1), Observation((0.7, 0.4), 0, 0.2)]
    settings = Settings(np.ones(2), np.ones(2), np.full(levels, 0.1), correlation)
    assert first_level(Surrogate(seen, levels, settings), levels) == first


def test_only_proposals_of_the_process_skip_rungs():
    places = np.random.default_rng(0).random((40, 2))
    whole = 1 - abs(places[:, 0] - 0.3)
    unlike = [Observation(tuple(place), level, fitness)
              for place, end in zip(places, whole, strict=True)
              for level, fitness in ((0, 1.5 - end), (1, end), (2, end))]  # the first rung says the contrary
    proposals = methods(CountedResults(ROWS, unlike, [], 3), range(9, 39))
    assert {(proposal.how, proposal.level) for proposal in proposals} == {("random", 0), ("evolve", 0), ("gp", 1)}
