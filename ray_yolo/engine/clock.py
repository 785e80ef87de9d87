"""Times and counts of a worker's epoch, and the events that tell them."""

from __future__ import annotations

import os
import socket
import time
from dataclasses import dataclass, field
from typing import Any

import torch

from ray_yolo.engine.loop import StepResult
from ray_yolo.engine.plan import Step
from ray_yolo.events import EpochEvent, ShardEvent, StepEvent
from ray_yolo.ops.schedule import Rates
from ray_yolo.structures import Progress

STEP_EVENTS_PER_EPOCH = 100


@dataclass
class Clock:
    """Of one epoch, or of what is left of it when training goes on inside.

    Args:
        steps: of the whole epoch; of so many, `STEP_EVENTS_PER_EPOCH` are told.
    """

    steps: int
    began: float = field(default_factory=time.perf_counter)
    last: float = field(default_factory=time.perf_counter)
    trained: float = 0.0  # when the last step had been taken
    wait_seconds: float = 0.0
    images: int = 0  # forwarded by this worker
    step_images: int = 0  # forwarded by all workers

    def stop_step(self, result: StepResult, images: int) -> float:
        """A step of so many images has been taken. Returns its seconds."""
        now = time.perf_counter()
        seconds, self.last = now - self.last, now
        self.wait_seconds += result.wait_seconds
        self.images += result.images
        self.step_images += images
        return seconds

    def go_on(self) -> None:
        """There was no training since the last step."""
        now = time.perf_counter()
        self.began, self.last = self.began + now - self.last, now

    def stop_training(self) -> None:
        """The epoch's last step has been taken."""
        self.trained = time.perf_counter()

    def tells(self, step: int, result: StepResult) -> bool:
        """Whether there is to be an event of a step."""
        return step % -(-self.steps // STEP_EVENTS_PER_EPOCH) == 0 or result.skipped

    def step_event(self, progress: Progress, step: Step, rates: Rates, result: StepResult, seconds: float) -> StepEvent:
        """Of the step just taken."""
        return StepEvent(
            step=progress.step, epoch=progress.epoch, batch=step.batch, loss=result.losses.tolist(), lr=rates.lr,
            images=len(step.images), images_per_second=len(step.images) / seconds, seconds=seconds,
            wait_seconds=result.wait_seconds, gradient_norm=result.gradient_norm, skipped=result.skipped)

    def shard_event(self, progress: Progress, worker: int) -> ShardEvent:
        """Of this worker's part of the epoch."""
        return ShardEvent(worker=worker, epoch=progress.epoch, step=progress.step, images=self.images,
                          wait_seconds=self.wait_seconds, seconds=self.trained - self.began,
                          node=socket.gethostname(), pid=os.getpid())

    def epoch_event(self, epoch: int, step: int, rates: Rates, device: torch.device, **measured: Any) -> EpochEvent:
        """Of the epoch, with what was `measured`, by the event's names."""
        seconds = self.trained - self.began
        return EpochEvent(
            epoch=epoch, step=step, lr=rates.lr, images_per_second=self.step_images / seconds,
            wait_share=self.wait_seconds / seconds, seconds=time.perf_counter() - self.began,
            memory_gb=torch.cuda.max_memory_reserved() / 1e9 if device.type == "cuda" else 0.0, **measured)
