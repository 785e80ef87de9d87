"""What every value of the configuration has in common, and the objective by hand."""

from __future__ import annotations

import math

import pytest
from pydantic import ValidationError

from ray_yolo.config.sections import LossConfig, ObjectiveConfig, OptimizerConfig, objective_field


def test_values_are_frozen_and_known() -> None:
    with pytest.raises(ValidationError) as frozen:
        LossConfig().box = 1.0
    with pytest.raises(ValidationError) as unknown:
        LossConfig.model_validate({"bax": 1.0})
    assert [caught.value.errors()[0]["type"] for caught in (frozen, unknown)] == ["frozen_instance", "extra_forbidden"]


@pytest.mark.parametrize("value", [math.inf, math.nan, -1.0])
def test_numbers_are_finite_and_in_their_range(value: float) -> None:
    with pytest.raises(ValidationError):
        LossConfig(box=value)


def test_text_holds_no_control_characters() -> None:
    with pytest.raises(ValidationError):
        OptimizerConfig.model_validate({"name": "SGD\n"})


def test_fitness_is_the_weighted_sum_of_the_metrics() -> None:
    metrics = {"precision": 0.5, "recall": 0.25, "mAP50": 0.8, "mAP50-95": 0.4}
    assert ObjectiveConfig().fitness(metrics) == pytest.approx(0.1 * 0.8 + 0.9 * 0.4)
    assert ObjectiveConfig(precision=2, map50=0, map50_95=0).fitness(metrics) == 1.0


def test_there_is_no_fitness_without_the_metrics_that_count() -> None:
    for metrics in (None, {}, {"mAP50": 0.5}, {"mAP50": 0.5, "mAP50-95": None}, {"mAP50": 0.5, "mAP50-95": math.nan}):
        assert ObjectiveConfig().fitness(metrics) is None, metrics


def test_metrics_have_fields() -> None:
    assert {objective_field(name) for name in ("precision", "recall", "mAP50", "mAP50-95")} == set(
        ObjectiveConfig.model_fields)
