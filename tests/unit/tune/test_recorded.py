"""Ledgers that ray_yolo 0.2.0 has written: the schedules of today make the same decisions again."""

from __future__ import annotations

from pathlib import Path
from types import NoneType

import pytest

from ray_yolo.tune.ledger import begun_of, read_ledger, verify
from ray_yolo.tune.ledger_events import ClosedEvent, CountedEvent, FailedEvent, LedgerEvent
from ray_yolo.tune.schedule import Outcome, Task

LEDGERS = Path(__file__).parents[2] / "golden" / "ledgers"
SWEEPS = {"evolve": 90, "gp": 108, "grid": 42, "cost": 104, "continued": 70, "killed": 31, "trained_sweep": 32}
"""The lines after the first one, by name. `killed` ends in the middle, `continued` goes on after its first claim, and
the trainings of `trained_sweep` are real."""


@pytest.mark.parametrize("name", SWEEPS)
def test_each_line_follows_from_those_before(name: str) -> None:
    lines = read_ledger(LEDGERS / f"{name}.jsonl")
    assert len(lines) == 1 + SWEEPS[name]
    assert verify(lines) == []


@pytest.mark.parametrize("name", SWEEPS)
def test_a_new_schedule_writes_the_recorded_lines(name: str) -> None:
    lines = read_ledger(LEDGERS / f"{name}.jsonl")
    recorded = lines[1:]
    outcomes = {(line.trial, line.seed, line.epochs): Outcome.model_validate(line, from_attributes=True)
                for line in recorded if isinstance(line, (CountedEvent, FailedEvent))}
    written: list[LedgerEvent] = []

    def explores() -> bool:
        decisions = (line for line in recorded[len(written):] if not isinstance(line, (CountedEvent, FailedEvent)))
        return not isinstance(next(decisions, None), (ClosedEvent, NoneType))

    schedule = begun_of(lines).schedule(write=written.append)
    for _ in range(2 * len(recorded)):
        if len(written) >= len(recorded):
            break
        task = schedule.next(explores)
        if isinstance(task, Task) and (task.trial, task.seed, task.until) in outcomes:
            schedule.finish(task, outcomes[task.trial, task.seed, task.until])
    assert written[:len(recorded)] == recorded
