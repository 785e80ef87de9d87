"""The time of a sweep: forecast, remaining time, and the end of its exploration.

Work is counted in epochs of the base recipe, as in the schedule.
"""

from __future__ import annotations

import math
import random
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path

from ray_yolo.config.recipe import Recipe
from ray_yolo.core.events import DatasetEvent, EndEvent, Event, RunEvent, StartEvent, WorkerEvent
from ray_yolo.core.formatting import format_count, format_duration
from ray_yolo.runs.event_log import EVENTS_FILE, read_events
from ray_yolo.tune.ledger import Begun
from ray_yolo.tune.schedule import Claimed, Line, Outcome, Schedule, Scheduled, confirmation_of
from ray_yolo.tune.search import MOST_TRIALS

RESERVE_SECONDS = 5.0  # for files, plots and the tracking server at the end
PLAYED = 40  # trials up to which a forecast simulates the schedule
_READ_LOGS = 20  # newest trainings of a project, for the time of an epoch


@dataclass(frozen=True)
class Forecast:
    """The trainings of a sweep with a number of trials, in epochs of the base recipe."""

    trials: int
    exploration: float
    confirmation: tuple[float, ...]  # phases, one after another

    def seconds(self, epoch_seconds: float, slots: int, epochs: int) -> float:
        """Seconds until the end, if one slot takes `epoch_seconds` for an epoch."""
        return (self.exploration / slots * epoch_seconds
                + sum(phase_seconds(work, epochs, slots, epoch_seconds) for work in self.confirmation))


def phase_seconds(work: float, epochs: int, slots: int, epoch_seconds: float) -> float:
    """Seconds for whole trainings of `epochs` epochs, `work` in total, that run in parallel on the slots."""
    return math.ceil(work / epochs / slots - 1e-9) * epochs * epoch_seconds


