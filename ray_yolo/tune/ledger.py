"""The ledger of a sweep: an append-only log of each proposal, the rows it follows from, and its result.

A restart reads the ledger and nothing else. Trials that ended never run again; unfinished ones continue under the same
number with the same genes. Every proposal can be recomputed from the rows before it.
"""

from __future__ import annotations

import math
import os
import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

from pydantic import BaseModel, ValidationError

from ray_yolo.config.recipe import Recipe, recipe_digest
from ray_yolo.core.errors import InputError
from ray_yolo.runs.event_log import EventLog, plain, read_lines
from ray_yolo.tune.evolution import Genes, Space, TrialRow, parents_of, propose, searcher
from ray_yolo.tune.search import Search
from ray_yolo.tune.trials import Origin, Segment, Trial, finished_rows, fork_trial, new_trial, replay_command

if TYPE_CHECKING:
    from ray_yolo.runs.remote_run import RemoteRun

VERSION = 1
Numbers = Mapping[str, float | None]


class Begun(BaseModel, frozen=True):
    """The first line, of type `sweep`: what is searched."""

    version: int = VERSION
    identity: dict[str, str]  # digests of `data set` and `base recipe`, and the `searcher`
    space: Space
    search: Search
    recipe: Recipe  # the base of all trials, resolved


class TrialEvent(BaseModel, frozen=True):
    """A later line: what happened to a trial. New fields need a default, so that older lines can be read."""

    trial: int


class Proposed(TrialEvent):
    """A new row, and the rows it follows from."""

    genes: Genes
    seen: tuple[int, ...]  # the trials that had finished before
    rungs: tuple[int, ...]  # their rungs
    parents: tuple[int, ...]
    command: str


class Started(TrialEvent):
    """Its training starts or resumes."""

    attempt: int


class Judged(TrialEvent):
    """The scheduler compared it with others after `epoch` epochs, and lets it continue."""

    epoch: int
    fitness: float


class Lost(TrialEvent):
    """A failure that the recipe did not cause interrupted it: it is queued again."""

    reason: str


class Exploited(TrialEvent):
    """It continues from another trial's checkpoint with changed genes."""

    genes: Genes
    origin: Origin
    command: str


class Finished(TrialEvent):
    """It completed, or the scheduler stopped it. Fitness, metrics and losses are those of its best.pt."""

    fitness: float
    metrics: Numbers
    losses: Numbers
    epochs: int  # trained
    stopped: bool
    last_fitness: float | None = None  # of the last epoch, which the scheduler has compared; None: `fitness`


class Failed(TrialEvent):
    """It failed, and does not run again."""

    reason: str


TYPES: dict[str, type[Begun | TrialEvent]] = {"sweep": Begun, **{kind.__name__.lower(): kind for kind in (
    Proposed, Started, Judged, Lost, Exploited, Finished, Failed)}}
NAMES = {kind: name for name, kind in TYPES.items()}
Line = TypeVar("Line", Begun, TrialEvent)


@dataclass(frozen=True)
class Sweep:
    """The identity of a sweep: an equal one continues its ledger, any other is refused."""

    space: Space
    search: Search
    recipe: Recipe  # base of all trials, as requested; its seed also seeds the search
    labels: str  # digest of the data set's labels


