"""The status of a study in words, from its ledger. It imports neither torch nor Ray."""

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
from ray_yolo.tune.compared import comparison_table, result_text
from ray_yolo.tune.ledger import begun_of, claim_of, pairs_claim_of, read_ledger, read_trials
from ray_yolo.tune.ledger_events import CountedEvent, FailedEvent, LedgerEvent
from ray_yolo.tune.pairs import claim_from, results_of, training_folder
from ray_yolo.tune.pool_log import last_pool_lines
from ray_yolo.tune.study import ComparisonEvent
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


def study_state(folder: Path, doing: str) -> str:
    """The state of a study in words; what is before a colon names it. `doing`: the word for a study that runs."""
    if is_active(folder):
        return doing
    return "finished" if (folder / "finished").exists() else "interrupted: the same command continues it"


def describe_study(folder: Path) -> list[str]:
    """The status of a run, sweep or comparison, line by line. Running trainings are described as by `describe_run`.

    Raises:
        InputError: if the folder is not that of a run, sweep or comparison, or its ledger cannot be read.
    """
    if not (folder / LEDGER_FILE).is_file():
        return describe_run(folder)
    lines = read_ledger(folder / LEDGER_FILE)
    describe = _describe_comparison if isinstance(begun_of(lines), ComparisonEvent) else _describe_sweep
    described, running = describe(folder, lines)
    for name in running:
        run_dir = folder / "trials" / name
        with suppress(InputError):  # it has not started
            run_dir = local_folder(location(run_dir), whole=False)
            if (run_dir / EVENTS_FILE).is_file():
                described += [f"  {line}" for line in describe_run(run_dir)]
    return described


def _describe_sweep(folder: Path, lines: Sequence[LedgerEvent]) -> tuple[list[str], list[str]]:
    """The lines of a sweep, and the run folders of the trials that train."""
    trials = list(read_trials(lines).values())
    described = [f"{location(folder)}: {study_state(folder, 'searching')}; {summary_line(trials)}"]
    described += [f"  {'  '.join(row)}" for row in table_rows(trials)] * any(trial.epochs for trial in trials)
    if claim := claim_of(lines):
        described.append(f"claim: {claim}")
    described += [result_line(trial) for trial in trials if trial.state == "failed"]
    described += [f"workers: {line}" for line in last_pool_lines(folder, POOL_LINES)]
    return described, [trial.folder_name for trial in trials if trial.state == "running"]


def _describe_comparison(folder: Path, lines: Sequence[LedgerEvent]) -> tuple[list[str], list[str]]:
    """The lines of a comparison, and the run folders without a result."""
    results = results_of(lines)
    claim = pairs_claim_of(lines) or claim_from(results)
    described = [f"{location(folder)}: {study_state(folder, 'comparing')}", str(claim),
                 *begun_of(lines).recipes.differences, *comparison_table(results, claim)]
    described += [result_text(line) for line in lines if isinstance(line, (CountedEvent, FailedEvent))]
    described += [f"workers: {line}" for line in last_pool_lines(folder, POOL_LINES)]
    ended = {training_folder(pair, side) for pair, side in results}
    return described, [path.name for path in sorted((folder / "trials").glob("*")) if path.name not in ended]
