"""Which step of a log to replay, where it was trained, and whether replayed losses are the log's."""

from __future__ import annotations

import math
from typing import Any

import pytest

from ray_yolo.core.events import CheckpointEvent, Event
from ray_yolo.runs.steps import Agreement, choose_step, compare_losses, last_step, logged_steps, start_of
from tests.support import run_log


def steps(*losses: float | None, **changes: dict[int, Any]) -> dict[int, Any]:
    """Steps 1, 2, ... with these losses in their first term."""
    events = []
    for number, loss in enumerate(losses, 1):
        own = {name: values[number] for name, values in changes.items() if number in values}
        events.append(run_log.step(number, loss=(loss, 0.0, 0.0), **own))
    return logged_steps(events)


def test_the_worst_step_has_the_highest_loss() -> None:
    assert choose_step(steps(3.0, 9.0, None, 1.0), "worst") == 2


def test_a_spike_rises_most_over_the_median_before_it() -> None:
    """Step 1 is the highest, and step 3 rises by 3 - median(9, 1) = -2, step 5 by 3 - median(9, 1, 3, 1) = 1."""
    assert choose_step(steps(9.0, 1.0, 3.0, 1.0, 3.0, None), "spike") == 5
    assert choose_step(steps(*[5.0] * 60, *[1.0] * 60, 2.5), "spike") == 121  # the first 60 are forgotten


def test_the_first_step_that_is_not_finite_was_skipped_or_has_no_loss() -> None:
    assert choose_step(steps(1.0, 2.0, 1.0, None, skipped={3: True}), "nan") == 3
    assert choose_step(steps(1.0, None, 1.0), "nan") == 2


def test_an_overflow_of_fp16_counts_if_nothing_else_was_not_finite() -> None:
    overflow = {"gradient_norm": {1: None}}
    assert choose_step(steps(1.0, 2.0, None, **overflow), "nan") == 3
    assert choose_step(steps(1.0, 2.0, **overflow), "nan") == 1


def test_a_step_that_was_trained_twice_counts_once() -> None:
    events = [run_log.step(1, loss=(1.0, 0.0, 0.0)), run_log.step(2), run_log.step(1, loss=(2.0, 0.0, 0.0))]
    assert logged_steps(events)[1].loss[0] == 2.0
    assert list(logged_steps(events)) == [1, 2]


def test_the_last_step_may_be_one_that_is_not_logged() -> None:
    events: list[Event] = [run_log.step(4)]
    assert last_step([]) == 0
    assert last_step(events) == 4
    assert last_step([*events, CheckpointEvent(step=7, epoch=0, path="", kinds=())]) == 7


def test_the_start_of_a_step_is_that_of_its_last_training() -> None:
    one, two, three = (run_log.start(number, threads=number + 1) for number in (0, 4, 8))
    events = [one, run_log.step(3), run_log.step(6), two, run_log.step(5), run_log.step(6), three, run_log.step(9)]
    assert start_of(events, 3) == one
    assert start_of(events, 6) == two
    assert start_of(events, 10) == three
    assert start_of([], 3) is None


def test_equal_losses_agree_and_all_that_is_not_finite_is_equal() -> None:
    agreement = compare_losses(steps(0.1, None), {1: [0.1, 0.0, 0.0], 2: [math.inf, 0.0, 0.0], 3: [7.0, 0.0, 0.0]})
    assert agreement == Agreement(2, 2)
    assert "all losses of 2 logged steps are those of the log, bit for bit" in agreement.line


def test_the_first_and_the_largest_difference_are_reported() -> None:
    replayed = {1: [1.0, 0.0, 0.0], 2: [2.0 * (1 + 1e-7), 0.0, 0.0], 3: [3.3, 0.0, 0.0]}
    agreement = compare_losses(steps(1.0, 2.0, 3.0), replayed)
    assert (agreement.compared, agreement.equal, agreement.first) == (3, 1, 2)
    assert agreement.largest == pytest.approx(0.1)
    assert "first difference is at step 2 (2.0000002, 0, 0, in the log 2, 0, 0)" in agreement.line
    assert compare_losses(steps(1.0), {1: [math.nan, 0.0, 0.0]}).first == 1


def test_without_a_logged_step_nothing_is_compared() -> None:
    assert "none of these steps is in the log" in compare_losses(steps(1.0), {2: [1.0, 0.0, 0.0]}).line
