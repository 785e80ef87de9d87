"""The MLflow sink of a run folder, as a driver runs it."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from ray_yolo.runs.event_log import EVENTS_FILE
from ray_yolo.sinks.base import Sinks
from ray_yolo.sinks.mlflow_run import Mlflow


class Tracking:
    """Delivers a run folder to MLflow, from its construction on."""

    def __init__(self, run_dir: Path, uri: str, warn: Callable[[str], None], **link: Any) -> None:
        self._mlflow = Mlflow(run_dir, uri, **link)
        self._sinks = Sinks(run_dir / EVENTS_FILE, [self._mlflow], warn)

    def finish(self, patience_seconds: float | None = None) -> str | None:
        """Deliver the rest. Returns a note for the user, if any."""
        if patience_seconds is not None:
            self._mlflow.patience_seconds = patience_seconds
        self._sinks.finish()
        return next(iter(self._mlflow.notes), None)
