"""What interruptions have cost, by hand."""

from __future__ import annotations

import pytest

from ray_yolo.core.events import DatasetEvent, Event
from ray_yolo.runs.event_log import Goodput, measure_goodput
from tests.support import run_log


def at(time: float, event: Event) -> Event:
    return event.model_copy(update={"time": time})


COMMAND = DatasetEvent(names=("a",), splits={})
CALM = [at(0, COMMAND), at(5, run_log.start(0)), at(6, run_log.step(1)), at(7, run_log.step(2))]


def test_an_uninterrupted_training_has_none() -> None:
    assert measure_goodput([]) == measure_goodput(CALM) == Goodput(0, 0, 0, 0.0, 1.0)


def test_a_regrouping_repeats_nothing_and_takes_from_the_last_step_to_the_next() -> None:
    found = measure_goodput([*CALM, at(8, run_log.start(2, regrouped=True)), at(10, run_log.step(3)),
                           at(14, run_log.step(4))])
    assert found == Goodput(0, 1, 0, 3.0, pytest.approx(6 / 9))
    assert found.line == "0 restarts, 1 regrouping: 0 steps done twice, 3 s without training, goodput 66.7 %"


def test_a_restart_goes_back_and_the_time_between_two_commands_is_nobodys() -> None:
    found = measure_goodput([*CALM, at(100, COMMAND), at(104, run_log.start(1)), at(105, run_log.step(2))])
    assert found == Goodput(1, 0, 1, 5.0, pytest.approx(2 / 7))


def test_failures_before_the_first_step_count_too() -> None:
    story = [at(0, COMMAND), at(5, run_log.start(4)), at(9, run_log.start(4)), at(10, run_log.step(5))]
    assert measure_goodput(story) == Goodput(2, 0, 0, 10.0, 0.0)
