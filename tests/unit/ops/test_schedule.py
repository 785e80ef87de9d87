"""Hand-worked cases of the recipe's rates (specification section 5)."""

import pytest

from ray_yolo.ops.schedule import accumulation, decay_factor, interpolate, warm_rates


def test_linear_decay_goes_from_one_towards_lrf() -> None:
    assert decay_factor(0, 100, 0.01, cosine=False) == 1.0
    assert decay_factor(50, 100, 0.01, cosine=False) == pytest.approx(0.505)
    assert decay_factor(99, 100, 0.01, cosine=False) == pytest.approx(0.01 * 0.99 + 0.01)


def test_cosine_decay_is_one_at_the_start_and_the_mean_half_way() -> None:
    assert decay_factor(0, 100, 0.1, cosine=True) == 1.0
    assert decay_factor(50, 100, 0.1, cosine=True) == pytest.approx(0.55)
    assert decay_factor(100, 100, 0.1, cosine=True) == pytest.approx(0.1)


def test_warm_up_raises_weights_from_zero_and_lowers_biases() -> None:
    start = warm_rates(0, 100, lr=0.01, bias_lr=0.1, momentum=0.937, warmup_momentum=0.8)
    assert start == ((0.1, 0.0, 0.0), 0.8)
    half = warm_rates(50, 100, lr=0.01, bias_lr=0.1, momentum=0.937, warmup_momentum=0.8)
    assert half.lr == pytest.approx((0.055, 0.005, 0.005))
    assert half.momentum == pytest.approx(0.8685)
    assert warm_rates(100, 100, 0.01, 0.1, 0.937, 0.8) == ((0.01, 0.01, 0.01), 0.937)


def test_without_warm_up_rates_are_the_schedules_from_the_first_batch() -> None:
    assert warm_rates(0, 0, 0.01, 0.1, 0.937, 0.8) == ((0.01, 0.01, 0.01), 0.937)


def test_accumulation_rises_from_one_batch_to_the_nominal_ones() -> None:
    assert [accumulation(b, 100, 16, 64) for b in (0, 10, 50, 99, 100, 10**6)] == [1, 1, 2, 4, 4, 4]
    assert accumulation(500, 100, 128, 64) == 1
    assert accumulation(500, 100, 48, 64) == 1  # round(1.33)
    assert accumulation(500, 100, 24, 64) == 3  # round(2.67)


def test_interpolation_is_constant_outside() -> None:
    assert interpolate(-5, 10, 1.0, 3.0) == 1.0
    assert interpolate(5, 10, 1.0, 3.0) == 2.0
    assert interpolate(15, 10, 1.0, 3.0) == 3.0
