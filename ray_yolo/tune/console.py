"""Displays the progress of a sweep on the driver's console.

A terminal shows a live table of trials, with other output above it. Job logs and files get one line for each trial that
ends.
"""

from __future__ import annotations

import math
import shlex
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TextIO

from rich.console import Group
from rich.live import Live
from rich.table import Column, Table
from rich.text import Text

from ray_yolo.config.recipe import Recipe
from ray_yolo.core.errors import InputError
from ray_yolo.core.formatting import format_duration
from ray_yolo.runs.location import is_active, local_folder, location
from ray_yolo.runs.record import LEDGER_FILE, SweepRecord, read_record
from ray_yolo.runs.status import describe_run
from ray_yolo.sinks.console import build_console, print_unwrapped
from ray_yolo.tune.ledger import read_ledger, read_trials
from ray_yolo.tune.trials import State, Trial, best_trial, replay_command

COLUMNS = ("trial", "state", "epoch", "fitness", "best")

_STYLES = {"finished": "green", "failed": "red"}
_RECENT = 5  # ended trials in the table
_REASON_LENGTH = 160
_OTHER_LINES = 4  # of the terminal: header, blank line, summary, and a spare one


@dataclass(frozen=True)
class TrialStatus:
    """The progress of a trial: epochs done, and the fitness of each reported epoch."""

    trial: int
    state: State = "running"
    epoch: int = 0
    fitness: tuple[float, ...] = ()
    started: float = 0.0  # by the display's clock


class SweepDisplay:
    """Writes the progress of a sweep's trials to a stream, from its construction until `close()`.

    Use it from one thread; `say` is thread-safe.

    Args:
        total: number of trials of the sweep.
        epochs: epochs of a trial that is not stopped early.
        trials: the present rows of the ledger.
    """

    def __init__(self, stream: TextIO, total: int, epochs: int, clock: Callable[[], float] = time.monotonic,
                 trials: Sequence[Trial] = ()) -> None:
        self._total, self._epochs, self._clock, self._trials = total, epochs, clock, trials
        self._running: dict[int, TrialStatus] = {}
        self._ended: list[TrialStatus] = []  # newest first
        self._durations: list[float] = []
        self._slots = 0  # the most trials that ran at once
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

    def started(self, trial_number: int) -> None:
        """Show that a trial's training starts or resumes."""
        self._running[trial_number] = TrialStatus(trial_number, started=self._clock())
        self._slots = max(self._slots, len(self._running))
        self._draw()

    def epoch(self, trial_number: int, epoch: int, fitness: float) -> None:
        """Show that a trial has completed `epoch` epochs, the last one with this fitness."""
        status = self._running[trial_number]
        self._running[trial_number] = replace(status, epoch=epoch, fitness=(*status.fitness, fitness))
        self._draw()

    def ended(self, trial: Trial, trials: Sequence[Trial]) -> None:
        """Show that a trial has ended; `trials` are all rows of the ledger."""
        # it may have failed before its start
        status = self._running.pop(trial.number, TrialStatus(trial.number, started=self._clock()))
        if trial.fitness is not None:  # Tune does not report the epoch at which it stops a trial
            status = replace(status, epoch=trial.epochs, fitness=(*status.fitness, trial.fitness))
        self._trials = trials
        self._durations.append(self._clock() - status.started)
        self._ended = [replace(status, state=trial.state), *self._ended][:_RECENT]
        if trial.state == "failed" or not self._console.is_interactive:  # the table has no column for reasons
            self.say(ended_line(trial, trials, self._total) + self._left())
        self._draw()

    def _draw(self) -> None:
        if self._console.is_interactive:
            self._live.refresh()

    def _picture(self) -> Group:
        table = Table(*(Column(name, justify="right", no_wrap=True, overflow="crop") for name in COLUMNS),
                      box=None, header_style="bold", pad_edge=False)
        height = max(self._console.height - _OTHER_LINES, 1)
        for row in table_rows(list(self._running.values()), self._ended, self._epochs, height):
            table.add_row(*row, style=_STYLES.get(row[1]))
        summary = summary_line(self._trials, self._total) + self._left()
        return Group(table, "", Text(summary, no_wrap=True, overflow="crop"))

    def _left(self) -> str:
        ages = [self._clock() - status.started for status in self._running.values()]
        num_waiting = self._total - sum(trial.has_ended for trial in self._trials) - len(ages)
        seconds = seconds_left(self._durations, ages, num_waiting, self._slots)
        return "" if seconds is None else f"; about {format_duration(seconds)} left"


