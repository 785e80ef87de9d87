"""The status of a start, from the command to the first training step."""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import TextIO

from rich.control import Control
from rich.segment import ControlType

from ray_yolo.core.events import EndEvent, EpochEvent, StepEvent, WorkerEvent
from ray_yolo.runs.event_log import EVENTS_FILE, follow
from ray_yolo.runs.status import STARTUP_FILE, write_startup
from ray_yolo.sinks.console import build_console

_TICK_SECONDS = 0.5
_FIRST_SECONDS, _NEXT_SECONDS = 10.0, 30.0  # without a terminal, a phase is printed after, and then again every
_WAIT_SECONDS = 10.0  # without a worker, what it waits for is looked up this often
_FILE_SECONDS = 2.0  # the file that `ray_yolo.status` reads is written this often


class StartupStatus:
    """Context that shows the phase of a start and its seconds. A terminal gets a live line, other outputs get a new
    line at intervals. It ends at the first training step.

    Args:
        quiet: show no phases; `print` still prints.
        clock: returns the time in seconds.
    """

    def __init__(self, stream: TextIO, *, quiet: bool = False, clock: Callable[[], float] = time.monotonic) -> None:
        self._stream, self._quiet, self._clock = stream, quiet, clock
        self._console = build_console(stream)
        self._live = stream.isatty() and not quiet
        self._lock, self._over = threading.RLock(), threading.Event()
        self._text, self._since, self._due = "", 0.0, 0.0
        self._observe: Callable[[], None] = lambda: None
        self._waits_for = ""
        self._written_at = -_FILE_SECONDS
        self.run_dir: Path | None = None
        """The run that starts, once it is known; `ray_yolo.status` shows its phase."""

    def __enter__(self) -> StartupStatus:
        if not self._quiet:
            threading.Thread(target=self._run, name="ray_yolo startup", daemon=True).start()
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def phase(self, text: str) -> None:
        """The start has entered a phase."""
        with self._lock:
            if text != self._text:
                self._text, self._since = text, self._clock()
                self._due = self._since + _FIRST_SECONDS
            self.update()

    def watch_workers(self, run_dir: Path, num_workers: int, describe_wait: Callable[[], str] = str) -> None:
        """From now on, show the phase of the workers, according to the run's log.

        Args:
            num_workers: of the start; 0: training runs in this process.
            describe_wait: the resources that workers wait for, and the jobs that hold them; '': they do not wait.
        """
        self.run_dir, looked_at = run_dir, self._clock()
        log, started = follow(run_dir / EVENTS_FILE), set[int]()
        next(log)  # of earlier starts

        def observe() -> None:
            nonlocal looked_at
            for event in next(log):
                if isinstance(event, WorkerEvent):
                    started.add(event.worker)
                elif isinstance(event, (StepEvent, EpochEvent, EndEvent)):
                    self.close()
            if started:
                self._waits_for = ""
            elif num_workers and self._clock() - looked_at >= _WAIT_SECONDS:
                self._waits_for, looked_at = describe_wait(), self._clock()
            self.phase(f"starting workers: {len(started)} of {num_workers} up" if len(started) < num_workers else
                       "preparing the first step")

        self._observe = observe

    def print(self, text: str) -> None:
        """Print a line above the live one."""
        with self._lock:
            self._erase()
            print(text, file=self._stream)

    def update(self) -> None:
        """Show the phase, if it is due."""
        with self._lock:
            now = self._clock()
            line = f"{self._text}, {now - self._since:.0f} s"
            if self._quiet or self._over.is_set() or not self._text:
                return
            if self._live:
                self._erase()
                print(line[:79], end="\r", file=self._stream, flush=True)  # other output then starts at the left
            elif now >= self._due:
                self._due = now + _NEXT_SECONDS
                print(line, file=self._stream, flush=True)

    def close(self) -> None:
        """Remove the live line, for good."""
        with self._lock:
            if not self._over.is_set():
                self._over.set()
                self._erase()
                if self.run_dir:
                    with contextlib.suppress(OSError):  # of a storage that fails: the error of the start counts
                        (self.run_dir / STARTUP_FILE).unlink(missing_ok=True)

    def _run(self) -> None:
        while not self._over.wait(_TICK_SECONDS):
            self._observe()
            self.update()
            self._write()

    def _write(self) -> None:
        """Write the phase for `ray_yolo.status`, if it is due."""
        with self._lock:
            now = self._clock()
            if self.run_dir and self._text and not self._over.is_set() and now - self._written_at >= _FILE_SECONDS:
                self._written_at = now
                write_startup(self.run_dir, self._text, now - self._since, self._waits_for)

    def _erase(self) -> None:
        if self._live:
            self._console.control(Control(ControlType.CARRIAGE_RETURN, (ControlType.ERASE_IN_LINE, 2)))
