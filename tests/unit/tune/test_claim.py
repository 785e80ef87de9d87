"""What sweeps and comparisons claim: their intervals, and how often they are wrong."""

import json
import math
from itertools import product
from pathlib import Path

import numpy as np
import pytest

from ray_yolo.ops.statistics import student, student_quantile, student_tail
from ray_yolo.tune.claim import FORMER_LAW, LAW, difference_error, judge, judge_pairs, share_not_excluded
from ray_yolo.tune.schedule import rungs_of


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
    error = plain.detectable / student(3)  # 1 degree of freedom beforehand, 1 of each two runs
    claim = judge([0.8, 0.82], [0.6, 0.61], expected=(0.3, error / 1.5))  # as reliable as the runs: half way
    assert plain.gain == pytest.approx(0.205)
    assert claim.gain == pytest.approx((0.205 + 0.3 - error) / 2, rel=1e-4)
    assert claim.margin == pytest.approx(plain.margin / 2**0.5, rel=1e-4)
    assert claim.detectable == plain.detectable


def test_where_the_default_has_collapsed_the_exploration_is_less_certain_too():
    """It has seen the collapse (0.1), and expects a gain of 0.9 +- 0.07: the interval was 0.73 +- 0.31."""
    collapsed, expected = [0.1, 1.21], (0.9, 0.07)
    claim = judge([0.89, 0.95], collapsed, 0.109, expected)
    assert claim.gain - claim.margin < -0.07 < 0 < claim.gain + claim.margin  # the truth of this sweep
    former = judge([0.89, 0.95], collapsed, 0.109, expected, law=LAW._replace(widens=False))
    assert former.gain - former.margin > 0.4
    quiet = judge([0.89, 0.95], [0.9, 0.92], 0.109, expected)  # no more noise than was fitted
    assert quiet == judge([0.89, 0.95], [0.9, 0.92], 0.109, expected, law=LAW._replace(widens=False))


def test_better_needs_significant_runs_and_an_expectation_that_does_not_deny_them():
    assert judge([0.8, 0.82], [0.6, 0.61], expected=(0.2, 0.05)).better
    assert not judge([0.61, 0.62], [0.6, 0.61], expected=(0.3, 0.01)).better
    assert not judge([0.8, 0.82], [0.6, 0.61], expected=(-0.2, 0.02)).better


def test_ahead_are_those_that_are_expected_to_be_better_by_all_that_is_known():
    """An expectation whose deviation is the error of the fresh seeds counts as much as they do."""
    assert judge([0.61, 0.60], [0.6, 0.6]).ahead
    assert not judge([0.60, 0.59], [0.6, 0.6]).ahead
    noise = 0.1 / 3**0.5  # the prior's, and two trainings that do not deviate
    error = noise * (0.55**2 / 2 + 0.6**2 / 2) ** 0.5
    for mean, ahead in ((0.21, True), (0.19, False)):  # with twice the variance, a third of the weight
        for deviation in (0.0001, error * 2**0.5):  # one training of each side has as much
            claim = judge([0.5, 0.6], [0.6, 0.7], expected=(mean, deviation), noise=0.1)
            assert claim.ahead is ahead, deviation
    claim = judge([0.55, 0.55], [0.6, 0.6], expected=(0.2, error * 2**0.5))
    assert claim.expected == pytest.approx(-0.05 + (0.2 + 0.05) / 3, rel=1e-4)
    for law in (LAW, FORMER_LAW):
        claim = judge([0.55, 0.55], [0.6, 0.6], expected=(0.3, 0.01), law=law)
        assert (claim.ahead, claim.expected > 0) == (law.keeps_expected, law.keeps_expected)


def test_what_is_better_is_ahead():
    rng, said = np.random.default_rng(3), 0
    for _ in range(3000):
        runs, default = 0.7 + 0.02 * rng.standard_normal((2, 3)) + [[0.1 * rng.random()], [0.0]]
        expected = 0.2 * rng.standard_normal(), 0.2 * rng.random()
        claim = judge(runs.tolist(), default.tolist(), noise=0.03 * rng.random(), expected=expected)
        assert claim.ahead or not claim.better
        said += claim.better
    assert said > 100


