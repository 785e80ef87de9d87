"""Hours by market type and what they cost: by hand, and against workers whose times are known."""

from __future__ import annotations

from dataclasses import dataclass
from operator import itemgetter
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ray_yolo.core.events import DatasetEvent, Event, WarningEvent, WorkerEvent
from ray_yolo.runs.event_log import EVENTS_FILE, each_event, read_events
from ray_yolo.runs.usage import MARKET_TYPES, Usage, cost_table, measure_usage, parse_prices, total_usage
from tests.support import run_log

HOUR = 3600
COMMAND = DatasetEvent(names=("a",), splits={})
PRICES = {"spot": 1.0, "on-demand": 4.0}


def at(hours: float, event: Event) -> Event:
    return event.model_copy(update={"time": HOUR * hours})


def process(worker: int, market_type: str = "spot") -> WorkerEvent:
    return WorkerEvent(worker=worker, node=f"n{worker}", pid=1, market_type=market_type)


def start(*members: int, step: int = 0, **changes: Any) -> Event:
    changes = {"gpus": 1, "regrouped": step > 0} | changes
    return run_log.start(step, members=members, num_workers=len(members), **changes)


def step(number: int, **changes: Any) -> Event:
    return run_log.step(number, **({"seconds": HOUR} | changes))


THREE = [
    at(0, COMMAND), at(0, process(0)), at(0, process(1)), at(0, process(2, "on-demand")), at(1, start(0, 1, 2)),
    *(at(1 + number, step(number)) for number in range(1, 5))]  # step 4 ends at 5 h
LOST = [at(6, start(0, 2, step=4)), *(at(3 + number, step(number)) for number in range(5, 8))]  # step 5 at 8 h
BACK = [at(10, process(1)), at(11, start(0, 1, 2, step=7)), at(12, step(8)), at(13, run_log.end(8))]


def test_two_spot_workers_and_one_on_demand_of_which_one_is_lost_and_comes_back() -> None:
    """Worker 1 is away from 6 h to 10 h, and its process starts for an hour, in which the others train.

    Step 4 ends at 5 h, and step 5, which takes an hour, at 8 h: 5 h to 7 h is lost, for worker 1 up to 6 h. Likewise
    10 h to 11 h, in which the process of worker 1 starts.
    """
    usage = measure_usage([*THREE, *LOST, *BACK])
    assert usage.hours == {"spot": pytest.approx(13 + (6 + 3)), "on-demand": pytest.approx(13)}
    assert usage.lost == {"spot": pytest.approx((2 + 1) + (1 + 1)), "on-demand": pytest.approx(2 + 1)}
    assert usage.unit == "GPU hours"
    assert usage.line == "35.00 GPU hours: 22.00 spot, 13.00 on-demand; 8.00 of them lost to interruptions"


def test_an_uninterrupted_training_loses_nothing_and_its_first_start_is_no_loss() -> None:
    usage = measure_usage(THREE)
    assert (usage.hours, usage.lost) == ({"spot": 10.0, "on-demand": 5.0}, {"spot": 0.0, "on-demand": 0.0})
    assert usage.line == "15.00 GPU hours: 10.00 spot, 5.00 on-demand"
    assert measure_usage([]).line == measure_usage([run_log.run()]).line == ""


def test_a_restart_loses_the_steps_that_are_done_again_and_the_start_of_its_workers() -> None:
    """The command is killed after step 5 (9 h), before which it validated; step 2 (3 h) was saved. The workers of the
    next command need 2 h until step 3 begins."""
    again = [at(24, run_log.run()), at(24, COMMAND), *(at(25, process(number, "spot")) for number in range(3)),
             at(26, start(0, 1, 2, step=2, regrouped=False)), at(28, step(3)), at(29, run_log.end(3, "stopped"))]
    usage = measure_usage([*THREE, at(9, step(5)), *again])
    assert usage.hours == {"spot": pytest.approx(18 + 9), "on-demand": pytest.approx(9)}
    assert usage.lost == {"spot": pytest.approx(2 * 6 + 3 * 2), "on-demand": pytest.approx(6)}


