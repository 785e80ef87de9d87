"""What a sweep, or a single training, is doing now, by its folder."""

from __future__ import annotations

from contextlib import suppress
from pathlib import Path

from ray_yolo.errors import InputError
from ray_yolo.runlog.folders import is_held
from ray_yolo.runlog.record import LEDGER_FILE, SweepRecord, read_record
from ray_yolo.runlog.spool import address_of, is_leased
from ray_yolo.runlog.status import describe_run
from ray_yolo.runlog.stored_files import copy_of
from ray_yolo.tune.console import ended_line, summary_line
from ray_yolo.tune.ledger import read_ledger, read_trials


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
    state = "searching" if is_held(folder) or is_leased(folder) else "finished" if (folder / "finished").exists() else (
        "interrupted: the same command continues it")
    lines = [f"{address_of(folder) or folder}: {state}; {summary_line(trials, total)}"]
    lines += [ended_line(trial, trials, total) for trial in trials if trial.state == "failed"]
    for trial in trials:
        run_dir = folder / "trials" / trial.folder_name
        if trial.state == "running" and (address := address_of(run_dir)):
            with suppress(InputError):  # it has not begun
                run_dir = copy_of(address, whole=False)
        if trial.state == "running" and (run_dir / "events.jsonl").is_file():
            lines += [f"  {line}" for line in describe_run(run_dir)]
    return lines
