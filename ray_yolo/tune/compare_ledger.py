"""The ledger of a comparison: its sides, the result of each training, and the claim. An append-only log.

Each line is on disk before the comparison acts on it, and a restart reads only the ledger. The file has the name of a
sweep's ledger; the type of its first line, `comparison`, tells them apart.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Literal

from pydantic import Field, ValidationError

from ray_yolo.config.recipe import Recipe
from ray_yolo.core.errors import InputError, TrainingError
from ray_yolo.runs.event_log import EventLog, plain, read_lines
from ray_yolo.runs.run_record import LEDGER_FILE
from ray_yolo.tune.claim import PairsClaim
from ray_yolo.tune.identity import changed_parts
from ray_yolo.tune.ledger_events import LedgerEvent, TrialNumbers
from ray_yolo.tune.sides import Recipes

VERSION = 1
FIRST = "comparison"

Side = Literal["A", "B"]


class ComparisonEvent(LedgerEvent):
    """The first line: what is compared."""

    version: int = VERSION
    identity: Mapping[str, str]  # digests of the data sets and named files of both sides; see `tune.identity`
    a: Recipe  # resolved; its seed is the one from which those of the pairs follow
    b: Recipe

    @property
    def recipes(self) -> Recipes:
        """Both recipes."""
        return Recipes(self.a, self.b)


class TrainedEvent(LedgerEvent):
    """The result of one training. Without a fitness, it has diverged."""

    pair: int  # from 1 on
    side: Side
    seed: int
    fitness: float | None
    metrics: TrialNumbers = Field(default_factory=dict)
    classes: TrialNumbers = Field(default_factory=dict)  # mAP50-95 by class, of the epoch of `fitness`, the best one
    weights: str = ""
    reason: str = ""  # why it has diverged


class ClaimEvent(LedgerEvent):
    """The claim at the end. If the comparison is continued with more pairs, another one follows."""

    claim: PairsClaim


_TYPES: dict[str, type[LedgerEvent]] = {FIRST: ComparisonEvent, "trained": TrainedEvent, "claim": ClaimEvent}
_NAMES = {kind: name for name, kind in _TYPES.items()}

PairResults = dict[tuple[int, Side], TrainedEvent]


class CompareLedger:
    """The only writer of a comparison's ledger. Opening it continues an existing one.

    Raises:
        InputError: if the file is of another comparison; the error states the difference.
    """

    def __init__(self, path: Path, begun: ComparisonEvent) -> None:
        self.path = path
        self.lines = read_comparison(path)
        """All lines so far."""
        if self.lines:
            changed = changed_parts(begun_of(self.lines).identity, begun.identity)
            if changed:
                raise InputError(f"{path}: started with another {' and another '.join(changed)}; restore it to "
                                 "continue, or give another --name to start a new comparison (nothing was changed)")
        self._log = EventLog(path, durable=True)
        if not self.lines:
            self.append(begun)

    @property
    def begun(self) -> ComparisonEvent:
        """The first line."""
        return begun_of(self.lines)

    def append(self, line: LedgerEvent) -> None:
        """Write a line.

        Raises:
            TrainingError: if the line is not on disk; the comparison must not act on it.
        """
        fields = line.model_dump(mode="json")
        try:
            self._log.append_line(_NAMES[type(line)], **fields)
        except OSError as error:
            raise TrainingError(f"{self.path}: cannot be written ({error.strerror or error}); free or repair the "
                                "storage and run the same command again: it continues") from error
        self.lines.append(type(line).model_validate(plain(fields)))

    def close(self) -> None:
        """Close the file."""
        self._log.close()


def is_comparison(folder: str | os.PathLike[str]) -> bool:
    """Whether a folder is that of a comparison."""
    lines = read_lines(Path(folder) / LEDGER_FILE)
    return bool(lines) and lines[0]["type"] == FIRST


def read_comparison(path: Path) -> list[LedgerEvent]:
    """All lines of a comparison's ledger; none if the file does not exist.

    Raises:
        InputError: if the file is another one, was written by a later version, or is damaged.
    """
    lines = read_lines(path)
    if lines and lines[0]["type"] != FIRST:
        raise InputError(f"{path}: not the ledger of a comparison; choose another --name")
    if lines and lines[0].get("version", 1) > VERSION:
        raise InputError(f"{path}: written by a later ray_yolo; continue it with that one, or choose another --name")
    try:
        return [_TYPES[line["type"]].model_validate(line) for line in lines]
    except (KeyError, ValidationError) as error:
        what = " ".join(str(error).split("\n")[:2])
        raise InputError(f"{path}: damaged: {what}; restore it from a copy, or choose another --name") from None


def begun_of(lines: Sequence[LedgerEvent]) -> ComparisonEvent:
    """The first line of a ledger."""
    assert isinstance(lines[0], ComparisonEvent)
    return lines[0]


def results_of(lines: Sequence[LedgerEvent]) -> PairResults:
    """The result of each training, by pair and side."""
    results: PairResults = {}
    for line in lines:
        if isinstance(line, TrainedEvent):
            results.setdefault((line.pair, line.side), line)
    return results


def claim_of(lines: Sequence[LedgerEvent]) -> PairsClaim | None:
    """The last claim; None before the end."""
    return next((line.claim for line in reversed(lines) if isinstance(line, ClaimEvent)), None)
