"""The ledger of a study: an append-only log of what is asked, each decision, each result, and the claim.

The first line says what the study asks (`tune.study`); the others are those of `tune.ledger_events`, in virtual order.
Each line is on disk before the study acts on it. A restart reads only the ledger. Apart from its envelope, a line
contains no wall-clock time, attempt or lost worker, so two executions of a study have equal ledgers.

| version | ray_yolo | continued | read by `status`, `verify` and `list` |
|---|---|---|---|
| 6 | 0.3.0 | yes | yes |
| 5 of a sweep | 0.2.0 | yes: the decisions are the same, and its claims follow by the law of 0.2.0 | yes |
| 1 of a comparison | 0.2.0 | yes: its claims are made again, by the law of today | yes |
| earlier, or population based training | up to 0.2.0 | no | no: the error names the version |
"""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import ray_yolo
from ray_yolo.core.errors import InputError, TrainingError
from ray_yolo.runs.event_log import EventLog, plain, read_lines
from ray_yolo.runs.run_record import LEDGER_FILE
from ray_yolo.tune.claim import SIDES, PairsClaim
from ray_yolo.tune.identity import has_same_inputs
from ray_yolo.tune.ledger_events import (
    EVENTS,
    ClaimedEvent,
    CountedEvent,
    FailedEvent,
    LedgerEvent,
    ProposedEvent,
    ScheduledEvent,
)
from ray_yolo.tune.pairs import claim_from, pair_of, training_number
from ray_yolo.tune.schedule import Outcome, address
from ray_yolo.tune.study import VERSION, ComparisonEvent, StudyEvent, SweepEvent
from ray_yolo.tune.trials import Trial, trial_folder

if TYPE_CHECKING:
    from ray_yolo.runs.remote_run import RemoteRun

_KINDS: tuple[type[LedgerEvent], ...] = (SweepEvent, ComparisonEvent, *EVENTS)
TYPES = {kind.__name__.removesuffix("Event").lower(): kind for kind in _KINDS}
NAMES = {kind: name for name, kind in TYPES.items()}
_FORMER = {"sweep": (5,), "comparison": (1,)}
"""Earlier versions whose decisions are those of today, by the type of the first line."""


class Ledger:
    """The only writer of a study's ledger. Opening it continues an existing one. Thread-safe.

    Args:
        path: the file; created if it does not exist.
        begun: what is asked. A ledger of the same study keeps its own first line.
        stored: the study's folder in a store, if any. Each line is uploaded before it takes effect.

    Raises:
        InputError: if the file is the ledger of another study; the error states the difference.
    """

    def __init__(self, path: str | os.PathLike[str], begun: StudyEvent, stored: RemoteRun | None = None) -> None:
        self.path, self.stored = Path(path), stored
        self._lock = threading.RLock()
        self._is_closed = False
        lines = read_ledger(self.path)
        if lines:
            _check_identity(self.path, begun_of(lines), begun)
        self._log = EventLog(self.path, durable=True)
        self.begun: Any = begun_of(lines) if lines else begun
        """The first line, of the kind that was given."""
        if not lines:
            self.begun = self._write(begun.model_copy(update={"ray_yolo": ray_yolo.__version__}))
        self.lines = lines[1:]
        """All others."""

    @property
    def trials(self) -> tuple[Trial, ...]:
        """All rows of a sweep, by number."""
        with self._lock:
            return tuple(read_trials([self.begun, *self.lines]).values())

    @property
    def claim(self) -> ClaimedEvent | None:
        """The claim of a study that has ended."""
        return claim_of(self.lines)

    def append(self, line: LedgerEvent) -> None:
        """Write a line.

        Raises:
            TrainingError: if the line is not on disk; the study must not act on it.
        """
        with self._lock:
            if self._is_closed:  # a thread of Ray Tune outlives an interrupted command in a notebook
                raise TrainingError(f"{self.path}: this command has ended the study")
            self.lines.append(self._write(line))

    def close(self) -> None:
        """Close the file. Nothing can be appended any more."""
        with self._lock:
            if not self._is_closed:
                self._is_closed = True
                self._log.close()

    def _write(self, line: LedgerEvent) -> LedgerEvent:
        fields = {**line.model_dump(mode="json"), **self.begun.annotations(line)}
        try:
            self._log.append_line(NAMES[type(line)], **fields)
        except OSError as error:
            raise TrainingError(f"{self.path}: cannot be written ({error.strerror or error}); free or repair the "
                                "storage and run the same command again: it continues") from error
        if self.stored:
            self.stored.sync_files()
        return _as_written(line)


def is_comparison(folder: str | os.PathLike[str]) -> bool:
    """Whether a folder is that of a comparison."""
    lines = read_lines(Path(folder) / LEDGER_FILE)
    return bool(lines) and lines[0]["type"] == NAMES[ComparisonEvent]


def read_ledger(path: str | os.PathLike[str]) -> list[LedgerEvent]:
    """All lines of a ledger; none if the file does not exist. Those of an earlier version are translated.

    Raises:
        InputError: if the file is not a ledger, was written by a version that cannot be read, or is damaged.
    """
    lines = read_lines(path)
    if not lines:
        return []
    first = lines[0]
    _check_version(path, first)
    lost = next((number for number, line in enumerate(lines) if line["seq"] != number), None)
    if lost is not None:
        raise InputError(f"{path}:{lost + 1}: damaged: this line cannot be read; restore the file from a copy, or "
                         "choose another --name")
    try:
        if first["type"] == "comparison" and first["version"] < VERSION:
            lines = _translated(lines)
        return [TYPES[line["type"]].model_validate(line) for line in lines]
    except (KeyError, TypeError, ValueError) as error:  # pydantic's ValidationError is a ValueError
        what = " ".join(str(error).split("\n")[:2])
        raise InputError(f"{path}: damaged: {what}; restore it from a copy, or choose another --name") from None


