"""The end of a sweep: how many trainings confirm it, and which finalist wins."""

import pytest

from ray_yolo.tune.confirmation import compare_finalists, number_of_runs, plan_confirmation


@pytest.mark.parametrize(("explored", "slots", "runs"), [
    (8, 1, 1), (28, 1, 3), (8, 2, 1), (8, 4, 2), (24, 10, 8), (80, 8, 9), (1e4, 64, 16)])
def test_one_run_for_nine_trainings_and_at_least_as_many_as_train_at_once(explored, slots, runs):
    assert number_of_runs(explored, slots) == runs


def test_a_plan_has_exactly_its_runs_and_each_finalist_has_a_seed():
    for runs in range(1, 17):
        plan = plan_confirmation(runs)
        assert plan.finalists * plan.seeds + plan.default_seeds == runs
        assert plan.seeds >= 1
        assert plan.default_seeds >= 0
        assert plan.seeds - 1 <= plan.default_seeds + 1  # the default has a run of the exploration already
    assert [plan_confirmation(runs).finalists for runs in (1, 5, 6, 9, 16)] == [1, 1, 2, 3, 3]


def test_the_finalist_with_the_highest_gain_comes_first_and_one_without_a_result_last():
    runs = {3: [0.5, 0.52], 7: [], 5: [0.7, 0.72]}
    compared = compare_finalists(runs, [0.4, 0.41], None, {0: (0.5,), 3: (0.1,), 5: (0.2,), 7: (0.3,)})
    assert [each.trial for each in compared] == [5, 3, 7]
    assert compared[0].claim.better
    assert compared[-1].claim.runs == 0
