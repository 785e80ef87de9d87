"""The progress of a training on the driver's console, told from the event log.

Only the driver prints: a worker's output reaches it with a prefix on every line, where a progress bar is rubbish. On
a terminal one live line is redrawn; elsewhere (job logs, files) there is one whole line for each epoch, or one every
half minute of a longer one.
"""

from __future__ import annotations

import io
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TextIO

from rich.console import Console as RichConsole
from rich.live import Live
from rich.text import Text

from ray_yolo.core.events import Event, RunEvent
from ray_yolo.runs.event_log import EVENTS_FILE, read_events
from ray_yolo.sinks.base import Sink
from ray_yolo.sinks.report import TrainingReport, closing_message

_QUIET_SECONDS = 30.0


class Display:
    """Writes a narrator's lines to a stream; on a terminal with the progress as a live last line."""

    def __init__(self, stream: TextIO, clock: Callable[[], float] = time.monotonic) -> None:
        self._console, self._clock = build_console(stream), clock
        self._live = Live(console=self._console, auto_refresh=False, transient=True, redirect_stdout=False,
                          redirect_stderr=False)
        self._report = TrainingReport(live=self._console.is_interactive)
        self._told_at = clock()

    def recall(self, events: Sequence[Event]) -> None:
        """Learn what happened before, and tell no more of it than which run this is."""
        self._show([line for event in events for line in self._report.observe(event)
                    if isinstance(event, RunEvent)], "")

    def update(self, events: Sequence[Event]) -> None:
        """Tell what is new."""
        lines = [line for event in events for line in self._report.observe(event)]
        progress = self._report.progress()
        is_due = self._clock() - self._told_at >= _QUIET_SECONDS
        if not self._console.is_interactive and not lines and progress and is_due:
            lines = [progress]
        if lines:
            self._told_at = self._clock()
        self._show(lines, progress)

    def close(self) -> None:
        """Leave the stream at the begin of a line."""
        self._live.stop()

    def _show(self, lines: Sequence[str], progress: str) -> None:
        if lines:
            print_whole(self._console, "\n".join(lines))
        if self._console.is_interactive:
            self._live.start()
            self._live.update(Text(progress[: self._console.width - 1], no_wrap=True), refresh=True)
        else:
            self._console.print("", end="")  # writes what rich has kept because the stream refused it


class _Console(RichConsole):
    def on_broken_pipe(self) -> None:
        """Leave the error to the caller: rich would end the process."""
        raise


def build_console(stream: TextIO) -> RichConsole:
    """A console on a stream; letters that it does not have become question marks."""
    if isinstance(stream, io.TextIOWrapper):
        stream.reconfigure(errors="replace")
    return _Console(file=stream, force_terminal=stream.isatty(), markup=False, emoji=False)


def print_whole(console: RichConsole, text: str) -> None:
    """Print lines as they are, above what is live: paths and commands stay whole for copying."""
    console.print(Text(text), soft_wrap=True)


class Console(Sink):
    """Tells a run folder's log from now on, and at the end what came of the training.

    Args:
        notes: called at the end: what else the user has to know.
    """

    name, interval_seconds, patience_seconds = "console", 0.5, 2.0

    def __init__(self, run_dir: Path, stream: TextIO, notes: Callable[[], Sequence[str]] = tuple) -> None:
        super().__init__()
        self._run_dir, self._stream, self._notes = run_dir, stream, notes
        self._display = Display(stream)
        self._last_past = max((event.seq for event in read_events(run_dir / EVENTS_FILE)), default=-1)
        self._past: list[Event] = []
        self._new: list[Event] = []

    def event(self, event: Event) -> None:
        """Take note of what happened before, and of what is new."""
        (self._new if event.seq > self._last_past else self._past).append(event)

    def update(self, last: bool = False) -> None:
        """Tell it."""
        past, self._past, new, self._new = self._past, [], self._new, []
        if past:
            self._display.recall(past)
        self._display.update(new)

    def finish(self) -> None:
        """Leave the stream at the begin of a line, and tell the outcome."""
        self._display.close()
        self._tell_outcome()

    def abandon(self) -> str:
        """Tell at least the outcome."""
        self._display.close()
        self._tell_outcome()
        return super().abandon()

    def _tell_outcome(self) -> None:
        for text in (closing_message(self._run_dir, read_events(self._run_dir / EVENTS_FILE)), *self._notes()):
            print(text, file=self._stream)
