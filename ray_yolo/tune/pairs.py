"""The order of a comparison's trainings, and its claim: pair after pair, both sides on the pair's fresh seed.

The seed of a pair follows from the base seed and the pair's number. A result counts when all results before it have
counted, in the order of pairs and sides, whatever the order in which trainings end. Ledger and claim therefore do not
depend on workers, interruptions and speed.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Mapping

from ray_yolo.core.errors import TrainingError
from ray_yolo.ops.seeding import Stream, generator
from ray_yolo.tune.claim import SIDES, PairsClaim, Side, judge_pairs
from ray_yolo.tune.ledger_events import ClaimedEvent, CountedEvent, FailedEvent, LedgerEvent
from ray_yolo.tune.schedule import Ending, Outcome, Replayable, Task
from ray_yolo.tune.sides import Recipes, all_settings

PairResults = Mapping[tuple[int, Side], Outcome]
"""The outcome of each training, by pair and side. One without a fitness has diverged."""


def pair_seed(base: int, pair: int) -> int:
    """The seed of a pair, from 0 to 2^32 - 1."""
    return int(generator(Stream.PAIRS, base, pair).integers(2**32))


def training_number(pair: int, side: Side) -> int:
    """The number of a training: 0 and 1 are A and B of pair 1."""
    return 2 * (pair - 1) + SIDES.index(side)


def pair_of(number: int) -> tuple[int, Side]:
    """Pair and side of a training's number."""
    return number // 2 + 1, SIDES[number % 2]


def training_folder(pair: int, side: Side) -> str:
    """The name of a training's run folder: pair1-a."""
    return f"pair{pair}-{side.lower()}"


def results_of(lines: Iterable[LedgerEvent]) -> PairResults:
    """The results in the ledger of a comparison."""
    return {pair_of(line.trial): Outcome.model_validate(line, from_attributes=True)
            for line in lines if isinstance(line, (CountedEvent, FailedEvent))}


def claim_from(results: PairResults, most: int | None = None) -> PairsClaim:
    """The claim of the pairs that have ended on both sides: the first one that is significant, else the last one.

    Args:
        most: pairs to look at; None: all.
    """
    fitness: dict[Side, list[float]] = {"A": [], "B": []}
    failed = [0, 0]
    claim = judge_pairs([], [])
    pair = 1
    while all((pair, side) in results for side in SIDES) and (most is None or pair <= most) and not claim.better:
        for number, side in enumerate(SIDES):
            result = results[pair, side]
            fitness[side].append(result.fitness or 0.0)
            failed[number] += result.fitness is None
        claim = judge_pairs(fitness["A"], fitness["B"], (failed[0], failed[1]))
        pair += 1
    return claim


class PairSchedule(Replayable):
    """Decides what to train next. It reads no clock and no file. Not thread-safe.

    Args:
        recipes: of both sides, resolved. The seed of A is the base seed.
        write: called with each new event, in the order of the pairs, before it takes effect.
        limit: returns the most trainings at once. More are not handed out, for a result may end the comparison.
    """

    def __init__(self, recipes: Recipes, write: Callable[[LedgerEvent], None] = lambda event: None,
                 limit: Callable[[], int] = lambda: 1) -> None:
        super().__init__(write)
        self._settings = [all_settings(recipe) for recipe in recipes]
        self._epochs = [recipe.epochs for recipe in recipes]
        self._seed, self._limit = recipes.a.seed, limit
        self._known: dict[int, Outcome] = {}
        """The outcome of each training that has ended, by its number. The first `_counted` of them have counted."""
        self._counted = 0
        self._verdict = judge_pairs([], [])
        """What the pairs say that have counted on both sides."""
        self._running: set[int] = set()
        self._claimed: ClaimedEvent | None = None

    @property
    def results(self) -> PairResults:
        """The results that have counted."""
        return {pair_of(number): self._known[number] for number in range(self._counted)}

    @property
    def num_pairs(self) -> int:
        """The pairs that have begun, in this command or in an earlier one."""
        return (max((*self._known, *self._running), default=-1) + 2) // 2

    def next(self, explore: bool | Callable[[], bool] = True, ending: Callable[[], Ending] = Ending
             ) -> Task | ClaimedEvent | None:
        """The next training; None if the decision needs a result that is missing; the claim at the end.

        Args:
            explore: whether another pair may start. If not, pairs that have begun are completed, and the claim follows.
            ending: not used, for no training pauses.
        """
        while not self._verdict.better and self._count_next():
            pass
        if self._verdict.better:
            return self._claim()
        if len(self._running) >= self._limit():
            return None
        number = next(number for number in range(2 * self.num_pairs + 1)
                      if number not in self._known and number not in self._running)
        is_new_pair = number == 2 * self.num_pairs
        if is_new_pair and not (explore() if callable(explore) else explore):
            return None if self._running else self._claim()
        self._claimed = None  # it goes on after a claim, with more pairs
        self._running.add(number)
        pair, _ = pair_of(number)
        return Task(number, self._settings[number % 2], pair_seed(self._seed, pair), self._epochs[number % 2],
                    start=float(pair), end=float(pair))

    def finish(self, task: Task, outcome: Outcome) -> None:
        """Record the outcome of a training. Outcomes may arrive in any order.

        Raises:
            TrainingError: if the training failed for another reason than that it has diverged; it has no result.
        """
        self._running.discard(task.trial)
        if outcome.fitness is None and not outcome.diverged:
            raise TrainingError(f"{training_folder(*pair_of(task.trial))}: {outcome.reason}")
        self._known[task.trial] = outcome

    def verify(self, events: Iterable[LedgerEvent], *, check_genes: bool = True) -> list[str]:
        """Replay a ledger in this schedule.

        Returns its inconsistencies, up to the first event that does not follow from those before it.
        """
        self._recorded, problems = deque(events), self._problems
        for event in self._recorded:
            if isinstance(event, (CountedEvent, FailedEvent)):
                self._known.setdefault(event.trial, Outcome.model_validate(event, from_attributes=True))
        while self._recorded and not problems:
            if isinstance(self._recorded[0], ClaimedEvent):
                self._claimed = None
                self._claim()
            elif self._verdict.better or not self._count_next():
                problems.append(f"{self._recorded[0]} does not follow from the lines before")
        return problems

    def _count_next(self) -> bool:
        """Write the result of the first training that has not counted; False if it has not ended."""
        number = self._counted
        outcome = self._known.get(number)
        if outcome is None:
            return False
        pair, _ = pair_of(number)
        training = {"trial": number, "seed": pair_seed(self._seed, pair), "epochs": self._epochs[number % 2]}
        self._claimed = None
        if outcome.fitness is None:
            self._emit(FailedEvent(**training, reason=outcome.reason, diverged=outcome.diverged))
        else:
            self._emit(CountedEvent(**training, **outcome.model_dump(exclude={"reason", "diverged"})))
        self._counted += 1
        if self._counted % 2 == 0:
            outcomes = [self._known[number] for number in range(self._counted)]
            fitness = [outcome.fitness or 0.0 for outcome in outcomes]
            failed = [outcome.fitness is None for outcome in outcomes]
            self._verdict = judge_pairs(fitness[::2], fitness[1::2], (sum(failed[::2]), sum(failed[1::2])))
        return True

    def _claim(self) -> ClaimedEvent:
        """The claim from the results that have counted, written once."""
        if self._claimed is None:
            self._claimed = ClaimedEvent(claim=self._verdict)
            self._emit(self._claimed)
        return self._claimed
