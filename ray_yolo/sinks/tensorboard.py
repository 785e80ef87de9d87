"""TensorBoard's event files of a run folder, written from its event log."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING

from ray_yolo.core.events import EpochEvent, Event
from ray_yolo.runs.event_log import durable, epoch_rows
from ray_yolo.sinks.metric_names import Metric, metrics, terms_of

if TYPE_CHECKING:
    from torch.utils.tensorboard.writer import SummaryWriter


def is_installed() -> bool:
    """Whether TensorBoard is installed."""
    return find_spec("tensorboard") is not None


class TensorBoard:
    """A run's durable epochs as scalars.

    TensorBoard cannot remove a point, so only durable epochs are written. Points in existing files are read first, so
    that a restart at any moment neither repeats nor loses a point.
    """

    name, uses_time = "TensorBoard", True

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._writer: SummaryWriter | None = None
        self._written: set[tuple[str, int]] = set()  # (tag, step) of every scalar in the files

    def update(self, events: Sequence[Event], ended: bool) -> None:
        """Add the durable points that the files lack. The end closes the file.

        Raises:
            OSError: if the files cannot be written; the next call reads them again and adds the rest.
        """
        rows = epoch_rows(durable(events))
        points = [point for row in rows for point in _points(row, metrics(terms_of(rows)))]
        if points and self._writer is None:
            self._written = self._read()
        lacking = [point for point in points if point[:2] not in self._written]
        if lacking:  # a writer that is opened makes a new file
            # The writer is kept only if all goes well: a failed one stays broken.
            writer, self._writer = self._writer or self._open(), None
            for tag, step, number, seconds in lacking:
                writer.add_scalar(tag, number, step, walltime=seconds)
                self._written.add((tag, step))
            writer.flush()
            self._writer = writer
        if ended and self._writer is not None:
            self._writer.close()
            self._writer = None

    def _read(self) -> set[tuple[str, int]]:
        from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

        files = EventAccumulator(str(self._folder), size_guidance={"scalars": 0}).Reload()
        return {(tag, point.step) for tag in files.Tags()["scalars"] for point in files.Scalars(tag)}

    def _open(self) -> SummaryWriter:
        from torch.utils.tensorboard.writer import SummaryWriter  # here: it takes a second

        return SummaryWriter(str(self._folder))


def _points(row: EpochEvent, columns: Sequence[Metric]) -> Iterator[tuple[str, int, float, float]]:
    """(tag, step, value, time) of each number of an epoch; the steps are the epochs, counted from 1."""
    for metric in columns:
        if (number := metric.of(row)) is not None:
            yield metric.name, row.epoch + 1, number, row.time
