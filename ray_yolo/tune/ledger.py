"""The ledger of a sweep: an append-only log of each proposal, each training and each result, in virtual order.

The first line describes what is searched; the others are those of `tune/schedule.py`. Each line is on disk before the
sweep acts on it. A restart reads only the ledger. Apart from its envelope, a line contains no wall-clock time, attempt
or lost worker, so two executions of a sweep have equal ledgers.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pydantic import ValidationError

from ray_yolo.config.recipe import Recipe
from ray_yolo.core.errors import InputError, TrainingError
from ray_yolo.runs.event_log import EventLog, plain, read_lines
from ray_yolo.runs.run_record import LEDGER_FILE
from ray_yolo.tune.evolution import Genes, Space
from ray_yolo.tune.identity import changed_parts, has_same_inputs
from ray_yolo.tune.ledger_events import (
    SCHEDULE_EVENTS,
    ClaimedEvent,
    CountedEvent,
    FailedEvent,
    LedgerEvent,
    ProposedEvent,
    ScheduledEvent,
)
from ray_yolo.tune.schedule import Outcome, Schedule, address
from ray_yolo.tune.search import Search
from ray_yolo.tune.trials import (
    Trial,
    network_name,
    overlay,
    replay_command,
    trial_folder,
)

if TYPE_CHECKING:
    from ray_yolo.runs.remote_run import RemoteRun

VERSION = 5


class SweepEvent(LedgerEvent):
    """The first line, of type `sweep`: what is searched."""

    version: int = VERSION
    identity: dict[str, str]  # digests of the data sets, the base recipe and named files; see `tune.identity`
    space: Space
    search: Search
    recipe: Recipe  # the base of all trials, resolved; its seed also seeds the search
    rungs: tuple[int, ...]  # epochs at which trials pause; the last one is the whole training
    virtual_slots: int
    latencies: Mapping[str, float] = {}  # milliseconds per image of each network, if the search has a limit

    def schedule(self, **options: Any) -> Schedule:
        """The schedule of this sweep; the options are its `write`."""
        return Schedule(self.space, self.recipe.seed, self.rungs, self.virtual_slots, self.cost, **options)

    def cost(self, genes: Genes) -> float:
        """Virtual time of an epoch with these genes: pixels x images, 1 for the base recipe."""
        ours, base = overlay(self.recipe, genes), self.recipe
        return (ours.imgsz / base.imgsz) ** 2 * ours.fraction / base.fraction

    def exceeds_limit(self, genes: Genes) -> str:
        """Why these genes are not trained; '': their network is fast enough."""
        limit, network = self.search.limit, network_name(overlay(self.recipe, genes))
        if limit is None or (time := self.latencies[network]) <= limit.latency_ms:
            return ""
        return f"{network} takes {time:.3g} ms an image, over the limit of {limit.latency_ms:g}"


_EVENTS: tuple[type[LedgerEvent], ...] = (SweepEvent, *SCHEDULE_EVENTS)
TYPES = {kind.__name__.removesuffix("Event").lower(): kind for kind in _EVENTS}
NAMES = {kind: name for name, kind in TYPES.items()}


class Ledger:
    """The only writer of a sweep's ledger. Opening it continues an existing one. Thread-safe.

    Args:
        path: the file; created if it does not exist.
        begun: what is searched. A ledger of the same identity, space and search keeps its own first line.
        stored: the sweep's folder in a store, if any. Each line is uploaded before it takes effect.

    Raises:
        InputError: if the file is the ledger of another sweep; the error states the difference.
    """

    def __init__(self, path: str | os.PathLike[str], begun: SweepEvent, stored: RemoteRun | None = None) -> None:
        self.path, self.stored = Path(path), stored
        self._lock = threading.RLock()
        self._is_closed = False
        lines = read_ledger(self.path)
        if lines:
            _check_identity(self.path, begun_of(lines), _as_written(begun))
        self._log = EventLog(self.path, durable=True)
        lines = lines or [self._write(begun)]
        self.begun, self.lines = begun_of(lines), lines[1:]
        """The first line, and all others."""
        self._trials = read_trials(lines)
        self.recipe = self.begun.recipe

    @property
    def trials(self) -> tuple[Trial, ...]:
        """All rows, by number."""
        with self._lock:
            return tuple(self._trials.values())

    @property
    def claim(self) -> ClaimedEvent | None:
        """The claim of a sweep that has ended; None during exploration."""
        return claim_of(self.lines)

    def append(self, line: LedgerEvent) -> None:
        """Write a line, and update its row.

        Raises:
            TrainingError: if the line is not on disk; the sweep must not act on it.
        """
        with self._lock:
            if self._is_closed:  # a thread of Ray Tune outlives an interrupted command in a notebook
                raise TrainingError(f"{self.path}: this command has ended the sweep")
            written = self._write(line)
            self.lines.append(written)
            _fold(self._trials, written, self.begun)

    def close(self) -> None:
        """Close the file. Nothing can be appended any more."""
        with self._lock:
            if not self._is_closed:
                self._is_closed = True
                self._log.close()

    def _write(self, line: LedgerEvent) -> LedgerEvent:
        fields = line.model_dump(mode="json")
        if isinstance(line, ProposedEvent):
            fields["command"] = replay_command(self.recipe, line.genes)
        try:
            self._log.append_line(NAMES[type(line)], **fields)
        except OSError as error:
            raise TrainingError(f"{self.path}: cannot be written ({error.strerror or error}); free or repair the "
                                "storage and run the same command again: it continues the sweep") from error
        if self.stored:
            self.stored.sync_files()
        return _as_written(line)


def read_ledger(path: str | os.PathLike[str]) -> list[LedgerEvent]:
    """All lines of a ledger; none if the file does not exist.

    Raises:
        InputError: if the file is not a ledger, was written by another version, or is damaged.
    """
    lines = read_lines(path)
    if lines and lines[0]["type"] != "sweep":
        raise InputError(f"{path}: not the ledger of a sweep; choose another --name")
    if lines and (version := lines[0].get("version", 1)) != VERSION:
        other = "a later" if version > VERSION else "an earlier"
        raise InputError(f"{path}: written by {other} ray_yolo; continue it with that one, or choose another --name")
    if lines and _scheduler_of(lines[0]) == "pbt":
        raise InputError(f"{path}: a sweep by population based training, which ray_yolo has had up to 0.2.0; read or "
                         "continue it with that version, or choose another --name")
    try:
        return [TYPES[line["type"]].model_validate(line) for line in lines]
    except (KeyError, ValidationError) as error:
        what = " ".join(str(error).split("\n")[:2])
        raise InputError(f"{path}: damaged: {what}; restore it from a copy, or choose another --name") from None


def _scheduler_of(first: Mapping[str, Any]) -> Any:
    """The name of the scheduler in the first line of a ledger; None if the line is damaged."""
    try:
        return first["search"]["scheduler"]["name"]
    except (KeyError, TypeError):
        return None


def begun_of(lines: Sequence[LedgerEvent]) -> SweepEvent:
    """The first line of a ledger."""
    assert isinstance(lines[0], SweepEvent)
    return lines[0]


def claim_of(lines: Sequence[LedgerEvent]) -> ClaimedEvent | None:
    """The claim, if it is the last line."""
    return lines[-1] if lines and isinstance(lines[-1], ClaimedEvent) else None


def read_trials(lines: Sequence[LedgerEvent]) -> dict[int, Trial]:
    """The current rows of a ledger, by number.

    Raises:
        InputError: if a proposal is missing.
    """
    trials: dict[int, Trial] = {}
    for line in lines[1:]:
        try:
            _fold(trials, line, begun_of(lines))
        except KeyError:  # its trial
            raise InputError(f"ledger: a line before {line!r} is missing; restore it from a copy, or choose another "
                             "--name") from None
    return trials


def rung_results(lines: Sequence[LedgerEvent]) -> dict[int, dict[int, float]]:
    """Fitness by epochs, by trial, on the seed that the trial was first trained with."""
    first_seeds: dict[int, int] = {}
    results: dict[int, dict[int, float]] = {}
    for line in lines:
        if isinstance(line, CountedEvent) and line.seed == first_seeds.setdefault(line.trial, line.seed):
            results.setdefault(line.trial, {})[line.epochs] = line.fitness
    return results


def verify(lines: Sequence[LedgerEvent]) -> list[str]:
    """The inconsistencies of a ledger, one text each; none if every line follows from those before it."""
    return begun_of(lines).schedule().verify(lines[1:])


def results_elsewhere(project: Path, identity: Mapping[str, str], but: Path
                      ) -> Iterator[tuple[tuple[str, int], Path, Outcome]]:
    """The results of all other sweeps of a project on the same data and files: address and epochs, run folder, and
    outcome."""
    for path in sorted(project.glob(f"*/{LEDGER_FILE}")):
        try:
            lines = read_ledger(path) if path != but else []
        except InputError:
            continue
        if not lines:
            continue
        begun = begun_of(lines)
        if not has_same_inputs(begun.identity, identity):
            continue
        genes = {line.trial: line.genes for line in lines if isinstance(line, ProposedEvent)}
        for line in lines:
            if isinstance(line, CountedEvent):
                folder = trial_folder(line.trial, seed=None if line.seed == begun.recipe.seed else line.seed)
                key = address(begun.recipe, genes[line.trial], line.seed), line.epochs
                yield key, path.parent / "trials" / folder, Outcome.model_validate(line, from_attributes=True)


def _fold(trials: dict[int, Trial], line: LedgerEvent, begun: SweepEvent) -> None:
    """Update the rows by one line."""
    base_seed = begun.recipe.seed  # of every training but those on fresh seeds
    match line:
        case ProposedEvent():
            trials[line.trial] = Trial(line.trial, line.genes, line.parents)
        case ScheduledEvent() if line.seed == base_seed:
            trials[line.trial] = replace(trials[line.trial], state="running")
        case CountedEvent() if line.seed == base_seed:
            trials[line.trial] = replace(
                trials[line.trial], epochs=line.epochs, fitness=line.fitness, metrics=line.metrics, losses=line.losses,
                weights=line.weights, state="finished" if line.epochs >= begun.rungs[-1] else "paused")
        case CountedEvent():  # on a fresh seed
            seeds = {**trials[line.trial].seeds, line.seed: line.fitness}
            trials[line.trial] = replace(trials[line.trial], seeds=seeds)
        case FailedEvent() if line.seed == base_seed:
            trials[line.trial] = replace(trials[line.trial], state="failed", fitness=None, reason=line.reason)
        case _:  # the search's own decisions, and trainings on fresh seeds that start or fail, change no row
            pass


def _as_written(line: Any) -> Any:
    """The line as it is read back from the file."""
    return type(line).model_validate(plain(line.model_dump(mode="json")))


def _check_identity(path: Path, recorded: SweepEvent, current: SweepEvent) -> None:
    changed = [] if recorded.space == current.space else ["search space"]
    changed += [] if recorded.search == current.search else ["search settings"]
    changed += changed_parts(recorded.identity, current.identity)
    if changed:
        raise InputError(f"{path}: started with another {' and another '.join(changed)}; give the original one to "
                         "continue it, or another --name to start a new sweep (nothing was changed)")
