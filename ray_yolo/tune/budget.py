"""The time of a sweep: forecast, remaining time, and the end of its exploration.

Work is counted in epochs of the base recipe, as in the schedule.
"""

from __future__ import annotations

import math
import random
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from pathlib import Path
from statistics import fmean
from typing import Any

from ray_yolo.config.recipe import Recipe
from ray_yolo.core.events import DatasetEvent, EndEvent, Event, RunEvent, StartEvent, WorkerEvent
from ray_yolo.core.formatting import format_count, format_duration
from ray_yolo.runs.event_log import EVENTS_FILE, read_events
from ray_yolo.tune.confirmation import number_of_runs
from ray_yolo.tune.evolution import Gene, Genes, Space
from ray_yolo.tune.schedule import Ending, Outcome, Schedule, Task, genes_key
from ray_yolo.tune.search import MOST_TRIALS
from ray_yolo.tune.study import SweepEvent

RESERVE_SECONDS = 5.0  # files, plots and the tracking server need them at the end
RESERVE_MOST = 0.01  # the reserve is at most this share of the limit
RESERVE_SHARE = 0.005  # this share of the limit is added, because equal trainings take unequal times
UNEVEN, UNEVEN_SHARE = 0.1, 0.05  # the share instead, where an epoch of some trial takes so much more or less
ROUNDING = 1 + 1e-9  # a time that was planned is enough
SIMULATED = 80  # trials up to which a forecast simulates the schedule
_READ_LOGS = 20  # newest trainings of a project, for the time of an epoch
_TIMED_FIELDS = ("imgsz", "batch_size", "microbatch", "precision", "noval")  # these fields of a recipe decide this time


@dataclass(frozen=True)
class Forecast:
    """The trainings of a sweep with a number of trials. Work and times are in epochs of the base recipe."""

    trials: int
    exploration: float  # work
    time: float  # virtual, until exploration is closed
    runs: int  # trainings on fresh seeds

    def work(self, begun: SweepEvent) -> float:
        """All work, if each slot trains while paused trials train to their ends."""
        finishing = begun.virtual_slots * (begun.rungs[-1] - begun.rungs[0])
        return self.exploration + finishing + self.runs * begun.rungs[-1]

    def seconds(self, begun: SweepEvent, epoch_seconds: float, slots: int) -> float:
        """Seconds until the end, if one slot takes `epoch_seconds` for an epoch."""
        epochs = begun.rungs[-1]
        # Virtual epochs times virtual slots are work, which the real slots share. Paused trials train to their ends.
        until_confirmation = (self.time + epochs - begun.rungs[0]) * begun.virtual_slots / slots
        confirmation = math.ceil(self.runs / slots) * epochs
        return (until_confirmation + confirmation) * epoch_seconds


@lru_cache(maxsize=64)
def _explored(rungs: tuple[int, ...], virtual_slots: int, trials: int) -> tuple[float, float]:
    """The work and the virtual time of an exploration of `trials` trials with a cost of 1."""
    space = Space((Gene("any", high=1.0),), ({"any": 0.5},), "random")
    schedule = Schedule(space, 0, rungs, virtual_slots)
    tasks: deque[Task] = deque()
    while len(schedule.genes) < trials:
        reply = schedule.next()
        if isinstance(reply, Task):
            tasks.append(reply)
        else:
            task = tasks.popleft()
            schedule.finish(task, Outcome(fitness=random.Random(task.trial).random()))
    return schedule.explored_work, schedule.explored_time


def forecast(begun: SweepEvent, trials: int) -> Forecast:
    """Forecast a sweep by simulating its schedule. Beyond `SIMULATED` trials, each one counts as the mean trial of the
    second half of the simulation."""
    work, time = _explored(begun.rungs, begun.virtual_slots, min(trials, SIMULATED))
    if trials > SIMULATED:
        half = SIMULATED // 2
        half_work, half_time = _explored(begun.rungs, begun.virtual_slots, half)
        more = (trials - SIMULATED) / (SIMULATED - half)  # times the second half
        work += more * (work - half_work)
        time += more * (time - half_time)
    runs = 0  # the default alone is compared with nothing
    if trials > 1:
        runs = number_of_runs(work / begun.rungs[-1], begun.virtual_slots)
    return Forecast(trials, work, time, runs)