def table_rows(running: Sequence[TrialStatus], ended: Sequence[TrialStatus], epochs: int, limit: int
               ) -> list[tuple[str, ...]]:
    """At most `limit` rows of COLUMNS: the running trials, then as many of the ended ones as fit."""
    shown = running if len(running) <= limit else running[:limit - 1]
    rows = [_cells(each, epochs) for each in shown]
    if len(shown) < len(running):
        rows.append(("...", f"{len(running) - len(shown)} more", "", "", ""))
    return rows + [_cells(each, epochs) for each in ended[:limit - len(rows)]]


def _cells(status: TrialStatus, epochs: int) -> tuple[str, ...]:
    fitness = status.fitness
    numbers = (f"{fitness[-1]:.4f}", f"{max(fitness):.4f}") if fitness else ("-", "-")
    return str(status.trial), status.state, f"{status.epoch or '-'}/{epochs}", *numbers


def summary_line(trials: Sequence[Trial], total: int) -> str:
    """The progress of a sweep, and its best trial."""
    ended, failed = sum(trial.has_ended for trial in trials), sum(trial.state == "failed" for trial in trials)
    best = best_trial(trials)
    return (f"{ended}/{total} trials ended" + (f", {failed} failed" if failed else "")
            + (f"; best {best.fitness:.4f} (trial {best.number})" if best else ""))


def ended_line(trial: Trial, trials: Sequence[Trial], total: int) -> str:
    """The result of a trial on one line. A reason is shortened, without line breaks and colour codes."""
    ended, best = sum(each.has_ended for each in trials), best_trial(trials)
    outcome = " ".join(Text.from_ansi(trial.reason).plain.split())
    if len(outcome) > _REASON_LENGTH:
        outcome = f"{outcome[:_REASON_LENGTH - 3]}..."
    if trial.fitness is not None:
        outcome = f"fitness {trial.fitness:.5g} after {trial.epochs} epochs"
    best_so_far = f"; best {best.fitness:.5g} (trial {best.number})" if best else ""
    return f"{ended}/{total}  trial {trial.number} {trial.state}: {outcome}{best_so_far}"


def seconds_left(durations: Sequence[float], ages: Sequence[float], num_waiting: int, slots: int) -> float | None:
    """Seconds until all trials have ended, if each takes the mean of `durations`: the seconds of the ended trials.

    `ages` are the seconds for which the running trials have run; `slots` is how many run at once. None if no trial has
    ended yet, or none is left.
    """
    if not durations or not num_waiting + len(ages):
        return None
    mean = math.fsum(durations) / len(durations)
    work = num_waiting * mean + math.fsum(max(mean - age, 0.0) for age in ages)
    return work / min(slots, num_waiting + len(ages))


def closing_message(folder: Path, recipe: Recipe, best: Trial) -> str:
    """The result of a sweep over `recipe`, and the commands that use it."""
    weights = f"{location(folder)}/weights/best.pt"
    return (f"best: trial {best.number}, fitness {best.fitness:.5g}, weights {weights}\n"
            f"train with it: --hyp {shlex.quote(str(folder / 'hyp_evolve.yaml'))}\n"
            f"repeat it:     {replay_command(recipe, best.lineage)}")


def describe_sweep(folder: Path) -> list[str]:
    """The status of a run or sweep, line by line. A sweep's running trials are described as by `describe_run`.

    Raises:
        InputError: if the folder is not that of a run or sweep.
    """
    if not (folder / LEDGER_FILE).is_file():
        return describe_run(folder)
    trials = list(read_trials(read_ledger(folder / LEDGER_FILE)).values())
    record = read_record(folder)
    total = record.trials if isinstance(record, SweepRecord) else len(trials)
    state = "searching" if is_active(folder) else "finished" if (folder / "finished").exists() else (
        "interrupted: the same command continues it")
    lines = [f"{location(folder)}: {state}; {summary_line(trials, total)}"]
    lines += [ended_line(trial, trials, total) for trial in trials if trial.state == "failed"]
    for trial in trials:
        run_dir = folder / "trials" / trial.folder_name
        if trial.state == "running":
            with suppress(InputError):  # it has not started
                run_dir = local_folder(location(run_dir), whole=False)
        if trial.state == "running" and (run_dir / "events.jsonl").is_file():
            lines += [f"  {line}" for line in describe_run(run_dir)]
    return lines