def test_a_choice_takes_the_likely_noise_where_a_claim_must_assume_more():
    """One training each: the exploration has seen a noise of 0.02, of which the prior makes 0.045."""
    claim = judge([0.5], [0.6], noise=0.02, expected=(0.05, 0.04))
    error = (0.1 * 0.02) ** 0.5 * (0.5**2 + 0.6**2) ** 0.5
    trust = 0.04**2 / (0.04**2 + error**2)
    assert claim.expected == pytest.approx(0.05 + trust * (-0.1 - 0.05), rel=1e-4)
    assert not claim.ahead
    assert claim.margin > 3 * error


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
        "not compared with the default: no training of both finished in time with a fitness above 0")


def test_what_is_not_better_says_what_could_have_been_shown():
    claim = judge([0.6, 0.61], [0.6, 0.61])
    assert not claim.better
    assert str(claim) == f"not better than the default; 2 fresh seeds could have shown {claim.detectable:.2g}"
    assert "; 1 fresh seed could have shown " in str(judge([0.6], [0.6, 0.61]))


def test_one_training_of_the_default_cannot_show_anything():
    """It may have collapsed. One of two that has collapsed makes the measured noise large."""
    claim = judge([0.6], [0.06], noise=0.05)
    assert (claim.better, claim.ahead) == (False, True)
    assert str(claim).startswith("not shown to be better than the default: a gain of 0.54 +- ")
    assert not judge([0.6], [0.06, 0.6], noise=0.05).better
    assert judge([0.6], [0.06, 0.06], noise=0.05).better
    assert judge([0.6], [0.06], noise=0.05, law=FORMER_LAW).better


def test_trainings_too_short_to_learn_are_not_compared():
    claim = judge([0.0023, 0.0022], [0.0018, 0.0018])
    assert (claim.better, claim.ahead, claim.runs) == (False, False, 0)
    assert "no mean fitness reaches 0.01, so these trainings are too short to judge a recipe" in str(claim)
    assert judge([0.099, 0.1], [0.0018, 0.0018]).better  # the default alone has learned nothing
    assert judge([0.0023, 0.0023], [0.0018, 0.0018], 0.001, law=FORMER_LAW).better


RECORDED = sorted((Path(__file__).parents[2] / "benchmarks").glob("*_curves.json"))


@pytest.mark.parametrize("table", RECORDED, ids=[table.stem for table in RECORDED])
def test_recorded_trainings_that_learn_are_compared(table):
    """Also those whose first epochs are nearly as good as the last ones. The best epoch is a trial's fitness."""
    rows = json.loads(table.read_text())["rows"]
    curves = [row["fitness"] for row in rows if row["genes"] == rows[0]["genes"]]
    rung = rungs_of(len(curves[0]))[0]
    assert len(curves) >= 3
    for curve in curves:
        assert not judge([max(curve)], [max(curve)], first=max(curve[:rung])).floor


@pytest.mark.parametrize(("first", "last", "floor"), [
    (0.0004, 0.0014, 0.01), (0.0003, 0.0043, 0.01), (0.0003, 0.0016, 0.01), (0.0002, 0.0018, 0.01),
    (0.0578, 0.0796, 0.1), (0.0222, 0.0222, 0.0444), (0.0171, 0.0285, 0.0342)])
def test_recorded_trainings_without_a_clear_rise_are_not_compared(first, last, floor):
    """Four of yolov5n from scratch on BCCD (64 px, 9 epochs); then the first four epochs of yolo11n_bccd_12_curves and
    of yolov5n_cards_12_curves, whose weights find something at once and lose it."""
    assert judge([last, last], [last, last], first=first).floor == floor


def compare_until_claimed(rng, gain, noises, most_pairs):
    """A simulated comparison: the claims of all looks, until one side is called better."""
    a, b, looks = [], [], []
    for _ in range(most_pairs):
        a.append(0.4 + noises[0] * rng.standard_normal())
        b.append(0.4 + gain + noises[1] * rng.standard_normal())
        looks.append(judge_pairs(a, b))
        if looks[-1].better:
            break
    return looks