class Ledger:
    """The only writer of a sweep's ledger. Opening it continues an existing one. Thread-safe.

    Args:
        path: the file; created if it does not exist.
        sweep: what is searched.
        resolved: the base recipe with every open setting decided. Used by the first start only.
        stored: the sweep's folder in a store, if it is in one: each line is uploaded before it takes effect.

    Raises:
        InputError: if the file is the ledger of another sweep, naming what differs.
    """

    def __init__(self, path: str | os.PathLike[str], sweep: Sweep, resolved: Recipe,
                 stored: RemoteRun | None = None) -> None:
        self.path, self.stored = Path(path), stored
        self._sweep = sweep
        self._lock = threading.RLock()
        begun = Begun(identity={"data set": sweep.labels, "base recipe": recipe_digest(sweep.recipe),
                                "searcher": searcher(sweep.space)}, space=sweep.space,
                      search=sweep.search, recipe=resolved)
        events = read_ledger(self.path)
        if events:
            _check_identity(self.path, _split(events)[0], _as_written(begun))
        self._log = EventLog(self.path)
        self._begun, _ = _split(events or [self._write(begun)])
        self._trials = read_trials(events)
        self.warning = _searcher_warning(self._begun, begun)
        """Warning that the sweep continues with another version of the searcher; '': none."""
        self.recipe = self._begun.recipe
        self.rungs = sweep.search.rungs(self.recipe.epochs)
        """Epochs after which the scheduler compares trials, ascending."""

    @property
    def trials(self) -> tuple[Trial, ...]:
        """All rows, by number."""
        with self._lock:
            return tuple(self._trials.values())

    @property
    def to_run(self) -> tuple[Trial, ...]:
        """Rows that have not ended. A restart continues them before it proposes others."""
        return tuple(trial for trial in self.trials if not trial.has_ended)

    def propose(self) -> Trial:
        """A new row, proposed from all rows finished so far; it is on disk before this returns."""
        with self._lock:
            number, rows = len(self._trials), finished_rows(self._trials.values())
            arguments = self._sweep.space, self.recipe.seed, number, rows
            genes = propose(*arguments)
            self.append(Proposed(trial=number, genes=genes, seen=tuple(row.trial for row in rows),
                                 rungs=tuple(row.rung for row in rows), parents=parents_of(*arguments),
                                 command=replay_command(self.recipe, [Segment(0, genes)])))
            return self._trials[number]

    def start(self, number: int) -> None:
        """Record that a trial's training starts, or resumes after an interruption."""
        self.append(Started(trial=number, attempt=self._trials[number].attempts + 1))

    def exploit(self, number: int, genes: Genes, origin: Origin) -> None:
        """Record that a trial continues from another one's checkpoint with changed genes, before it does."""
        command = replay_command(self.recipe, fork_trial(self._trials, self._trials[number], genes, origin).lineage)
        self.append(Exploited(trial=number, genes=genes, origin=origin, command=command))

    def finish(self, number: int, fitness: float | None, metrics: Numbers, losses: Numbers, epochs: int, *,
               stopped: bool = False, last_fitness: float | None = None) -> None:
        """Record that a trial completed, or was stopped, after `epochs` epochs. Without a finite fitness it failed."""
        if fitness is None or not math.isfinite(fitness):
            self.append(Failed(trial=number, reason=f"no finite fitness after {epochs} epochs"))
        else:
            self.append(Finished(trial=number, fitness=fitness, metrics=metrics, losses=losses, epochs=epochs,
                                 stopped=stopped, last_fitness=last_fitness))

    def append(self, event: TrialEvent) -> None:
        """Write an event of a trial that has not ended, and update its row."""
        with self._lock:
            trial = self._trials.get(event.trial)
            assert trial is None or not trial.has_ended, f"trial {event.trial} has ended already"
            _fold(self._trials, self._write(event), self._begun)

    def close(self) -> None:
        """Close the file."""
        self._log.close()

    def _write(self, event: Line) -> Line:
        self._log.append_line(NAMES[type(event)], **event.model_dump(mode="json"))
        if self.stored:
            self.stored.sync_files()
        return _as_written(event)


def read_ledger(path: str | os.PathLike[str]) -> list[Begun | TrialEvent]:
    """All events of a ledger; none if the file does not exist.

    Raises:
        InputError: if the file is no ledger, was written by a later version, or is damaged.
    """
    lines = read_lines(path)
    if lines and lines[0]["type"] != "sweep":
        raise InputError(f"{path}: not the ledger of a sweep; choose another --name")
    if lines and lines[0].get("version", VERSION) > VERSION:
        raise InputError(f"{path}: written by a later ray_yolo; continue it with that one, or choose another --name")
    try:
        return [TYPES[line["type"]].model_validate(line) for line in lines]
    except (KeyError, ValidationError) as error:
        what = " ".join(str(error).split("\n")[:2])
        raise InputError(f"{path}: damaged: {what}; restore it from a copy, or choose another --name") from None


