"""One worker's training from a start, or restart, to the end: restore, loop, validate, record, save.

Every worker runs the same code on the same numbers; only the recording worker (number 0) writes checkpoints, and
`emit` is given to it by its host. Nothing here knows who runs it.
"""

from __future__ import annotations

import contextlib
import math
import time
from collections.abc import Callable

import numpy as np

from ray_yolo.config.placement import Placement
from ray_yolo.engine.build import Host, Job, build, rebuild, regroup, ungroup
from ray_yolo.engine.clock import Clock
from ray_yolo.engine.evaluate import Evaluation, evaluate, outcome
from ray_yolo.engine.loop import REMEDY, StepResult, Wishes, train
from ray_yolo.engine.membership import FixedMembers, Generation, Membership
from ray_yolo.engine.plan import Step
from ray_yolo.engine.recovery import about, resume, take_over
from ray_yolo.engine.replicas import peers_needed
from ray_yolo.engine.saver import Saver
from ray_yolo.engine.state import TrainState, capture, fingerprint
from ray_yolo.errors import PeerLostError, TrainingError, WrongWeightsError
from ray_yolo.events import Emit, EndEvent, StartEvent, Summary, WarningEvent
from ray_yolo.ops.schedule import Rates

DETECTIONS_FILE = "detections.npy"
STEPS_PER_COMPARISON = 50  # of the workers' weights; they are compared before each checkpoint and regrouping as well
LEAVING_SECONDS = 10.0  # between two saves of workers who are all to leave: their nodes go at any moment
MAX_LOST = 3  # peers lost in a row without a step between: then it is not they