def _check_version(path: str | os.PathLike[str], first: Mapping[str, Any]) -> None:
    kind, version = first.get("type"), first.get("version", 1)
    if kind not in _FORMER:
        raise InputError(f"{path}: not the ledger of a sweep or comparison; choose another --name")
    if not isinstance(version, int):
        raise InputError(f"{path}: damaged: its version is {version}; restore it from a copy, or choose another --name")
    if version > VERSION:
        raise InputError(f"{path}: written by a later ray_yolo ({first.get('ray_yolo')}); read or continue it with "
                         "that one, or choose another --name")
    if version != VERSION and version not in _FORMER[kind]:
        raise InputError(f"{path}: written by an earlier ray_yolo than 0.2.0, with other rules for its decisions; read "
                         "or continue it with that one, or choose another --name")
    search = first.get("search") or {}
    if isinstance(search, Mapping) and (search.get("scheduler") or {}).get("name") == "pbt":
        raise InputError(f"{path}: a sweep by population based training, which ray_yolo has had up to 0.2.0; read or "
                         "continue it with that version, or choose another --name")


def _translated(lines: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """The lines of a comparison that version 1 began, in the words and the order of today.

    Version 1 wrote results as `trained`, in the order in which trainings ended, and a claim as `claim`, twice if the
    command was killed right after it. Today a result counts when all before it have, and none counts after the claim.
    The law of claims is another one, so the claims are made again from the results.
    A result that follows a missing one is left out: its training is read from its run folder again, and the line that
    today's version has written then counts.
    """
    first, *others = lines
    results: dict[int, dict[str, Any]] = {}
    claimed: dict[int, dict[str, Any]] = {}  # the lines of claims, by the number of their pairs
    for line in others:
        if line["type"] == "trained":
            number = training_number(line["pair"], line["side"])
            epochs = first["ab"[SIDES.index(line["side"])]]["epochs"]
            kind = {"type": "failed", "diverged": True} if line["fitness"] is None else {"type": "counted"}
            results.setdefault(number, {**line, **kind, "trial": number, "epochs": epochs})
        elif line["type"] in ("claim", "claimed"):
            claimed.setdefault(line["claim"]["pairs"], {**line, "type": "claimed"})
        elif line["type"] in ("counted", "failed"):
            results[line["trial"]] = line
        else:
            raise KeyError(line["type"])
    outcomes = {pair_of(number): Outcome(fitness=line.get("fitness")) for number, line in results.items()}
    claims: dict[int, dict[str, Any]] = {}
    for pairs, line in claimed.items():
        claim = claim_from(outcomes, pairs)  # it may be decided by fewer pairs
        claims.setdefault(claim.pairs, {**line, "claim": claim.model_dump()})
    verdict = claim_from(outcomes)
    most = 2 * verdict.pairs if verdict.better else len(results)
    translated = [first]
    for number in range(most + 1):
        if number % 2 == 0 and number // 2 in claims:
            translated.append(claims[number // 2])
        if number not in results or number == most:
            break
        translated.append(results[number])
    return translated


def begun_of(lines: Sequence[LedgerEvent]) -> Any:
    """The first line of a ledger: a `SweepEvent` or a `ComparisonEvent`."""
    return lines[0]


def claim_of(lines: Sequence[LedgerEvent]) -> ClaimedEvent | None:
    """The claim, if it is the last line."""
    return lines[-1] if lines and isinstance(lines[-1], ClaimedEvent) else None


def pairs_claim_of(lines: Sequence[LedgerEvent]) -> PairsClaim | None:
    """The last claim of a comparison; None before its first end."""
    claims = [line.claim for line in lines if isinstance(line, ClaimedEvent)]
    return claims[-1] if claims and isinstance(claims[-1], PairsClaim) else None


def read_trials(lines: Sequence[LedgerEvent]) -> dict[int, Trial]:
    """The current rows of a sweep's ledger, by number.

    Raises:
        InputError: if a proposal is missing.
    """
    trials: dict[int, Trial] = {}
    for line in lines[1:]:
        try:
            _fold(trials, line, begun_of(lines))
        except KeyError:  # its trial
            raise InputError(f"ledger: a line before {line} is missing; restore it from a copy, or choose another "
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
    problems: list[str] = begun_of(lines).schedule().verify(lines[1:])
    return problems


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
        if not isinstance(begun, SweepEvent) or not has_same_inputs(begun.identity, identity):
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


def _check_identity(path: Path, recorded: StudyEvent, current: StudyEvent) -> None:
    """Refuse to continue another study."""
    if type(recorded) is not type(current):
        raise InputError(f"{path}: not the ledger of a {NAMES[type(current)]}; choose another --name")
    changed = recorded.changed(_as_written(current))
    if changed:
        raise InputError(f"{path}: started with another {' and another '.join(changed)}; give the original one to "
                         "continue it, or another --name to start a new one (nothing was changed)")
