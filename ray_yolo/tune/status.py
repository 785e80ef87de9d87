"""The status of a study in lines, from its state. It imports neither torch nor Ray."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

from rich.text import Text

from ray_yolo.core.errors import InputError
from ray_yolo.core.formatting import format_count
from ray_yolo.runs.event_log import EVENTS_FILE
from ray_yolo.runs.location import local_folder, location
from ray_yolo.runs.run_record import LEDGER_FILE
from ray_yolo.runs.status import describe_run
from ray_yolo.tune.compared import comparison_table, result_text
from ray_yolo.tune.pool_log import last_pool_lines
from ray_yolo.tune.study_state import SweepState, read_study_state
from ray_yolo.tune.trials import Trial, best_trial, best_trials, short_value

BEST = 5  # trials in the table
POOL_LINES = 3  # this many of the newest events of the workers are shown
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


def describe_study(folder: Path) -> list[str]:
    """The status of a run, sweep or comparison, line by line. Running trainings are described as by `describe_run`.

    Raises:
        InputError: if the folder is not that of a run, sweep or comparison, or its ledger cannot be read.
    """
    if not (folder / LEDGER_FILE).is_file():
        return describe_run(folder)
    state = read_study_state(folder)
    head = f"{location(folder)}: {state.status(folder)}"
    if isinstance(state, SweepState):
        described = [f"{head}; {summary_line(state.trials)}"]
        described += [f"  {'  '.join(row)}" for row in table_rows(state.trials)] * (state.best is not None)
        described += [f"claim: {state.claim}"] if state.claim else []
        described += map(result_line, state.failed)
    else:
        described = [head, str(state.claim), *state.recipes.differences, *comparison_table(state.results, state.claim),
                     *map(result_text, state.trainings)]
    described += [f"workers: {line}" for line in last_pool_lines(folder, POOL_LINES)]
    for name in state.open_folders(folder):
        run_dir = folder / "trials" / name
        with suppress(InputError):  # it has not started
            run_dir = local_folder(location(run_dir), whole=False)
            if (run_dir / EVENTS_FILE).is_file():
                described += [f"  {line}" for line in describe_run(run_dir)]
    return described
