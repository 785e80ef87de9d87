"""What a training has used, by the market type of its nodes (spot, on-demand), and what that costs. From its log alone.

A worker is present from the start of its process to the first regrouping without it, to the start of its replacement,
or to the end of its command. Workers that are lost together leave with the last event that one of them has logged. For
each market type k, with the GPUs g of a worker (1 if it has none: then the unit is worker hours):

    hours(k) = sum of g x (time present), over the workers on nodes of type k
    lost(k)  = the part of hours(k) that interruptions took
    cost     = sum over k of hours(k) x price(k)
    cost of interruptions   = sum over k of lost(k) x price(k)
    cost on on-demand alone = (sum over k of hours(k) - lost(k)) x price(on-demand)

An interruption is every start of training after the first one: from a checkpoint, or of regrouped workers. It takes

- the time from the last step that is kept to the begin of the next one: steps that are done again, the wait, and the
  start. Where these steps are not logged, their times follow from the last logged step and its duration;
- the start of each worker that joins later, from the start of its process until it trains.

Node hours that no worker uses are not in the log: the head, nodes that start or wait, and free GPUs of a node.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace
from itertools import accumulate
from pathlib import Path
from typing import NamedTuple

from ray_yolo.core.errors import InputError
from ray_yolo.core.events import (
    CheckpointEvent,
    DatasetEvent,
    EndEvent,
    EpochEvent,
    Event,
    RowEvent,
    StartEvent,
    StepEvent,
    WorkerEvent,
)
from ray_yolo.core.formatting import align_columns
from ray_yolo.runs.event_log import EVENTS_FILE, each_event
from ray_yolo.runs.location import local_folder, location, run_names
from ray_yolo.runs.run_record import LEDGER_FILE

SPOT, ON_DEMAND, UNKNOWN = "spot", "on-demand", "unknown"
MARKET_TYPES = (SPOT, ON_DEMAND, UNKNOWN)
"""Unknown: the node has no label `ray.io/market-type`, or another value; or the log is older than these events."""

_EXAMPLE = "for example --price spot=0.9,on-demand=3.1"
_LEAST_SHOWN = 0.005  # hours; less would be shown as 0.00
_HOUR = 3600.0


@dataclass(frozen=True)
class Usage:
    """The hours of a training's workers, by market type; types without hours are left out."""

    hours: Mapping[str, float]
    lost: Mapping[str, float]
    """The part of `hours` that interruptions took."""
    unit: str
    """GPU hours; worker hours if no worker had a GPU, or the log does not say it."""

    @property
    def total(self) -> float:
        """The hours of all types."""
        return math.fsum(self.hours.values())

    @property
    def total_lost(self) -> float:
        """The hours of all types that interruptions took."""
        return math.fsum(self.lost.values())

    @property
    def line(self) -> str:
        """The hours in one line for people; '' if there are next to none."""
        if self.total < _LEAST_SHOWN:
            return ""
        text = f"{self.total:.2f} {self.unit}"
        if set(self.hours) != {UNKNOWN}:
            text += ": " + ", ".join(f"{hours:.2f} {market}" for market, hours in self.hours.items())
        if self.total_lost >= _LEAST_SHOWN:
            text += f"; {self.total_lost:.2f} of them lost to interruptions"
        return text


def usage_of(folder: Path) -> Usage:
    """The usage of a run, or the sum over all trainings of a sweep or comparison.

    Raises:
        InputError: if the logs of a sweep in a bucket cannot be read.
    """
    if not (folder / LEDGER_FILE).is_file():
        return measure_usage(each_event(folder / EVENTS_FILE))
    trials = f"{location(folder)}/trials"
    logs = [local_folder(f"{trials}/{name}", whole=False) / EVENTS_FILE for name in run_names(trials)]
    return total_usage(measure_usage(each_event(log)) for log in logs if log.is_file())


def measure_usage(events: Iterable[Event]) -> Usage:
    """The usage that a log shows, up to its last event of a worker. See the law at the top of this module.

    Logs of earlier releases do not name the workers of a group. Theirs are counted from start to start, as of unknown
    type. The writer's clock may be set back; time then stands still until it has caught up.
    """
    meter = UsageMeter()
    for event in events:
        meter.add(event)
    return meter.usage()


def total_usage(usages: Iterable[Usage]) -> Usage:
    """The sum of several trainings, such as the trials of a sweep."""
    parts = [usage for usage in usages if usage.hours]
    hours = {market: math.fsum(part.hours.get(market, 0.0) for part in parts) for market in MARKET_TYPES}
    lost = {market: math.fsum(part.lost.get(market, 0.0) for part in parts) for market in MARKET_TYPES}
    units: set[str] = set()
    for part in parts:
        units.update(part.unit.split(" and "))  # a training may have had workers of both kinds
    return _usage(hours, lost, units)


