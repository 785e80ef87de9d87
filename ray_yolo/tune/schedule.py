"""The order of a sweep's trainings: a state machine on a virtual clock. Outcomes may arrive in any real order.

The unit of virtual time is one epoch of the base recipe. A fixed number of virtual slots train. They start one after
another: equally long trainings then do not end together, and the next one waits for a single result. The slot that is
free first makes the next decision: it continues a paused trial to its next rung, or trains a new proposal. A result
counts when its virtual time has come. Every line of the ledger therefore follows from space, seed, slots and outcomes,
and executions at different speeds write equal ledgers.

Trials pause at each rung, and the best third continues. Audits also continue, whatever they show, but no faster than
the best third: the n-th one after 3 n proposals. If they show that the order at a rung does not predict the order at
the next one, the rung is dropped. When exploration is closed, the trials on the ladder continue to their ends, and the
best trials and the default are trained on fresh seeds. This phase is a fork of virtual time: a later exploration
continues at the point of closing and ignores the fork. The trainings of the fork are not repeated.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass, field, replace
from typing import Any, Literal, NamedTuple

import numpy as np
from pydantic import BaseModel

from ray_yolo.config.recipe import Recipe, recipe_digest, warmup_batches
from ray_yolo.config.settings import canonical
from ray_yolo.core.errors import InputError
from ray_yolo.ops.seeding import Stream, generator
from ray_yolo.tune.claim import Claim, judge
from ray_yolo.tune.evolution import (
    NUM_PARENTS,
    Genes,
    Space,
    TrialRow,
    best_rows,
    grid_size,
    propose,
    screen,
)
from ray_yolo.tune.surrogate import Observation, Surrogate, encode, fit_surrogate, propose_place
from ray_yolo.tune.trials import overlay

AUDITS_FIRST, AUDITS_EACH = 8, 10  # audited: the first eight trials, and every tenth
SHARE = 3  # one in `SHARE` continues
LEAST_CORRELATION = 0.55  # Spearman, between a rung and the next one
GP_EACH = 2  # all but each second trial are proposed by the Gaussian process,
SCREENED_FIRST, SCREENED_SHARE = 8, 0.3  # after the first trials; of the others, this share redraws some genes
WORK_PER_PAIR = 11.0  # trainings of exploration for each pair of the claim
MOST_PAIRS = 8
Numbers = Mapping[str, float | None]


class Outcome(BaseModel, frozen=True):
    """The result of a training after a number of epochs. Without a fitness, it failed for a `reason`."""

    fitness: float | None = None
    metrics: Numbers = {}
    losses: Numbers = {}
    weights: str = ""  # digest of the weights
    reason: str = ""


class Task(NamedTuple):
    """Train a trial on one seed, from its present epoch to a later one. Times are virtual."""

    trial: int
    genes: Genes
    seed: int  # the recipe's seed, or a fresh one
    until: int
    start: float
    end: float


class Line(BaseModel, frozen=True):
    """A line of the ledger. None has a wall-clock time or the number of an attempt."""


class Proposed(Line):
    """A new trial, proposed at a virtual time from the results counted by then."""

    trial: int
    genes: Genes
    how: str  # start, evolve, random, grid, gp
    parents: tuple[int, ...]
    at: float


class Scheduled(Line):
    """A slot trains a trial on a seed until it has a number of epochs."""

    trial: int
    seed: int
    until: int
    start: float
    end: float
    why: Literal["new", "best", "audit", "unranked", "seed"]
    closing: bool = False  # not part of the exploration


class Counted(Line):
    """The result of a training counts from now on."""

    trial: int
    seed: int
    epochs: int
    fitness: float
    metrics: Numbers = {}
    losses: Numbers = {}
    weights: str = ""


class Failed(Line):
    """A training has failed and does not continue."""

    trial: int
    seed: int
    epochs: int
    reason: str


class Dropped(Line):
    """The order of trials at a rung does not predict that at the next rung: trials no longer pause there."""

    epochs: int
    correlation: float
    pairs: int


class Closed(Line):
    """Exploration was closed: the best trials and the default are trained on fresh seeds."""

    at: float
    finalists: int  # how many compete on the first fresh seed
    pairs: int  # seeds of the claim


class Finalists(Line):
    """The best trials, best first. If there are several, the first fresh seed decides between them."""

    trials: tuple[int, ...]


class Chosen(Line):
    """The trial that the remaining seeds compare with the default."""

    trial: int


class Claimed(Line):
    """The end: the winner, which is the default (0) unless another trial is ahead of it, and the claim."""

    winner: int
    claim: Claim

    def __str__(self) -> str:
        if not self.winner:
            return f"{self.claim}; the default (trial 0) is kept"
        reason = f"for its expected gain of {self.claim.gain:.2g}" if self.claim.pairs else "because the default failed"
        return f"trial {self.winner} is {self.claim}" + f"; it is kept {reason}" * (not self.claim.better)


LINES: dict[str, type[Line]] = {kind.__name__.lower(): kind for kind in (
    Proposed, Scheduled, Counted, Failed, Dropped, Closed, Finalists, Chosen, Claimed)}
"""The kinds of lines by the `type` that the ledger writes."""


def address(recipe: Recipe, genes: Genes, seed: int) -> str:
    """The identity of a training of a sweep over `recipe`: equal trainings need not be repeated."""
    return recipe_digest(overlay(recipe, genes).model_copy(update={"seed": seed}))


def rungs_of(epochs: int, warmup: float = 0.0, *, short: bool = False) -> tuple[int, ...]:
    """The epochs of the rungs: a third of a training, or later if a trial may warm up longer, and the whole training.

    Args:
        epochs: of a whole training.
        warmup: the most epochs of warm-up that the space allows; see `longest_warmup`.
        short: whether the budget is under ten trainings. The first rung is then a ninth, if warm-up is over by then.
    """
    third, past = -(-epochs // 3), math.floor(warmup) + 1
    first = max(-(-epochs // (9 if short else 3)), past)
    return (*(rung for rung in ((first, third) if third >= 2 * first else (first,)) if rung < epochs), epochs)


def longest_warmup(space: Space, recipe: Recipe, batches_per_epoch: int) -> float:
    """The most epochs of warm-up of any trial."""
    highest = {gene.name: max(gene.values, default=gene.high) for gene in space.genes
               if canonical(gene.name) in ("schedule.warmup_epochs", "schedule.warmup_min_batches")}
    return warmup_batches(overlay(recipe, highest), batches_per_epoch) / batches_per_epoch


def confirmation_of(trainings: float) -> tuple[int, int]:
    """The numbers of finalists and of pairs after an exploration of `trainings`: their work is about a fifth of it."""
    return 1 if trainings < 60 else 3, int(np.clip(round(trainings / WORK_PER_PAIR), 1, MOST_PAIRS))


def spearman(left: Sequence[float], right: Sequence[float]) -> float:
    """Rank correlation; 0 if all values on a side are equal."""
    ranks = [np.unique(values, return_inverse=True, return_counts=True) for values in (left, right)]
    a, b = ((np.cumsum(counts) - (counts - 1) / 2)[inverse] for _, inverse, counts in ranks)
    a, b = a - a.mean(), b - b.mean()
    norm = float(np.sqrt((a @ a) * (b @ b)))
    return float(a @ b) / norm if norm else 0.0


def is_audited(trial: int) -> bool:
    """Whether a trial continues past the first rung regardless of its result."""
    return trial < AUDITS_FIRST or trial % AUDITS_EACH == AUDITS_EACH - 1


def is_due(audited: int, trials: int) -> bool:
    """Whether an audited trial continues now that there are `trials` proposals. In a short sweep, most audits would
    otherwise be random trials that take the time of better ones."""
    earlier = min(audited, AUDITS_FIRST) + audited // AUDITS_EACH
    return SHARE * earlier <= trials


@dataclass
class _Track:
    """One course of virtual time, with the trainings that were scheduled and counted in it."""

    slots: list[float]
    running: dict[tuple[int, int], Scheduled] = field(default_factory=dict)  # by trial and seed
    until: dict[int, int] = field(default_factory=dict)  # epochs that a trial has or will have trained
    results: dict[int, dict[int, float]] = field(default_factory=dict)  # trial -> epochs -> fitness
    failed: dict[int, int] = field(default_factory=dict)  # trial -> epochs
    counted: list[tuple[int, int, float | None]] = field(default_factory=list)  # (trial, epochs, fitness) in order
    dropped: tuple[int, ...] = ()
    work: float = 0.0  # scheduled, in virtual time of one slot

    def rows(self, genes: Sequence[Genes]) -> list[TrialRow]:
        """All trials with a result or a failure, with the fitness at the highest rung."""
        ended = [TrialRow(trial, genes[trial], results[max(results)], max(results))
                 for trial, results in self.results.items() if trial not in self.failed]
        return sorted([*ended, *(TrialRow(trial, genes[trial], None, rung) for trial, rung in self.failed.items())])


@dataclass
class _Closing:
    """The end of a sweep: a fork of the exploration, and the trainings on fresh seeds."""

    track: _Track
    plan: Closed
    tasks: list[tuple[int, int]]  # (trial, seed) still to be scheduled, at first those of the default
    finalists: tuple[int, ...] | None = None
    process: Surrogate | None = None  # of the exploration's trainings
    chosen: int | None = None
    over: Claimed | None = None


class Schedule:
    """Decides what to train next. It reads no clock and no file. Not thread-safe.

    Args:
        space: the genes, with all starts.
        seed: of proposals and trainings.
        rungs: epochs at which trials pause, ascending; the last one is the whole training.
        virtual_slots: trainings at the same virtual time.
        cost: virtual time of one epoch with these genes: pixels x images, 1 for the base recipe.
        write: called with each new line, in virtual order, before the line takes effect.
    """

    def __init__(self, space: Space, seed: int, rungs: Sequence[int], virtual_slots: int,
                 cost: Callable[[Genes], float] = lambda genes: 1.0, write: Callable[[Line], None] = lambda line: None
                 ) -> None:
        self._space, self._seed, self._rungs, self._cost, self._write = space, seed, tuple(rungs), cost, write
        self._explored = _Track([slot * self._rungs[0] / virtual_slots for slot in range(virtual_slots)])
        self._closing: _Closing | None = None
        self.genes: list[Genes] = []
        """Genes of each trial."""
        self._owners: dict[tuple[Any, ...], int] = {}  # the first trial with these genes
        self._known: dict[tuple[int, int, int], Outcome] = {}  # by owner, seed and epochs
        self._handed: set[tuple[int, int, int]] = set()
        self._ready: deque[Task] = deque()
        self._noted: set[tuple[int, int, int]] = set()  # trial, seed and epochs whose outcome has a line
        self._recorded: deque[Line] = deque()  # lines of a ledger that is replayed
        self._check_genes, self._problems = False, list[str]()

    def next(self, explore: bool | Callable[[], bool] = True) -> Task | Claimed | None:
        """The virtually earliest task that was not returned before; call it until it returns no task.

        Args:
            explore: whether exploration continues. If not, no more trials are proposed, the ladder is completed, and
            fresh seeds decide.

        Returns:
            The claim if the sweep has ended; with `explore` it continues. None if no decision can be made before one of
            the tasks handed out has its outcome.
        """
        while not self._ready:
            if not self._step(explore() if callable(explore) else explore):
                return self._closing.over if self._closing else None
        return self._ready.popleft()

    def finish(self, task: Task, outcome: Outcome) -> None:
        """Record the outcome of a task. Outcomes may arrive in any real order."""
        self._known[task.trial, task.seed, task.until] = outcome

    @property
    def closing_work(self) -> tuple[float, ...]:
        """The remaining work if exploration is closed now, in epochs of the base recipe. It has three parts: running
        tasks, the finalists' first seed, and the seeds of the claim."""
        closing = self._closing or self._close()
        if closing.over:
            return (0.0,)
        track, plan, epochs = closing.track, closing.plan, self._rungs[-1]
        now = min(track.slots)
        running = sum(line.end - max(line.start, now) + self._expected(track, line) for line in track.running.values())
        competing = plan.finalists if plan.finalists > 1 and not closing.finalists else 0
        pairs = plan.pairs if closing.chosen is None else 0
        return (running, float((competing + len(closing.tasks)) * epochs), float(pairs * epochs))

    @property
    def explored_work(self) -> float:
        """The work of the exploration so far."""
        return self._explored.work

    def _expected(self, track: _Track, line: Scheduled) -> float:
        """Work by which a running task is expected to be continued."""
        if line.seed != self._seed or line.until == self._rungs[-1]:
            return 0.0
        audit = is_audited(line.trial) and is_due(line.trial, len(self.genes))
        share = 1.0 if line.until in track.dropped or audit else 1 / SHARE
        return share * (self._next_rung(track, line.until) - line.until) * self._cost(self.genes[line.trial])

    def restore(self, lines: Iterable[Line]) -> None:
        """Continue from the lines of a ledger. Proposals are taken from the lines; everything else must follow from
        them.

        Raises:
            InputError: if a line does not follow from those before it.
        """
        if problems := self.verify(lines, check_genes=False):
            raise InputError(f"ledger: {problems[0]}; restore it from a copy, or choose another --name")

    def verify(self, lines: Iterable[Line], *, check_genes: bool = True) -> list[str]:
        """The inconsistencies of a ledger, up to the first line that does not follow from those before it."""
        self._recorded = deque(lines)
        self._check_genes, problems = check_genes, self._problems
        owners: dict[int, int] = {}
        for line in self._recorded:
            if isinstance(line, Proposed):
                owners[line.trial] = self._owners.setdefault(_key(line.genes), line.trial)
            elif isinstance(line, (Counted, Failed)):
                outcome = Outcome.model_validate(line, from_attributes=True)
                self._known.setdefault((owners.get(line.trial, line.trial), line.seed, line.epochs), outcome)
        while self._recorded and not problems:
            if not self._step(None) and self._recorded:
                problems.append(f"{self._recorded[0]!r} does not follow: a result before it is missing")
        return problems

    # One step: count what is due, then decide for the slot that is free first.

    def _step(self, explore: bool | None) -> bool:
        """Advance by one decision; False at the end, or if a result is missing. Without `explore`, the recorded lines
        decide."""
        closing = self._closing
        if closing and closing.over:
            if not (self._recorded if explore is None else self._goes_on(explore)):
                return False
            self._closing = None
            return True
        track = closing.track if closing else self._explored
        slot = min(range(len(track.slots)), key=lambda slot: (track.slots[slot], slot))
        now = track.slots[slot]
        for line in sorted(track.running.values(), key=lambda line: (line.end, line.trial, line.seed)):
            if line.end > now:
                break
            if not self._count(track, line):
                return False
        if ready := self._ladder(track):
            trial, why = ready
            self._schedule(track, slot, trial, self._seed, self._next_rung(track, track.until[trial]), why)
        elif closing:
            self._close_step(closing, slot)
        elif self._goes_on(explore):
            self._propose(track, slot)
        elif explore is None and not self._recorded:
            return False
        else:
            closing = self._close()
            self._emit(closing.plan)
            self._closing = replace(closing, track=deepcopy(track))
        return True

    def _goes_on(self, explore: bool | None) -> bool:
        if explore is None:
            return bool(self._recorded) and not isinstance(self._recorded[0], Closed)
        is_exhausted = self._space.algorithm == "grid" and len(self.genes) >= grid_size(self._space.genes)
        return (explore and not is_exhausted) or not self.genes  # there is always a default

    def _count(self, track: _Track, line: Scheduled) -> bool:
        """Count the result of a task; False if it is not there yet."""
        outcome = self._known.get((self._owner(line.trial), line.seed, line.until))
        if outcome is None:
            return False
        key = line.trial, line.seed, line.until
        fitness = outcome.fitness if outcome.fitness is not None and np.isfinite(outcome.fitness) else None
        if key not in self._noted:
            self._noted.add(key)
            where = {"trial": line.trial, "seed": line.seed, "epochs": line.until}
            if fitness is None:
                self._emit(Failed(**where, reason=outcome.reason or "no finite fitness"))
            else:
                self._emit(Counted(**where, **outcome.model_dump(exclude={"reason"})))
        del track.running[line.trial, line.seed]
        if line.seed != self._seed:
            return True
        track.counted.append((line.trial, line.until, fitness))
        if fitness is None:
            track.failed[line.trial] = line.until
        else:
            track.results.setdefault(line.trial, {})[line.until] = fitness
            self._drop(track, line.trial, line.until)
        return True

    def _drop(self, track: _Track, trial: int, epochs: int) -> None:
        """Drop the rung below if audits show that its order does not predict that at this rung. After exploration, it
        stays: otherwise all trials paused there would continue and delay the end."""
        below = [rung for rung in self._rungs if rung < epochs and rung not in track.dropped]
        if self._closing or not below or not is_audited(trial):
            return
        pairs = [(results[below[-1]], results[epochs]) for number, results in track.results.items()
                 if is_audited(number) and below[-1] in results and epochs in results]
        if len(pairs) >= AUDITS_FIRST and (correlation := spearman(*zip(*pairs, strict=True))) < LEAST_CORRELATION:
            self._emit(Dropped(epochs=below[-1], correlation=correlation, pairs=len(pairs)))
            track.dropped = (*track.dropped, below[-1])

    def _next_rung(self, track: _Track, trained: int) -> int:
        return next(rung for rung in self._rungs if rung > trained and rung not in track.dropped)

    def _ladder(self, track: _Track) -> tuple[int, Literal["best", "audit", "unranked"]] | None:
        """The paused trial that continues next, highest rung first, and the reason."""
        for level, rung in reversed(list(enumerate(self._rungs[:-1]))):
            at_rung = {trial: results[rung] for trial, results in track.results.items() if rung in results}
            ranked = sorted(at_rung, key=lambda trial: (-at_rung[trial], trial))
            paused = [trial for trial in ranked if track.until[trial] == rung and trial not in track.failed]
            if paused and rung in track.dropped:
                return paused[0], "unranked"
            if audits := [trial for trial in paused if trial == 0 or (
                    level == 0 and is_audited(trial) and is_due(trial, len(self.genes)))]:
                return min(audits), "audit"
            if best := [trial for trial in ranked[:len(ranked) // SHARE] if trial in paused]:
                return best[0], "best"
        return None

    def _schedule(self, track: _Track, slot: int, trial: int, seed: int, until: int,
                  why: Literal["new", "best", "audit", "unranked", "seed"]) -> None:
        owner = self._owner(trial)
        trained = track.until.get(trial, 0) if seed == self._seed else 0
        work = (until - trained) * self._cost(self.genes[trial])
        start = track.slots[slot]
        line = Scheduled(trial=trial, seed=seed, until=until, start=start, end=start + work, why=why,
                         closing=self._closing is not None)
        self._emit(line)
        track.slots[slot], track.running[trial, seed] = line.end, line
        track.work += work
        if seed == self._seed:
            track.until[trial] = until
        if (key := (owner, seed, until)) not in self._known and key not in self._handed:
            self._handed.add(key)
            self._ready.append(Task(owner, self.genes[owner], seed, until, start, line.end))

    def _propose(self, track: _Track, slot: int) -> None:
        number = len(self.genes)
        genes, how, parents = self._proposal(number, track.rows(self.genes))
        if self._recorded and isinstance(line := self._recorded[0], Proposed) and line.trial == number:
            if self._check_genes and (wrong := [name for name in genes if genes[name] != line.genes.get(name)]):
                self._problems.append(f"trial {number}: {wrong[0]} is {line.genes.get(wrong[0])!r}, but "
                                      f"{genes[wrong[0]]!r} follows from its rows")
            genes = line.genes
        self._emit(Proposed(trial=number, genes=genes, how=how, parents=parents, at=track.slots[slot]))
        self.genes.append(dict(genes))
        self._owners.setdefault(_key(genes), number)
        self._schedule(track, slot, number, self._seed, self._next_rung(track, 0), "new")

    def _proposal(self, number: int, rows: Sequence[TrialRow]) -> tuple[Genes, str, tuple[int, ...]]:
        """The genes of a new trial, the method that chose them, and its parents."""
        space = self._space
        if space.algorithm == "gp":
            process = self._process(self._explored) if number >= SCREENED_FIRST and number % GP_EACH else None
            if process:
                tops = sorted({self._owner(row.trial) for row in rows if row.fitness is not None})
                return self._improve(process, tops, number), "gp", ()
            rng = generator(Stream.TRIALS, self._seed, number, 1)
            if number >= len(space.starts) and (number < SCREENED_FIRST or rng.random() < SCREENED_SHARE):
                origin = next((row.trial for row in best_rows(rows, 1) if number >= SCREENED_FIRST), 0)
                return screen(space.genes, self.genes[origin], rng), "random", (origin,)
            space = replace(space, algorithm="evolve", random_share=0.0)
        genes, parents = propose(space, self._seed, number, rows)
        how = "start" if number < len(space.starts) and space.algorithm != "grid" else space.algorithm
        return genes, how, parents

    def _improve(self, process: Surrogate, trials: Sequence[int], number: int) -> Genes:
        """The choice of the process, near the best of these trials."""
        places = np.array([self._place(trial) for trial in trials])
        tops = places[np.argsort(-process.predict(places)[0], kind="stable")[:NUM_PARENTS]]
        running = [Observation(self._place(line.trial), self._rungs.index(line.until), None)
                   for line in self._explored.running.values()]
        return propose_place(process, self._space.genes, tops, running, generator(Stream.TRIALS, self._seed, number))

    def _place(self, trial: int) -> tuple[float, ...]:
        return encode(self._space.genes, self.genes[trial])

    def _process(self, track: _Track) -> Surrogate | None:
        """The process of all counted results, if there are any."""
        seen = [Observation(self._place(trial), self._rungs.index(epochs), fitness)
                for trial, epochs, fitness in track.counted]
        return fit_surrogate(seen, len(self._rungs)) if sum(row.fitness is not None for row in seen) > 1 else None

    # The end: finalists on fresh seeds, always together with the default.

    def _close(self) -> _Closing:
        """The end of the sweep if exploration is closed now."""
        finalists, pairs = confirmation_of(self._explored.work / self._rungs[-1])
        plan = Closed(at=min(self._explored.slots), finalists=finalists, pairs=pairs)
        first = self._seed + 1
        return _Closing(self._explored, plan, [(0, first + n) for n in range(pairs + (finalists > 1))])

    def _close_step(self, closing: _Closing, slot: int) -> None:
        track, last = closing.track, self._rungs[-1]
        if 0 in track.failed:
            closing.tasks = [task for task in closing.tasks if task[0]]
        if closing.tasks:
            self._schedule(track, slot, *closing.tasks.pop(0), last, "seed")
        elif track.running:
            track.slots[slot] = min(line.end for line in track.running.values())
        elif closing.finalists is None:
            closing.process = self._process(track)
            closing.finalists = self._finalists(track, closing.process)[:closing.plan.finalists]
            self._emit(Finalists(trials=closing.finalists))
            if len(closing.finalists) > 1:
                closing.tasks = [(trial, self._seed + 1) for trial in closing.finalists]
        elif closing.chosen is None:
            closing.chosen = self._choose(closing)
            self._emit(Chosen(trial=closing.chosen))
            if closing.chosen:
                closing.tasks = [(closing.chosen, seed) for seed in self._claim_seeds(closing)]
        else:
            closing.over = self._claim(closing)
            self._emit(closing.over)

    def _finalists(self, track: _Track, process: Surrogate | None) -> tuple[int, ...]:
        """Trials other than the default, best first, by the fitness that the process expects of a whole training."""
        default = self._owner(0)
        trials = sorted({self._owner(trial) for trial in track.results if trial not in track.failed} - {default})
        if not trials or not process:
            return tuple(trials)
        expected = process.predict(np.array([self._place(trial) for trial in trials]))[0]
        return tuple(trials[number] for number in np.argsort(-expected, kind="stable"))

    def _choose(self, closing: _Closing) -> int:
        finalists = closing.finalists or (0,)
        if len(finalists) == 1:
            return finalists[0]
        fitness = {trial: self._on_seed(trial, self._seed + 1) for trial in finalists}
        return max(finalists, key=lambda trial: (-1.0 if fitness[trial] is None else fitness[trial], -trial))

    def _claim_seeds(self, closing: _Closing) -> range:
        first = self._seed + 1 + (closing.plan.finalists > 1)
        return range(first, first + closing.plan.pairs)

    def _claim(self, closing: _Closing) -> Claimed:
        chosen = closing.chosen or 0
        pairs = [(self._on_seed(chosen, seed), self._on_seed(0, seed)) for seed in self._claim_seeds(closing)]
        whole = [(left, right) for left, right in pairs if left is not None and right is not None]
        others = [self._on_seed(0, seed) for seed in range(self._seed, self._claim_seeds(closing)[0])]
        process = closing.process
        claim = judge([left for left, _ in whole], [right for _, right in whole],
                      [fitness for fitness in others if fitness is not None], process.noise if process else 0.0,
                      process.gain(self._place(chosen), self._place(0)) if process else None)
        wins = claim.ahead or 0 in closing.track.failed
        return Claimed(winner=chosen if wins else 0, claim=claim)

    def _on_seed(self, trial: int, seed: int) -> float | None:
        outcome = self._known.get((self._owner(trial), seed, self._rungs[-1]))
        return outcome.fitness if outcome else None

    def _owner(self, trial: int) -> int:
        """The first trial with the same genes, whose trainings are reused."""
        return self._owners[_key(self.genes[trial])]

    def _emit(self, line: Line) -> None:
        """Write a line, or compare it with the recorded one."""
        if not self._recorded:
            self._write(line)
        elif (recorded := self._recorded.popleft()) != line:
            self._problems.append(f"{recorded!r} is recorded, but {line!r} follows from the lines before")


def _key(genes: Genes) -> tuple[Any, ...]:
    return tuple((name, type(value).__name__, value) for name, value in sorted(genes.items()))
