"""What interruptions have cost a training, by its log."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from ray_yolo.events import DatasetEvent, EpochEvent, Event, StartEvent, StepEvent
from ray_yolo.formatting import format_count


@dataclass(frozen=True)
class Interruptions:
    """Of a whole training, over all its commands."""

    restarts: int  # of all workers, from a checkpoint
    regroupings: int  # workers lost, replaced or added while the others went on
    steps_repeated: int
    idle_seconds: float  # from the last that was done before each to the first step after it
    goodput: float  # seconds of training over those and the idle ones; 1 for none

    @property
    def line(self) -> str:
        """All of it in words."""
        return (f"{format_count(self.restarts, 'restart')}, {format_count(self.regroupings, 'regrouping')}: "
                f"{format_count(self.steps_repeated, 'step')} done twice, {self.idle_seconds:.0f} s without training, "
                f"goodput {100 * self.goodput:.1f} %")


def interruptions(events: Sequence[Event]) -> Interruptions:
    """Count them. Time between commands is nobody's: a command begins with its `dataset` event."""
    restarts = regroupings = repeated = 0
    idle = training = 0.0
    done: Event | None = None  # the last sign of training; a start or a command that has begun until there is one
    reached, waits = 0, False
    for event in events:
        if isinstance(event, DatasetEvent):
            done = event
        elif isinstance(event, StartEvent):
            if reached or event.step:
                restarts, regroupings = restarts + (not event.regrouped), regroupings + event.regrouped
                repeated += max(reached - event.step, 0)
                waits = True
            else:
                done = event
            reached = event.step
        elif isinstance(event, (StepEvent, EpochEvent)):
            passed = event.time - done.time if done else 0.0
            idle, training = idle + waits * passed, training + (not waits) * passed
            done, waits, reached = event, False, max(reached, event.step)
    return Interruptions(restarts, regroupings, repeated, idle, training / (idle + training) if idle else 1.0)