def parse_prices(text: str) -> dict[str, float]:
    """The price of an hour by market type, from `spot=0.9,on-demand=3.1`.

    Raises:
        InputError: if a market type is unknown or given twice, or a price is not a number >= 0.
    """
    prices: dict[str, float] = {}
    for part in text.split(","):
        market, equals, value = (word.strip() for word in part.partition("="))
        if market not in MARKET_TYPES or not equals:
            raise InputError(f"--price: got {part.strip()!r}; give TYPE=PRICE, {_EXAMPLE}; the types are "
                             f"{', '.join(MARKET_TYPES)}")
        if market in prices:
            raise InputError(f"--price: {market} is given twice; give it once, {_EXAMPLE}")
        try:
            price = float(value)
        except ValueError:
            price = math.nan
        if not (math.isfinite(price) and price >= 0):
            raise InputError(f"--price: {market}={value}: a price is a number >= 0, {_EXAMPLE}")
        prices[market] = price
    return prices


def cost_table(usage: Usage, prices: Mapping[str, float]) -> list[str]:
    """Hours, price and cost by market type, the cost of interruptions, and the cost on on-demand nodes alone.

    Raises:
        InputError: if hours of a market type have no price.
    """
    for market, hours in usage.hours.items():
        if market not in prices:
            why = "; their nodes have no label ray.io/market-type" if market == UNKNOWN else ""
            raise InputError(f"--price: has no price for {hours:.2f} {usage.unit} of type {market}{why}; "
                             f"add {market}=PRICE")
    rows: list[tuple[str, ...]] = [("", usage.unit, "price", "cost", "lost hours", "their cost")]
    cost = lost_cost = 0.0
    for market, hours in usage.hours.items():
        price, lost = prices[market], usage.lost.get(market, 0.0)
        cost, lost_cost = cost + hours * price, lost_cost + lost * price
        rows.append((market, *_cells(hours, price, hours * price, lost, lost * price)))
    rows.append(("all", f"{usage.total:.2f}", "", *_cells(cost, usage.total_lost, lost_cost)))
    if ON_DEMAND in prices:
        useful, price = usage.total - usage.total_lost, prices[ON_DEMAND]
        alone = useful * price
        share = f"{100 * (alone - cost) / alone:.0f} %" if alone else ""
        rows.append(("on-demand alone", *_cells(useful, price, alone), "", ""))
        rows.append(("saved", "", share, f"{alone - cost:.2f}", "", ""))
    return align_columns(rows)


def _cells(*numbers: float) -> list[str]:
    return [f"{number:.2f}" for number in numbers]


def _usage(hours: Mapping[str, float], lost: Mapping[str, float], units: set[str]) -> Usage:
    in_order = [market for market in MARKET_TYPES if hours[market]]
    return Usage({market: hours[market] for market in in_order}, {market: lost[market] for market in in_order},
                 " and ".join(sorted(units)) or "worker hours")


class _Process(NamedTuple):
    """A worker process that has started."""

    time: float
    market_type: str


@dataclass
class _Stay:
    """A worker from the start of its process until it leaves."""

    since: float
    joined: float
    market_type: str
    gpus: float
    is_late: bool  # it joined after the first start
    until: float = 0.0

    @property
    def weight(self) -> float:
        """What an hour of it counts."""
        return self.gpus or 1.0


class _Mark(NamedTuple):
    """Progress of training."""

    step: int
    time: float


