"""The projections of a run's event log that the driver keeps while it trains: console, result files, MLflow."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import TextIO

from ray_yolo.runlog.background import Background, reason_of
from ray_yolo.runlog.console import ProgressDisplay
from ray_yolo.runlog.events import read_events
from ray_yolo.runlog.mlflow import Tracking
from ray_yolo.runlog.narrator import closing_message
from ray_yolo.runlog.recorder import Emit
from ray_yolo.runlog.results_files import EVENTS_FILE, Results


class Records:
    """Three threads, none of which training ever waits for.

    Args:
        run_dir: the run folder; its event log may hold the story of earlier attempts.
        mlflow_uri: the tracking server (`tracking.tracking_uri`); None: no tracking.
        emit: told of what goes wrong, once for each projection; the display then shows it.
        stream: the console.
        parent_run_id, tags: of the MLflow run, see `tracking.Tracker`.
    """

    def __init__(self, run_dir: Path, mlflow_uri: str | None, emit: Emit, stream: TextIO, *,
                 parent_run_id: str | None = None, tags: Mapping[str, str] | None = None) -> None:
        def warn(message: str) -> None:
            emit("warning", message=message)

        self._run_dir, self._stream, self._warn = run_dir, stream, warn
        self._display = ProgressDisplay(run_dir, stream, warn)
        self._results = Results(run_dir)
        self._results_thread = Background("result files", self._results.update, interval_seconds=2.0, warn=warn)
        self._tracking = mlflow_uri and Tracking(run_dir, mlflow_uri, warn, parent_run_id=parent_run_id, tags=tags)

    def finish(self, draw_plots: Callable[[], None], patience_seconds: float | None = None,
               flush: Callable[[], None] = lambda: None) -> None:
        """Complete everything, each part on its own, and print the closing message. What fails is a warning.

        The log must be complete by then, but for such warnings.

        Args:
            draw_plots: called when results.csv is final and before files go to MLflow.
            patience_seconds: how long to wait for a tracking server that does not answer, see `Tracking.finish`.
            flush: called to have warnings written, before the console tells the rest.
        """
        note: list[str | None] = []
        tracking = self._tracking
        self._alone("result files", self._finish_results)
        self._alone("pictures", draw_plots)
        if tracking:
            self._alone("MLflow", lambda: note.append(tracking.finish(patience_seconds)))
        flush()
        self._alone("console", lambda: self._finish_console(filter(None, note)))

    def _alone(self, name: str, work: Callable[[], None]) -> None:
        try:
            work()
        except Exception as error:  # whatever it is: training is over, and the others have their own work to end
            self._warn(f"{name}: {reason_of(error)}")

    def _finish_results(self) -> None:
        if not self._results_thread.finish(patience_seconds=10.0):
            raise TimeoutError("not complete after 10 s")
        self._results.close()

    def _finish_console(self, notes: Iterable[str]) -> None:
        self._display.finish()
        for text in (closing_message(self._run_dir, read_events(self._run_dir / EVENTS_FILE)), *notes):
            print(text, file=self._stream)
