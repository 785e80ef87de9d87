"""The steps of a run by its log: which one to replay, where and how they were trained, and whether a replay agrees."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from statistics import median
from typing import Literal, NamedTuple

from ray_yolo.core.errors import InputError
from ray_yolo.core.events import CheckpointEvent, EndEvent, EpochEvent, Event, StartEvent, StepEvent
from ray_yolo.core.formatting import format_count

Around = Literal["nan", "spike", "worst"]

SPIKE_STEPS = 50
"""Logged steps before a step whose median loss it is compared with."""


def logged_steps(events: Iterable[Event]) -> dict[int, StepEvent]:
    """The logged steps by number, ascending. If a step was trained twice, the later one."""
    steps = {event.step: event for event in events if isinstance(event, StepEvent)}
    return dict(sorted(steps.items()))


def last_step(events: Iterable[Event]) -> int:
    """The newest step that the log names; not every step has an event. 0 before the first one."""
    kinds = (StepEvent, EpochEvent, CheckpointEvent, EndEvent)
    return max((event.step for event in events if isinstance(event, kinds)), default=0)


def total_loss(event: StepEvent) -> float:
    """The sum of a step's loss terms; NaN if one of them is not finite."""
    return sum(math.nan if term is None else term for term in event.loss)


def choose_step(steps: Mapping[int, StepEvent], around: Around) -> int:
    """The number of a logged step.

    | around | step |
    |---|---|
    | nan | the first that was skipped, or whose loss is not finite; without any, the first whose gradient is not |
    | spike | the largest difference between its loss and the median of up to `SPIKE_STEPS` logged steps before it |
    | worst | the highest loss |

    Losses that are not finite count for `nan` alone. An overflow of fp16 leaves the loss finite and lowers the scale.

    Raises:
        InputError: if there is no such step.
    """
    if around == "nan":
        return _first_not_finite(steps)
    losses = {number: total_loss(event) for number, event in steps.items()}
    losses = {number: loss for number, loss in losses.items() if math.isfinite(loss)}
    if around == "worst":
        if not losses:
            raise InputError("--around worst: the log has no step with a finite loss; use --around nan")
        return max(losses, key=losses.__getitem__)
    numbers, rises = list(losses), dict[int, float]()
    for position in range(1, len(numbers)):
        before = [losses[number] for number in numbers[max(position - SPIKE_STEPS, 0) : position]]
        rises[numbers[position]] = losses[numbers[position]] - median(before)
    if not rises:
        raise InputError("--around spike: the log has fewer than two steps with a finite loss")
    return max(rises, key=rises.__getitem__)


def _first_not_finite(steps: Mapping[int, StepEvent]) -> int:
    for number, event in steps.items():
        if event.skipped or None in event.loss:
            return number
    for number, event in steps.items():
        if event.gradient_norm is None:
            return number
    raise InputError("--around nan: loss and gradient of every step in the log are finite; use --step, --around spike, "
                     "or --around worst")


def start_of(events: Iterable[Event], step: int) -> StartEvent | None:
    """The start of the workers that trained a step: the last one before the last logged step up to it. None if no such
    step is logged."""
    current = found = None
    for event in events:
        if isinstance(event, StartEvent):
            current = event
        elif isinstance(event, (StepEvent, EpochEvent)) and event.step <= step:
            found = current
    return found or current


class Agreement(NamedTuple):
    """How far replayed losses equal those of the log."""

    compared: int  # logged steps that were replayed
    equal: int  # those that are equal to the bit in every term
    first: int | None = None  # step of the first difference
    logged: tuple[float | None, ...] = ()  # losses of that step
    replayed: tuple[float | None, ...] = ()
    largest: float = 0.0  # largest difference of a finite term, relative to the logged one

    @property
    def line(self) -> str:
        """The comparison in one line."""
        if not self.compared:
            return "none of these steps is in the log, so no loss can be compared"
        if self.first is None:
            return f"all losses of {format_count(self.compared, 'logged step')} are those of the log, bit for bit"
        return (f"the losses of {self.equal} of {format_count(self.compared, 'logged step')} are those of the log; the "
                f"first difference is at step {self.first} ({_text(self.replayed)}, in the log {_text(self.logged)}), "
                f"the largest is {self.largest:.2g} of the logged value")


def compare_losses(logged: Mapping[int, StepEvent], replayed: Mapping[int, Sequence[float]]) -> Agreement:
    """Compare the replayed loss terms by step with the log's. JSON has no NaN: all values that are not finite are
    equal."""
    agreement = Agreement(0, 0)
    for number in sorted(logged.keys() & replayed.keys()):
        own = tuple(term if math.isfinite(term) else None for term in replayed[number])
        others = logged[number].loss
        is_equal = own == others
        agreement = agreement._replace(compared=agreement.compared + 1, equal=agreement.equal + is_equal)
        if is_equal:
            continue
        if agreement.first is None:
            agreement = agreement._replace(first=number, logged=others, replayed=own)
        largest = max(_difference(term, other) for term, other in zip(own, others, strict=True))
        agreement = agreement._replace(largest=max(largest, agreement.largest))
    return agreement


def _difference(term: float | None, logged: float | None) -> float:
    """The difference relative to the logged value; 0 if one of both is not finite."""
    if term is None or logged is None or term == logged:
        return 0.0
    return abs(term - logged) / abs(logged) if logged else math.inf


def _text(losses: Sequence[float | None]) -> str:
    return ", ".join("not finite" if loss is None else f"{loss:.9g}" for loss in losses)