def most_trials(begun: SweepEvent, seconds: float, epoch_seconds: float, slots: int, limit: int) -> Forecast:
    """The largest sweep that ends within `seconds`, found by bisection."""
    low, high = 1, limit
    while high - low > max(1, low // 20):
        middle = min((low + high) // 2, 2 * low + 1)
        if forecast(begun, middle).seconds(begun, epoch_seconds, slots) < seconds:
            low = middle
        else:
            high = middle
    return forecast(begun, low)


def recorded_epoch_seconds(project: Path, recipe: Recipe, labels: str, workers: int) -> float | None:
    """Seconds of an epoch on `workers` workers, or None if it is unknown. They are taken from the newest trainings of
    a project of sweeps, and of the project `train` beside it, with the same model, sizes and labels."""
    of_trials = project.glob(f"*/trials/*/{EVENTS_FILE}")
    of_trainings = (project.parent / "train").glob(f"*/{EVENTS_FILE}")
    newest_first = sorted((*of_trials, *of_trainings), key=lambda log: log.stat().st_mtime_ns, reverse=True)
    epochs, seconds = 0, 0.0
    for log in newest_first[:_READ_LOGS]:
        events = read_events(log)
        if not _is_comparable(events, recipe, labels):
            continue
        for more_epochs, more_seconds in trained_spans(events, workers):
            epochs += more_epochs
            seconds += more_seconds
    return seconds / epochs if epochs else None


def _is_comparable(events: Sequence[Event], recipe: Recipe, labels: str) -> bool:
    """Whether a training had the same labels, model and sizes, so that its epochs take as long."""
    run = next((event for event in events if isinstance(event, RunEvent)), None)
    data = next((event for event in events if isinstance(event, DatasetEvent)), None)
    if run is None or data is None or data.splits["train"].digest != labels:
        return False
    if Path(run.recipe["model"]).name != Path(recipe.model).name:  # the same file in another folder is the same model
        return False
    wanted = recipe.model_dump(mode="json")
    return all(run.recipe.get(name) == wanted[name] for name in _TIMED_FIELDS)


def trained_spans(events: Sequence[Event], workers: int) -> list[tuple[int, float]]:
    """(epochs, seconds of a slot of `workers` workers) of each ended command of a log. The time lasts from the
    command's first worker to its end, so it includes validation and checkpoints."""
    spans: list[tuple[int, float]] = []
    first: StartEvent | None = None  # it is the first of the command
    since = 0.0  # up to here the seconds are counted; 0: the command has no worker yet
    seconds = 0.0  # `workers` workers have taken them so far in the command
    number = 0  # this many workers train since then
    for event in events:
        if isinstance(event, DatasetEvent):  # the next command starts
            first, since, seconds = None, 0.0, 0.0
        elif isinstance(event, WorkerEvent) and not since:
            since, number = event.time, workers
        elif isinstance(event, (StartEvent, EndEvent)) and since:
            seconds += (event.time - since) * number / workers
            since = event.time
            if isinstance(event, StartEvent):  # also after a regrouping, perhaps of another number of workers
                first = first or event
                number = event.num_workers
            elif first and event.epoch >= first.epoch:
                spans.append((event.epoch + 1 - first.epoch, seconds))
    return spans


class Budget:
    """Decides when exploration ends: after a number of trials, or in time for the confirmation.

    Args:
        begun: the sweep.
        trials: number at which exploration ends.
        hours: until the end of the sweep; 0: no limit.
        spent: seconds of the sweep's earlier commands.
        epoch_seconds: of one slot, if known.
        slots: returns how many trials train in parallel.
    """

    def __init__(self, begun: SweepEvent, trials: int, hours: float, spent: float, epoch_seconds: float | None,
                 slots: Callable[[], int], clock: Callable[[], float] = time.monotonic) -> None:
        self._begun, self._trials, self._spent = begun, trials, spent
        self._limit = 3600 * hours if hours else math.inf
        self._known, self._slots, self._clock = epoch_seconds, slots, clock
        self._began = clock()
        self._work = 0.0  # The finished tasks are worth so many epochs of the base recipe.
        self._slot_seconds = 0.0  # They took a slot for so long.
        self._seconds_by_epochs: dict[int, list[float]] = {}
        """Seconds of each finished task over its trial's cost, by the number of its epochs."""
        self._tasks_by_genes: dict[tuple[Any, ...], list[tuple[int, float]]] = {}
        """(epochs, seconds over cost) of the finished tasks of each recipe, by its genes."""
        self._closed = False
        self.schedule: Schedule | None = None

    @cached_property
    def _whole(self) -> Forecast:
        return forecast(self._begun, self._trials)

    @property
    def seconds(self) -> float:
        """The running time of the sweep, over all its commands."""
        return self._spent + self._clock() - self._began

    @property
    def epoch_seconds(self) -> float | None:
        """Seconds of an epoch of the base recipe on one slot, from measurements of this sweep and from earlier records.

        The record counts as two trainings, because after a restart the first tasks are short and include the start of
        their workers.
        """
        work, seconds = self._work, self._slot_seconds
        if self._known:
            prior = 2.0 * self._begun.rungs[-1]
            work = prior + work
            seconds = prior * self._known + seconds
        return seconds / work if work else None

    def measure(self, genes: Genes, epochs: int, seconds: float) -> None:
        """Note that a slot took `seconds` for some epochs of a trial."""
        cost = self._begun.cost(genes)
        self._work += epochs * cost
        self._slot_seconds += seconds
        self._seconds_by_epochs.setdefault(epochs, []).append(seconds / cost)
        self._tasks_by_genes.setdefault(genes_key(genes), []).append((epochs, seconds / cost))

    def _slowness(self, trial: int) -> float:
        """The time of an epoch of a trial, measured in epochs of the base recipe.

        Its cost is known beforehand where pixels and images decide. Other genes (the network, the batch) make it slower
        or faster, too: its tasks are compared with all tasks of as many epochs, because each includes a start of
        workers. The cost alone counts as half a task. A small difference is none: equal trainings take unequal times.
        """
        assert self.schedule is not None
        each = self.epoch_seconds
        if trial == 0 or not each:
            return 1.0
        genes, cost = self.schedule.genes[trial], self.schedule.costs[trial]
        ratios = [seconds / fmean(self._seconds_by_epochs[epochs])
                  for epochs, seconds in self._tasks_by_genes.get(genes_key(genes), [])]
        measured = cost * (0.5 + sum(ratios)) / (0.5 + len(ratios))
        return measured if abs(measured - 1) > UNEVEN else 1.0

    def explores(self) -> bool:
        """Whether the sweep continues with new trials. Once False, it stays False."""
        assert self.schedule is not None
        if not self._closed:
            has_all_trials = len(self.schedule.genes) >= self._trials
            is_late = self.seconds + (self._closing_seconds() or 0.0) >= self._limit
            self._closed = has_all_trials or is_late
        return not self._closed

    def ending(self) -> Ending:
        """What there is time for, if exploration is closed now."""
        schedule, each, slots = self.schedule, self.epoch_seconds, self._real_slots
        assert schedule is not None
        if each is None or self._limit == math.inf:
            return Ending()
        left = (self._limit - self.seconds - self._reserve) / each
        _, confirming = schedule.closing_time(slots, self._slowness, self._limit / each)
        finishing = max(left - confirming, schedule.running_time(slots))
        too_slow = []
        for trial in range(1, len(schedule.genes)):
            is_slow = self._slowness(trial) > 1.0
            if is_slow and (schedule.finishing_time(trial, slots, self._slowness) > finishing
                            or schedule.confirming_time(trial, slots, self._slowness) > (left - finishing) * ROUNDING):
                too_slow.append(trial)
        return Ending(finishing * slots / self._begun.virtual_slots, tuple(too_slow))

    @property
    def _real_slots(self) -> int:
        return max(1, self._slots())

    @property
    def _reserve(self) -> float:
        """Seconds at the end in which nothing trains."""
        assert self.schedule is not None
        if self._limit == math.inf:
            return RESERVE_SECONDS
        is_uneven = any(self._slowness(trial) != 1.0 for trial in range(len(self.schedule.genes)))
        share = UNEVEN_SHARE if is_uneven else RESERVE_SHARE
        return min(RESERVE_SECONDS, RESERVE_MOST * self._limit) + share * self._limit

    def _closing_seconds(self) -> float | None:
        """Seconds until the end, if exploration ends now."""
        assert self.schedule is not None
        each = self.epoch_seconds
        if each is None:
            return None
        return self._reserve + each * sum(
            self.schedule.closing_time(self._real_slots, self._slowness, self._limit / each))

    def seconds_left(self) -> float | None:
        """Seconds until the end of the sweep; None if unknown."""
        each = self.epoch_seconds
        if self.schedule is None or each is None:
            return None
        if self._closed:
            return self._closing_seconds()
        if self._limit < math.inf:
            return max(0.0, self._limit - self.seconds)
        ahead = max(0.0, self._whole.time - self.schedule.explored_time) * self._begun.virtual_slots
        return ahead / self._real_slots * each + (self._closing_seconds() or 0.0)


def describe(begun: SweepEvent, trials: int, hours: float, slots: int, epoch_seconds: float | None) -> list[str]:
    """The trainings of a sweep and their time, line by line."""
    rungs = begun.rungs
    lines = [f"genes: {', '.join(gene.name for gene in begun.space.genes)}"]
    if len(rungs) > 1:
        lines.append(f"ladder: {' -> '.join(map(str, rungs))} epochs, the best quarter continues; the winner and the "
                     "default are then trained on fresh seeds")
    else:
        lines.append(f"ladder: none, every trial trains {rungs[0]} epochs")
    lines.append(f"slots: {format_count(slots, 'trial')} at a time ({begun.virtual_slots} virtual)")
    if epoch_seconds is None:
        limit = f"{trials} trials"
        if hours and trials == MOST_TRIALS:
            limit = f"it ends after {hours:g} hours"
        elif hours:
            limit = f"{trials} trials or {hours:g} hours, whichever comes first"
        return [*lines, f"budget: {limit}; the time of an epoch is not known before the first trial has trained"]
    plan = forecast(begun, trials)
    seconds = plan.seconds(begun, epoch_seconds, slots)
    hours_end_first = hours and seconds >= 3600 * hours
    if hours and trials < MOST_TRIALS:
        limits = f"{trials} trials", f"{hours:g} hours"
        first, other = reversed(limits) if hours_end_first else limits
        lines.append(f"budget: {first}, which end before {other}")
    if hours_end_first:
        seconds = 3600 * hours
        plan = most_trials(begun, seconds, epoch_seconds, slots, trials)
    lines.append(f"epochs: {plan.work(begun):.0f} for {plan.trials} trials, {plan.runs * rungs[-1]} of them to confirm "
                 f"the winner; {epoch_seconds:.3g} s each on one slot")
    lines.append(f"time: about {format_duration(seconds)} on this cluster")
    if begun.space.algorithm == "gp" and len(rungs) > 2:  # how many do depends on results
        lines.append(f"not counted: trials that leave out the rung of {format_count(rungs[0], 'epoch')} where it says "
                     "too little; with them, a quarter fewer trials or a third more time")
    return lines