def test_two_hundred_comparisons_of_equal_sides_claim_a_difference_in_at_most_five_percent():
    rng = np.random.default_rng(5)
    ends = [compare_until_claimed(rng, 0.0, (0.03, 0.01), 6)[-1] for _ in range(200)]
    assert sum(bool(end.better) for end in ends) <= 10


def test_looking_at_ordinary_intervals_after_each_pair_would_claim_too_often():
    """Why the law has shares: without them over 10 % of 200 equal comparisons claim a difference, in the test above at
    most 5 %."""
    rng, wrong = np.random.default_rng(5), 0
    for _ in range(200):
        a, b = 0.4 + 0.03 * rng.standard_normal((2, 6))
        wrong += any(abs(np.mean(b[:n]) - np.mean(a[:n])) > student(2 * n - 2) * difference_error(a[:n], b[:n])
                     for n in range(4, 7))
    assert wrong > 20


def test_a_true_difference_is_claimed_with_an_interval_that_holds_it():
    rng = np.random.default_rng(6)
    ends = [compare_until_claimed(rng, 0.06, (0.01, 0.01), 8)[-1] for _ in range(100)]
    assert [end.better for end in ends].count("B") >= 95
    assert sum(abs(end.difference - 0.06) <= end.margin for end in ends) >= 95


def test_the_margin_of_four_pairs_is_worked_by_hand():
    """Variances 0.002 / 3 each and no variance of the differences, so an error of sqrt(0.001 / 3), freedom 6, share
    5 % x 3 / (4 x 3) = 1 / 80."""
    low, high = [0.50, 0.52, 0.54, 0.56], [0.60, 0.62, 0.64, 0.66]
    claim = judge_pairs(low, high)
    assert claim.error == pytest.approx(math.sqrt(0.001 / 3), rel=1e-5)
    assert claim.margin == pytest.approx(3.52122 * math.sqrt(0.001 / 3), rel=1e-4)  # t of 6 degrees at 1 - 1/160
    assert (claim.better, claim.difference, claim.wins) == ("B", pytest.approx(0.1), (0, 4))
    assert str(claim) == ("B is better by 0.1000 +- 0.064, 4 pairs, of which it won 4; "
                          "0 of 4 trainings of B collapsed, up to 53 % is not excluded")
    assert str(judge_pairs(high, low)).startswith("A is better by 0.1000 +- 0.064, 4 pairs, of which it won 4; ")


def test_the_error_is_that_of_the_pairs_if_they_are_unlike():
    """A seed that is good for A is bad for B: variance of the differences 4 x 0.002 / 3."""
    claim = judge_pairs([0.50, 0.52, 0.54, 0.56], [0.86, 0.84, 0.82, 0.80])
    assert claim.margin == pytest.approx(3.52122 * math.sqrt(0.002 / 3), rel=1e-4)


@pytest.mark.parametrize(("wins", "pairs", "enough"), [
    (4, 4, True), (3, 4, False), (5, 5, True), (4, 5, False), (8, 8, True), (7, 8, False), (8, 9, True), (9, 10, True),
    (8, 10, False)])
def test_a_claim_needs_wins_that_a_coin_seldom_has(wins, pairs, enough):
    """By hand: (1 + 10) / 1024 for nine of ten is at most 1/40, (1 + 10 + 45) / 1024 for eight is more. The interval
    alone would claim in each case."""
    a = [0.5 + 0.001 * number for number in range(pairs)]
    b = [value + 0.1 for value in a[:wins]] + [value - 0.0001 for value in a[wins:]]
    claim = judge_pairs(a, b)
    assert claim.wins == (pairs - wins, wins)
    assert claim.model_copy(update={"margin": 0.0}).better == ("B" if enough else "")


def test_the_share_of_failures_that_is_not_excluded():
    """By Clopper and Pearson's tables: without a failure 1 - 0.05^(1/n)."""
    for seen, trainings, share in ((0, 5, 0.4507), (0, 10, 0.2589), (1, 10, 0.3942), (5, 5, 1.0)):
        assert share_not_excluded(seen, trainings) == pytest.approx(share, abs=1e-4)


