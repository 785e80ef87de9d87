"""Prints the progress of a training on the driver's console, from the event log.

Only the driver prints: Ray prefixes every line of a worker's output, which breaks progress bars. A terminal shows one
live line, and so does the cell of a notebook; other streams (job logs, files) get one row per epoch, and a line every
30 s of a longer epoch.
"""

from __future__ import annotations

import io
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, TextIO

from rich.console import Console as RichConsole
from rich.live import Live
from rich.text import Text

from ray_yolo.core.events import Event, RunEvent
from ray_yolo.runs.event_log import EVENTS_FILE, read_events
from ray_yolo.sinks.base import Sink
from ray_yolo.sinks.report import TrainingReport, closing_message

_QUIET_SECONDS = 30.0


class _Console(RichConsole):
    def on_broken_pipe(self) -> None:
        """Raise the error to the caller: rich would end the process."""
        raise


def build_console(stream: TextIO) -> RichConsole:
    """A console on a stream; characters outside its encoding become question marks.

    In a notebook it writes text like to a file: rich's own way adds an empty output to the cell with every update.
    """
    if isinstance(stream, io.TextIOWrapper):
        stream.reconfigure(errors="replace")
    return _Console(file=stream, force_terminal=stream.isatty(), force_jupyter=False, markup=False, emoji=False)


def print_unwrapped(console: RichConsole, text: str) -> None:
    """Print lines above the live one, without wrapping: paths and commands can be copied."""
    console.print(Text(text), soft_wrap=True)


class _CellLine:
    """A line in the output of a notebook's cell, which each update replaces."""

    def __init__(self) -> None:
        self._handle: Any = None
        self._text = ""

    def update(self, text: str) -> None:
        """Show another text."""
        if text == self._text:
            return
        self._text = text
        if self._handle is None:
            from IPython.display import display

            self._handle = display({"text/plain": text}, raw=True, display_id=True)
        else:
            self._handle.update({"text/plain": text}, raw=True)


def _is_cell(stream: TextIO) -> bool:
    """Whether a stream is the output of a notebook's cell."""
    return type(stream).__module__ == "ipykernel.iostream"


class Console(Sink):
    """Prints the log of a run folder from now on, and a closing message at the end. On a terminal, the progress is a
    live last line.

    Args:
        notes: called at the end; returns further lines for the user.
        plots: whether pictures are drawn.
        uri: the MLflow server that gets the run.
    """

    name, interval_seconds, limit_seconds = "console", 0.5, 2.0

    def __init__(self, run_dir: Path, stream: TextIO, notes: Callable[[], Sequence[str]] = tuple,
                 clock: Callable[[], float] = time.monotonic, *, plots: bool = False, uri: str | None = None) -> None:
        self._plots, self._uri = plots, uri
        self._run_dir, self._stream, self._notes, self._clock = run_dir, stream, notes, clock
        self._console = build_console(stream)
        self._live = Live(console=self._console, auto_refresh=False, transient=True, redirect_stdout=False,
                          redirect_stderr=False)
        self._report = TrainingReport(live=self._console.is_interactive)
        self._cell_line = _CellLine() if _is_cell(stream) else None
        self._printed_at = clock()
        self._past_seq = max((event.seq for event in read_events(run_dir / EVENTS_FILE)), default=-1)
        self._queued: list[Event] = []
        self.closes = True
        """Whether `finish` prints the closing message: not for a run whose folder was moved."""

    def event(self, event: Event) -> None:
        """Queue an event."""
        self._queued.append(event)

    def update(self, last: bool = False) -> None:
        """Print the queued events; of those of earlier starts, only the description of the run."""
        queued, self._queued = self._queued, []
        lines = [line for event in queued for line in self._report.observe(event)
                 if event.seq > self._past_seq or isinstance(event, RunEvent)]
        progress = self._report.progress()
        is_due = self._clock() - self._printed_at >= _QUIET_SECONDS
        has_line = self._console.is_interactive or self._cell_line
        if not has_line and not lines and progress and is_due:
            lines = [progress]
        if lines:
            self._printed_at = self._clock()
            print_unwrapped(self._console, "\n".join(lines))
        if self._console.is_interactive:
            self._live.start()
            self._live.update(Text(progress[: self._console.width - 1], no_wrap=True), refresh=True)
        elif self._cell_line:
            self._cell_line.update(progress)
        else:
            self._console.print("", end="")  # writes text that rich has buffered after a failed write

    def finish(self) -> None:
        """End the live line and print the closing message."""
        self._live.stop()
        if self._cell_line:
            self._cell_line.update("")
        if not self.closes:
            return
        closing = closing_message(self._run_dir, read_events(self._run_dir / EVENTS_FILE), plots=self._plots,
                                  uri=self._uri)
        for text in (closing, *self._notes()):
            print(text, file=self._stream)
