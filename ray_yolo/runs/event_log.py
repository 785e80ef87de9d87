"""An append-only log of events, one JSON object a line: what happened, in the order in which it was told.

The log is the truth of a run or of a sweep; tables, plots and tracking servers are projections of it that can be
rebuilt. It has one writer and any number of readers. A line is written by one call, so that it is there or not;
a line torn by a crash is cut off when the log is opened again, and no reader ever sees it.

Every line has `seq` (0, 1, 2, ... in the order of the file), `time` (Unix seconds by the writer's clock: for
people; nothing is ordered by it) and `type`. JSON has no NaN and no infinity: a number that is not finite is stored
as null. What the events of a training say is in `ray_yolo.core.events`; a sweep's ledger has lines of its own.
"""

from __future__ import annotations

import contextlib
import json
import logging
import math
import os
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from ray_yolo.core.events import (
    CheckpointEvent,
    DatasetEvent,
    EndEvent,
    EpochEvent,
    Event,
    RowEvent,
    StartEvent,
    StepEvent,
    parse_event,
)
from ray_yolo.core.formatting import format_count
from ray_yolo.core.redact import redact


@dataclass(frozen=True)
class Goodput:
    """Of a whole training, over all its commands."""

    restarts: int  # of all workers, from a checkpoint
    regroupings: int  # workers lost, replaced or added while the others went on
    steps_repeated: int
    idle_seconds: float  # from the last that was done before each to the first step after it
    goodput: float  # seconds of training over those and the idle ones; 1 for none

    @property
    def line(self) -> str:
        """All of it in words."""
        return (f"{format_count(self.restarts, 'restart')}, {format_count(self.regroupings, 'regrouping')}: "
                f"{format_count(self.steps_repeated, 'step')} done twice, {self.idle_seconds:.0f} s without training, "
                f"goodput {100 * self.goodput:.1f} %")


def measure_goodput(events: Sequence[Event]) -> Goodput:
    """Count them. Time between commands is nobody's: a command begins with its `dataset` event."""
    restarts = regroupings = repeated = 0
    idle = training = 0.0
    done: Event | None = None  # the last sign of training; a start or a command that has begun until there is one
    reached, waits = 0, False
    for event in events:
        if isinstance(event, DatasetEvent):
            done = event
        elif isinstance(event, StartEvent):
            if reached or event.step:
                restarts, regroupings = restarts + (not event.regrouped), regroupings + event.regrouped
                repeated += max(reached - event.step, 0)
                waits = True
            else:
                done = event
            reached = event.step
        elif isinstance(event, (StepEvent, EpochEvent)):
            passed = event.time - done.time if done else 0.0
            idle, training = idle + waits * passed, training + (not waits) * passed
            done, waits, reached = event, False, max(reached, event.step)
    return Goodput(restarts, regroupings, repeated, idle, training / (idle + training) if idle else 1.0)


EVENTS_FILE = "events.jsonl"
"""The log of a run, in its folder."""

Line = dict[str, Any]
_T = TypeVar("_T")

_RESERVED = frozenset({"seq", "time", "type"})
_TAIL_BYTES = 1 << 16
# While the disk refuses: some 10 hours of a fast run's steps, 50 MB. Beyond that the oldest are dropped, and the
# gap shows in the sequence numbers.
_MAX_PENDING = 100_000

_logger = logging.getLogger(__name__)


class EventLog:
    """The writer. Safe to use from several threads of one process.

    A disk that is full or failing never stops the caller: lines wait in memory, one warning is logged, and every
    later `append` tries again.

    Raises:
        OSError: on construction only, if the log cannot be opened at all.
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self.path = Path(path)
        self.path.parent.mkdir(parents=True, exist_ok=True)
        self._lock = threading.Lock()
        self._pending: deque[bytes] = deque(maxlen=_MAX_PENDING)
        self._warned = False
        self._file: int | None
        self._file, last_seq = _open_and_repair(self.path)
        self._next_seq = last_seq + 1

    def append(self, event: Event) -> int:
        """Write one event of a training and return its sequence number."""
        return self.append_line(event.type, **event.fields)

    def append_line(self, type: str, /, **fields: Any) -> int:
        """Write one line and return its sequence number."""
        assert not _RESERVED & fields.keys(), f"reserved: {sorted(_RESERVED & fields.keys())}"
        with self._lock:
            seq = self._next_seq
            self._next_seq += 1
            line = {"seq": seq, "time": round(time.time(), 3), "type": type} | plain(fields)
            self._pending.append(json.dumps(line, separators=(",", ":")).encode() + b"\n")
            self._write_pending()
            return seq

    def close(self) -> None:
        """Try once more to write what waits, and release the file."""
        with self._lock:
            self._write_pending()
            self._release()

    def _write_pending(self) -> None:
        try:
            if self._file is None:
                self._file, _ = _open_and_repair(self.path)
            while self._pending:
                _write_line(self._file, self._pending[0])
                self._pending.popleft()
        except OSError as error:
            self._release()  # opening it again cuts off what part of the line was written
            if not self._warned:
                _logger.warning("%s cannot be written (%s): events wait in memory and are written when it works again",
                                self.path, error.strerror)
            self._warned = True

    def _release(self) -> None:
        if self._file is not None:
            with contextlib.suppress(OSError):
                os.close(self._file)
        self._file = None


def read_events(path: str | os.PathLike[str]) -> list[Event]:
    """All events of a training's log; a log not begun yet has none. What is torn or unknown here is left out."""
    return next(follow(path))


