"""An append-only log of events, one JSON object per line, in the order in which they arrived.

The log is the source of truth of a run or a sweep. Tables, plots and tracking servers are sinks that can be rebuilt
from it. It has one writer and any number of readers. Each line is written by one call. A line that a crash has
truncated is removed when the log is opened again; readers skip it.

| field | content |
|---|---|
| `seq` | 0, 1, 2, ... in the order of the file |
| `time` | Unix seconds of the writer's clock, for people; it orders nothing |
| `type` | the kind of event: `ray_yolo.core.events` for a training; a sweep's ledger has its own |
| `crc` | the last entry, 8 hex digits: CRC-32 of the line's bytes before it, which continues the previous line's |

The last one makes a changed, removed or inserted line visible to `check_log`. Readers do not look at it; lines of
versions before it have none.

JSON has no NaN and no infinity: a number that is not finite is stored as null.
"""

from __future__ import annotations

import contextlib
import json
import math
import os
import re
import sys
import threading
import time
import zlib
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
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
    WarningEvent,
    parse_event,
)
from ray_yolo.core.files import sync
from ray_yolo.core.formatting import format_count
from ray_yolo.core.redact import redact

EVENTS_FILE = "events.jsonl"
"""The log of a run, in its folder."""

Line = dict[str, Any]
_T = TypeVar("_T")
_Kind = TypeVar("_Kind", bound=Event)

_RESERVED = frozenset({"seq", "time", "type", "crc"})
_CRC = re.compile(rb',"crc":"([0-9a-f]{8})"}\n?$')
_TAIL_BYTES = 1 << 16
# Lines in memory while the disk fails: 10 hours of a fast run's steps, 50 MB. Beyond that, the oldest are dropped,
# which leaves a gap in the sequence numbers.
_MAX_PENDING = 100_000

class EventLog:
    """The writer. Several threads of one process may use it.

    A full or failing disk does not stop a training: lines wait in memory, and every later `append` tries again. A
    warning among them goes to stderr at once, because nothing that reads the log can show it; so does one on the disk.
    A durable log has no such lines.

    Args:
        durable: `append` returns once its line is on the device. If that fails, it raises the OSError, and the log is
            without the line.

    Raises:
        OSError: on construction, if the log cannot be opened at all.
    """

    def __init__(self, path: str | os.PathLike[str], *, durable: bool = False) -> None:
        self.path, self._durable = Path(path), durable
        self.path.parent.mkdir(parents=True, exist_ok=True)
        self._lock = threading.Lock()
        self._pending: deque[bytes] = deque(maxlen=_MAX_PENDING)
        self._warned = False
        self._file: int | None
        # The checksum of the last line in the file, which the next line's continues.
        self._crc: int
        self._file, last_seq, self._crc = _open_and_repair(self.path)
        self._next_seq = last_seq + 1
        if durable:
            sync(self.path.parent)

    def append(self, event: Event) -> int:
        """Write one event of a training and return its sequence number."""
        return self.append_line(event.type, **event.fields)

    def append_line(self, type: str, /, **fields: Any) -> int:
        """Write one line and return its sequence number."""
        assert not _RESERVED & fields.keys(), f"reserved: {sorted(_RESERVED & fields.keys())}"
        with self._lock:
            seq = self._next_seq
            self._add_line(type, plain(fields))
            error = self._write_pending()
            if error and self._durable:
                self._pending.clear()
                self._next_seq = seq
                raise error
            if error and type == "warning":
                _print_warning(fields["message"])
            if error and not self._warned:
                self._warned = True
                message = (f"{self.path} cannot be written ({error.strerror or error}): events wait in memory until it "
                           "can be written again")
                self._add_line("warning", {"message": message})
                _print_warning(message)
            return seq

    def _add_line(self, type: str, fields: Mapping[str, Any]) -> None:
        """Let a line with the next number wait for the file."""
        line = {"seq": self._next_seq, "time": round(time.time(), 3), "type": type, **fields}
        self._pending.append(json.dumps(line, separators=(",", ":")).encode() + b"\n")
        self._next_seq += 1

    def close(self) -> list[str]:
        """Try once more to write the pending lines, and close the file. Returns the warnings that are lost."""
        with self._lock:
            self._write_pending()
            self._release()
            waiting = (parse_event(line) for line in self._pending)
            return [event.message for event in waiting if isinstance(event, WarningEvent)]

    def _write_pending(self) -> OSError | None:
        """Write the pending lines. Returns the error that prevented it."""
        end = 0
        try:
            if self._file is None:
                self._file, _, self._crc = _open_and_repair(self.path)
            end = os.fstat(self._file).st_size
            while self._pending:
                # The checksum is added only now: it continues the previous line's, and a full memory drops lines.
                text = self._pending[0].removesuffix(b"}\n")
                crc = zlib.crc32(text, self._crc)
                line = text + f',"crc":"{crc:08x}"}}\n'.encode()
                if os.write(self._file, line) < len(line):
                    raise OSError(0, "the disk accepted only a part of a line")
                self._crc = crc
                self._pending.popleft()
            if self._durable:
                os.fsync(self._file)
        except OSError as error:
            if self._durable and self._file is not None:  # a line that may be lost later must not be read until then
                with contextlib.suppress(OSError):
                    os.ftruncate(self._file, end)
            self._release()  # opening it again removes a line that was written in part
            return error
        return None

    def _release(self) -> None:
        if self._file is not None:
            with contextlib.suppress(OSError):
                os.close(self._file)
        self._file = None


