"""Asynchronous checkpoints: training waits for a copy of its state; a thread writes it."""

from __future__ import annotations

import math
import sys
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import Future
from contextlib import suppress
from pathlib import Path
from typing import IO, Any, Literal

import torch

from ray_yolo.checkpoints import local as checkpoint
from ray_yolo.checkpoints import state_file
from ray_yolo.checkpoints.layout import DRIVER_LOCK
from ray_yolo.checkpoints.remote_checkpoints import RemoteCheckpoints
from ray_yolo.core.errors import MovedRunError, TrainingError
from ray_yolo.core.events import CheckpointEvent, Emit, WarningEvent
from ray_yolo.core.files import is_in_place
from ray_yolo.core.threads import run_in_thread

MAX_MISSED_SAVES, MISSED_SECONDS = 3, 300.0  # training ends after both: failures in a row, time without a save
WRITE_SECONDS = 600.0  # a slower write counts as failed
LOSS_SECONDS = 60.0  # training time that may be lost with all workers
COST = 0.01  # the largest share of time for saves by time


class Saver:
    """Writes a run's checkpoints in order, one at a time. A failed save is a warning at first, then ends training.

    Args:
        keep: number of checkpoints to keep.
        stored: object storage to which they are uploaded; None: only `run_dir`.
    """

    def __init__(self, run_dir: Path, digest: str, keep: int, emit: Emit,
                 stored: RemoteCheckpoints | None = None) -> None:
        self._run_dir, self._digest, self._keep, self._emit, self._stored = run_dir, digest, keep, emit, stored
        self._pending: Future[None] | None = None
        self._missed, self._missed_since = 0, 0.0
        self._lock: IO[bytes] | None = None  # the run folder's; a worker's copy of a run in a bucket has none
        with suppress(OSError):  # storage that fails is reported by what needs it
            self._lock = (run_dir / DRIVER_LOCK).open("rb")
        self.step = -1  # the step of the newest requested checkpoint
        self.waited = self.wrote = 0.0  # seconds that the last save blocked training and occupied its thread

    def save(self, state: Mapping[str, Any], step: int, epoch: int, kinds: Sequence[str], *,
             compared: bool = True) -> None:
        """Write a snapshot of a state in a thread. Waits for the previous save first.

        Args:
            compared: whether all workers have compared these weights. If not, all older checkpoints remain: training
                may have to go back to one of them.

        Raises:
            TrainingError: if that one failed and no further failure is allowed.
        """
        began = time.monotonic()
        self.wait()
        self.step, copy = step, copied(state)
        self.waited = time.monotonic() - began

        def write() -> None:
            self.check_in_place()
            path = checkpoint.save_checkpoint(self._run_dir, copy, step, self._digest, kinds)
            keep = self._keep if compared else sys.maxsize
            if self._stored:
                self._stored.put(path, keep)
            checkpoint.prune(self._run_dir, keep)
            self._emit(CheckpointEvent(step=step, epoch=epoch, path=str(path), kinds=tuple(kinds),
                                       digest=state_file.digest(copy)))
            self.wrote = time.monotonic() - began

        self._pending = run_in_thread(write, "saver")

    def check_in_place(self) -> None:
        """Check that the run folder is the one in which this training began.

        Raises:
            MovedRunError: if it is not.
            OSError: if storage fails.
        """
        if self._lock and not is_in_place(self._lock):
            raise moved_run(self._run_dir)

    def close(self) -> None:
        """Close the lock's file."""
        if self._lock:
            self._lock.close()

    @property
    def is_busy(self) -> bool:
        """Whether a save is under way."""
        return self._pending is not None and not self._pending.done()

    @property
    def written(self) -> int:
        """The step of the newest checkpoint, if it is on storage; otherwise -1."""
        return self.step if not (self._pending or self._missed) else -1

    def wait(self, *, needed: bool = False) -> None:
        """Wait until the pending save has been written or has failed.

        Args:
            needed: its failure is an error.

        Raises:
            TrainingError: if a needed save failed, saves have failed for too long, or the run folder was moved.
        """
        pending, self._pending = self._pending, None
        try:
            if pending:
                pending.result(WRITE_SECONDS)
                self._missed = 0
        except OSError as error:
            self._missed += 1
            self._missed_since = time.monotonic() if self._missed == 1 else self._missed_since
            reason = str(error) or f"the storage has not answered for {WRITE_SECONDS:g} s"
            problem = f"the checkpoint at step {self.step} could not be written ({reason})"
            self._emit(WarningEvent(message=problem))
            elapsed = time.monotonic() - self._missed_since
            if needed or (self._missed >= MAX_MISSED_SAVES and elapsed >= MISSED_SECONDS):
                raise TrainingError(f"{self._run_dir}: {problem}; free or repair the storage and run the same command "
                                    "again") from error


def moved_run(folder: Path) -> MovedRunError:
    """The error that ends a training whose folder is not in its place any more."""
    return MovedRunError(f"{folder}: was moved, removed or replaced while this training ran in it: the training ends, "
                         "and writes nothing more; to continue a moved run, give its new folder to --resume")


def save_interval(setting: float | Literal["auto"], saver: Saver) -> float:
    """Seconds from the start of one save to that of the next; infinite if no save is due.

    `auto` aims at one completed save per `LOSS_SECONDS`. Saves block training for at most `COST` of the time, and their
    thread is idle for as long as it writes.
    """
    if setting != "auto":
        return setting or math.inf
    return math.inf if saver.is_busy else max(LOSS_SECONDS - saver.wrote, 2 * saver.wrote, saver.waited / COST)


def copied(tree: Any) -> Any:
    """A copy of nested dicts with their tensors in host memory; everything else is shared."""
    copy = _queue_copies(tree)
    if torch.cuda.is_initialized():
        torch.cuda.current_stream().synchronize()  # once, not for each of some hundred tensors
    return copy


def _queue_copies(tree: Any) -> Any:
    """As `copied`; a GPU has yet to write its tensors' copies, which are in pinned memory."""
    if isinstance(tree, torch.Tensor):
        on_host = not tree.is_cuda
        return tree.detach().to("cpu", copy=on_host, non_blocking=True)
    if isinstance(tree, Mapping):
        return {name: _queue_copies(value) for name, value in tree.items()}
    return tree
