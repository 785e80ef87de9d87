"""The order of a sweep's trainings: a state machine on a virtual clock. Outcomes may arrive in any real order.

The unit of virtual time is one epoch of the base recipe. A fixed number of virtual slots train. They start one after
another: equally long trainings then do not end together, and the next one waits for a single result. The slot that is
free first makes the next decision: it continues a paused trial to its next rung, or trains a new proposal. A result
counts when its virtual time has come. Every line of the ledger therefore follows from space, seed, slots and outcomes,
and executions at different speeds write equal ledgers.

Trials pause at each rung, and one in four continues, the best that is paused. A proposal of the process may leave out
the first one. The end takes a fork of virtual time, in two stages:

1. The best paused trials train to their ends, in the time that one of the first rung needs.
2. The best trials and the default train on fresh seeds, and the claim follows.

A later exploration continues at the point of closing and ignores the fork, whose trainings are not repeated.
"""

from __future__ import annotations

import heapq
import math
import operator
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
from pydantic import BaseModel

from ray_yolo.config.recipe import Recipe, recipe_digest
from ray_yolo.core.errors import InputError
from ray_yolo.tune.claim import LAW, Claim, Law
from ray_yolo.tune.confirmation import (
    MOST_FINALISTS,
    ConfirmationPlan,
    compare_finalists,
    number_of_runs,
    plan_confirmation,
)
from ray_yolo.tune.evolution import Genes, Space, grid_size, num_combinations
from ray_yolo.tune.ledger_events import (
    ChosenEvent,
    ClaimedEvent,
    ClosedEvent,
    CountedEvent,
    FailedEvent,
    FinalistsEvent,
    LedgerEvent,
    ProposedEvent,
    ScheduledEvent,
    TrialNumbers,
    Why,
)
from ray_yolo.tune.proposals import CountedResults, Proposal, fit_process, next_proposal
from ray_yolo.tune.surrogate import Observation, Surrogate, encode
from ray_yolo.tune.timeline import Timeline
from ray_yolo.tune.trials import overlay

REDUCTION = 4  # one in so many trials continues


class Outcome(BaseModel, frozen=True):
    """The result of a training after a number of epochs. Without a fitness, it failed for a `reason`."""

    fitness: float | None = None
    metrics: TrialNumbers = {}
    losses: TrialNumbers = {}
    classes: TrialNumbers = {}  # mAP50-95 by class
    weights: str = ""  # digest of the weights
    reason: str = ""
    diverged: bool = False


class Task(NamedTuple):
    """Train a trial on one seed, from its present epoch to a later one. Times are virtual."""

    trial: int
    genes: Genes
    seed: int  # the recipe's seed, or a fresh one
    until: int
    start: float
    end: float


class Ending(NamedTuple):
    """What there is time for once exploration is closed."""

    finishing: float = math.inf  # the virtual time in which paused trials may train to their ends
    too_slow: tuple[int, ...] = ()  # trials that can be no finalists


def address(recipe: Recipe, genes: Genes, seed: int) -> str:
    """The identity of a training of a sweep over `recipe`: equal trainings need not be repeated."""
    return recipe_digest(overlay(recipe, genes).model_copy(update={"seed": seed}))


