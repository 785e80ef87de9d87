"""Uploads a run in a bucket while it is trained: the driver its log, and the record process what it has made."""

from __future__ import annotations

import time
from collections.abc import Sequence
from pathlib import Path

from ray_yolo.core.errors import TrainingError
from ray_yolo.core.events import CheckpointEvent, EndEvent, EpochEvent, Event, WarningEvent
from ray_yolo.runs.remote_run import ChangedFiles, RemoteRun, ordinary_files
from ray_yolo.sinks.base import Sink
from ray_yolo.storage.lease import LEASE, read_terms
from ray_yolo.storage.store import Store, open_store

_FLUSH_SECONDS = 60.0


class LogUpload(Sink):
    """Uploads the log once a minute and with every epoch and checkpoint. The driver holds the run's lease."""

    name, limit_seconds = "storage", 60.0

    def __init__(self, run: RemoteRun) -> None:
        self._run = run
        self._is_due = False
        self._flushed_at = time.monotonic()

    def event(self, event: Event) -> None:
        """Record what is due."""
        self._is_due |= isinstance(event, (EpochEvent, CheckpointEvent, WarningEvent, EndEvent))

    def update(self, last: bool = False) -> None:
        """Upload it."""
        if self._is_due or last or time.monotonic() - self._flushed_at > _FLUSH_SECONDS:
            self._run.flush_log()
            self._is_due, self._flushed_at = False, time.monotonic()


class FileUpload:
    """The ordinary files of a working copy (tables, pictures, notes) in its bucket. Log, checkpoints and weights belong
    to the process that trains the run.

    Args:
        address: of the run.
    """

    name, uses_time = "storage", True

    def __init__(self, folder: Path, address: str) -> None:
        self._folder, self._address = folder, address
        self._store: Store | None = None  # opened by the first update: what makes records tries that again
        self._changed: ChangedFiles | None = None
        self._attempt: int | None = None  # the attempt that made these files

    def update(self, events: Sequence[Event], ended: bool) -> None:
        """Upload the files that are new or changed since the last call; the first call uploads all.

        Raises:
            OSError: if storage refuses.
            TrainingError: if another process trains the run by now. Its files are newer.
        """
        store = self._store = self._store or open_store(self._address)
        changed = self._changed = self._changed or ChangedFiles(store, self._folder)
        lease = read_terms(store, LEASE)
        attempt = lease[0].attempt if lease else 0
        if self._attempt is None:
            self._attempt = attempt
        if attempt != self._attempt:
            raise TrainingError(f"{self._address}: another process trains this run now; this one stores nothing more")
        changed.put(ordinary_files(self._folder))