def test_time_without_workers_costs_nothing() -> None:
    """All nodes are lost after step 4 (5 h); new ones come at 30 h. The driver and the records say things meanwhile."""
    waiting = [at(6, WarningEvent(message="no workers")), at(30, process(0, "")), at(30, process(1, "spot")),
               at(31, start(0, 1, step=4, regrouped=False)), at(32, step(5)),
               at(40, run_log.end(5, "failed", reason="no workers left"))]
    usage = measure_usage([*THREE, *waiting])
    assert usage.hours == {"spot": pytest.approx(10 + 2), "on-demand": pytest.approx(5), "unknown": pytest.approx(2)}
    assert usage.lost == {"spot": pytest.approx(1), "on-demand": 0.0, "unknown": pytest.approx(1)}  # the start


def test_a_worker_that_leaves_before_it_joins_is_not_counted() -> None:
    usage = measure_usage([*THREE, at(4, process(3)), *LOST])
    assert usage.hours == measure_usage([*THREE, *LOST]).hours


def test_gpus_of_a_worker_and_workers_without() -> None:
    def of(gpus: float | None) -> Usage:
        return measure_usage([at(0, process(0)), at(0, start(0, gpus=gpus)), at(2, step(1))])

    assert (of(2).hours, of(2).unit) == ({"spot": 4.0}, "GPU hours")
    assert (of(0.5).hours, of(0.5).unit) == ({"spot": 1.0}, "GPU hours")
    for gpus in (0, None):
        assert (of(gpus).hours, of(gpus).unit) == ({"spot": 2.0}, "worker hours")
    both = total_usage([of(2), of(0), measure_usage([])])
    assert (both.hours, both.unit) == ({"spot": 6.0}, "GPU hours and worker hours")


def test_an_older_log_has_hours_of_unknown_type_from_start_to_start(tmp_path: Path) -> None:
    """Its lines as they were written: no market type, no members, no GPUs."""
    start_line = '"type":"start","step":0,"epoch":0,"images_in_epoch":0,"epochs":3,"terms":["box"]'
    lines = [
        '{"seq":0,"time":0,"type":"worker","worker":0,"node":"a","pid":1}',
        '{"seq":1,"time":0,"type":"worker","worker":1,"node":"b","pid":1}',
        f'{{"seq":2,"time":3600,{start_line},"num_workers":2,"regrouped":false,"device":"cpu","threads":1}}',
        f'{{"seq":3,"time":10800,{start_line},"num_workers":1,"regrouped":true}}',
        '{"seq":4,"time":14400,"type":"end","status":"done","step":9,"epoch":0}']
    log = tmp_path / EVENTS_FILE
    log.write_text("\n".join(lines) + "\n")
    usage = measure_usage(each_event(log))
    assert usage.hours == {"unknown": pytest.approx(2 * 2 + 1)}
    assert usage.line == "5.00 worker hours; 5.00 of them lost to interruptions"  # it has no step


def test_steps_that_are_not_logged_are_no_loss() -> None:
    """Every fourth step is logged; steps take a quarter of an hour. The regrouping after step 6 takes 1 h: from 2.5 h
    to 3.5 h."""
    log = [at(0, process(0)), at(0, process(1)), at(1, start(0, 1)), at(2, step(4, seconds=HOUR / 4)),
           at(3.5, start(0, step=6)), at(4, step(8, seconds=HOUR / 4))]
    usage = measure_usage(log)
    assert usage.hours == {"spot": pytest.approx(4 + 3.5)}
    assert usage.lost == {"spot": pytest.approx(1 + 1)}


def test_the_last_epoch_that_is_reported_again_is_no_progress_and_a_validation_is_no_loss() -> None:
    def epoch(step: int) -> Event:
        return run_log.epoch(0, step=step)

    log = [at(0, start(0)), at(1, step(1)), at(2, epoch(1)), at(3, start(0, step=1)), at(3, epoch(1)), at(6, step(2))]
    assert measure_usage(log).lost == {"unknown": pytest.approx(3)}  # 2 h to 5 h


def test_a_clock_that_is_set_back_adds_nothing() -> None:
    log = [at(10, process(0)), at(10, start(0)), at(12, step(1)), at(3, step(2)), at(13, step(3)),
           at(4, run_log.end(3))]
    assert measure_usage(log).hours == {"spot": pytest.approx(3)}


