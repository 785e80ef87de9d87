"""TensorBoard's event files of a run folder, written from its event log."""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING

from ray_yolo.core.events import CheckpointEvent, EndEvent, EpochEvent, StartEvent
from ray_yolo.runs.event_log import EVENTS_FILE, durable, epoch_rows, read_events
from ray_yolo.sinks.base import Sink
from ray_yolo.sinks.metric_names import metrics, terms_of

if TYPE_CHECKING:
    from torch.utils.tensorboard.writer import SummaryWriter


def is_installed() -> bool:
    """Whether TensorBoard is installed."""
    return find_spec("tensorboard") is not None


class TensorBoard(Sink):
    """A run's durable epochs as scalars.

    TensorBoard cannot remove a point, so only durable epochs are written. Points in existing files are read first, so
    that a restart at any moment neither repeats nor loses a point.
    """

    name, needs, prompt_seconds = "TensorBoard", (StartEvent, EpochEvent, CheckpointEvent, EndEvent), 1.0

    def __init__(self, folder: Path) -> None:
        super().__init__()
        self._folder = folder
        self._writer: SummaryWriter | None = None
        self._written: set[tuple[str, int]] = set()  # (tag, step) of every scalar in the files

    def update(self, last: bool = False) -> None:
        """Add the durable points that the files lack.

        Raises:
            OSError: if the files cannot be written; the next call reads them again and adds the rest.
        """
        rows = epoch_rows(durable(self.history)) if self.is_stale else []
        points = [(metric.results, row, number) for row in rows for metric in metrics(terms_of(rows))
                  if metric.results and (number := metric.of(row)) is not None]
        if not points:
            return
        writer, self._writer = self._writer or self._open(), None  # kept if all goes well: a failed writer stays broken
        for tag, row, number in points:
            if (tag, row.epoch) not in self._written:
                writer.add_scalar(tag, number, row.epoch, walltime=row.time)
                self._written.add((tag, row.epoch))
        writer.flush()
        self._writer, self.is_stale = writer, False

    def finish(self) -> None:
        """Close the file."""
        if self._writer is not None:
            self._writer.close()
        self._writer = None

    def abandon(self) -> str:
        """Leave the rest to the plot process, or to `ray_yolo.sync`."""
        return f"TensorBoard gets the last epochs in the background; if not: python -m ray_yolo.sync {self._folder}"

    def _open(self) -> SummaryWriter:
        from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
        from torch.utils.tensorboard.writer import SummaryWriter

        files = EventAccumulator(str(self._folder), size_guidance={"scalars": 0}).Reload()
        self._written = {(tag, point.step) for tag in files.Tags()["scalars"] for point in files.Scalars(tag)}
        return SummaryWriter(str(self._folder))


def complete(run_dir: Path) -> None:
    """Write what the files of a run lack, if TensorBoard is installed."""
    if is_installed():
        board = TensorBoard(run_dir)
        for event in read_events(run_dir / EVENTS_FILE):
            board.event(event)
        board.update(last=True)
        board.finish()
