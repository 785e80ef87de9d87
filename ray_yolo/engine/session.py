"""One worker's training from a start, or restart, to the end: restore, loop, validate, record, save.

Every worker runs the same code on the same numbers; only the recording worker (number 0) writes checkpoints, and
`emit` is given to it by its host. Nothing here knows who runs it.
"""

from __future__ import annotations

import json
import os
import platform
import socket
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch

from ray_yolo.config.placement import Placement
from ray_yolo.engine import checkpoint
from ray_yolo.engine.build import Host, Job, build, rebuild
from ray_yolo.engine.evaluate import Evaluation, evaluate, per_class
from ray_yolo.engine.loop import REMEDY, StepResult, train
from ray_yolo.engine.plan import Step
from ray_yolo.engine.state import TrainState, capture, restore
from ray_yolo.errors import TrainingError
from ray_yolo.events import (
    CheckpointEvent,
    ClassResult,
    Emit,
    EndEvent,
    EpochEvent,
    ShardEvent,
    StartEvent,
    StepEvent,
    Summary,
    WarningEvent,
)
from ray_yolo.ops.schedule import Rates

MAX_MISSED_SAVES = 3
STEP_EVENTS_PER_EPOCH = 100
DETECTIONS_FILE = "detections.npy"

Report = Callable[[dict[str, Any]], None]


def run_session(job: Job, host: Host, placement: Placement, emit: Emit, report: Report,
                stop_asked: Callable[[], bool] = lambda: False) -> Summary:
    """Train `job` on this worker until it is done. Collective. Returns how it ended, equal on all workers.

    Args:
        emit: appends an event to the run's log without waiting.
        report: called by every worker once per epoch with the same metrics.
        stop_asked: called in each step; once it is true on any worker, all stop after the same step, which is saved.
            The summary's `stopped` says so.

    Raises:
        TrainingError: if the loss stays non-finite, or checkpoints cannot be written.
        CheckpointError: if there are checkpoints and none of them can be gone on from.
    """
    session = Session(job, host, placement, emit, report)
    try:
        while not session.is_over:
            session.follow_changes()
            train(session.parts, session.state, session.after_step, session.after_epoch, stop_asked)
    finally:
        for store in session.parts.stores:
            store.close()
    return session.finish()


@dataclass
class _Clock:
    """Times and counts of this worker's epoch so far."""

    event_interval: int  # steps from one step event to the next
    began: float = field(default_factory=time.perf_counter)
    last: float = field(default_factory=time.perf_counter)
    wait_seconds: float = 0.0
    images: int = 0  # forwarded by this worker
    step_images: int = 0  # forwarded by all workers


