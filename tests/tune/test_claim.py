"""What a sweep claims: its interval, and how often it is wrong."""

import numpy as np
import pytest

from ray_yolo.tune.claim import judge, student


def trials(gain, noise, pairs, count=2000):
    rng = np.random.default_rng(3)
    for _ in range(count):
        default = 0.6 * (1 + noise * rng.standard_normal(pairs + 1))
        candidate = (0.6 + gain) * (1 + noise * rng.standard_normal(pairs))
        yield judge(candidate, default[:pairs], default[pairs:], noise)


@pytest.mark.parametrize("noise", [0.03, 0.08])
@pytest.mark.parametrize("pairs", [1, 2, 5])
def test_better_is_said_wrongly_in_five_percent_and_the_interval_holds_the_truth_in_ninety(noise, pairs):
    claims = list(trials(0.0, noise, pairs))
    assert np.mean([claim.better for claim in claims]) <= 0.06
    assert np.mean([abs(claim.gain) <= claim.margin for claim in claims]) >= 0.88


def test_a_large_gain_is_shown_and_stated_without_bias():
    claims = list(trials(0.2, 0.03, 2))
    assert np.mean([claim.better for claim in claims]) > 0.95
    assert np.mean([claim.gain for claim in claims]) == pytest.approx(0.2, abs=0.005)
    assert str(judge([0.8, 0.82], [0.6, 0.61])).startswith("better than the default by 0.205 +- ")


def test_what_is_not_better_says_what_could_have_been_shown():
    claim = judge([0.6, 0.61], [0.6, 0.61])
    assert not claim.better
    assert str(claim) == f"not better than the default; 2 pairs could have shown {claim.detectable:.2g}"
    assert str(judge([], [])) == "not compared with the default: no pair of trainings finished"


def test_students_quantile():
    assert [student(freedom) for freedom in (3, 4, 6, 20)] == pytest.approx([2.353, 2.132, 1.943, 1.725], rel=0.005)