def forecast(begun: Begun, trials: int) -> Forecast:
    """Forecast a sweep by simulating its schedule with equal orders at all rungs. Beyond `PLAYED` trials, each one
    counts as the mean trial of the second half."""
    if trials <= PLAYED:
        exploration = _explored(begun, trials)
    else:
        half, whole = (_explored(begun, played) for played in (PLAYED // 2, PLAYED))
        exploration = whole + (trials - PLAYED) * (whole - half) / (PLAYED - PLAYED // 2)
    epochs = begun.rungs[-1]
    finalists, pairs = confirmation_of(exploration / epochs)
    competing = finalists if finalists > 1 else 0
    return Forecast(trials, exploration, (float((pairs + (competing > 0) + competing) * epochs), float(pairs * epochs)))


def _explored(begun: Begun, trials: int) -> float:
    """Work of the exploration of `trials` trials, including the rest of the ladder at its end."""
    lines: list[Line] = []
    space = replace(begun.space, algorithm="grid" if begun.space.algorithm == "grid" else "random")
    schedule = begun.model_copy(update={"space": space}).schedule(write=lines.append)
    while not isinstance(reply := schedule.next(lambda: len(schedule.genes) < trials), Claimed):
        assert reply
        schedule.finish(reply, Outcome(fitness=random.Random(reply.trial).random()))
    return sum(line.end - line.start for line in lines if isinstance(line, Scheduled) and line.why != "seed")


def most_trials(begun: Begun, seconds: float, epoch_seconds: float, slots: int, limit: int) -> Forecast:
    """The largest sweep that ends within `seconds`, found by bisection."""
    low, high, epochs = 1, limit, begun.rungs[-1]
    while high - low > max(1, low // 20):
        middle = min((low + high) // 2, 2 * low + 1)
        fits = forecast(begun, middle).seconds(epoch_seconds, slots, epochs) < seconds
        low, high = (middle, high) if fits else (low, middle)
    return forecast(begun, low)


def recorded_epoch_seconds(project: Path, recipe: Recipe, labels: str, workers: int) -> float | None:
    """Seconds of an epoch on `workers` workers, or None if it is unknown. They are taken from the newest trainings of
    a project of sweeps, and of the project `train` beside it, with the same model, sizes and labels."""
    logs = sorted((*project.glob(f"*/trials/*/{EVENTS_FILE}"), *(project.parent / "train").glob(f"*/{EVENTS_FILE}")),
                  key=lambda log: log.stat().st_mtime_ns, reverse=True)
    spans = [span for log in logs[:_READ_LOGS] for span in _comparable_spans(read_events(log), recipe, labels, workers)]
    epochs = sum(epochs for epochs, _ in spans)
    return sum(seconds for _, seconds in spans) / epochs if epochs else None


def _comparable_spans(events: Sequence[Event], recipe: Recipe, labels: str, workers: int) -> list[tuple[int, float]]:
    run = next((event for event in events if isinstance(event, RunEvent)), None)
    data = next((event for event in events if isinstance(event, DatasetEvent)), None)
    wanted, names = recipe.model_dump(mode="json"), ("imgsz", "batch_size", "microbatch", "precision", "noval")
    if (run is None or data is None or data.splits["train"].digest != labels
            or Path(run.recipe["model"]).name != Path(recipe.model).name
            or any(run.recipe.get(name) != wanted[name] for name in names)):
        return []
    return trained_spans(events, workers)


def trained_spans(events: Sequence[Event], workers: int) -> list[tuple[int, float]]:
    """(epochs, seconds of a slot of `workers` workers) of each ended command of a log. The time lasts from the
    command's first worker to its end, so it includes validation and checkpoints."""
    spans: list[tuple[int, float]] = []
    first: StartEvent | None = None
    since, seconds, number = 0.0, 0.0, 0
    for event in events:
        if isinstance(event, DatasetEvent):
            first, since, seconds = None, 0.0, 0.0
        elif isinstance(event, WorkerEvent) and not since:
            since, number = event.time, workers
        elif isinstance(event, (StartEvent, EndEvent)) and since:
            seconds, since = seconds + (event.time - since) * number / workers, event.time
            if isinstance(event, StartEvent):
                first, number = first or event, event.num_workers
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

    def __init__(self, begun: Begun, trials: int, hours: float, spent: float, epoch_seconds: float | None,
                 slots: Callable[[], int], clock: Callable[[], float] = time.monotonic) -> None:
        self._begun, self._trials, self._limit, self._spent = begun, trials, 3600 * hours or math.inf, spent
        self._known, self._slots, self._clock = epoch_seconds, slots, clock
        self._began = clock()
        self._measured: list[tuple[float, float]] = []  # (work, slot seconds) of finished tasks
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
        prior = 2.0 * self._begun.rungs[-1] if self._known else 0.0
        work = prior + sum(work for work, _ in self._measured)
        seconds = prior * (self._known or 0.0) + sum(seconds for _, seconds in self._measured)
        return seconds / work if work else None

    def measure(self, work: float, seconds: float) -> None:
        """Note that a slot took `seconds` for `work`."""
        self._measured.append((work, seconds))

    def explores(self) -> bool:
        """Whether the sweep continues with new trials. Once False, it stays False."""
        assert self.schedule is not None
        self._closed = (self._closed or len(self.schedule.genes) >= self._trials
                        or self.seconds + (self._closing_seconds(self._promoted) or 0.0) >= self._limit)
        return not self._closed

    @property
    def _promoted(self) -> float:
        """Work of the paused trials that continue when exploration ends: about a third of those that are due."""
        return self._begun.virtual_slots / 3 * (self._begun.rungs[-1] - self._begun.rungs[0])

    def _closing_seconds(self, promoted: float) -> float | None:
        """Seconds until the end, if exploration ends now."""
        assert self.schedule is not None
        each, slots, epochs = self.epoch_seconds, max(1, self._slots()), self._begun.rungs[-1]
        if each is None:
            return None
        running, *phases = self.schedule.closing_work
        return (RESERVE_SECONDS + (running + promoted) / slots * each
                + sum(phase_seconds(work, epochs, slots, each) for work in phases))

    def seconds_left(self) -> float | None:
        """Seconds until the end of the sweep; None if unknown."""
        if self.schedule is None or (each := self.epoch_seconds) is None:
            return None
        if self._closed:
            return self._closing_seconds(self._promoted)
        if self._limit < math.inf:
            return max(0.0, self._limit - self.seconds)
        ahead = max(0.0, self._whole.exploration - self.schedule.explored_work)
        return ahead / max(1, self._slots()) * each + (self._closing_seconds(0.0) or 0.0)


def describe(begun: Begun, trials: int, hours: float, slots: int, epoch_seconds: float | None) -> list[str]:
    """The trainings of a sweep and their time, line by line."""
    rungs, genes = begun.rungs, ", ".join(gene.name for gene in begun.space.genes)
    lines = [f"genes: {genes}",
             f"ladder: {' -> '.join(map(str, rungs))} epochs, the best third continues; the winner and the default are "
             "then trained on fresh seeds" if len(rungs) > 1 else f"ladder: none, every trial trains {rungs[0]} epochs",
             f"slots: {format_count(slots, 'trial')} at a time ({begun.virtual_slots} virtual)"]
    if epoch_seconds is None:
        limit = f"{trials} trials"
        if hours and trials == MOST_TRIALS:
            limit = f"it ends after {hours:g} hours"
        elif hours:
            limit = f"{trials} trials or {hours:g} hours, whichever comes first"
        return [*lines, f"budget: {limit}; the time of an epoch is not known before the first trial has trained"]
    plan = most_trials(begun, 3600 * hours, epoch_seconds, slots, trials) if hours else forecast(begun, trials)
    seconds = plan.seconds(epoch_seconds, slots, rungs[-1])
    confirmation = sum(plan.confirmation)
    return [*lines, f"epochs: {plan.exploration + confirmation:.0f} for {plan.trials} trials, {confirmation:.0f} of "
                    f"them to confirm the winner; {epoch_seconds:.3g} s each on one slot",
            f"time: about {format_duration(3600 * hours if hours else seconds)} on this cluster"]
