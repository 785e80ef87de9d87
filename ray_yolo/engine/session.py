"""One worker's training from a start, or restart, to the end: restore, loop, validate, record, save.

Every worker runs the same code on the same numbers; only the recording worker (number 0) writes checkpoints, and
`emit` is given to it by its host. Nothing here knows who runs it.
"""

from __future__ import annotations

import contextlib
import math
import os
import socket
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch

from ray_yolo.checkpoints import local as checkpoint
from ray_yolo.checkpoints.writer import Saver, save_interval
from ray_yolo.config.placement import Placement
from ray_yolo.core.errors import PeerLostError, TrainingError, WrongWeightsError
from ray_yolo.core.events import Emit, EndEvent, EpochEvent, ShardEvent, StartEvent, StepEvent, Summary, WarningEvent
from ray_yolo.core.structures import Progress
from ray_yolo.engine.build import TrainSpec, WorkerContext, build, rebuild, regroup, release_process_group
from ray_yolo.engine.collectives import Collectives, collective_errors
from ray_yolo.engine.evaluate import Evaluation, evaluate, outcome
from ray_yolo.engine.loop import REMEDY, ControlFlags, StepResult, train
from ray_yolo.engine.membership import FixedRendezvous, Generation, Rendezvous
from ray_yolo.engine.plan import Step
from ray_yolo.engine.state import TrainState, about, capture, fingerprint, resume, sync_from_peer
from ray_yolo.ops.schedule import Rates

STEP_EVENTS_PER_EPOCH = 100


@dataclass
class StepTimer:
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

    def should_log(self, step: int, result: StepResult) -> bool:
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


DETECTIONS_FILE = "detections.npy"
STEPS_PER_COMPARISON = 50  # of the workers' weights; they are compared before each checkpoint and regrouping as well
LEAVING_SECONDS = 10.0  # between two saves of workers who are all to leave: their nodes go at any moment


def run_session(
    spec: TrainSpec,
    context: WorkerContext,
    placement: Placement,
    emit: Emit,
    rendezvous: Rendezvous | None = None,
    stop_requested: Callable[[], bool] = lambda: False,
) -> Summary | None:
    """Train `job` on this worker until the last checkpoint is on storage. Collective. Returns how it ended, equal on
    all workers; None on a worker that was asked to leave, without which the training continues.

    Args:
        emit: appends an event to the run's log without waiting.
        members: how the others are found, and found again when one was lost; None: they are those of `host`.
        stop_asked: called in each step; once it is true on any worker, all stop after the same step, which is saved.
            The summary's `stopped` says so.

    Raises:
        TrainingError: if the loss stays non-finite, or checkpoints cannot be written.
        PeerLostError: if a worker was lost whom these `members` cannot do without.
        CheckpointError: if there are checkpoints and none of them can be gone on from.
    """
    session = Session(spec, context, placement, emit, rendezvous or FixedRendezvous(context.collectives))
    try:
        session.train_with_others(stop_requested)
    finally:
        session.close()
    return session.ended