def read_lines(path: str | os.PathLike[str]) -> list[Line]:
    """The same of a log with lines of its own."""
    return next(_follow(path, _parse_line))


def follow(path: str | os.PathLike[str]) -> Iterator[list[Event]]:
    """Never ends: each `next()` gives the events appended since the one before, possibly none.

    The first one gives what is there already. Reads each byte once; the file need not exist yet, and a file that
    cannot be read now has nothing new now.
    """
    return _follow(path, parse_event)


def surviving(events: Sequence[Event]) -> list[Event]:
    """The events without the rows that training took back by going on from an earlier step.

    A start at step s voids every row before it that has a step > s. Other events are facts and stay. Idempotent;
    keeps the order.
    """
    return _project(events, committed=math.inf)


def durable(events: Sequence[Event]) -> list[Event]:
    """The surviving events without the rows that training might still take back.

    A row is durable once a checkpoint, a start or a good end with a step at or above its own follows. A durable row
    stays durable however the log goes on, as long as training goes back to saved steps only: so what is published from
    here never has to be withdrawn.
    """
    return _project(events, committed=-1)


def epoch_rows(events: Sequence[Event]) -> list[EpochEvent]:
    """The epoch events by epoch, one for each: of an epoch told twice the first counts (it may be published)."""
    rows: dict[int, EpochEvent] = {}
    for event in events:
        if isinstance(event, EpochEvent):
            rows.setdefault(event.epoch, event)
    return [rows[epoch] for epoch in sorted(rows)]


def best_row(rows: Sequence[EpochEvent]) -> EpochEvent | None:
    """The best of the epoch rows: the last one that was better than all before it."""
    return next((row for row in reversed(rows) if row.best), None)


def plain(value: Any) -> Any:
    """The value as JSON has it, without secrets.

    Mappings, sequences, arrays and scalars (numpy, torch) become dicts, lists and numbers; a number that is not finite
    becomes None; text is redacted; anything else becomes its text.
    """
    if value is None or isinstance(value, (bool, int)):
        return value
    if isinstance(value, float):
        return float(value) if math.isfinite(value) else None
    if isinstance(value, Mapping):
        return {str(key): plain(item) for key, item in value.items()}
    if isinstance(value, (list, tuple, set, frozenset)):
        return [plain(item) for item in value]
    if hasattr(value, "tolist"):
        return plain(value.tolist())
    return redact(str(value))


def _project(events: Sequence[Event], committed: float) -> list[Event]:
    """Walk backwards: what follows an event decides whether it stays."""
    kept: list[Event] = []
    limit = math.inf
    for event in reversed(events):
        # What training never goes back before; after a failure it does: to the last checkpoint. Where workers went on
        # out of their memory, nothing was saved.
        match event:
            case CheckpointEvent() | StartEvent(regrouped=False) | EndEvent(status="done"):
                committed = max(committed, event.step)
        if isinstance(event, StartEvent):
            limit = min(limit, event.step)
        if not isinstance(event, RowEvent) or event.step <= min(limit, committed):
            kept.append(event)
    return kept[::-1]


def _open_and_repair(path: Path) -> tuple[int, int]:
    """(file open for appending, last sequence number or -1), with a torn last line cut off."""
    file = os.open(path, os.O_RDWR | os.O_APPEND | os.O_CREAT, 0o644)
    try:
        size = os.fstat(file).st_size
        end, last_seq = _find_end(file, size)
        if end < size:
            os.ftruncate(file, end)
    except OSError:
        os.close(file)
        raise
    return file, last_seq


def _find_end(file: int, size: int) -> tuple[int, int]:
    """(bytes up to the last line end, last sequence number or -1), read from the back in growing pieces."""
    length = _TAIL_BYTES
    while True:
        start = max(0, size - length)
        data = os.pread(file, size - start, start)
        end = data.rfind(b"\n") + 1
        for line in reversed(data[:end].splitlines()):
            if found := _parse_line(line):
                return start + end, found["seq"]
        if start == 0:
            return end, -1
        length *= 8


def _write_line(file: int, line: bytes) -> None:
    if os.write(file, line) < len(line):
        raise OSError(0, "the disk took only a part of a line")


def _read_complete_lines(path: str | os.PathLike[str], offset: int) -> bytes:
    # Opened anew each time: network file systems show other writers' bytes to a file opened after the write only.
    try:
        with open(path, "rb") as file:
            file.seek(offset)
            data = file.read()
    except OSError:
        return b""
    return data[: data.rfind(b"\n") + 1]


def _follow(path: str | os.PathLike[str], parse: Callable[[bytes], _T | None]) -> Iterator[list[_T]]:
    offset = 0
    while True:
        data = _read_complete_lines(path, offset)
        offset += len(data)
        yield [found for line in data.splitlines() if (found := parse(line)) is not None]


def _parse_line(line: bytes) -> Line | None:
    try:
        found = json.loads(line)
    except ValueError:
        return None
    return found if isinstance(found, dict) and isinstance(found.get("seq"), int) and "type" in found else None
