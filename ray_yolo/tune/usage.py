"""The usage of a sweep or comparison: the sum over its trainings. It imports neither torch nor Ray."""

from __future__ import annotations

from pathlib import Path

from ray_yolo.runs.event_log import EVENTS_FILE, each_event
from ray_yolo.runs.location import local_folder, location
from ray_yolo.runs.run_record import LEDGER_FILE
from ray_yolo.runs.usage import Usage, measure_usage, total_usage
from ray_yolo.tune.listing import run_names


def usage_of(folder: Path) -> Usage:
    """The usage of a run, or of all trainings of a sweep or comparison.

    Raises:
        InputError: if the logs of a sweep in a bucket cannot be read.
    """
    if not (folder / LEDGER_FILE).is_file():
        return measure_usage(each_event(folder / EVENTS_FILE))
    trials = f"{location(folder)}/trials"
    logs = [local_folder(f"{trials}/{name}", whole=False) / EVENTS_FILE for name in run_names(trials)]
    return total_usage(measure_usage(each_event(log)) for log in logs if log.is_file())
