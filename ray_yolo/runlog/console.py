"""The progress of a training on the driver's console, told from the event log.

Only the driver prints: a worker's output reaches it with a prefix on every line, where a progress bar is rubbish. On
a terminal one live line is redrawn; elsewhere (job logs, files) there is one whole line for each epoch, or one every
half minute of a longer one.
"""

from __future__ import annotations

import shutil
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TextIO

from ray_yolo.runlog.background import Background
from ray_yolo.runlog.events import Event, follow, read_events
from ray_yolo.runlog.narrator import Narrator
from ray_yolo.runlog.results_files import EVENTS_FILE

_QUIET_SECONDS = 30.0
_CLEAR_LINE = "\r\x1b[K"


class Display:
    """Writes a narrator's lines to a stream; on a terminal with the progress as a live last line."""

    def __init__(self, stream: TextIO, clock: Callable[[], float] = time.monotonic) -> None:
        self._stream = stream
        self._clock = clock
        self._live = stream.isatty()
        self._narrator = Narrator(live=self._live)
        self._told_at = clock()

    def recall(self, events: Sequence[Event]) -> None:
        """Learn what happened before, and tell no more of it than which run this is."""
        lines = [line for event in events for line in self._narrator.observe(event) if event["type"] == "run"]
        self._write("".join(f"{line}\n" for line in lines), "")

    def update(self, events: Sequence[Event]) -> None:
        """Tell what is new."""
        lines = [line for event in events for line in self._narrator.observe(event)]
        progress = self._narrator.progress()
        if not self._live and not lines and progress and self._clock() - self._told_at >= _QUIET_SECONDS:
            lines = [progress]
        if lines:
            self._told_at = self._clock()
        self._write("".join(f"{line}\n" for line in lines), progress)

    def close(self) -> None:
        """Leave the stream at the begin of a line."""
        self._write("", "")

    def _write(self, text: str, progress: str) -> None:
        if self._live:
            columns = shutil.get_terminal_size().columns
            text = f"{_CLEAR_LINE}{text}{progress[: columns - 1]}"  # a line that wraps cannot be redrawn
        encoding = self._stream.encoding or "utf-8"  # class names may not exist in the console's alphabet
        self._stream.write(text.encode(encoding, "replace").decode(encoding))
        self._stream.flush()


class ProgressDisplay:
    """The display thread of a driver: tells a run folder's log from now on. `warn` is told once if that fails."""

    def __init__(self, run_dir: str | Path, stream: TextIO, warn: Callable[[str], None]) -> None:
        path = Path(run_dir) / EVENTS_FILE
        past = read_events(path)
        log = follow(path, after_seq=past[-1]["seq"] if past else -1)
        self._display = display = Display(stream)
        display.recall(past)
        self._thread = Background("display", lambda: display.update(next(log)), interval_seconds=0.5, warn=warn)

    def finish(self, patience_seconds: float = 2.0) -> None:
        """Tell the rest, and leave the stream at the begin of a line."""
        if self._thread.finish(patience_seconds):
            self._display.close()