@dataclass
class UsageMeter:
    """Measures the usage, event by event. See the law at the top of this module."""

    now: float = 0.0
    last_seen: float = 0.0  # time of the last event of a worker that trains
    started: dict[int, _Process] = field(default_factory=dict)  # keys: numbers of workers that have not joined
    present: dict[tuple[int, int], _Stay] = field(default_factory=dict)
    """The stays of the workers that train, by the worker's number and how often the group had that number before."""
    stays: list[_Stay] = field(default_factory=list)  # they have ended
    marks: list[_Mark] = field(default_factory=list)  # the progress that is kept; the first one is the first start
    pace: float = 0.0  # seconds of the last logged step
    resumed: int | None = None  # the step of an interruption without progress since
    lost: list[tuple[float, float]] = field(default_factory=list)

    def add(self, event: Event) -> None:
        """Take the next event of the log."""
        before = self.last_seen
        self.now = max(self.now, event.time)
        is_done = isinstance(event, EndEvent) and event.status == "done"  # else the driver may write it much later
        if is_done or isinstance(event, (RowEvent, StartEvent, CheckpointEvent)):
            self.last_seen = self.now
        match event:
            case DatasetEvent():  # the next command starts
                self._end_all()
            case WorkerEvent():
                self.started[event.worker] = _Process(self.now, event.market_type)
            case StartEvent():
                self._regroup(event, before)
                self._go_back(event.step)
            case StepEvent() | EpochEvent():
                self._advance(event)
            case EndEvent():
                self._end_all()

    def usage(self) -> Usage:
        """The usage up to now."""
        stays = [*self.stays, *(_ended(stay, self.last_seen) for stay in self.present.values())]
        lost = list(self.lost)
        if self.resumed is not None:  # the steps since the last one that counts are being trained again
            lost.append((self.marks[-1].time, self.last_seen))
        lost_until = _covered(lost)
        hours = dict.fromkeys(MARKET_TYPES, 0.0)
        lost_hours = dict.fromkeys(MARKET_TYPES, 0.0)
        for stay in stays:
            market = stay.market_type if stay.market_type in (SPOT, ON_DEMAND) else UNKNOWN
            starting = stay.joined - stay.since if stay.is_late else 0.0
            # the start of a late worker, and what of its stay is in lost intervals
            seconds = starting + lost_until(stay.until) - lost_until(stay.joined)
            hours[market] += (stay.until - stay.since) * stay.weight / _HOUR
            lost_hours[market] += seconds * stay.weight / _HOUR
        units = {"GPU hours" if stay.gpus else "worker hours" for stay in stays}
        return _usage(hours, lost_hours, units)

    def _regroup(self, event: StartEvent, before: float) -> None:
        """Training starts with a group of workers. `before`: when one of the previous group was last seen."""
        group = self._next_group(event)  # it passes on the same object for a worker that continues
        some_continue = any(group.get(slot) is stay for slot, stay in self.present.items())
        for slot, stay in self.present.items():
            following = group.get(slot)
            if following is stay:
                continue
            if not some_continue:
                until = before  # all were lost at once, after one of them was last seen
            elif following:
                until = following.since  # the place counts until the time of the replacement begins
            else:
                until = self.now
            self.stays.append(_ended(stay, until))
        self.present = group

    def _next_group(self, event: StartEvent) -> dict[tuple[int, int], _Stay]:
        """The workers that train from now on: a new process begins a stay, the others continue theirs."""
        occurrences: Counter[int] = Counter()  # a number is there twice if its worker was replaced, and returned
        group: dict[tuple[int, int], _Stay] = {}
        is_late = bool(self.marks)
        for number in event.members or range(event.num_workers):
            slot = (number, occurrences[number])
            occurrences[number] += 1
            # Without members, as in older logs, it is not known which of the started processes have joined.
            process = self.started.pop(number, None) if event.members else None
            if process is None and slot in self.present:
                group[slot] = self.present[slot]
                continue
            if process is None:  # its start is not in the log
                process = _Process(self.now, "")
            group[slot] = _Stay(process.time, self.now, process.market_type, event.gpus or 0.0, is_late)
        return group

    def _end_all(self) -> None:
        """All workers have left, with the command."""
        self.stays += [_ended(stay, self.last_seen) for stay in self.present.values()]
        self.present = {}
        self.started.clear()

    def _go_back(self, step: int) -> None:
        """Training continues at `step`; progress beyond it is void."""
        if not self.marks:
            self.marks.append(_Mark(step, self.now))
            return
        while len(self.marks) > 1 and self.marks[-1].step > step:
            self.marks.pop()
        self.resumed = step

    def _advance(self, event: StepEvent | EpochEvent) -> None:
        """A step has ended, or an epoch with its validation."""
        if not self.marks or event.step <= (self.marks[-1].step - 1 if self.resumed is None else self.resumed):
            return  # the last epoch is reported again after a start
        if self.resumed is not None:
            last = self.marks[-1]
            begin = last.time + (self.resumed - last.step) * self.pace
            end = self.now - (event.step - self.resumed) * self.pace
            if begin < end:
                self.lost.append((begin, end))
            self.resumed = None
        if isinstance(event, StepEvent):
            self.pace = event.seconds
        self.marks.append(_Mark(event.step, self.now))


def _ended(stay: _Stay, time: float) -> _Stay:
    return replace(stay, until=max(time, stay.since))


def _covered(intervals: list[tuple[float, float]]) -> Callable[[float], float]:
    """A function: the seconds up to a time that are in at least one of the intervals."""
    merged: list[tuple[float, float]] = []
    for begin, end in sorted(intervals):
        if merged and begin <= merged[-1][1]:
            merged[-1] = (merged[-1][0], max(end, merged[-1][1]))
        else:
            merged.append((begin, end))
    begins = [begin for begin, _ in merged]
    sums = list(accumulate((end - begin for begin, end in merged), initial=0.0))

    def seconds_until(time: float) -> float:
        index = bisect_right(begins, time)  # so many intervals have begun
        if index == 0:
            return 0.0
        begin, end = merged[index - 1]
        return sums[index - 1] + min(time, end) - begin

    return seconds_until
