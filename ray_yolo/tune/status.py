"""The status of a sweep in words, from its ledger. It imports neither torch nor Ray."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

from rich.text import Text

from ray_yolo.core.errors import InputError
from ray_yolo.core.formatting import format_count
from ray_yolo.runs.event_log import EVENTS_FILE
from ray_yolo.runs.location import is_active, local_folder, location
from ray_yolo.runs.run_record import LEDGER_FILE
from ray_yolo.runs.status import describe_run
from ray_yolo.tune.compare_ledger import is_comparison
from ray_yolo.tune.compare_status import describe_comparison
from ray_yolo.tune.ledger import claim_of, read_ledger, read_trials
from ray_yolo.tune.pool_log import last_pool_lines
from ray_yolo.tune.trials import Trial, best_trial, best_trials, short_value

BEST = 5  # trials in the table
POOL_LINES = 3  # of the newest events of the workers
_REASON_LENGTH = 160


def table_rows(trials: Sequence[Trial]) -> list[tuple[str, ...]]:
    """A header, and the best trials with their genes; genes that are equal in all of them are left out."""
    best = best_trials(trials, BEST)
    names = best[0].genes if best else ()
    differing = [name for name in names if len({trial.genes[name] for trial in best}) > 1]
    rows: list[tuple[str, ...]] = [("trial", "epochs", "fitness", *differing)]
    for trial in best:
        genes = [short_value(trial.genes[name]) for name in differing]
        rows.append((str(trial.number), str(trial.epochs), f"{trial.fitness:.4f}", *genes))
    return rows


def summary_line(trials: Sequence[Trial]) -> str:
    """The progress of a sweep, and its best trial."""
    states = Counter(trial.state for trial in trials)
    line = f"{format_count(len(trials), 'trial')}, {states['finished']} trained to the end"
    if states["failed"]:
        line += f", {states['failed']} failed"
    best = best_trial(trials)
    if best:
        line += f"; best {best.fitness:.4f} (trial {best.number})"
    return line


def result_line(trial: Trial) -> str:
    """The last result of a trial on one line. A reason is shortened, without line breaks and colour codes."""
    if trial.state == "failed":
        reason = " ".join(Text.from_ansi(trial.reason).plain.split())
        return f"trial {trial.number} failed: {reason[:_REASON_LENGTH]}{'...' * (len(reason) > _REASON_LENGTH)}"
    seeds = ", ".join(f"{fitness:.5g} on seed {seed}" for seed, fitness in trial.seeds.items())
    return f"trial {trial.number}: fitness {trial.fitness:.5g} after {trial.epochs} epochs{seeds and f', {seeds}'}"


def sweep_state(folder: Path) -> str:
    """The state of a sweep in words; what is before a colon names it."""
    if is_active(folder):
        return "searching"
    return "finished" if (folder / "finished").exists() else "interrupted: the same command continues it"


def describe_sweep(folder: Path) -> list[str]:
    """The status of a run, sweep or comparison, line by line. Running trials are described as by `describe_run`.

    Raises:
        InputError: if the folder is not that of a run, sweep or comparison.
    """
    if not (folder / LEDGER_FILE).is_file():
        return describe_run(folder)
    if is_comparison(folder):
        return describe_comparison(folder)
    ledger = read_ledger(folder / LEDGER_FILE)
    trials = list(read_trials(ledger).values())
    lines = [f"{location(folder)}: {sweep_state(folder)}; {summary_line(trials)}"]
    lines += [f"  {'  '.join(row)}" for row in table_rows(trials)] * any(trial.epochs for trial in trials)
    if claim := claim_of(ledger):
        lines.append(f"claim: {claim}")
    lines += [result_line(trial) for trial in trials if trial.state == "failed"]
    lines += [f"workers: {line}" for line in last_pool_lines(folder, POOL_LINES)]
    for trial in trials:
        if trial.state == "running":
            run_dir = folder / "trials" / trial.folder_name
            with suppress(InputError):  # it has not started
                run_dir = local_folder(location(run_dir), whole=False)
            if (run_dir / EVENTS_FILE).is_file():
                lines += [f"  {line}" for line in describe_run(run_dir)]
    return lines