def rungs_of(epochs: int) -> tuple[int, ...]:
    """The epochs of the rungs: a ninth of a training, four ninths, and the whole training."""
    first = -(-epochs // 9)
    second = -(-4 * epochs // 9)
    return tuple(sorted({first, second, epochs}))


@dataclass
class _Closing:
    """The end of a sweep: a fork of the exploration, and the trainings on fresh seeds."""

    timeline: Timeline
    closed: ClosedEvent
    plan: ConfirmationPlan
    process: Surrogate | None = None  # it has learnt from the exploration's trainings
    finalists: tuple[int, ...] | None = None
    tasks: deque[tuple[int, int]] | None = None  # (trial, seed) still to be scheduled
    claimed: ClaimedEvent | None = None


class Replayable(ABC):
    """Writes each decision, or compares it with the recorded one while a ledger is replayed.

    Args:
        write: called with each new event before it takes effect.
    """

    def __init__(self, write: Callable[[LedgerEvent], None]) -> None:
        self._write = write
        self._recorded: deque[LedgerEvent] = deque()  # events of a ledger that is replayed
        self._problems: list[str] = []

    def restore(self, events: Iterable[LedgerEvent]) -> None:
        """Continue from the events of a ledger. Proposals are taken from them; everything else must follow from them.

        Raises:
            InputError: if an event does not follow from those before it.
        """
        problems = self.verify(events, check_genes=False)  # it replays the events in this schedule
        if problems:
            raise InputError(f"ledger: {problems[0]}; restore it from a copy, or choose another --name")

    @abstractmethod
    def verify(self, events: Iterable[LedgerEvent], *, check_genes: bool = True) -> list[str]:
        """Replay a ledger in this schedule.

        Returns its inconsistencies, up to the first event that does not follow from those before it.
        """

    def _emit(self, event: LedgerEvent) -> None:
        """Write an event, or compare it with the recorded one."""
        if not self._recorded:
            self._write(event)
            return
        recorded = self._recorded.popleft()
        if recorded != event:
            self._problems.append(f"{recorded} is recorded, but {event} follows from the lines before")


class Schedule(Replayable):
    """Decides what to train next. It reads no clock and no file. Not thread-safe.

    Args:
        space: the genes, with all starts.
        seed: of proposals and trainings.
        rungs: epochs at which trials pause, ascending; the last one is the whole training.
        virtual_slots: trainings at the same virtual time.
        cost: virtual time of one epoch with these genes: pixels x images, 1 for the base recipe.
        write: called with each new event, in virtual order, before it takes effect.
        law: the rules of the release that began the sweep.
    """

    def __init__(self, space: Space, seed: int, rungs: Sequence[int], virtual_slots: int,
                 cost: Callable[[Genes], float] = lambda genes: 1.0,
                 write: Callable[[LedgerEvent], None] = lambda event: None, law: Law = LAW) -> None:
        self._space, self._seed, self._rungs, self._law = space, seed, tuple(rungs), law
        super().__init__(write)
        self._cost = cost
        self._epochs = self._rungs[-1]
        starts = [slot * self._rungs[0] / virtual_slots for slot in range(virtual_slots)]
        self._explored = Timeline(starts, seed)
        self._closing: _Closing | None = None
        self.genes: list[Genes] = []
        """Genes of each trial."""
        self.costs: list[float] = []
        """Virtual time of an epoch of each trial."""
        self._places: list[tuple[float, ...]] = []  # genes lie there in the unit cube
        self._owners: dict[tuple[Any, ...], int] = {}  # the first trial with these genes
        self._known: dict[tuple[int, int, int], Outcome] = {}  # the keys are owner, seed and epochs
        self._handed: set[tuple[int, int, int]] = set()  # tasks, by the same
        self._ready: deque[Task] = deque()
        self._noted: set[tuple[int, int, int]] = set()  # trial, seed and epochs whose outcome has an event
        self._check_genes = False
        self._expected: tuple[tuple[bool, int, int], list[int]] | None = None
        """What a ranking follows from (whether of the exploration, its numbers of results and of trials), and it."""

    def next(self, explore: bool | Callable[[], bool] = True, ending: Callable[[], Ending] = Ending
             ) -> Task | ClaimedEvent | None:
        """The virtually earliest task that was not returned before; call it until it returns no task.

        Args:
            explore: whether exploration continues. If not, no more trials are proposed, and the sweep ends. A sweep
            that has ended continues if it explores again.
            ending: returns what there is time for once exploration is closed. Paused trials get at most the time that
            the slowest possible finalist needs; by default they get all of it.

        Returns:
            A task; the claim if the sweep has ended; None if no decision can be made before one of the tasks handed out
            has its outcome.
        """
        while not self._ready:
            explores = explore() if callable(explore) else explore
            if not self._decide(explores, ending):
                return self._closing.claimed if self._closing else None
        return self._ready.popleft()

    def finish(self, task: Task, outcome: Outcome) -> None:
        """Record the outcome of a task. Outcomes may arrive in any real order."""
        self._known[task.trial, task.seed, task.until] = outcome

    def closing_time(self, slots: int, epoch: Callable[[int], float] = lambda trial: 1.0, most: float = math.inf
                     ) -> tuple[float, float]:
        """The time to the end of the sweep if exploration is closed after one more trial, in epochs: (finishing,
        confirming).

        Until the finalists are known, the slowest of those that may become finalists count, also for the next trial.

        Args:
            slots: real slots. A virtual slot is slower where there are more virtual slots than real ones.
            epoch: returns the time of an epoch of a trial; 1 for the base recipe.
            most: time that a trial may need to become a finalist and be confirmed; no time is left for a slower one.
        """
        closing = self._closing or self._plan_closing(math.inf)
        if closing.claimed:
            return 0.0, 0.0
        timeline = closing.timeline
        slowness = len(timeline.slots) / slots
        running = timeline.running_time(slots)
        if closing.tasks is None:
            planned, slowest = float(self._epochs - self._rungs[0]), 0
            step = max(map(operator.sub, self._rungs[1:], self._rungs[:-1]), default=self._rungs[0])
            likely = self._likely_finalists(timeline, closing.plan, epoch)
            if not self._closing and self._may_propose(True):
                proposed = self._rungs[self._last_first_level] * max(map(epoch, likely), default=1.0)
                running = max(running, _makespan(
                    [*self._unfinished(timeline), proposed], slots, len(timeline.slots)))
            for trial in set(likely) - set(closing.closed.too_slow):
                planned = max(planned, step * epoch(trial) / slowness)  # it may continue to another rung before the end
                left = (self._epochs - timeline.until[trial]) * epoch(trial)
                if left * slowness + self.confirming_time(trial, slots, epoch) <= most:
                    planned = max(planned, left)
                    slowest = max(slowest, trial, key=epoch)
            if self._closing:
                planned = closing.closed.until - timeline.now
            return max(planned * slowness, running), self.confirming_time(slowest, slots, epoch)
        waiting = _makespan([self._epochs * epoch(trial) for trial, _ in closing.tasks], slots, len(timeline.slots))
        return 0.0, running + waiting

    @property
    def _last_first_level(self) -> int:
        """The highest rung to which the next trial may train first."""
        is_by_process = self._law.skips_rungs and self._space.algorithm == "gp"
        return max(0, len(self._rungs) - 2) if is_by_process else 0

    def _unfinished(self, timeline: Timeline) -> Iterator[float]:
        """The times of the trainings that run beyond the next decision and have no outcome: on real slots, they may all
        wait."""
        for event in timeline.running.values():
            key = self._owner(event.trial), event.seed, event.until
            if event.end > timeline.now and key not in self._known:
                yield event.end - event.start

    def running_time(self, slots: int) -> float:
        """The time until the trainings of the exploration end that run now, in epochs."""
        return self._explored.running_time(slots)

    def finishing_time(self, trial: int, slots: int, epoch: Callable[[int], float]) -> float:
        """The time until a trial has trained to its end, in epochs; 0 if it has. Arguments as in `closing_time`."""
        left = self._epochs - self._explored.until.get(trial, self._epochs)
        return left * epoch(trial) * len(self._explored.slots) / slots

    def confirming_time(self, trial: int, slots: int, epoch: Callable[[int], float]) -> float:
        """The time of the trainings on fresh seeds, in epochs, where all finalists are as slow as this trial.

        Arguments as in `closing_time`.
        """
        plan = (self._closing or self._plan_closing(math.inf)).plan
        runs = self._fresh_runs(plan, [trial] * plan.finalists)
        return _makespan([self._epochs * epoch(each) for each, _ in runs], slots, len(self._explored.slots))

    def may_win(self) -> set[int]:
        """The trials whose whole trainings may win the sweep: the default, and the finalists; before these are known,
        those of the highest expectation, and two more."""
        if self._closing and self._closing.finalists is not None:
            return {0, *self._closing.finalists}
        timeline = self._closing.timeline if self._closing else self._explored
        return {0, *self._best_whole(timeline, self._process(timeline))[:MOST_FINALISTS + 2]}

    @property
    def explored_work(self) -> float:
        """The work of the exploration so far."""
        return self._explored.work

    @property
    def explored_time(self) -> float:
        """The virtual time of the exploration's next decision."""
        return self._explored.now

    def verify(self, events: Iterable[LedgerEvent], *, check_genes: bool = True) -> list[str]:
        """Replay a ledger in this schedule.

        Returns its inconsistencies, up to the first event that does not follow from those before it.
        """
        self._recorded = deque(events)
        self._check_genes, problems = check_genes, self._problems
        self._learn_outcomes(self._recorded)
        while self._recorded and not problems:
            if not self._replay() and self._recorded:
                problems.append(f"{self._recorded[0]} does not follow: a result before it is missing")
        return problems

    def _learn_outcomes(self, events: Iterable[LedgerEvent]) -> None:
        """Take the outcomes of a ledger."""
        owners: dict[int, int] = {}
        for event in events:
            if isinstance(event, ProposedEvent):
                owners[event.trial] = self._owners.setdefault(genes_key(event.genes), event.trial)
            elif isinstance(event, (CountedEvent, FailedEvent)):
                owner = owners.get(event.trial, event.trial)
                outcome = Outcome.model_validate(event, from_attributes=True)
                self._known.setdefault((owner, event.seed, event.epochs), outcome)

    # Two ways to make a decision. Most follow from the results; the budget or the ledger decides when exploration ends.

    def _decide(self, explores: bool, ending: Callable[[], Ending]) -> bool:
        """Make the next decision. False at the end of the sweep, or if a result is missing."""
        if self._has_ended:
            if not self._may_propose(explores):
                return False
            self._closing = None
            return True
        if not self._count_due():
            return False
        if self._follow():
            return True
        if self._may_propose(explores):
            self._propose()
        else:
            ends = ending()
            self._close(self._plan_closing(self._explored.now + ends.finishing, ends.too_slow))
        return True

    def _replay(self) -> bool:
        """Make the next decision of the recorded events. False if a result is missing, or the record is at its end."""
        if self._has_ended:  # and events follow: the sweep was continued
            self._closing = None
            return True
        if not self._count_due():
            return False
        if self._follow():
            return True
        if not self._recorded:
            return False
        event = self._recorded[0]
        if isinstance(event, ClosedEvent):
            self._close(self._plan_closing(event.until, event.too_slow))
        else:
            self._propose()
        return True

    @property
    def _has_ended(self) -> bool:
        return self._closing is not None and self._closing.claimed is not None

    def _may_propose(self, explores: bool) -> bool:
        """Whether a new trial is proposed. There is always a default, and a finite space has an end."""
        if not self.genes:
            return True
        if self._space.algorithm == "grid":
            is_exhausted = len(self.genes) >= grid_size(self._space.genes)
        else:
            is_exhausted = len(self._owners) >= num_combinations(self._space.genes)
        return explores and not is_exhausted

    def _follow(self) -> bool:
        """Make the decision that follows from the results; False if a proposal or the end is due."""
        if self._closing:
            self._continue_closing(self._closing)
            return True
        promoted = self._promoted(self._explored)
        if promoted is None:
            return False
        trial, why = promoted
        rung = self._explored.until[trial]
        self._schedule(self._explored, trial, self._seed, self._rungs[self._rungs.index(rung) + 1], why)
        return True

    def _count_due(self) -> bool:
        """Count the results that are due; False if one of them is missing."""
        timeline = self._closing.timeline if self._closing else self._explored
        for event in timeline.due():
            outcome = self._known.get((self._owner(event.trial), event.seed, event.until))
            if outcome is None:
                return False
            fitness = outcome.fitness
            if fitness is not None and not np.isfinite(fitness):
                fitness = None
            self._note_result(event, outcome, fitness)
            timeline.count(event, fitness)
        return True

    def _note_result(self, event: ScheduledEvent, outcome: Outcome, fitness: float | None) -> None:
        """Write the result of a training, once."""
        key = event.trial, event.seed, event.until
        if key in self._noted:
            return
        self._noted.add(key)
        training = {"trial": event.trial, "seed": event.seed, "epochs": event.until}
        if fitness is None:
            self._emit(FailedEvent(**training, reason=outcome.reason or "no finite fitness", diverged=outcome.diverged))
        else:
            self._emit(CountedEvent(**training, **outcome.model_dump(exclude={"reason", "diverged", "classes"})))

    def _promoted(self, timeline: Timeline) -> tuple[int, Why] | None:
        """The paused trial that continues to its next rung, and why; the highest rung first.

        The default always continues. Of the others, so many have continued at any time: one in `REDUCTION`, each the
        best that was paused.
        """
        for rung in reversed(self._rungs[:-1]):
            if timeline.is_paused(0, rung):
                return 0, "default"
            others = [trial for trial in timeline.ranked(rung) if trial != 0]
            paused = [trial for trial in others if timeline.is_paused(trial, rung)]
            continued = sum(timeline.until[trial] > rung for trial in others)
            if paused and continued < len(others) // REDUCTION:
                return paused[0], "best"
        return None

    def _schedule(self, timeline: Timeline, trial: int, seed: int, until: int, why: Why) -> None:
        """Train a trial on the slot that is free first."""
        owner, slot = self._owner(trial), timeline.free_slot
        trained = 0  # a training on a fresh seed starts from its first epoch
        if seed == self._seed:
            trained = timeline.until.get(trial, 0)
        start = timeline.slots[slot]
        end = start + (until - trained) * self.costs[trial]
        event = ScheduledEvent(trial=trial, seed=seed, until=until, start=start, end=end, why=why,
                               closing=self._closing is not None)
        self._emit(event)
        timeline.occupy(slot, event)
        key = owner, seed, until
        if key not in self._known and key not in self._handed:
            self._handed.add(key)
            self._ready.append(Task(owner, self.genes[owner], seed, until, start, end))

    def _propose(self) -> None:
        """Propose a trial, and train it to the first rung."""
        timeline = self._explored
        number = len(self.genes)
        running = []
        for event in timeline.running.values():
            level = self._rungs.index(event.until)
            running.append(Observation(self._places[event.trial], level, None))
        results = CountedResults(timeline.rows(self.genes), self._observations(timeline), running, len(self._rungs))
        proposal = next_proposal(self._space, self._seed, number, results)
        proposal = proposal._replace(level=min(proposal.level, self._last_first_level))
        genes, level = self._checked_proposal(number, proposal)
        self._emit(ProposedEvent(
            trial=number, genes=genes, how=proposal.how, parents=proposal.parents, at=timeline.now, level=level))
        self.genes.append(dict(genes))
        self.costs.append(self._cost(genes))
        self._places.append(encode(self._space.genes, genes))
        self._owners.setdefault(genes_key(genes), number)
        self._schedule(timeline, number, self._seed, self._rungs[level], "new")

    def _checked_proposal(self, number: int, proposal: Proposal) -> tuple[Genes, int]:
        """The recorded genes and first rung of a trial that is replayed, else those of its proposal."""
        recorded = self._recorded[0] if self._recorded else None
        if not isinstance(recorded, ProposedEvent) or recorded.trial != number:
            return proposal.genes, proposal.level
        follows = {**proposal.genes, "its first rung": proposal.level}
        found = {**recorded.genes, "its first rung": recorded.level}
        wrong = [name for name in follows if follows[name] != found.get(name)]
        if self._check_genes and wrong:
            name = wrong[0]
            self._problems.append(f"trial {number}: {name} is {found.get(name)!r}, but {follows[name]!r} follows from "
                                  "its rows")
        return recorded.genes, min(recorded.level, len(self._rungs) - 1)

    # The end: the best paused trials train to their ends, then finalists and default train on fresh seeds.

    def _plan_closing(self, until: float, too_slow: tuple[int, ...] = ()) -> _Closing:
        """The end of the sweep if exploration is closed now, and paused trials may end until a time."""
        timeline = self._explored
        runs = number_of_runs(timeline.work / self._epochs, len(timeline.slots))
        plan = plan_confirmation(runs)
        longest = float(self._epochs - self._rungs[0])  # for a trial that is paused at the first rung
        for trial in self._likely_finalists(timeline, plan, self.costs.__getitem__):
            longest = max(longest, (self._epochs - timeline.until[trial]) * self.costs[trial])
        until = min(max(until, timeline.now), timeline.now + longest)
        closed = ClosedEvent(at=timeline.now, until=until, runs=runs, too_slow=too_slow)
        return _Closing(timeline, closed, plan)

    def _close(self, closing: _Closing) -> None:
        """End the exploration in a fork of its timeline."""
        self._emit(closing.closed)
        closing.timeline = deepcopy(closing.timeline)
        self._closing = closing

    def _continue_closing(self, closing: _Closing) -> None:
        """Make the next decision for the slot that is free first."""
        timeline = closing.timeline
        if closing.tasks is None:
            trial = self._next_to_finish(closing)
            if trial is not None:
                self._schedule(timeline, trial, self._seed, self._epochs, "finish")
            elif timeline.running:
                timeline.wait(timeline.free_slot)
            else:
                self._choose_finalists(closing)
        elif closing.tasks:
            trial, seed = closing.tasks.popleft()
            self._schedule(timeline, trial, seed, self._epochs, "seed")
        elif timeline.running:
            timeline.wait(timeline.free_slot)
        else:
            self._claim(closing)

    def _next_to_finish(self, closing: _Closing) -> int | None:
        """The paused trial of the highest expectation among those that can end in time; the default ends in any case.
        """
        timeline = closing.timeline
        candidates = []
        for rung, trial in timeline.paused(self._rungs[:-1]):
            if trial == 0:
                return trial
            if trial in closing.closed.too_slow:
                continue
            end = timeline.now + (self._epochs - rung) * self.costs[trial]
            if end <= closing.closed.until:
                candidates.append(trial)
        ranked = self._ranked(candidates, self._process(timeline))
        return ranked[0] if ranked else None

    def _choose_finalists(self, closing: _Closing) -> None:
        """The best trials by expectation of a whole training, other than the default."""
        timeline = closing.timeline
        closing.process = self._process(timeline)
        best = self._best_whole(timeline, closing.process, closing.closed.too_slow)
        closing.finalists = tuple(best[:closing.plan.finalists])
        self._emit(FinalistsEvent(trials=closing.finalists))
        closing.tasks = deque(self._fresh_runs(closing.plan, closing.finalists))

    def _best_whole(self, timeline: Timeline, process: Surrogate | None, but: Sequence[int] = ()) -> list[int]:
        """The trials with a whole training, other than the default and these, by expectation, best first."""
        whole = {self._owner(trial) for trial in timeline.ranked(self._epochs) if trial not in timeline.failed}
        return self._ranked(sorted(whole - {0, *but}), process)

    def _likely_finalists(self, timeline: Timeline, plan: ConfirmationPlan, epoch: Callable[[int], float]) -> list[int]:
        """The best trials by expectation, and two more, because results until then change the order.

        None where every trial is as fast as the default, so that none of them decides a time.
        """
        if all(epoch(trial) == 1.0 for trial in timeline.until):
            return []
        state = timeline is self._explored, len(timeline.counted), len(timeline.until)
        if self._expected is None or self._expected[0] != state:  # the process takes a while to fit
            trials = {self._owner(trial) for trial in timeline.until if trial not in timeline.failed}
            ranked = self._ranked(sorted(trials - {0}), self._process(timeline))
            self._expected = state, ranked[:MOST_FINALISTS + 2]
        return self._expected[1][:plan.finalists + 2]

    def _fresh_runs(self, plan: ConfirmationPlan, finalists: Sequence[int]) -> Iterator[tuple[int, int]]:
        """The trainings on fresh seeds: all finalists on the same ones, the default on some more or fewer."""
        first = self._seed + 1
        if not finalists:
            return
        for number in range(max(plan.seeds, plan.default_seeds)):
            if number < plan.seeds:
                for trial in finalists:
                    yield trial, first + number
            if number < plan.default_seeds and 0 not in self._explored.failed:
                yield 0, first + number

    def _claim(self, closing: _Closing) -> None:
        """The winner and its claim: the end of the sweep."""
        finalists = closing.finalists or ()
        seeds = [self._seed + 1 + number for number in range(closing.plan.seeds)]
        runs = {trial: self._fitness(self._outcomes(trial, seeds)) for trial in finalists}
        default_seeds = [self._seed, *(self._seed + 1 + number for number in range(closing.plan.default_seeds))]
        of_default = self._outcomes(0, default_seeds)
        default = self._fitness(of_default)
        places = {trial: self._places[trial] for trial in (0, *finalists)}
        first = closing.timeline.results.get(0, {}).get(self._rungs[0], 0.0) if len(self._rungs) > 1 else 0.0
        comparisons = compare_finalists(runs, default, closing.process, places, self._law, first)
        chosen, claim = comparisons[0] if comparisons else (0, Claim(better=False))
        if claim.runs and self._law.counts_diverged:
            sides = self._outcomes(chosen, seeds), of_default
            diverged = tuple(sum(outcome.diverged for outcome in side) for side in sides)
            claim = claim.model_copy(update={"diverged": diverged})
        self._emit(ChosenEvent(trial=chosen))
        has_default = bool(default) and self._law.counts_diverged  # else, a failed default is no default
        wins = claim.ahead or (0 in closing.timeline.failed and not has_default)
        closing.claimed = ClaimedEvent(winner=chosen if wins else 0, claim=claim)
        self._emit(closing.claimed)

    def _outcomes(self, trial: int, seeds: Sequence[int]) -> list[Outcome]:
        """The outcomes of a trial's whole trainings on these seeds, in order, without those that are missing."""
        keys = ((self._owner(trial), seed, self._epochs) for seed in seeds)
        return [self._known[key] for key in keys if key in self._known]

    def _fitness(self, outcomes: Iterable[Outcome]) -> list[float]:
        """The fitness of trainings, in order: 0 where one has diverged, none where it has failed otherwise."""
        fitness = []
        for outcome in outcomes:
            if outcome.fitness is not None and math.isfinite(outcome.fitness):
                fitness.append(outcome.fitness)
            elif outcome.diverged and self._law.counts_diverged:
                fitness.append(0.0)
        return fitness

    def _ranked(self, trials: Sequence[int], process: Surrogate | None) -> list[int]:
        """The trials by the fitness that the process expects of a whole training, best first."""
        if not trials or process is None:
            return list(trials)
        expected, _ = process.predict(np.array([self._places[trial] for trial in trials]))
        return [trials[index] for index in np.argsort(-expected, kind="stable")]

    def _observations(self, timeline: Timeline) -> list[Observation]:
        """All counted results."""
        return [Observation(self._places[trial], self._rungs.index(epochs), fitness)
                for trial, epochs, fitness in timeline.counted]

    def _process(self, timeline: Timeline) -> Surrogate | None:
        return fit_process(self._observations(timeline), len(self._rungs))

    def _owner(self, trial: int) -> int:
        """The first trial with the same genes, whose trainings are reused."""
        return self._owners[genes_key(self.genes[trial])]


def _makespan(times: Sequence[float], slots: int, virtual_slots: int) -> float:
    """When the last of some trainings ends, if each starts on the slot that is free first. Those beyond the virtual
    slots wait for all before them, because these have to count first."""
    end = 0.0
    for first in range(0, len(times), virtual_slots):
        free = [end] * slots
        for time in times[first:first + virtual_slots]:
            heapq.heapreplace(free, free[0] + time)
        end = max(free)
    return end


def genes_key(genes: Mapping[str, Any]) -> tuple[Any, ...]:
    """What two equal trials have in common."""
    return tuple((name, type(value).__name__, value) for name, value in sorted(genes.items()))
