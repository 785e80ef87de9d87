"""Settings of a search: what counts as fitness, and where the first rung lies."""

import math

import pytest
from pydantic import ValidationError

from ray_yolo.cli import parse_tune
from ray_yolo.config.recipe import Recipe
from ray_yolo.config.sections import ObjectiveConfig
from ray_yolo.core.errors import ConfigError
from ray_yolo.tune.search import Asha, MedianStop, Pbt, Search

METRICS = {"precision": 0.5, "recall": 0.25, "mAP50": 0.4, "mAP50-95": 0.2}


class TestFitness:
    def test_it_is_yolov5s_by_default(self):
        assert Search().fitness(METRICS) == pytest.approx(0.1 * 0.4 + 0.9 * 0.2)

    def test_trials_have_the_same_objective(self):
        search = Search(objective={"recall": 2.0, "mAP50-95": 1.0})
        assert search.recipe_objective == ObjectiveConfig(precision=0.0, recall=2.0, map50=0.0, map50_95=1.0)
        assert search.recipe_objective.fitness(METRICS) == search.fitness(METRICS) == 2 * 0.25 + 0.2
        assert Search().recipe_objective == ObjectiveConfig() == Recipe().objective

    def test_weights_replace_the_default_ones(self):
        assert Search(objective={"recall": 1.0}).fitness(METRICS) == 0.25

    @pytest.mark.parametrize("value", [None, math.nan, math.inf])
    def test_what_was_not_measured_is_no_zero(self, value):
        assert Search().fitness({**METRICS, "mAP50": value}) is None
        assert Search().fitness({"mAP50": 0.4}) is None
        assert Search().fitness(None) is None

    def test_what_has_no_weight_need_not_be_measured(self):
        assert Search(objective={"mAP50": 0.5, "recall": 0.0}).fitness({"mAP50": 0.4, "recall": math.nan}) == 0.2


class TestSchedulers:
    @pytest.mark.parametrize(("name", "kind"), [("asha", Asha), ("median", MedianStop), ("pbt", Pbt)])
    def test_a_name_is_a_scheduler_with_its_defaults(self, name, kind):
        assert Search.model_validate({"scheduler": name}).scheduler == kind()
        assert Search.model_validate({"scheduler": {"name": name}}).scheduler == kind()

    def test_another_schedulers_settings_are_refused(self):
        with pytest.raises(ValidationError):
            Search.model_validate({"scheduler": {"name": "median", "reduction": 3}})

    @pytest.mark.parametrize(("epochs", "rung"), [(1, 1), (9, 1), (10, 2), (27, 3), (100, 12)])
    def test_the_first_rung_is_a_ninth_rounded_up(self, epochs, rung):
        search = Search(scheduler=Asha())
        assert search.first_rung(epochs) == rung
        assert search.rung_warning(epochs) is None

    def test_a_rung_that_was_set_is_kept(self):
        assert Search(scheduler=Asha(grace_epochs=5)).first_rung(100) == 5

    def test_an_early_rung_is_warned_of_with_the_reason(self):
        warning = Search(scheduler=MedianStop(grace_epochs=2)).rung_warning(27)
        assert warning == (
            "median: the first rung, 2 of 27 epochs, is much shorter than the schedule: warm-up may not be over and "
            "the learning rate is still high, so that it prefers fast starters to good finishers; "
            "grace_epochs 3 or more is safer")

    def test_without_rungs_there_is_nothing_to_warn_of(self):
        assert Search().rung_warning(1000) is None
        assert Search(scheduler=Pbt(interval_epochs=1)).rung_warning(1000) is None


class TestRungs:
    @pytest.mark.parametrize(("scheduler", "epochs", "rungs"), [
        ("asha", 9, [1, 4]), ("asha", 90, [10, 40]), ("asha", 4, [1]),
        (Asha(grace_epochs=3, reduction=3), 100, [3, 9, 27, 81]), (Asha(grace_epochs=9), 9, []),
        ("median", 4, [1, 2, 3]), ("none", 90, []), ("pbt", 90, [])])
    def test_a_scheduler_stops_trials_at_its_rungs_before_the_end(self, scheduler, epochs, rungs):
        assert list(Search.model_validate({"scheduler": scheduler}).rungs(epochs)) == rungs

    def test_a_row_has_as_many_as_it_has_reached_and_one_more_for_its_own_end(self):
        search = Search(scheduler=Asha())  # rungs after 10 and 40 of 90 epochs
        assert [search.rung(trained, 90, stopped=True) for trained in (10, 39, 40, 90)] == [1, 1, 2, 3]
        assert search.rung(25, 90, stopped=False) == 3  # its patience was over: more epochs are of no use to it

    def test_without_rungs_all_rows_are_equal(self):
        assert {Search().rung(trained, 90, stopped=stopped) for trained in (1, 90) for stopped in (True, False)} == {0}


class TestRandomFirst:
    @pytest.mark.parametrize(("trials", "warned"), [(1, False), (2, True), (21, True), (22, False)])
    def test_a_sweep_that_ends_before_its_first_child_is_warned_of(self, trials, warned):
        warning = Search(random_first=20).random_warning(trials, starts=1)
        assert (warning is not None) == warned
        assert warning is None or f"all {trials} trials" in warning

    def test_other_algorithms_have_no_children(self):
        assert Search(algorithm="random", random_first=20).random_warning(5, starts=1) is None


@pytest.mark.parametrize("number", ["0", "-1", "none"])
def test_no_trials_at_a_time_are_refused(number):
    with pytest.raises(ConfigError, match=f"--max-concurrent: got {number}|got '{number}'"):
        parse_tune([f"--max-concurrent={number}"])


@pytest.mark.parametrize(("words", "value"), [([], "auto"), (["--max-concurrent", "auto"], "auto"),
                                              (["--max-concurrent", "1"], 1)])
def test_as_many_as_there_is_room_for_or_so_many(words, value):
    assert parse_tune(words).config.sweep.max_concurrent == value