def run_session(job: Job, host: Host, placement: Placement, emit: Emit, members: Membership | None = None,
                stop_asked: Callable[[], bool] = lambda: False) -> Summary | None:
    """Train `job` on this worker until it is done. Collective. Returns how it ended, equal on all workers; None on one
    that was told to leave, without whom it goes on.

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
    session = Session(job, host, placement, emit, members or FixedMembers(host.replicas))
    try:
        session.train_with_others(stop_asked)
    finally:
        session.close()
    return session.finish()


class Session:
    """The state of `run_session`."""

    def __init__(self, job: Job, host: Host, placement: Placement, emit: Emit, members: Membership) -> None:
        self.job, self.placement = job, placement
        self._emit, self._members = emit, members
        self.parts = build(job, host)
        self.state = TrainState()
        self.saver = Saver(job.run_dir, job.digest, placement.keep_checkpoints, emit, host.stored)
        self.parted = False  # is no member of the last generation: was told to leave, or came too late
        self.ended: Summary | None = None  # without this worker
        self.stopped = self.stopped_early = False  # because it was told to; for want of a better fitness
        self.clock = Clock(0)
        self._begun = False
        self._lost = 0  # peers since the last step
        self._wished = -math.inf  # when it last wished to save

    @property
    def host(self) -> Host:
        """What surrounds this worker, with the replicas of the present generation."""
        return self.parts.host

    @property
    def records(self) -> bool:
        """Whether this worker writes the checkpoints, and tells what is equal on all."""
        return self.host.replicas.worker == 0

    @property
    def is_over(self) -> bool:
        """Whether there is nothing left to train, or nobody who wants it now."""
        return (self.parted or self.stopped or self.stopped_early
                or self.state.progress.epoch >= self.job.recipe.epochs)

    def train_with_others(self, stop_asked: Callable[[], bool]) -> None:
        """Train to the end in generation after generation. Collective."""
        def listen() -> Wishes:
            return Wishes(stop_asked(), self._members.regroups(), self._wishes_to_save())

        while not (self._begun and self.is_over):
            try:
                with peers_needed():
                    self.join()
                    self._train(listen)
            except PeerLostError:
                self._lost += 1
                if self._members.lasting or self._lost > MAX_LOST:
                    raise
                self._rescue()
        self.saver.wait(needed=not self.stopped)

    def join(self) -> None:
        """Become a member of a generation, and take the state of whoever is furthest. Collective."""
        self.host.pulse.enter("joining")
        if not self._members.lasting:
            ungroup(self.parts)
        found = self._members.join(self.state.progress if self._begun else None)
        if not isinstance(found, Generation):
            self.ended, self.parted, self._begun = found, True, True
            return
        before = self.state
        self.state = (take_over(self.parts, self.state, found) if found.source is not None
                      else resume(self.parts, found.replicas, self._warn))
        self._begun, self.host.pulse.step = True, self.state.progress.step
        if not self._members.lasting:  # now that all have one state: DDP would give them that of worker 0
            self.parts = regroup(self.parts, found.replicas)
        if self.records:
            progress = self.state.progress
            self._emit(StartEvent(
                step=progress.step, epoch=progress.epoch, images_in_epoch=progress.images_in_epoch,
                num_workers=self.host.replicas.num_workers, epochs=self.job.recipe.epochs, terms=self.parts.loss.names,
                regrouped=found.source is not None))
            if self.state.last_epoch:  # its event may have been lost on the way when a worker died
                self._emit(self.state.last_epoch)
        if self.state is before:  # its own, between the same two steps
            self.clock.go_on()
        else:
            self.clock = Clock(len(self.parts.plan.steps(self.state.progress.epoch)))
        self._count_anew()
        self.stopped_early = self._has_stalled()

    def _train(self, listen: Callable[[], Wishes]) -> None:
        """Train until the end, or until somebody waits to join. Collective."""
        self._regroup = False
        while not (self.is_over or self._regroup):
            self.follow_changes()
            train(self.parts, self.state, self.after_step, self.after_epoch, listen)

    def _rescue(self) -> None:
        """Give up the step in hand, and have one of those who are left save the last finished one."""
        self.parts.optimizer.zero_grad(set_to_none=True)
        step = self.state.progress.step
        if self._begun and step > self.saver.step and not self.placement.nosave and self._members.rescues():
            self._save(["last"])

    def close(self) -> None:
        """Let go of what is held beside memory, when everything is on storage."""
        with contextlib.suppress(TrainingError):  # it has been told as a warning, and is not why this ends
            self.saver.wait()
        for store in self.parts.stores:
            store.close()

    def follow_changes(self) -> None:
        """Train by the settings that hold now; see `Recipe.changes`."""
        if self.job.recipe.changes:
            self.parts = rebuild(self.parts, self.job.recipe.at(self.state.progress.epoch))

    def after_step(self, step: Step, rates: Rates, result: StepResult) -> None:
        """Record a step, and save where `save_steps` asks for it (an epoch's last step is saved with the epoch)."""
        progress, clock = self.state.progress, self.clock
        self.host.pulse.enter("computing")  # nobody is waited for any more
        seconds = clock.stop_step(result, len(step.images))
        if self.records and clock.tells(progress.step, result):
            self._emit(clock.step_event(progress, step, rates, result, seconds))
        self.host.pulse.finished(progress.step, seconds)
        self._lost = 0
        save_steps = self.placement.save_steps
        inside = step.images.stop < len(self.job.train)
        self.stopped, self._regroup, save = result.wishes
        due = not self.placement.nosave and (
            self.stopped or (inside and (save or (save_steps and progress.step % save_steps == 0))))
        if due or self._regroup or progress.step % STEPS_PER_COMPARISON == 0:
            self.compare_weights()
        if due and self.records:
            self._save(["last"])

    def after_epoch(self, epoch: int) -> bool:
        """Validate, decide, record, save. Returns whether training is over, or goes on by other settings."""
        recipe, state = self.job.recipe, self.state
        last = epoch + 1 == recipe.epochs
        self.clock.stop_training()
        self.compare_weights()
        found = self.validate() if last or not recipe.noval else None
        self.saver.wait()  # so that the log tells of an epoch's checkpoint before the next epoch
        self._emit(self.clock.shard_event(state.progress, self.host.replicas.worker))
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
        self.stopped_early = self._has_stalled() and not last
        plan = self.parts.plan
        state.last_epoch = self.clock.epoch_event(
            epoch, state.progress.step, plan.rates(plan.steps(epoch)[-1], epoch), self.host.device,
            train=dict(zip(self.parts.loss.names, losses, strict=True)), fitness=score, best=best,
            **outcome(found, self.job.val))
        if self.records:
            self._emit(state.last_epoch)
        period = self.placement.save_period
        kinds = ["last"] + ["best"] * best + [f"epoch{epoch}"] * (period > 0 and (epoch + 1) % period == 0)
        if self.records and (last or self.stopped_early or not self.placement.nosave):
            self._save(kinds)
        self.clock = Clock(len(self.parts.plan.steps(self.state.progress.epoch)))
        return self.is_over or recipe.last_change(epoch + 1) == epoch + 1

    def validate(self) -> Evaluation:
        """Validate the moving average over all workers. Collective."""
        parts = self.parts
        parts.host.pulse.enter("validating")
        return evaluate(parts.ema.model, parts.family, parts.loss, parts.val_batches, self.job.val,
                        self.job.recipe.evaluate, self.job.recipe.precision, self.host.replicas, self.host.device)

    def compare_weights(self) -> None:
        """Find out whether a worker has other weights than the rest: it computes wrongly. Collective.

        Raises:
            WrongWeightsError: on workers that do not belong to a majority. They are as good as lost.
        """
        self.host.pulse.enter("exchanging")
        found = self.host.replicas.gather(fingerprint(self.parts)[None, None]).flatten().tolist()
        self.host.pulse.enter("computing")
        if 2 * found.count(found[self.host.replicas.worker]) <= len(found) > 1:
            raise WrongWeightsError(f"the weights after step {self.state.progress.step} are not those of the other "
                                    "workers: memory or arithmetic that is broken, or a processor of another kind")

    def finish(self) -> Summary | None:
        """Record the end, if it is one. Returns how it was; None if this worker has left before.

        Raises:
            TrainingError: if all that training did was to skip steps.
        """
        if self.parted:
            return self.ended
        state = self.state
        if not self.stopped and not state.moved:
            raise TrainingError(f"loss or gradient was not finite in any of the {state.progress.step} steps: nothing "
                                f"was trained; {REMEDY}")
        if self.records and not self.stopped:
            self._emit(EndEvent(status="done", reason="early stop" if self.stopped_early else "all epochs",
                                step=state.progress.step, epoch=state.progress.epoch - 1, best_epoch=state.best_epoch,
                                best_fitness=state.best_fitness, stopped_early=self.stopped_early))
        summary = Summary(step=state.progress.step, epoch=state.progress.epoch - 1, best_epoch=state.best_epoch,
                          best_fitness=state.best_fitness, stopped_early=self.stopped_early, stopped=self.stopped,
                          last_epoch=state.last_epoch)
        self._members.finish(summary)
        return summary

    def _warn(self, message: str) -> None:
        self._emit(WarningEvent(message=message))

    def _count_anew(self) -> None:
        """Forget a best epoch from before the last change: what goes on is another training from there."""
        if self.state.best_epoch < self.job.recipe.last_change(self.state.progress.epoch):
            self.state.best_fitness, self.state.best_epoch = -1.0, -1

    def _has_stalled(self) -> bool:
        """Whether the last epoch was the `patience`-th without a better fitness."""
        state, patience = self.state, self.job.recipe.patience
        return patience > 0 and state.best_epoch >= 0 and state.progress.epoch - 1 - state.best_epoch >= patience

    def _wishes_to_save(self) -> bool:
        """Whether what is done would be lost for want of anybody who stays, at once and again from time to time."""
        wishes = (self.records and self._members.nobody_stays()
                  and time.monotonic() - self._wished >= LEAVING_SECONDS)
        self._wished = time.monotonic() if wishes else self._wished
        return wishes

    def _save(self, kinds: list[str]) -> None:
        """Have the training checkpointed."""
        progress = self.state.progress
        self.host.pulse.enter("saving")
        self.saver.save(capture(self.parts, self.state, about(self.job)), progress.step, progress.epoch, kinds)

    def _keep_detections(self, found: Evaluation) -> None:
        """Leave the best epoch's detections for the pictures that are drawn when training has ended."""
        if self.records:
            try:
                path = self.job.run_dir / DETECTIONS_FILE
                np.save(path, found.detections, allow_pickle=False)
                if self.host.stored:
                    self.host.stored.put_file(path)
            except OSError as error:
                self._warn(f"{DETECTIONS_FILE} could not be written: {error}")