@dataclass
class Worker:
    """What really happened to a worker."""

    market_type: str
    came: int
    joined: int
    left: int


@st.composite
def stories(draw: st.DrawFn) -> tuple[list[Event], list[Worker]]:
    """The log of groups that follow one another every few hours, and its workers.

    Between two starts, some workers are lost and some are replaced or added: their processes start at most an hour
    before they join.
    """
    events: list[Event] = []
    workers: list[Worker] = []
    present: dict[int, Worker] = {}
    time = 0
    for generation in range(draw(st.integers(1, 6))):
        time += draw(st.integers(2, 5))
        lost = {number for number in present if draw(st.booleans())} if generation else set()
        if lost == set(present):
            lost = set(list(lost)[1:])  # one continues
        before = {number: present.pop(number) for number in lost}
        for worker in before.values():
            worker.left = time
        numbers = draw(st.sets(st.integers(0, 5), min_size=0 if present else 1)) - present.keys()
        for number, came in sorted(((number, time - draw(st.integers(0, 1))) for number in numbers), key=itemgetter(1)):
            worker = Worker(draw(st.sampled_from(("spot", "on-demand", ""))), came, time, time)
            events.append(at(came, process(number, worker.market_type)))
            workers.append(worker)
            present[number] = worker
            if number in before:
                before[number].left = came  # it is replaced after its end
        events.append(at(time, start(*sorted(present), step=generation)))
    time += draw(st.integers(1, 5))
    events.append(at(time, run_log.end(9)))
    for worker in present.values():
        worker.left = time
    return events, workers


@settings(max_examples=50, deadline=None)
@given(stories())
def test_hours_are_the_integral_of_the_number_of_workers(story: tuple[list[Event], list[Worker]]) -> None:
    """Counted hour by hour, in which the numbers are constant."""
    events, workers = story
    usage = measure_usage(events)
    last = max(worker.left for worker in workers)
    present = [sum(worker.came <= hour < worker.left for worker in workers) for hour in range(-1, last)]
    assert usage.total == pytest.approx(sum(present))
    for market in MARKET_TYPES:
        own = [worker for worker in workers if (worker.market_type or "unknown") == market]
        assert usage.hours.get(market, 0.0) == pytest.approx(sum(worker.left - worker.came for worker in own))
    assert all(0 <= usage.lost[market] <= usage.hours[market] + 1e-9 for market in usage.hours)
    assert total_usage([usage, usage]).total == pytest.approx(2 * usage.total)


def test_the_cost_of_the_three_workers() -> None:
    """22 h of spot at 1 and 13 h of on-demand at 4 are 74. Alone on on-demand: 35 - 8 hours at 4 are 108."""
    assert cost_table(measure_usage([*THREE, *LOST, *BACK]), PRICES) == [
        "                 GPU hours  price    cost  lost hours  their cost",
        "spot                 22.00   1.00   22.00        5.00        5.00",
        "on-demand            13.00   4.00   52.00        3.00       12.00",
        "all                  35.00          74.00        8.00       17.00",
        "on-demand alone      27.00   4.00  108.00",
        "saved                        31 %   34.00"]


def test_without_a_price_of_on_demand_there_is_no_comparison() -> None:
    usage = measure_usage([at(0, process(0)), at(0, start(0)), at(2, step(1))])
    assert cost_table(usage, {"spot": 0.5})[1:] == [
        "spot       2.00   0.50  1.00        0.00        0.00", "all        2.00         1.00        0.00        0.00"]
    assert cost_table(measure_usage([]), PRICES)[-1].split() == ["saved", "0.00"]


def test_prices_are_read() -> None:
    assert parse_prices("spot=0.9,on-demand=3.1") == {"spot": 0.9, "on-demand": 3.1}
    assert parse_prices(" unknown = 0 ") == {"unknown": 0.0}


def test_a_log_is_read_event_by_event(tmp_path: Path) -> None:
    log = tmp_path / EVENTS_FILE
    run_log.write(log, [*THREE, *LOST])
    with log.open("ab") as file:
        file.write(b'{"seq":99,"type":"weather","time":1.0}\n{"seq":100,"ti')
    assert list(each_event(log)) == read_events(log)
