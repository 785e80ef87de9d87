"""The times of an epoch's steps, and the events that report them."""

from __future__ import annotations

import os
import socket
import time
from dataclasses import dataclass, field
from typing import Any

import torch

from ray_yolo.core.events import EpochEvent, ShardEvent, StepEvent
from ray_yolo.core.structures import Progress
from ray_yolo.engine.loop import StepResult
from ray_yolo.engine.plan import Step
from ray_yolo.ops.schedule import Rates

STEP_EVENTS_PER_EPOCH = 100


@dataclass
class StepTimer:
    """Times and image counts of one epoch, or of the rest of it after a restart.

    Args:
        steps: in the whole epoch; about `STEP_EVENTS_PER_EPOCH` of them are logged.
    """

    steps: int
    began: float = field(default_factory=time.perf_counter)
    last: float = field(default_factory=time.perf_counter)  # end of the last step
    trained: float = 0.0  # end of the epoch's last step
    wait_seconds: float = 0.0
    images: int = 0  # forwarded by this worker
    step_images: int = 0  # forwarded by all workers

    def stop_step(self, result: StepResult, images: int) -> float:
        """Record the end of a step of `images` images. Returns its seconds."""
        now = time.perf_counter()
        seconds, self.last = now - self.last, now
        self.wait_seconds += result.wait_seconds
        self.images += result.images
        self.step_images += images
        return seconds

    def resume(self) -> None:
        """Exclude the time since the last step, in which no step was trained."""
        now = time.perf_counter()
        self.began, self.last = self.began + now - self.last, now

    def should_log(self, step: int, result: StepResult) -> bool:
        """Whether to log a step: at regular intervals, and if it was skipped."""
        return step % -(-self.steps // STEP_EVENTS_PER_EPOCH) == 0 or result.skipped

    def step_event(self, progress: Progress, step: Step, rates: Rates, result: StepResult, seconds: float) -> StepEvent:
        """The event of the step that has just ended."""
        return StepEvent(
            step=progress.step, epoch=progress.epoch, batch=step.batch, loss=result.losses.tolist(), lr=rates.lr,
            images=len(step.images), images_per_second=len(step.images) / seconds, seconds=seconds,
            wait_seconds=result.wait_seconds, gradient_norm=result.gradient_norm, skipped=result.skipped)

    def shard_event(self, progress: Progress, worker: int) -> ShardEvent:
        """The event of this worker's share of the epoch."""
        return ShardEvent(worker=worker, epoch=progress.epoch, step=progress.step, images=self.images,
                          wait_seconds=self.wait_seconds, seconds=self.trained - self.began,
                          node=socket.gethostname(), pid=os.getpid())

    def epoch_event(self, epoch: int, step: int, rates: Rates, device: torch.device, **measured: Any) -> EpochEvent:
        """The event of the epoch; `measured` contains further fields."""
        seconds = self.trained - self.began
        return EpochEvent(
            epoch=epoch, step=step, lr=rates.lr, images_per_second=self.step_images / seconds,
            wait_share=self.wait_seconds / seconds, seconds=time.perf_counter() - self.began,
            memory_gb=torch.cuda.max_memory_reserved() / 1e9 if device.type == "cuda" else 0.0, **measured)
