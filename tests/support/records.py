"""The record process of a training without a process: most tests need its records, not its seconds of imports."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from ray_yolo.sinks import records
from ray_yolo.sinks.retry import Warn


class RecordsHere:
    """Makes the records at the end, in the process of the test. It has the methods of `RecordProcess`."""

    def __init__(self, module: str, folder: Path, uri: str | None, warn: Warn, *, own_session: bool) -> None:
        assert module == "ray_yolo.sinks.records"
        self._folder, self._uri, self._warn = folder, uri, warn
        self.pending: list[str] = []
        self._notes: list[str] = []

    def keep_running(self) -> None:
        """Nothing: the records are made at the end."""

    def finish(self, limit_seconds: float) -> None:
        done = records.complete(self._folder, self._uri, Path.cwd(), self._warn, self._notes.append)
        assert done is not None
        self.pending = done.pending

    def describe_rest(self) -> str:
        rest = f"{', '.join(self.pending)}: not complete" if self.pending else ""
        return "\n".join(filter(None, (*self._notes, rest)))


def make_here(patch: Any) -> None:
    """Let trainings of this process make their records so."""
    patch.setattr("ray_yolo.sinks.run_logger.RecordProcess", RecordsHere)
