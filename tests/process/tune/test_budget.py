"""How long a sweep takes, and when its exploration ends so that it ends in time."""

from __future__ import annotations

from pathlib import Path

import pytest

from ray_yolo.tune.budget import (
    Budget,
    forecast,
)
from ray_yolo.tune.evolution import Gene, Space
from ray_yolo.tune.ledger_events import ClosedEvent, ScheduledEvent
from ray_yolo.tune.schedule import rungs_of
from tests.support.schedules import open_ledger, run_sweep, sweep_of
from tests.unit.tune.test_budget import drive

FINE = Space((Gene("lr0", low=0.001, high=0.1), Gene("augment.close_mosaic", "int", 1, 8),), (
    {"lr0": 0.01, "augment.close_mosaic": 5},), "random")


@pytest.mark.parametrize("trials", [1, 12, 40, 200])
def test_a_forecast_is_what_a_sweep_explores_and_confirms(tmp_path: Path, trials: int) -> None:
    """With a space whose trials do not fail. Beyond 80 trials, it is extrapolated."""
    begun = open_ledger(tmp_path / "ledger.jsonl", space=FINE).begun
    planned = forecast(begun, trials)
    ledger = run_sweep(tmp_path / "ledger.jsonl", trials, space=FINE)
    scheduled = [line for line in ledger.lines if isinstance(line, ScheduledEvent)]
    exploration = sum(line.end - line.start for line in scheduled if not line.closing)
    (closed,) = (line for line in ledger.lines if isinstance(line, ClosedEvent))
    assert planned.exploration == pytest.approx(exploration, rel=0.03)
    assert planned.time == pytest.approx(closed.at, rel=0.03)
    assert planned.runs == pytest.approx(closed.runs, abs=1)
    last = max(line.end for line in scheduled)
    assert planned.seconds(begun, 2.0, 3) == pytest.approx(2.0 * last, rel=0.1, abs=2.0 * begun.rungs[0])


@pytest.mark.parametrize(("trainings", "slots", "virtual_slots"), [
    (10, 1, 1), (10, 1, 2), (30, 1, 2), (6, 8, 10), (10, 8, 8), (10, 8, 10)])
def test_a_sweep_with_hours_ends_within_five_percent(trainings: int, slots: int, virtual_slots: int) -> None:
    now = [0.0]
    begun = sweep_of(virtual_slots=virtual_slots, rungs=rungs_of(9))
    seconds = trainings * begun.rungs[-1] * 60.0
    budget = Budget(begun, 1000, seconds / 3600, 0.0, None, lambda: slots, lambda: now[0])
    assert drive(budget, begun.schedule(), now, lambda genes: 60.0, slots) == pytest.approx(seconds, rel=0.05)


@pytest.mark.parametrize("spent", [0.0, 150.0])
def test_a_sweep_ends_in_time_also_in_several_commands(spent: float) -> None:
    now = [0.0]
    begun = sweep_of(virtual_slots=2, rungs=rungs_of(9))
    budget = Budget(begun, 1000, 0.1, spent, None, lambda: 1, lambda: now[0])
    assert spent + drive(budget, begun.schedule(), now, lambda genes: 0.5) == pytest.approx(360, rel=0.05)
    assert budget.seconds == pytest.approx(360, rel=0.05)
