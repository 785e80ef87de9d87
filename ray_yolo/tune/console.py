"""Displays the progress of a sweep on the driver's console.

A terminal shows a live table of the best trials, with other output above it. Job logs and files get one line per
result.
"""

from __future__ import annotations

import shlex
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TextIO

from rich.console import Group
from rich.live import Live
from rich.table import Column, Table
from rich.text import Text

from ray_yolo.config.recipe import Recipe
from ray_yolo.core.formatting import format_duration
from ray_yolo.runs.location import location
from ray_yolo.sinks.console import build_console, print_unwrapped
from ray_yolo.tune.ledger_events import ClaimedEvent
from ray_yolo.tune.status import result_line, summary_line, table_rows
from ray_yolo.tune.trials import Trial, replay_command


class SweepDisplay:
    """Writes the progress of a sweep's trials to a stream, from its construction until `close()`.

    Use it from one thread; `say` is thread-safe.

    Args:
        trials: the current rows of the ledger.
        left: returns the seconds until the end of the sweep; None: unknown.
    """

    def __init__(self, stream: TextIO, trials: Sequence[Trial] = (), left: Callable[[], float | None] = lambda: None
                 ) -> None:
        self._trials, self._left = tuple(trials), left
        self._running: dict[str, int] = {}  # epochs to train, by run folder
        self._console = build_console(stream)
        self._live = Live(console=self._console, auto_refresh=False, get_renderable=self._picture,
                          # a redirected stream stays redirected
                          redirect_stdout=sys.stdout.isatty(), redirect_stderr=sys.stderr.isatty())
        if self._console.is_interactive:
            self._live.start(refresh=True)

    def close(self) -> None:
        """Stop redrawing the table; later output follows below it."""
        self._live.stop()

    def say(self, text: str) -> None:
        """Print lines, above the table if there is one."""
        print_unwrapped(self._console, text)

    def started(self, name: str, until: int) -> None:
        """Show that a trial is trained until `until` epochs."""
        self._running[name] = until
        self._draw()

    def ended(self, name: str) -> None:
        """Show that a trial no longer trains."""
        self._running.pop(name, None)
        self._draw()

    def update(self, trials: Sequence[Trial]) -> None:
        """Show the rows of the ledger, and print new results."""
        shown = {trial.number: (trial.epochs, trial.reason, trial.seeds) for trial in self._trials}
        self._trials = tuple(trials)
        left = self._time_left()
        for trial in trials:
            is_news = (trial.epochs, trial.reason, trial.seeds) != shown.get(trial.number)
            has_result = bool(trial.epochs or trial.reason)
            in_table = self._console.is_interactive and not trial.reason  # a line for each would hide the table
            if is_news and has_result and not in_table:
                self.say(f"{result_line(trial)}; {summary_line(trials)}{left}")
        self._draw()

    def _draw(self) -> None:
        if self._console.is_interactive:
            self._live.refresh()

    def _picture(self) -> Group:
        header, *rows = table_rows(self._trials)
        table = Table(*(Column(name, justify="right", no_wrap=True, overflow="crop") for name in header),
                      box=None, header_style="bold", pad_edge=False)
        for row in rows:
            table.add_row(*row)
        training = ", ".join(f"{name} to epoch {until}" for name, until in self._running.items())
        return Group(table, "", *(Text(line, no_wrap=True, overflow="crop") for line in (
            f"training: {training or '-'}", summary_line(self._trials) + self._time_left())))

    def _time_left(self) -> str:
        seconds = self._left()
        return "" if seconds is None else f"; about {format_duration(seconds)} left"


def closing_message(folder: Path, recipe: Recipe, best: Trial, claim: ClaimedEvent | None = None) -> str:
    """The result of a sweep over `recipe`, its claim, and commands that use the result."""
    weights = f"{location(folder)}/weights/best.pt"
    lines = [f"best: trial {best.number}, fitness {best.fitness:.5g}, weights {weights}",
             f"train with it: --hyp {shlex.quote(str(folder / 'hyp_evolve.yaml'))}",
             f"repeat it:     {replay_command(recipe, best.genes)}"]
    return "\n".join([*lines, *([f"claim: {claim}"] if claim else [])])
