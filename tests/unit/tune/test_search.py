"""Settings of a search: what counts as fitness, and how long it goes on."""

import math

import pytest
from pydantic import ValidationError

from ray_yolo.cli import parse_tune
from ray_yolo.config.recipe import Recipe
from ray_yolo.config.sections import ObjectiveConfig
from ray_yolo.tune.search import Ladder, NoStopping, Search, SweepConfig

METRICS = {"precision": 0.5, "recall": 0.25, "mAP50": 0.4, "mAP50-95": 0.2}


class TestFitness:
    def test_it_is_yolov5s_by_default(self):
        assert Search().recipe_objective.fitness(METRICS) == pytest.approx(0.1 * 0.4 + 0.9 * 0.2)

    def test_trials_have_the_same_objective(self):
        search = Search(objective={"recall": 2.0, "mAP50-95": 1.0})
        assert search.recipe_objective == ObjectiveConfig(precision=0.0, recall=2.0, map50=0.0, map50_95=1.0)
        assert search.recipe_objective.fitness(METRICS) == 2 * 0.25 + 0.2
        assert Search().recipe_objective == ObjectiveConfig() == Recipe().objective

    def test_weights_replace_the_default_ones(self):
        assert Search(objective={"recall": 1.0}).recipe_objective.fitness(METRICS) == 0.25

    @pytest.mark.parametrize("value", [None, math.nan, math.inf])
    def test_what_was_not_measured_is_no_zero(self, value):
        assert Search().recipe_objective.fitness({**METRICS, "mAP50": value}) is None
        assert Search().recipe_objective.fitness({"mAP50": 0.4}) is None
        assert Search().recipe_objective.fitness(None) is None

    def test_what_has_no_weight_need_not_be_measured(self):
        objective = Search(objective={"mAP50": 0.5, "recall": 0.0}).recipe_objective
        assert objective.fitness({"mAP50": 0.4, "recall": math.nan}) == 0.2


class TestSchedulers:
    @pytest.mark.parametrize(("name", "kind"), [("none", NoStopping), ("ladder", Ladder)])
    def test_a_name_is_a_scheduler_with_its_defaults(self, name, kind):
        assert Search.model_validate({"scheduler": name}).scheduler == kind()
        assert Search.model_validate({"scheduler": {"name": name}}).scheduler == kind()

    def test_another_schedulers_settings_are_refused(self):
        with pytest.raises(ValidationError):
            Search.model_validate({"scheduler": {"name": "ladder", "interval_epochs": 3}})


def test_a_sweep_has_so_many_trials_or_as_many_as_fit_into_its_hours():
    for settings, trials in (({}, 300), ({"trials": 7}, 7), ({"hours": 8}, 100_000), ({"hours": 8, "trials": 7}, 7)):
        assert SweepConfig(**settings).most_trials == trials, settings


@pytest.mark.parametrize(("words", "value"), [([], "auto"), (["--max-concurrent", "auto"], "auto"),
                                              (["--max-concurrent", "1"], 1)])
def test_as_many_as_there_is_room_for_or_so_many(words, value):
    assert parse_tune(words).config.sweep.max_concurrent == value