def read_events(path: str | os.PathLike[str]) -> list[Event]:
    """All events of a training's log; none if it does not exist yet. Torn lines and unknown events are left out."""
    return next(follow(path))


def each_event(path: str | os.PathLike[str]) -> Iterator[Event]:
    """The events of `read_events`, one after the other, without holding all of them in memory.

    Raises:
        OSError: if the log cannot be read.
    """
    with open(path, "rb") as file:
        for line in file:
            event = parse_event(line)
            if event is not None and line.endswith(b"\n"):
                yield event


def read_lines(path: str | os.PathLike[str]) -> list[Line]:
    """All lines of a log as plain objects."""
    return next(_follow(path, _parse_line))


def follow(path: str | os.PathLike[str]) -> Iterator[list[Event]]:
    """An endless iterator: each `next()` returns the events appended since the last one, possibly none.

    The first one returns all events so far. Each byte is read once. The file need not exist yet; a file that cannot be
    read has no new events.
    """
    return _follow(path, parse_event)


def surviving(events: Sequence[Event]) -> list[Event]:
    """The events without the rows that a restart from an earlier step has voided.

    A start at step s voids every earlier row with a step > s. Other events are facts and stay. Idempotent; keeps the
    order.
    """
    return _filter_rows(events, committed=math.inf)


def durable(events: Sequence[Event]) -> list[Event]:
    """The surviving events without the rows that a restart might still void.

    A row is durable when a checkpoint, a command's start or a successful end at its step or a later one follows. It
    stays durable, because training restarts from saved steps only. A sink that publishes durable rows never has to
    withdraw one.
    """
    return _filter_rows(events, committed=-1)


def epoch_rows(events: Sequence[Event]) -> list[EpochEvent]:
    """One event per epoch, in order. If an epoch was reported twice, the first counts: it may be published."""
    rows: dict[int, EpochEvent] = {}
    for event in events:
        if isinstance(event, EpochEvent):
            rows.setdefault(event.epoch, event)
    return [rows[epoch] for epoch in sorted(rows)]


def last_of(events: Sequence[Event], *types: type[_Kind]) -> _Kind | None:
    """The last event of one of these types."""
    return next((event for event in reversed(events) if isinstance(event, types)), None)


def best_row(rows: Sequence[EpochEvent]) -> EpochEvent | None:
    """The best epoch: the last one that was better than all earlier ones."""
    return next((row for row in reversed(rows) if row.best), None)


@dataclass(frozen=True)
class Goodput:
    """The cost of a training's interruptions, over all its commands."""

    restarts: int
    """How often all workers began again from a checkpoint."""
    regroupings: int
    """How often workers were lost, replaced or added while the others continued."""
    steps_repeated: int
    idle_seconds: float
    """The sum of the times from the last progress before an interruption to the first step after it."""
    goodput: float
    """Seconds of training / (seconds of training + `idle_seconds`); 1 without interruptions."""

    @property
    def line(self) -> str:
        """All numbers in one line for people; '' without an interruption."""
        if not self.restarts and not self.regroupings:
            return ""
        return (f"{format_count(self.restarts, 'restart')}, {format_count(self.regroupings, 'regrouping')}: "
                f"{format_count(self.steps_repeated, 'step')} done twice, {self.idle_seconds:.0f} s without training, "
                f"goodput {100 * self.goodput:.1f} %")


class GoodputMeter:
    """Measures the cost of interruptions, event by event.

    Time between commands does not count: a `dataset` event starts a command.
    """

    def __init__(self) -> None:
        self._restarts = self._regroupings = self._repeated = 0
        self._idle = self._training = 0.0
        self._progress: Event | None = None
        """The last event that shows progress, or the start before the first one."""
        self._reached = 0
        """The last step that was done."""
        self._is_interrupted = False
        """A start interrupts the training until the next progress."""

    def add(self, event: Event) -> None:
        """Take the next event of the log."""
        if isinstance(event, DatasetEvent):
            self._progress = event
        elif isinstance(event, StartEvent):
            if self._reached or event.step:  # it continues a training; the first start of all interrupts nothing
                self._regroupings += event.regrouped
                self._restarts += not event.regrouped
                self._repeated += max(self._reached - event.step, 0)
                self._is_interrupted = True
            else:
                self._progress = event
            self._reached = event.step
        elif isinstance(event, (StepEvent, EpochEvent)):
            seconds = event.time - self._progress.time if self._progress else 0.0
            if self._is_interrupted:  # all time since the last progress was lost
                self._idle += seconds
            else:
                self._training += seconds
            self._progress, self._is_interrupted = event, False
            self._reached = max(self._reached, event.step)

    def goodput(self) -> Goodput:
        """The cost up to now."""
        share = self._training / (self._idle + self._training) if self._idle else 1.0
        return Goodput(self._restarts, self._regroupings, self._repeated, self._idle, share)


