"""Uploads the files of a run in a bucket while it is trained."""

from __future__ import annotations

import time

from ray_yolo.core.events import CheckpointEvent, EndEvent, EpochEvent, Event, WarningEvent
from ray_yolo.runs.remote_run import RemoteRun
from ray_yolo.sinks.base import Sink

_FLUSH_SECONDS = 60.0


class UploadSink(Sink):
    """Uploads the log once a minute and with every epoch and checkpoint, other files with every epoch."""

    name, patience_seconds = "storage", 60.0

    def __init__(self, run: RemoteRun) -> None:
        super().__init__()
        self._run = run
        self._files_are_due = False
        self._flushed_at = time.monotonic()

    def event(self, event: Event) -> None:
        """Record what is due."""
        self.is_stale |= isinstance(event, (EpochEvent, CheckpointEvent, WarningEvent, EndEvent))
        self._files_are_due |= isinstance(event, (EpochEvent, EndEvent))

    def update(self, last: bool = False) -> None:
        """Upload it."""
        if self.is_stale or last or time.monotonic() - self._flushed_at > _FLUSH_SECONDS:
            self._run.flush_log()
            self.is_stale, self._flushed_at = False, time.monotonic()
        if self._files_are_due:
            self._run.put_files()
            self._files_are_due = False
