"""report.html of a run: its curves, pictures, data and results on one page, from its folder alone."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from ray_yolo.core.events import DatasetEvent, EpochEvent, Event, RunEvent
from ray_yolo.core.files import atomic_write
from ray_yolo.plots.page import Section, render_page
from ray_yolo.runs.event_log import EVENTS_FILE, best_row, each_event, epoch_rows, last_of, surviving
from ray_yolo.runs.usage import measure_usage
from ray_yolo.sinks.report import closing_message, dataset_table

REPORT_FILE = "report.html"
_CURVES = ("results.png", "PR_curve.png", "F1_curve.png", "P_curve.png", "R_curve.png")
_MATRICES = ("confusion_matrix.png", "confusion_matrix_normalized.png")


def run_page(folder: Path, events: Sequence[Event]) -> str:
    """The page of a run, from its log and the pictures in its folder.

    Args:
        events: of the log. They may lack steps, workers and the results of each class, which are read from the file.
    """
    run = last_of(events, RunEvent)
    dataset = last_of(events, DatasetEvent)
    about = [] if run is None else [
        run.command, f"{run.recipe['model']}, {run.num_parameters:,} parameters, {run.recipe['data']}"]
    usage = measure_usage(each_event(folder / EVENTS_FILE)).line
    return render_page(folder.name, [
        Section("Run", about),
        Section("Result", closing_message(folder, _with_best_classes(folder, events)).splitlines()),
        Section("Hours", [usage] if usage else ()),
        Section("Curves", pictures=[folder / name for name in _CURVES]),
        Section("Confusion of classes", pictures=[folder / name for name in _MATRICES]),
        Section("Data", dataset_table(dataset.splits, dataset.names) if dataset else (), [folder / "labels.jpg"]),
        Section("Labels and detections of validation", pictures=sorted(folder.glob("val_batch*_pred.jpg"))),
        Section("First training batches", pictures=sorted(folder.glob("train_batch*.jpg"))),
    ])


def _with_best_classes(folder: Path, events: Sequence[Event]) -> list[Event]:
    """The events, with the results of each class in the best epoch, as the log has it."""
    best = best_row(epoch_rows(surviving(events)))
    if best is None:
        return list(events)
    logged = (event for event in each_event(folder / EVENTS_FILE) if isinstance(event, EpochEvent))
    whole = next(event for event in logged if event.seq == best.seq)
    return [whole if event is best else event for event in events]


class RunPage:
    """The record of a run that writes its page when the log has ended. It comes after the pictures that it shows."""

    name, uses_time = "report", True

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def update(self, events: Sequence[Event], ended: bool) -> None:
        """Write the page of an ended log, and again if a picture has been added since."""
        if not ended:
            return
        path = self._folder / REPORT_FILE
        page = run_page(self._folder.resolve(), events)  # the record process calls it "."
        if not path.is_file() or path.read_text() != page:
            atomic_write(path, page, durable=False)