class Session:
    """The state of `run_session`."""

    def __init__(
        self, spec: TrainSpec, context: WorkerContext, placement: Placement, emit: Emit, rendezvous: Rendezvous
    ) -> None:
        self.spec, self.placement = spec, placement
        self._emit, self._rendezvous = emit, rendezvous
        self.components = build(spec, context)
        self.state = TrainState()
        self.saver = Saver(spec.run_dir, spec.digest, placement.keep_checkpoints, emit, context.stored)
        self.done = False  # the training has ended, or continues without this worker
        self.ended: Summary | None = None
        self.stopped = self.stopped_early = False  # because it was told to; for want of a better fitness
        self.timer = StepTimer(0)
        self._begun = False  # has a state to train on from
        self._lost = 0  # peers since the last step
        self._agreed = -1  # step of the newest checkpoint whose weights were compared before
        self._wished = -math.inf  # when it last wished to save
        self._saved = time.monotonic()  # when the last save began

    @property
    def context(self) -> WorkerContext:
        """What surrounds this worker, with the replicas of the present generation."""
        return self.components.context

    @property
    def records(self) -> bool:
        """Whether this worker writes the checkpoints, and tells what is equal on all."""
        return self.context.collectives.worker == 0

    @property
    def is_over(self) -> bool:
        """Whether there is nothing left to train, or nobody who wants it now."""
        return (self.done or self.stopped or self.stopped_early
                or self.state.progress.epoch >= self.spec.recipe.epochs)

    def train_with_others(self, stop_requested: Callable[[], bool]) -> None:
        """Train to the end in generation after generation. Collective.

        Workers that do not record wait for the end in `join`. If the recording worker is lost before its last
        checkpoint is on storage, they form another generation there, whose first worker saves.
        """
        def poll_controls() -> ControlFlags:
            return ControlFlags(stop_requested(), self._rendezvous.must_regroup(), self._wishes_to_save())

        while not self.done:
            try:
                with collective_errors():
                    self.join()
                    self._train(poll_controls)
            except PeerLostError:
                self._lost += 1
                if self._rendezvous.lasting or 0 <= self.placement.max_failures < self._lost:
                    raise
                self._rescue()
            else:
                self._end()

    def join(self) -> None:
        """Become a member of a generation, and take the state of whoever is furthest. Collective."""
        self.context.activity.enter("joining")
        if not self._rendezvous.lasting:
            release_process_group(self.components)
        found = self._rendezvous.join(self.state.progress if self._begun else None)
        if not isinstance(found, Generation):
            self.ended, self.done = found, True
            return
        before, self.stopped = self.state, False  # a newcomer has not heard of the stop: all hear of it again
        if found.source is None:
            self.state = resume(self.components, found.collectives, self._warn)
            self._agreed = self.saver.step = self.state.progress.step
        else:
            self._compare(found.collectives)
            self.state = sync_from_peer(self.components, self.state, found)
        self._begun, self.context.activity.step = True, self.state.progress.step
        if not self._rendezvous.lasting:  # now that all have one state: DDP would give them that of worker 0
            self.components = regroup(self.components, found.collectives)
        if self.records:
            progress = self.state.progress
            self._emit(
                StartEvent(
                    step=progress.step,
                    epoch=progress.epoch,
                    images_in_epoch=progress.images_in_epoch,
                    num_workers=self.context.collectives.num_workers,
                    epochs=self.spec.recipe.epochs,
                    terms=self.components.loss.names,
                    regrouped=found.source is not None,
                )
            )
            if self.state.last_epoch:  # its event may have been lost on the way when a worker died
                self._emit(self.state.last_epoch)
        if self.state is before:  # its own, between the same two steps
            self.timer.go_on()
        else:
            self.timer = StepTimer(len(self.components.plan.steps(self.state.progress.epoch)))
        self._count_anew()
        self.stopped_early = self._has_stalled()

    def _train(self, poll_controls: Callable[[], ControlFlags]) -> None:
        """Train until the end, or until somebody waits to join. Collective."""
        self._regroup = False
        while not (self.is_over or self._regroup):
            self.follow_changes()
            train(self.components, self.state, self.after_step, self.after_epoch, poll_controls)

    def _rescue(self) -> None:
        """Give up the step in hand, and have one of those who are left save the last finished one."""
        self.components.optimizer.zero_grad(set_to_none=True)
        step = self.state.progress.step
        if self._begun and step > self.saver.step and not self.placement.nosave and self._rendezvous.elect_saver():
            self._save()

    def _end(self) -> None:
        """If training is over: save and announce the end as the recording worker. Others return to `join` for it.

        Raises:
            TrainingError: if all that training did was to skip steps, or the last checkpoint cannot be written.
        """
        state = self.state
        if self.done or not self.is_over:
            return
        if not (self.stopped or state.moved):
            raise TrainingError(f"loss or gradient was not finite in any of the {state.progress.step} steps: nothing "
                                f"was trained; {REMEDY}")
        if self.records:
            if state.progress.step > self.saver.step and not (self.stopped and self.placement.nosave):
                self._save()
            self._await_saver(needed=not self.stopped)
        elif not self._rendezvous.lasting:
            return
        self.ended, self.done = Summary(
            step=state.progress.step, epoch=state.progress.epoch - 1, best_epoch=state.best_epoch,
            best_fitness=state.best_fitness, stopped_early=self.stopped_early, stopped=self.stopped,
            last_epoch=state.last_epoch), True
        if self.records and not self.stopped:
            self._emit(EndEvent(status="done", reason="early stop" if self.stopped_early else "all epochs",
                                step=state.progress.step, epoch=state.progress.epoch - 1, best_epoch=state.best_epoch,
                                best_fitness=state.best_fitness, stopped_early=self.stopped_early))
        self._rendezvous.finish(self.ended)

    def close(self) -> None:
        """Let go of what is held beside memory, when everything is on storage."""
        with contextlib.suppress(TrainingError):  # it has been told as a warning, and is not why this ends
            self._await_saver()
        for store in self.components.stores:
            store.close()

    def follow_changes(self) -> None:
        """Train by the settings that hold now; see `Recipe.changes`."""
        if self.spec.recipe.changes:
            self.components = rebuild(self.components, self.spec.recipe.at(self.state.progress.epoch))

    def after_step(self, step: Step, rates: Rates, result: StepResult) -> None:
        """Record a step, and save where that is due inside an epoch (its last step is saved with the epoch)."""
        progress, timer = self.state.progress, self.timer
        self.context.activity.enter("computing")  # nobody is waited for any more
        seconds = timer.stop_step(result, len(step.images))
        if self.records and timer.should_log(progress.step, result):
            self._emit(timer.step_event(progress, step, rates, result, seconds))
        self.context.activity.finished(progress.step, seconds)
        self._lost = 0
        save_steps = self.placement.save_steps
        inside = step.images.stop < len(self.spec.train)
        self.stopped, self._regroup, save = result.flags
        due = not self.placement.nosave and (
            self.stopped or (inside and (save or (save_steps and progress.step % save_steps == 0))))
        if due or self._regroup or progress.step % STEPS_PER_COMPARISON == 0:
            self.compare_weights()
        if due:
            self._save_agreed()

    def after_epoch(self, epoch: int) -> bool:
        """Validate, decide, record, save. Returns whether training is over, or goes on by other settings."""
        recipe, state = self.spec.recipe, self.state
        last = epoch + 1 == recipe.epochs
        self.timer.stop_training()
        self.compare_weights()
        found = self.validate() if last or not recipe.noval else None
        self._await_saver()  # so that the log tells of an epoch's checkpoint before the next epoch
        self._emit(self.timer.shard_event(state.progress, self.context.collectives.worker))
        if self.records and state.skipped:
            self._warn(f"epoch {epoch + 1}: {state.skipped} of its steps were skipped, the first at step "
                       f"{state.first_skipped}: loss or gradient was not finite")
        losses = state.close_epoch()
        score = None if found is None else recipe.objective.fitness(found.summary)
        best = score is not None and score > state.best_fitness
        if found is not None:
            state.class_maps = tuple(found.metrics.ap.mean(1).tolist())
        if best and found is not None and score is not None:
            state.best_fitness, state.best_epoch = score, epoch
            self._keep_detections(found)
        self._count_anew()
        self.stopped_early = self._has_stalled()
        plan = self.components.plan
        state.last_epoch = self.timer.epoch_event(
            epoch, state.progress.step, plan.rates(plan.steps(epoch)[-1], epoch), self.context.device,
            train=dict(zip(self.components.loss.names, losses, strict=True)), fitness=score, best=best,
            **outcome(found, self.spec.val))
        if self.records:
            self._emit(state.last_epoch)
        if not self.placement.nosave:
            self._save_agreed()
        self.timer = StepTimer(len(self.components.plan.steps(self.state.progress.epoch)))
        return self.is_over or recipe.last_change(epoch + 1) == epoch + 1

    def validate(self) -> Evaluation:
        """Validate the moving average over all workers. Collective."""
        components = self.components
        components.context.activity.enter("validating")
        return evaluate(
            components.ema.model,
            components.family,
            components.loss,
            components.val_batches,
            self.spec.val,
            self.spec.recipe.evaluate,
            self.spec.recipe.precision,
            self.context.collectives,
            self.context.device,
        )

    def compare_weights(self) -> None:
        """Find out whether a worker has other weights than the rest: it computes wrongly. Collective.

        Raises:
            WrongWeightsError: on workers that do not belong to a majority. They are as good as lost.
            PeerLostError: on the others, which have summed its gradients: they no longer have a state, and `join`
                restores the newest checkpoint whose weights were compared.
        """
        self.context.activity.enter("exchanging")
        self._compare(self.context.collectives)
        self.context.activity.enter("computing")

    def _compare(self, collectives: Collectives) -> None:
        """The same among the workers of a group that have its newest state; all learn what was agreed. Collective."""
        own = [self.state.progress.step if self._begun else -1, self._agreed, int(fingerprint(self.components))]
        rows = collectives.gather(torch.tensor([own])).tolist()
        step, self._agreed = max(row[0] for row in rows), max(row[1] for row in rows)
        weights = [row[2] for row in rows if row[0] == step]
        if len(set(weights)) == 1:
            return
        self._begun = False
        self._await_saver()
        with contextlib.suppress(PeerLostError), collective_errors():
            # a worker that left earlier would look lost to one that does not know
            collectives.gather(torch.zeros(1, 1))
        if collectives.worker == 0:
            self._withdraw()
        if own[0] == step and 2 * weights.count(own[2]) <= len(weights):
            raise WrongWeightsError(f"the weights after step {step} are not those of the other workers: memory or "
                                    "arithmetic that is broken, or a processor of another kind")
        raise PeerLostError(f"a worker had other weights than the rest after step {step}")

    def _withdraw(self) -> None:
        """Remove checkpoints whose weights were not compared, and which workers that were wrong have a part in."""
        self._warn(f"the workers' weights differ after step {self.state.progress.step}: training goes back to the "
                   "newest checkpoint on which they agreed")
        checkpoint.remove_newer(self.spec.run_dir, self._agreed)
        if self.context.stored:
            self.context.stored.remove_newer(self._agreed)

    def _warn(self, message: str) -> None:
        self._emit(WarningEvent(message=message))

    def _count_anew(self) -> None:
        """Forget a best epoch from before the last change: what goes on is another training from there."""
        if self.state.best_epoch < self.spec.recipe.last_change(self.state.progress.epoch):
            self.state.best_fitness, self.state.best_epoch = -1.0, -1

    def _has_stalled(self) -> bool:
        """Whether the last epoch was the `patience`-th without a better fitness, and there are more."""
        state, patience, epoch = self.state, self.spec.recipe.patience, self.state.progress.epoch
        return 0 < patience < epoch - state.best_epoch and state.best_epoch >= 0 and epoch < self.spec.recipe.epochs

    def _wishes_to_save(self) -> bool:
        """Whether too much would be lost now: the last save is long ago, or all workers are to leave (at once, and
        again from time to time)."""
        now = time.monotonic()
        leaving = self._rendezvous.all_draining() and now - self._wished >= LEAVING_SECONDS
        late = now - self._saved >= save_interval(self.placement.save_seconds, self.saver)
        flags = self.records and (leaving or late)
        if flags:  # on a GPU the next step asks before this one's save
            self._wished = self._saved = now
        return flags

    def _save_agreed(self) -> None:
        """Have the training checkpointed by the recording worker, now that all workers agree on the weights."""
        self._agreed = self.state.progress.step
        if self.records:
            self._save()

    def _save(self) -> None:
        """Have the training checkpointed: between two epochs also as what the last one's end has made it."""
        progress, period, kinds = self.state.progress, self.placement.save_period, ["last"]
        if (ended := self.state.last_epoch) and not progress.images_in_epoch:
            kinds += ["best"] * ended.best + [f"epoch{ended.epoch}"] * (period > 0 and progress.epoch % period == 0)
        self.context.activity.enter("saving")
        self._saved = time.monotonic()
        self.saver.save(capture(self.components, self.state, about(self.spec)), progress.step, progress.epoch, kinds)

    def _await_saver(self, *, needed: bool = False) -> None:
        """Wait for what is being written, for as long as that may take."""
        self.context.activity.enter("saving")
        self.saver.wait(needed=needed)
        self.context.activity.enter("computing")

    def _keep_detections(self, found: Evaluation) -> None:
        """Leave the best epoch's detections for the pictures that are drawn when training has ended."""
        if self.records:
            try:
                path = self.spec.run_dir / DETECTIONS_FILE
                np.save(path, found.detections, allow_pickle=False)
                if self.context.stored:
                    self.context.stored.put_file(path)
            except OSError as error:
                self._warn(f"{DETECTIONS_FILE} could not be written: {error}")