def read_trials(events: Sequence[Begun | TrialEvent]) -> dict[int, Trial]:
    """The current rows of a ledger, by number. A row that ended twice keeps its first end."""
    trials: dict[int, Trial] = {}
    if events:
        begun, later = _split(events)
        for event in later:
            _fold(trials, event, begun)
    return trials


def verify(events: Sequence[Begun | TrialEvent]) -> list[str]:
    """The inconsistencies of a ledger, one text each; none if every line follows from those before it.

    Each proposal must equal `propose(space, seed, number, rows)`. Its `seen` and `rungs` must be those of the rows that
    finished before it. Numbers must count from 0, and no trial may end twice.
    """
    begun, later = _split(events)
    trials, problems = dict[int, Trial](), list[str]()
    for event in later:
        number, trial = event.trial, trials.get(event.trial)
        if isinstance(event, Proposed) and (trial or number != len(trials)):
            problems.append(f"trial {number}: proposed in the place of trial {len(trials)}")
        elif isinstance(event, Proposed):
            problems += _check_proposal(event, begun, finished_rows(trials.values()))
        elif trial is None or trial.has_ended:
            fault = "has ended" if trial else "is unknown"
            problems.append(f"trial {number}: {NAMES[type(event)]}, although it {fault}")
        _fold(trials, event, begun)
    return problems


def _check_proposal(event: Proposed, begun: Begun, rows: Sequence[TrialRow]) -> list[str]:
    subject, seen, rungs = f"trial {event.trial}", [row.trial for row in rows], [row.rung for row in rows]
    if list(event.seen) != seen:
        return [f"{subject}: records the finished trials {list(event.seen)}, but {seen} had finished"]
    if list(event.rungs) != rungs:
        return [f"{subject}: records the rungs {list(event.rungs)} of the finished trials, but they were {rungs}"]
    expected = plain(propose(begun.space, begun.recipe.seed, event.trial, rows))
    return [f"{subject}: {name} is {event.genes.get(name)!r}, but {value!r} follows from its rows"
            for name, value in expected.items() if event.genes.get(name) != value]


def _fold(trials: dict[int, Trial], event: TrialEvent, begun: Begun) -> None:
    """Update the rows by one event."""
    trial = trials.get(event.trial)
    if isinstance(event, Proposed):
        trials.setdefault(event.trial, new_trial(event.trial, event.genes, event.seen, event.parents))
    if trial is None or trial.has_ended:
        return
    match event:
        case Started():
            trial = replace(trial, state="running", attempts=event.attempt)
        case Judged():
            trial = replace(trial, judged=(*trial.judged, (event.epoch, event.fitness)))
        case Exploited():
            trial = fork_trial(trials, trial, event.genes, event.origin)
        case Finished():
            rung = begun.search.rung(event.epochs, begun.recipe.epochs, stopped=event.stopped)
            trial = replace(trial, state="finished", rung=rung, **event.model_dump(exclude={"trial", "stopped"}))
        case Lost() | Failed():
            trial = replace(trial, state="proposed" if isinstance(event, Lost) else "failed", reason=event.reason)
    trials[event.trial] = trial


def _split(events: Sequence[Begun | TrialEvent]) -> tuple[Begun, list[TrialEvent]]:
    begun, *later = events
    assert isinstance(begun, Begun)
    return begun, [event for event in later if isinstance(event, TrialEvent)]


def _as_written(event: Line) -> Line:
    """The event as a reader of the file gets it."""
    return type(event).model_validate(plain(event.model_dump(mode="json")))


def _searcher_warning(recorded: Begun, current: Begun) -> str:
    before, after = recorded.identity.get("searcher", ""), current.identity["searcher"]
    return "" if before in ("", after) else (
        f"the sweep was started with {before} and continues with {after}: its next proposals may differ from those of "
        f"{before}; install that version to repeat them")


def _check_identity(path: Path, recorded: Begun, current: Begun) -> None:
    same = {"search space": recorded.space == current.space, "search settings": recorded.search == current.search,
            **{part: recorded.identity[part] == current.identity[part] for part in ("data set", "base recipe")}}
    if changed := [part for part, equal in same.items() if not equal]:
        raise InputError(f"{path}: started with another {' and another '.join(changed)}; give the original one to "
                         "continue it, or another --name to start a new sweep (nothing was changed)")