def measure_goodput(events: Iterable[Event]) -> Goodput:
    """The cost of the interruptions that a log shows."""
    meter = GoodputMeter()
    for event in events:
        meter.add(event)
    return meter.goodput()


def plain(value: Any) -> Any:
    """The value as plain JSON, without secrets.

    Mappings, sequences, arrays and scalars (numpy, torch) become dicts, lists and numbers. A number that is not finite
    becomes None. Text is redacted; any other value becomes its text.
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


def _filter_rows(events: Sequence[Event], committed: float) -> list[Event]:
    """The events, without the rows of steps after a later start's, and without those that no later save has reached.

    Args:
        committed: a step that counts as saved at the end of the log; infinite: every row does.
    """
    kept: list[Event] = []
    limit = math.inf  # the step of the earliest start so far
    for event in reversed(events):  # the events after a row decide whether it stays
        # Training never restarts from before these steps. After a failure it restarts from the last checkpoint. A start
        # of regrouped workers is no checkpoint, since they continue from memory.
        match event:
            case CheckpointEvent() | StartEvent(regrouped=False) | EndEvent(status="done"):
                committed = max(committed, event.step)
        if isinstance(event, StartEvent):
            limit = min(limit, event.step)
        if not isinstance(event, RowEvent) or event.step <= min(limit, committed):
            kept.append(event)
    return kept[::-1]


def _print_warning(message: str) -> None:
    with contextlib.suppress(OSError, ValueError):  # a stderr that is closed, or is on the same disk
        print(f"WARNING: {redact(message)}", file=sys.stderr, flush=True)


def check_log(path: Path) -> str | None:
    """The first line of a log that does not match its checksum, in words; None if there is none.

    Lines before the first one with a checksum are of an earlier version, unless that one has the number 0.

    Raises:
        OSError: if the log cannot be read.
    """
    crc, has_begun = 0, False
    with path.open("rb") as file:
        for number, line in enumerate(file, 1):
            if not line.endswith(b"\n"):  # its writer is at work, or was killed
                break
            match = _CRC.search(line)
            if match is None and has_begun:
                return f"line {number} has no checksum"
            if match:
                crc = zlib.crc32(line[:match.start()], crc)
                if f"{crc:08x}".encode() != match[1]:
                    return f"line {number} does not match its checksum: it was changed, or lines before it are missing"
                if number > 1 and not has_begun and line.startswith(b'{"seq":0,'):  # the first one that was written
                    return "line 1 has no checksum"
                has_begun = True
    return None


def _open_and_repair(path: Path) -> tuple[int, int, int]:
    """(file open for appending, last sequence number or -1, checksum of the last line or 0). Removes a torn last line.
    """
    file = os.open(path, os.O_RDWR | os.O_APPEND | os.O_CREAT, 0o644)
    try:
        size = os.fstat(file).st_size
        end, last_seq, crc = _find_end(file, size)
        if end < size:
            os.ftruncate(file, end)
    except OSError:
        os.close(file)
        raise
    return file, last_seq, crc


def _find_end(file: int, size: int) -> tuple[int, int, int]:
    """(bytes up to the last line end, last sequence number or -1, checksum of the last line or 0), read from the end in
    growing pieces.
    """
    length = _TAIL_BYTES
    while True:
        start = max(0, size - length)
        data = os.pread(file, size - start, start)
        end = data.rfind(b"\n") + 1
        match = _CRC.search(data[:end])
        crc = int(match[1], 16) if match else 0
        for line in reversed(data[:end].splitlines()):
            parsed = _parse_line(line)
            if parsed:
                return start + end, parsed["seq"], crc
        if start == 0:
            return end, -1, crc
        length *= 8


def _follow(path: str | os.PathLike[str], parse: Callable[[bytes], _T | None]) -> Iterator[list[_T]]:
    """As `follow`, for any way to read a line; what `parse` returns None for is left out."""
    offset = 0
    while True:
        lines = b""
        # Opened again each time: a network file system shows another node's write only to files opened after it.
        with contextlib.suppress(OSError), open(path, "rb") as file:
            file.seek(offset)
            data = file.read()
            lines = data[: data.rfind(b"\n") + 1]
        offset += len(lines)
        # The list stays in no variable here: a log may be large, and the consumer may not need it.
        yield [parsed for line in lines.splitlines() if (parsed := parse(line)) is not None]


def _parse_line(line: bytes) -> Line | None:
    try:
        parsed = json.loads(line)
    except ValueError:
        return None
    if not (isinstance(parsed, dict) and isinstance(parsed.get("seq"), int) and "type" in parsed):
        return None
    parsed.pop("crc", None)
    return parsed
