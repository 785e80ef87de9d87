"""The progress of a sweep on the driver's console.

On a terminal a live table of trials is redrawn, and other prints appear above it; elsewhere (job logs, files) there is
one whole line for each trial that ends.
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
_OTHER_LINES = 4  # of the terminal: header, blank line and summary, and one to spare


@dataclass(frozen=True)
class TrialStatus:
    """How far a trial has come: epochs done, and the fitness of each that was seen."""

    trial: int
    state: State = "running"
    epoch: int = 0
    fitness: tuple[float, ...] = ()
    begun: float = 0.0  # by the display's clock


class SweepDisplay:
    """Tells a stream what becomes of a sweep's trials, from its construction until `close()`.

    For one thread; `say` is for any.

    Args:
        total: trials that the sweep shall have.
        epochs: epochs of a trial that is not stopped early.
        trials: the rows of the ledger that there are already.
    """

    def __init__(self, stream: TextIO, total: int, epochs: int, clock: Callable[[], float] = time.monotonic,
                 trials: Sequence[Trial] = ()) -> None:
        self._total, self._epochs, self._clock, self._trials = total, epochs, clock, trials
        self._running: dict[int, TrialStatus] = {}
        self._ended: list[TrialStatus] = []  # newest first
        self._durations: list[float] = []
        self._slots = 0  # the most trials that have run at once
        self._console = build_console(stream)
        self._live = Live(console=self._console, auto_refresh=False, get_renderable=self._picture,
                          # what goes into a file shall stay there
                          redirect_stdout=sys.stdout.isatty(), redirect_stderr=sys.stderr.isatty())
        if self._console.is_interactive:
            self._live.start(refresh=True)

    def close(self) -> None:
        """Leave the last table where it is; what is said from now on follows below."""
        self._live.stop()

    def say(self, text: str) -> None:
        """Tell whole lines, above the table where there is one."""
        print_unwrapped(self._console, text)

    def started(self, trial_number: int) -> None:
        """A trial's training begins or goes on."""
        self._running[trial_number] = TrialStatus(trial_number, begun=self._clock())
        self._slots = max(self._slots, len(self._running))
        self._draw()

    def epoch(self, trial_number: int, epoch: int, fitness: float) -> None:
        """A trial has done so many epochs, the last one with this fitness."""
        before = self._running[trial_number]
        self._running[trial_number] = replace(before, epoch=epoch, fitness=(*before.fitness, fitness))
        self._draw()

    def ended(self, trial: Trial, trials: Sequence[Trial]) -> None:
        """A trial has ended; `trials` are all rows of the ledger."""
        # may never have begun
        standing = self._running.pop(trial.number, TrialStatus(trial.number, begun=self._clock()))
        if trial.fitness is not None:  # Ray Tune keeps the epoch at which a trial is stopped early to itself
            standing = replace(standing, epoch=trial.epochs, fitness=(*standing.fitness, trial.fitness))
        self._trials = trials
        self._durations.append(self._clock() - standing.begun)
        self._ended = [replace(standing, state=trial.state), *self._ended][:_RECENT]
        if trial.state == "failed" or not self._console.is_interactive:  # the table has no room for a reason
            self.say(ended_line(trial, trials, self._total) + self._left())
        self._draw()

    def _draw(self) -> None:
        if self._console.is_interactive:
            self._live.refresh()

    def _picture(self) -> Group:
        table = Table(*(Column(name, justify="right", no_wrap=True, overflow="crop") for name in COLUMNS),
                      box=None, header_style="bold", pad_edge=False)
        room = max(self._console.height - _OTHER_LINES, 1)
        for row in table_rows(list(self._running.values()), self._ended, self._epochs, room):
            table.add_row(*row, style=_STYLES.get(row[1]))
        summary = summary_line(self._trials, self._total) + self._left()
        return Group(table, "", Text(summary, no_wrap=True, overflow="crop"))

    def _left(self) -> str:
        ages = [self._clock() - standing.begun for standing in self._running.values()]
        waiting = self._total - sum(trial.has_ended for trial in self._trials) - len(ages)
        seconds = seconds_left(self._durations, ages, waiting, self._slots)
        return "" if seconds is None else f"; about {format_duration(seconds)} left"


def table_rows(running: Sequence[TrialStatus], ended: Sequence[TrialStatus], epochs: int, limit: int
               ) -> list[tuple[str, ...]]:
    """At most `limit` rows under COLUMNS: the running trials, then as many of the ended ones as there is room for."""
    shown = running if len(running) <= limit else running[:limit - 1]
    rows = [_cells(each, epochs) for each in shown]
    if len(shown) < len(running):
        rows.append(("...", f"{len(running) - len(shown)} more", "", "", ""))
    return rows + [_cells(each, epochs) for each in ended[:limit - len(rows)]]


def _cells(standing: TrialStatus, epochs: int) -> tuple[str, ...]:
    seen = standing.fitness
    numbers = (f"{seen[-1]:.4f}", f"{max(seen):.4f}") if seen else ("-", "-")
    return str(standing.trial), standing.state, f"{standing.epoch or '-'}/{epochs}", *numbers


def summary_line(trials: Sequence[Trial], total: int) -> str:
    """How far a sweep has come, and its best trial."""
    ended, failed = sum(trial.has_ended for trial in trials), sum(trial.state == "failed" for trial in trials)
    best = best_trial(trials)
    return (f"{ended}/{total} trials ended" + (f", {failed} failed" if failed else "")
            + (f"; best {best.fitness:.4f} (trial {best.number})" if best else ""))


def ended_line(trial: Trial, trials: Sequence[Trial], total: int) -> str:
    """What came of a trial that has ended, on one line: a reason without line breaks and colour codes, shortened."""
    ended, best = sum(each.has_ended for each in trials), best_trial(trials)
    outcome = " ".join(Text.from_ansi(trial.reason).plain.split())
    if len(outcome) > _REASON_LENGTH:
        outcome = f"{outcome[:_REASON_LENGTH - 3]}..."
    if trial.fitness is not None:
        outcome = f"fitness {trial.fitness:.5g} after {trial.epochs} epochs"
    lead = f"; best {best.fitness:.5g} (trial {best.number})" if best else ""
    return f"{ended}/{total}  trial {trial.number} {trial.state}: {outcome}{lead}"


def seconds_left(durations: Sequence[float], ages: Sequence[float], num_waiting: int, slots: int) -> float | None:
    """Seconds until all trials have ended, if each takes the mean of `durations`, those of the trials that have ended.

    `ages` are the seconds that the running ones have run, `slots` how many run at once. None if no trial has ended
    yet, or none is left.
    """
    if not durations or not num_waiting + len(ages):
        return None
    mean = math.fsum(durations) / len(durations)
    work = num_waiting * mean + math.fsum(max(mean - age, 0.0) for age in ages)
    return work / min(slots, num_waiting + len(ages))


def closing_message(folder: Path, recipe: Recipe, best: Trial) -> str:
    """What came of a sweep over `recipe`, and how to use it."""
    weights = f"{location(folder)}/weights/best.pt"
    return (f"best: trial {best.number}, fitness {best.fitness:.5g}, weights {weights}\n"
            f"train with it: --hyp {shlex.quote(str(folder / 'hyp_evolve.yaml'))}\n"
            f"repeat it:     {replay_command(recipe, best.lineage)}")


def describe_sweep(folder: Path) -> list[str]:
    """Line by line. Of a sweep: its trials, and of those that are under way what `describe_run` says.

    Raises:
        InputError: if the folder is neither's.
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