class Session:
    """The state of `run_session`."""

    def __init__(self, job: Job, host: Host, placement: Placement, emit: Emit, report: Report) -> None:
        self.job, self.host, self.placement = job, host, placement
        self.records = host.replicas.worker == 0
        self._emit, self._report = emit, report
        self.parts = build(job, host)
        self.state = self._resume()
        self.clock = self._start_clock()
        self.missed_saves = 0
        self.stopped = False  # because it was told to
        self._count_anew()
        self.stopped_early = self._has_stalled()

    @property
    def is_over(self) -> bool:
        """Whether there is nothing left to train, or nobody who wants it now."""
        return self.stopped or self.stopped_early or self.state.progress.epoch >= self.job.recipe.epochs

    def follow_changes(self) -> None:
        """Train by the settings that hold now; see `Recipe.changes`."""
        if self.job.recipe.changes:
            self.parts = rebuild(self.parts, self.job.recipe.at(self.state.progress.epoch))

    def after_step(self, step: Step, rates: Rates, result: StepResult) -> None:
        """Record a step, and save where `save_steps` asks for it (an epoch's last step is saved with the epoch)."""
        now, clock, progress = time.perf_counter(), self.clock, self.state.progress
        seconds, clock.last = now - clock.last, now
        clock.wait_seconds += result.wait_seconds
        clock.images += result.images
        clock.step_images += len(step.images)
        if self.records and (progress.step % clock.event_interval == 0 or result.skipped):
            self._emit(StepEvent(
                step=progress.step, epoch=progress.epoch, batch=step.batch, loss=result.losses.tolist(), lr=rates.lr,
                images=len(step.images), images_per_second=len(step.images) / seconds, seconds=seconds,
                wait_seconds=result.wait_seconds, gradient_norm=result.gradient_norm, skipped=result.skipped))
        save_steps = self.placement.save_steps
        inside = step.images.stop < len(self.job.train) and not self.placement.nosave
        self.stopped = result.stop
        if (save_steps and progress.step % save_steps == 0 and inside) or (result.stop and not self.placement.nosave):
            self._save(["last"])

    def after_epoch(self, epoch: int) -> bool:
        """Validate, decide, record, save. Returns whether training is over, or goes on by other settings."""
        recipe, state = self.job.recipe, self.state
        trained = time.perf_counter()
        self._emit(ShardEvent(worker=self.host.replicas.worker, epoch=epoch, step=state.progress.step,
                              images=self.clock.images, wait_seconds=self.clock.wait_seconds,
                              seconds=trained - self.clock.began, node=socket.gethostname(), pid=os.getpid()))
        if self.records and state.skipped:
            self._warn(f"epoch {epoch + 1}: {state.skipped} of its steps were skipped, the first at step "
                       f"{state.first_skipped}: loss or gradient was not finite")
        losses = state.close_epoch()
        last = epoch + 1 == recipe.epochs
        found = self.validate() if last or not recipe.noval else None
        score = None if found is None else recipe.objective.fitness(found.summary)
        best = score is not None and score > state.best_fitness
        if found is not None:
            state.class_maps = tuple(found.metrics.ap.mean(1).tolist())
        if best and found is not None and score is not None:
            state.best_fitness, state.best_epoch = score, epoch
            self._keep_detections(found)
        self._count_anew()
        self.stopped_early = self._has_stalled() and not last
        state.last_epoch = self._epoch_event(epoch, losses, found, score, best, trained)
        if self.records:
            self._emit(state.last_epoch)
        period = self.placement.save_period
        kinds = ["last"] + ["best"] * best + [f"epoch{epoch}"] * (period > 0 and (epoch + 1) % period == 0)
        if last or self.stopped_early or not self.placement.nosave:
            self._save(kinds)
        self._report({"epoch": epoch, "step": state.progress.step, "fitness": score,
                      "best_fitness": state.best_fitness})
        self.clock = self._start_clock()
        return self.is_over or recipe.last_change(epoch + 1) == epoch + 1

    def validate(self) -> Evaluation:
        """Validate the moving average over all workers. Collective."""
        parts = self.parts
        return evaluate(parts.ema.model, parts.family, parts.loss, parts.val_batches, self.job.val,
                        self.job.recipe.evaluate, self.job.recipe.precision, self.host.replicas, self.host.device)

    def finish(self) -> Summary:
        """Record the end, if it is one.

        Raises:
            TrainingError: if all that training did was to skip steps.
        """
        state = self.state
        if not self.stopped and not state.moved:
            raise TrainingError(f"loss or gradient was not finite in any of the {state.progress.step} steps: nothing "
                                f"was trained; {REMEDY}")
        if self.records and not self.stopped:
            self._emit(EndEvent(status="done", reason="early stop" if self.stopped_early else "all epochs",
                                step=state.progress.step, epoch=state.progress.epoch - 1, best_epoch=state.best_epoch,
                                best_fitness=state.best_fitness, stopped_early=self.stopped_early))
        return Summary(step=state.progress.step, epoch=state.progress.epoch - 1, best_epoch=state.best_epoch,
                       best_fitness=state.best_fitness, stopped_early=self.stopped_early, stopped=self.stopped,
                       last_epoch=state.last_epoch)

    def _warn(self, message: str) -> None:
        self._emit(WarningEvent(message=message))

    def _start_clock(self) -> _Clock:
        steps = len(self.parts.plan.steps(self.state.progress.epoch))
        return _Clock(event_interval=-(-steps // STEP_EVENTS_PER_EPOCH))

    def _count_anew(self) -> None:
        """Forget a best epoch from before the last change: what goes on is another training from there."""
        if self.state.best_epoch < self.job.recipe.last_change(self.state.progress.epoch):
            self.state.best_fitness, self.state.best_epoch = -1.0, -1

    def _has_stalled(self) -> bool:
        """Whether the last epoch was the `patience`-th without a better fitness."""
        state, patience = self.state, self.job.recipe.patience
        return patience > 0 and state.best_epoch >= 0 and state.progress.epoch - 1 - state.best_epoch >= patience

    def _resume(self) -> TrainState:
        """The state of the newest verified checkpoint, as the recording worker sees it, or a new one. Collective."""
        step = -1
        if self.records:
            step, problems = checkpoint.recover(self.job.run_dir, self.job.digest)
            for problem in problems:
                self._warn(f"damaged checkpoint set aside: {problem}")
        chosen = int(self.host.replicas.gather(torch.tensor([[step]], device=self.host.device))[0])
        state = TrainState()
        if chosen >= 0:
            saved = checkpoint.read_state(self.job.run_dir / "checkpoints" / f"step-{chosen}" / "state.pt")
            self._check_threads(json.loads(saved["meta"]))
            state = restore(self.parts, saved)
        if self.records:
            progress = state.progress
            self._emit(StartEvent(
                step=progress.step, epoch=progress.epoch, images_in_epoch=progress.images_in_epoch,
                num_workers=self.host.replicas.num_workers, epochs=self.job.recipe.epochs, terms=self.parts.loss.names))
            if state.last_epoch:  # its event may have been lost on the way when the worker died
                self._emit(state.last_epoch)
        return state

    def _check_threads(self, meta: dict[str, Any]) -> None:
        """Under exact, arithmetic threads are part of the result."""
        if self.job.recipe.exact and meta["threads"] != torch.get_num_threads():
            raise TrainingError(f"threads: the checkpoint was trained with {meta['threads']} arithmetic threads per "
                                f"worker, this worker uses {torch.get_num_threads()}; exact needs the same number")

    def _save(self, kinds: list[str]) -> None:
        """Checkpoint the training on the recording worker; a few failures in a row are survived with a warning.

        The last checkpoint is what training was for, and has to be written.
        """
        if not self.records:
            return
        step = self.state.progress.step
        try:
            path = checkpoint.save_checkpoint(self.job.run_dir, capture(self.parts, self.state, self._about()), step,
                                              self.job.digest, kinds)
            checkpoint.prune(self.job.run_dir, self.placement.keep_checkpoints)
        except OSError as error:
            self.missed_saves += 1
            problem = f"the checkpoint at step {step} ({', '.join(kinds)}) could not be written ({error})"
            self._warn(problem)
            if self.missed_saves >= MAX_MISSED_SAVES or (self.is_over and not self.stopped):
                raise TrainingError(f"{self.job.run_dir}: {problem}; free or repair the storage and run the same "
                                    "command again") from error
            return
        self.missed_saves = 0
        self._emit(CheckpointEvent(step=step, epoch=self.state.progress.epoch, path=str(path), kinds=tuple(kinds)))

    def _keep_detections(self, found: Evaluation) -> None:
        """Leave the best epoch's detections for the pictures that are drawn when training has ended."""
        if self.records:
            try:
                np.save(self.job.run_dir / DETECTIONS_FILE, found.detections, allow_pickle=False)
            except OSError as error:
                self._warn(f"{DETECTIONS_FILE} could not be written: {error}")

    def _about(self) -> dict[str, Any]:
        """What a checkpoint says of itself beside tensors."""
        job = self.job
        return {"format": checkpoint.FORMAT, "recipe": job.recipe.model_dump(mode="json"), "digest": job.digest,
                "names": list(job.names), "architecture": job.architecture, "anchors": job.anchors,
                "threads": torch.get_num_threads(), "labels": job.train.digest,
                "versions": {"python": platform.python_version(), "torch": torch.__version__}}

    def _epoch_event(self, epoch: int, losses: tuple[float, ...], found: Evaluation | None,
                     score: float | None, best: bool, trained: float) -> EpochEvent:
        seconds = trained - self.clock.began
        gpu, plan = self.host.device.type == "cuda", self.parts.plan
        return EpochEvent(
            epoch=epoch, step=self.state.progress.step, train=dict(zip(self.parts.loss.names, losses, strict=True)),
            val=None if found is None else found.losses, metrics=None if found is None else found.summary,
            per_class=() if found is None else tuple(map(ClassResult.model_validate, per_class(found, self.job.val))),
            lr=plan.rates(plan.steps(epoch)[-1], epoch).lr, fitness=score, best=best,
            images_per_second=self.clock.step_images / seconds, wait_share=self.clock.wait_seconds / seconds,
            seconds=time.perf_counter() - self.clock.began,
            memory_gb=torch.cuda.max_memory_reserved() / 1e9 if gpu else 0.0)
