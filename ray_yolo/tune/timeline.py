"""One course of virtual time of a sweep: its slots, the trainings that run on them, and the results that count.

The unit of virtual time is one epoch of the base recipe.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from ray_yolo.tune.evolution import Genes, TrialRow
from ray_yolo.tune.ledger_events import ScheduledEvent


@dataclass
class Timeline:
    """The exploration of a sweep, or the fork of it that ends the sweep.

    Args:
        slots: the virtual time at which each slot is free.
        seed: of the exploration's trainings; those on other seeds have no place among the results.
    """

    slots: list[float]
    seed: int
    running: dict[tuple[int, int], ScheduledEvent] = field(default_factory=dict)  # the keys are trial and seed
    until: dict[int, int] = field(default_factory=dict)  # epochs that a trial has or will have trained
    results: dict[int, dict[int, float]] = field(default_factory=dict)  # trial -> epochs -> fitness
    failed: dict[int, int] = field(default_factory=dict)  # trial -> epochs
    counted: list[tuple[int, int, float | None]] = field(default_factory=list)  # (trial, epochs, fitness) in order
    work: float = 0.0  # scheduled, in virtual time of one slot

    @property
    def free_slot(self) -> int:
        """The slot that is free first."""
        return self.slots.index(min(self.slots))

    @property
    def now(self) -> float:
        """The virtual time of the next decision."""
        return min(self.slots)

    def running_time(self, slots: int) -> float:
        """The time until all running trainings have ended, if so many real slots share their work."""
        left = [event.end - self.now for event in self.running.values()]
        return max(sum(left) / slots, *left, 0.0)

    def due(self) -> list[ScheduledEvent]:
        """The running trainings that have ended by now, in the order in which their results count."""
        ended = [event for event in self.running.values() if event.end <= self.now]
        return sorted(ended, key=lambda event: (event.end, event.trial, event.seed))

    def occupy(self, slot: int, event: ScheduledEvent) -> None:
        """Train on a slot."""
        self.slots[slot] = event.end
        self.running[event.trial, event.seed] = event
        self.work += event.end - event.start
        if event.seed == self.seed:
            self.until[event.trial] = event.until

    def wait(self, slot: int) -> None:
        """Leave a slot idle until the next training ends."""
        self.slots[slot] = min(event.end for event in self.running.values())

    def count(self, event: ScheduledEvent, fitness: float | None) -> None:
        """Count the result of a training; None: it failed."""
        del self.running[event.trial, event.seed]
        if event.seed != self.seed:
            return
        self.counted.append((event.trial, event.until, fitness))
        if fitness is None:
            self.failed[event.trial] = event.until
        else:
            self.results.setdefault(event.trial, {})[event.until] = fitness

    def ranked(self, rung: int) -> list[int]:
        """The trials with a result at a rung, best first."""
        fitness = {trial: results[rung] for trial, results in self.results.items() if rung in results}
        return sorted(fitness, key=lambda trial: (-fitness[trial], trial))

    def is_paused(self, trial: int, rung: int) -> bool:
        """Whether a trial waits at a rung to be continued."""
        return self.until.get(trial) == rung and trial not in self.failed and (trial, self.seed) not in self.running

    def paused(self, rungs: Sequence[int]) -> Iterator[tuple[int, int]]:
        """All (rung, trial) that wait at one of these rungs, best first within a rung."""
        for rung in rungs:
            for trial in self.ranked(rung):
                if self.is_paused(trial, rung):
                    yield rung, trial

    def rows(self, genes: Sequence[Genes]) -> list[TrialRow]:
        """All trials with a result or a failure, with the fitness at the highest rung."""
        rows = [TrialRow(trial, genes[trial], None, rung) for trial, rung in self.failed.items()]
        for trial, results in self.results.items():
            if trial not in self.failed:
                highest = max(results)
                rows.append(TrialRow(trial, genes[trial], results[highest], highest))
        return sorted(rows)