def skewed(sigma, width):
    """A lognormal side beside a normal one, shifted so that each wins half of all pairs."""
    def draw(rng, shape):
        both = np.random.default_rng(0).normal(size=(2, 200_000))
        typical = np.median(np.exp(sigma * both[0]) - width * both[1])
        return width * rng.normal(size=shape), np.exp(sigma * rng.normal(size=shape)) - typical
    return draw


def collapsing(share):
    """B collapses in a share of its trainings, and is else equal to A. So it wins less than half of all pairs."""
    def draw(rng, shape):
        return 10 + rng.normal(size=shape), np.where(rng.random(shape) < share, 0.0, 10 + rng.normal(size=shape))
    return draw


def alike(correlation):
    def draw(rng, shape):
        a, own = rng.normal(size=shape), rng.normal(size=shape)
        return a, correlation * a + math.sqrt(1 - correlation**2) * own
    return draw


NOISES = {
    "normal": lambda rng, shape: (rng.normal(size=shape), rng.normal(size=shape)),
    "normal, ratio 5": lambda rng, shape: (rng.normal(size=shape), 0.2 * rng.normal(size=shape)),
    "skewed": skewed(0.5, 0.3), "very skewed": skewed(1.0, 0.05),
    "heavy": lambda rng, shape: (rng.standard_t(2, shape), rng.standard_t(2, shape)),
    "tied": lambda rng, shape: (np.round(rng.normal(size=shape)), np.round(rng.normal(size=shape))),
    "collapsing in 5 %": collapsing(0.05), "collapsing in 20 %": collapsing(0.2),
    "unlike pairs": alike(-0.5), "alike pairs": alike(0.6)}


@pytest.mark.parametrize("noise", NOISES)
def test_wrong_claims_under_any_noise(noise):
    """A claim for a side that wins at most half of all pairs: at most 22 of 300, as often as 5 % may show by chance."""
    a, b = NOISES[noise](np.random.default_rng(9), (300, 8))
    wrong = {"B"} if noise.startswith("collapsing") else {"A", "B"}
    ends = [next((claim.better for n in range(4, 9) if (claim := judge_pairs(x[:n], y[:n])).better), "")
            for x, y in zip(a, b, strict=True)]
    assert sum(end in wrong for end in ends) <= 22


def test_power_at_three_deviations():
    """Within five pairs in at least 70 %, within ten in at least 95 %."""
    rng = np.random.default_rng(3)
    looks = []
    for a, b in zip(rng.normal(size=(300, 10)), 3 + rng.normal(size=(300, 10)), strict=True):
        looks.append(next((n for n in range(4, 11) if judge_pairs(a[:n], b[:n]).better == "B"), 99))
    assert sum(look <= 5 for look in looks) >= 210
    assert sum(look <= 10 for look in looks) >= 285


def test_a_comparison_that_shows_nothing_says_why():
    shown = str(judge_pairs([0.5, 0.6, 0.7, 0.6], [0.5, 0.6, 0.71, 0.6]))
    assert shown.startswith("no difference is shown: B less A is 0.0025 +- ")
    assert str(judge_pairs([0.5], [0.9])) == "no difference is shown: 1 pair, and a claim needs 4 or more"
    for pairs in range(4, 11):  # the mean of 0.1 and its like is rounded
        assert "no seed has changed" in str(judge_pairs([0.1] * pairs, [0.2] * pairs)), pairs
    assert str(judge_pairs([0.0] * 3, [0.5, 0.51, 0.52], failed=(3, 0))).endswith(
        "3 trainings of A diverged, counted with a fitness of 0")


def test_students_quantiles_are_those_of_the_tables():
    for tail, freedom, value in ((0.025, 2, 4.30265), (0.005, 5, 4.03214), (0.0005, 10, 4.58689), (0.0001, 3, 22.2037),
                                 (1 / 120, 4, 3.96079)):
        assert student_quantile(tail, freedom) == pytest.approx(value, rel=1e-3)
        assert student_tail(value, freedom) == pytest.approx(tail, rel=2e-3)
