"""What a sweep claims: its interval, and how often it is wrong."""

from itertools import product

import numpy as np
import pytest

from ray_yolo.ops.statistics import student
from ray_yolo.tune.claim import judge


def trials(gain, noise, runs, count=2000):
    rng = np.random.default_rng(3)
    for _ in range(count):
        default = 0.6 * (1 + noise * rng.standard_normal(runs + 1))
        candidate = (0.6 + gain) * (1 + noise * rng.standard_normal(runs))
        yield judge(candidate, default, noise)


def test_error_rate_and_coverage_of_the_claim():
    for noise, runs in product((0.03, 0.08), (1, 2, 5)):
        claims = list(trials(0.0, noise, runs))
        assert np.mean([claim.better for claim in claims]) <= 0.06, (noise, runs)
        assert np.mean([abs(claim.gain) <= claim.margin for claim in claims]) >= 0.88, (noise, runs)


def test_the_best_of_three_is_called_better_wrongly_in_five_percent():
    rng, wrong = np.random.default_rng(4), []
    for _ in range(2000):
        default, *candidates = 0.6 * (1 + 0.05 * rng.standard_normal((4, 2)))
        wrong.append(any(judge(each, default, 0.05, candidates=3).better for each in candidates))
    assert np.mean(wrong) <= 0.06


def test_a_large_gain_is_shown_and_stated_without_bias():
    claims = list(trials(0.2, 0.03, 2))
    assert np.mean([claim.better for claim in claims]) > 0.95
    assert np.mean([claim.gain for claim in claims]) == pytest.approx(0.2, abs=0.005)
    assert str(judge([0.8, 0.82], [0.6, 0.61])).startswith("better than the default by 0.205 +- ")


def test_the_gain_lies_between_the_runs_and_what_was_expected_less_one_deviation():
    plain = judge([0.8, 0.82], [0.6, 0.61])
    error = plain.detectable / student(5)  # 3 degrees of freedom beforehand, 1 of each two runs
    claim = judge([0.8, 0.82], [0.6, 0.61], expected=(0.3, error / 1.5))  # as reliable as the runs: half way
    assert plain.gain == pytest.approx(0.205)
    assert claim.gain == pytest.approx((0.205 + 0.3 - error) / 2, rel=1e-4)
    assert claim.margin == pytest.approx(plain.margin / 2**0.5, rel=1e-4)
    assert claim.detectable == plain.detectable


def test_better_needs_significant_runs_and_an_expectation_that_does_not_deny_them():
    assert judge([0.8, 0.82], [0.6, 0.61], expected=(0.2, 0.05)).better
    assert not judge([0.61, 0.62], [0.6, 0.61], expected=(0.3, 0.01)).better
    assert not judge([0.8, 0.82], [0.6, 0.61], expected=(-0.2, 0.02)).better


def test_ahead_are_those_with_the_higher_mean_and_a_positive_gain():
    assert judge([0.61, 0.60], [0.6, 0.6]).ahead
    assert not judge([0.60, 0.59], [0.6, 0.6], expected=(0.3, 0.01)).ahead
    assert judge([0.61, 0.60], [0.6, 0.6], expected=(0.02, 0.01)).ahead
    assert not judge([0.61, 0.60], [0.6, 0.6], expected=(-0.02, 0.01)).ahead


def test_the_best_of_several_is_not_overstated_where_better_is_said():
    rng, claims = np.random.default_rng(5), []
    for _ in range(4000):
        true, noise = 0.05 * rng.standard_normal(8), 0.08
        seen = true + 0.05 * rng.standard_normal(8)
        chosen = int(seen.argmax())  # its expectation is half of what was seen: it is as reliable as the prior
        pairs = 0.5 * (1 + noise * rng.standard_normal((2, 2))) + [[true[chosen]], [0.0]]
        expected = (float(seen[chosen]) / 2, 0.05 / 2**0.5)
        claims.append((judge(*pairs, noise=noise, expected=expected), pairs[0].mean() - pairs[1].mean(), true[chosen]))
    said = [(claim.gain - true, shown - true) for claim, shown, true in claims if claim.better]
    assert len(said) > 200
    stated, shown = np.mean(said, axis=0)
    assert stated < 0.01 < 0.03 < shown
    assert np.mean([abs(claim.gain - true) <= claim.margin for claim, _, true in claims]) >= 0.9


def test_a_default_that_detects_nothing_is_beaten():
    claim = judge([0.3, 0.31], [0.0, 0.0])
    assert claim.better
    assert claim.gain == pytest.approx(0.305)
    assert judge([0.0, 0.0], [0.0, 0.0]) == judge([], []) == judge([0.3], [])


@pytest.mark.parametrize("fitness", [[], [0.0], [0.0, 0.0]])
def test_without_a_fitness_above_0_nothing_is_compared(fitness):
    """Such runs are equal in the ledger, so one sentence is true of all of them."""
    assert str(judge(fitness, fitness)) == (
        "not compared with the default: no training of both finished with a fitness above 0")


def test_what_is_not_better_says_what_could_have_been_shown():
    claim = judge([0.6, 0.61], [0.6, 0.61])
    assert not claim.better
    assert str(claim) == f"not better than the default; 2 fresh seeds could have shown {claim.detectable:.2g}"
    assert "; 1 fresh seed could have shown " in str(judge([0.6], [0.6]))
