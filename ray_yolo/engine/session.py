"""One worker's training from a start or restart to the end: restore, loop, validate, record, save.

All workers run the same code on the same numbers. Only the recording worker (rank 0) writes checkpoints.
"""

from __future__ import annotations

import contextlib
import math
import os
import socket
import time
from collections import Counter
from collections.abc import Iterator, Mapping
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from ray_yolo.checkpoints import local as checkpoint
from ray_yolo.checkpoints import state_file
from ray_yolo.checkpoints.writer import WRITE_SECONDS, Saver, save_interval
from ray_yolo.config.placement import Placement
from ray_yolo.core.errors import DivergedError, PeerLostError, TrainingError, WrongWeightsError
from ray_yolo.core.events import (
    BalanceEvent,
    CheckpointEvent,
    Emit,
    EndEvent,
    EpochEvent,
    ShardEvent,
    StartEvent,
    StepEvent,
    Summary,
    WarningEvent,
)
from ray_yolo.core.files import replacing
from ray_yolo.core.formatting import format_count
from ray_yolo.core.structures import Orders, Progress
from ray_yolo.core.threads import run_in_thread
from ray_yolo.engine.balance import Balance
from ray_yolo.engine.build import (
    Batches,
    TrainSpec,
    WorkerContext,
    build,
    rebuild,
    regroup,
    release_process_group,
)
from ray_yolo.engine.callbacks import STEP_END, VAL_END
from ray_yolo.engine.collectives import Collectives, collective_errors
from ray_yolo.engine.devices import device_name, gpus_held
from ray_yolo.engine.evaluate import DETECTIONS_FILE, Evaluation, evaluate, per_class
from ray_yolo.engine.loop import REMEDY, StepResult, train
from ray_yolo.engine.membership import Generation, Rendezvous
from ray_yolo.engine.plan import Step
from ray_yolo.engine.state import TrainState, about, capture, fingerprint, resume, sync_from_peer
from ray_yolo.ops.schedule import Rates

STEP_EVENTS_PER_EPOCH = 100
STEPS_PER_COMPARISON = 50  # of the workers' weights; they are also compared before each checkpoint and regrouping
LEAVING_SECONDS = 10.0  # between two saves while all workers drain, because their nodes can disappear at any moment


def run_session(
    spec: TrainSpec,
    context: WorkerContext,
    placement: Placement,
    emit: Emit,
    rendezvous: Rendezvous | None = None,
) -> Summary | None:
    """Train `spec` on this worker until the last checkpoint is on storage. Collective.

    Args:
        emit: appends an event to the run's log without waiting.
        rendezvous: forms the group of workers, again after each loss; None: the group of `context` is permanent. It
            has this worker's orders: if any worker is ordered to stop, all stop after the same step, the step is saved,
            and the summary's `stopped` is True.

    Returns:
        The training's outcome, equal on all workers; None if this worker has left and the training continues.

    Raises:
        TrainingError: if the loss stays non-finite, or checkpoints cannot be written.
        PeerLostError: if a worker was lost and `rendezvous` cannot form another group.
        CheckpointError: if there are checkpoints and none of them can be resumed.
    """
    session = Session(spec, context, placement, emit, rendezvous or Rendezvous(context.collectives))
    try:
        session.train()
    finally:
        session.close()
    return session.summary


class Session:
    """The state of `run_session`."""

    def __init__(
        self, spec: TrainSpec, context: WorkerContext, placement: Placement, emit: Emit, rendezvous: Rendezvous
    ) -> None:
        self.spec, self.placement = spec, placement
        self._emit, self._rendezvous = emit, rendezvous
        self.components = build(spec, context)
        self.state = TrainState()
        self._until = min(spec.recipe.epochs, placement.stop_after or spec.recipe.epochs)
        """Epochs to train before the end or a pause."""
        self.saver = Saver(spec.run_dir, spec.digest, placement.keep_checkpoints, emit, context.stored)
        self.done = False  # the training has ended, or continues without this worker
        self.summary: Summary | None = None
        self.stopped = False  # on request
        self.stopped_early = False  # after `patience` epochs without a better fitness, or by a function of the user
        self.timer = StepTimer(0)
        self._has_state = False  # that training can continue from
        self._is_new = True  # it has never had one
        self._regroup = False  # the generation ends after this step
        self._resumed = -1  # step of the checkpoint that training continued from
        self._agreed = -1  # newest step after which all workers have compared their weights
        self._save_requested = -math.inf  # time of the last request to save in this generation
        self._saved = time.monotonic()  # start of the last save
        self._detections: Future[None] | None = None  # the file of the best epoch's, being written

    @property
    def context(self) -> WorkerContext:
        """The worker's context, with the collectives of the present generation."""
        return self.components.context

    @property
    def is_writer(self) -> bool:
        """Whether this worker writes the checkpoints, and the events that are equal on all workers."""
        return self.context.collectives.rank == 0

    @property
    def is_over(self) -> bool:
        """Whether nothing is left to train, or training was stopped or paused."""
        return self.done or self.stopped or self.stopped_early or self.state.progress.epoch >= self._until

    def train(self) -> None:
        """Train to the end, in as many generations of workers as needed. Collective.

        Workers that do not record wait for the end in `join`. If the recording worker is lost before its last
        checkpoint is on storage, the others form another generation in `join`, and its first worker saves.
        """
        while not self.done:
            try:
                with collective_errors():
                    self.join()
                    while not (self.is_over or self._regroup):
                        if self.spec.recipe.changes:  # the settings of this epoch
                            self.components = rebuild(self.components, self.spec.recipe.at(self.state.progress.epoch))
                        train(self.components, self.state, self.after_step, self.after_epoch, self._poll_orders,
                              self._until)
            except PeerLostError:
                if not self._rendezvous.may_regroup():
                    raise
                self._abandon_step()
            else:
                self._end()

    def join(self) -> None:
        """Join the next generation, and copy the state of its most advanced worker. Collective."""
        if self._regroup:  # another worker may record next: this one's checkpoint has to be older than its
            self._await_saver()
        self.context.activity.enter("joining")
        if not self._rendezvous.lasting:
            release_process_group(self.components)
        is_saved = self.placement.nosave or self.saver.written == self.state.progress.step
        generation = self._rendezvous.join(self.state.progress if self._has_state else None, is_saved=is_saved)
        if not isinstance(generation, Generation):
            self.summary, self.done = generation, True
            return
        before = self.state
        self._save_requested = -math.inf  # the step that was to be saved may have been abandoned
        self.stopped = self._regroup = False  # orders hold until they are carried out: all read them again
        if generation.source is None:
            self.state = resume(self.components, generation.collectives, self._warn, is_new=self._is_new)
            self._agreed = self.saver.step = self._resumed = self.state.progress.step
        else:
            self._compare(generation.collectives)
            self.state = sync_from_peer(self.components, self.state, generation)
        self._is_new, self._has_state, self.context.activity.step = False, True, self.state.progress.step
        if not self._rendezvous.lasting:  # after the sync: DDP would give every worker the weights of worker 0
            self.components = regroup(self.components, generation.collectives)
        if self.is_writer:
            self._emit_start(generation.members, regrouped=generation.source is not None)
        else:
            self._await_saver()  # as above, after a loss
        if self.state is before:  # this worker's own state, between the same two steps
            self.timer.resume()
        else:
            self._start_timer()
        self._check_patience()

    def _emit_start(self, members: tuple[int, ...], *, regrouped: bool) -> None:
        """Record the start of a generation. Also record the last epoch again: its event may be lost with a worker."""
        progress = self.state.progress
        self._emit(StartEvent(
            step=progress.step, epoch=progress.epoch, images_in_epoch=progress.images_in_epoch,
            num_workers=self.context.collectives.num_workers, epochs=self.spec.recipe.epochs,
            terms=self.components.loss.names, regrouped=regrouped, device=device_name(self.context.device),
            threads=torch.get_num_threads(), members=members,
            gpus=gpus_held(self.context.device, self.placement.gpus_per_worker)))
        if self.state.last_epoch:
            self._emit(self.state.last_epoch)

    def _start_timer(self) -> None:
        self.timer = StepTimer(len(self.components.plan.steps(self.state.progress.epoch)))

    def _abandon_step(self) -> None:
        """Abandon the step in progress. One of the remaining workers saves the last completed one."""
        self.components.optimizer.zero_grad(set_to_none=True)
        unsaved = self._has_state and self.state.progress.step > self.saver.step
        if unsaved and not self.placement.nosave and self._rendezvous.elect_saver():
            self._save()

    def _end(self) -> None:
        """If training is over, the recording worker saves and announces the end. The others wait for it in `join`.

        Raises:
            DivergedError: if every step was skipped.
            TrainingError: if the last checkpoint cannot be written.
        """
        state = self.state
        if self.done or not self.is_over:
            return
        ended_by = self.context.callbacks.stopped_by if self.stopped else ""
        if ended_by:  # by the user's function: nothing continues this training
            self.stopped, self.stopped_early = False, True
        paused = not (self.stopped or self.stopped_early) and state.progress.epoch < self.spec.recipe.epochs
        if not (self.stopped or state.moved):
            raise DivergedError(f"loss or gradient was not finite in any of the {state.progress.step} steps: nothing "
                                f"was trained; {REMEDY}")
        if self.is_writer:
            if state.progress.step > self.saver.step and not (self.stopped and self.placement.nosave):
                self._save()
            elif state.progress.step == self._resumed:  # the process that saved it may have ended before the report
                self._emit_checkpoint()
            self._await_saver(needed=not self.stopped)
            self._await_detections()
        elif not self._rendezvous.lasting:
            return
        self.summary, self.done = Summary(
            step=state.progress.step, epoch=state.progress.epoch - 1, best_epoch=state.best_epoch,
            best_fitness=state.best_fitness, stopped_early=self.stopped_early, stopped=self.stopped,
            last_epoch=state.last_epoch, paused=paused), True
        if self.is_writer and not self.stopped:
            reason = (f"{ended_by} returned 'stop'" if ended_by else
                      f"paused after {format_count(self._until, 'epoch')}" if paused else
                      "early stop" if self.stopped_early else "all epochs")
            self._emit(EndEvent(status="stopped" if paused else "done", reason=reason, step=state.progress.step,
                                epoch=state.progress.epoch - 1, best_epoch=state.best_epoch,
                                best_fitness=state.best_fitness, stopped_early=self.stopped_early))
        self._rendezvous.finish(self.summary)

    def _emit_checkpoint(self) -> None:
        """Record the checkpoint again from which this state was restored."""
        step, digest = self.state.progress.step, state_file.digest(capture(self.components, self.state, {}))
        self._emit(CheckpointEvent(step=step, epoch=self.state.progress.epoch, kinds=(), digest=digest,
                                   path=str(self.spec.run_dir / "checkpoints" / f"step-{step}")))

    def close(self) -> None:
        """Wait until everything is on storage, and release all resources, also those that DDP keeps in memory."""
        with contextlib.ExitStack() as all_of_these:  # from the last one to the first, also if one of them raises
            all_of_these.callback(release_process_group, self.components)  # DDP's native hook would keep the model
            for store in self.components.stores:
                all_of_these.callback(store.close)
            all_of_these.callback(self.saver.close)
            all_of_these.callback(self._await_detections)
            with contextlib.suppress(TrainingError):  # already reported as a warning, and not the reason for this end
                self._await_saver()

    def after_step(self, step: Step, rates: Rates, result: StepResult) -> None:
        """Log a step, and save if a save inside the epoch is due. `after_epoch` saves the epoch's last step."""
        progress, timer = self.state.progress, self.timer
        self.context.activity.enter("computing")  # no more exchange in this step
        seconds = timer.stop_step(result, len(step.images))
        if self.is_writer:
            self.context.callbacks.call(STEP_END, lambda: {
                **timer.step_event(progress, step, rates, result, seconds).fields,
                "loss": dict(zip(self.components.loss.names, result.losses.tolist(), strict=True))})
        if self.is_writer and timer.should_log(progress.step, result):
            self._emit(timer.step_event(progress, step, rates, result, seconds))
        if self.is_writer and result.balance:
            self._emit_balance(step, result.balance)
        complaint = self.components.graphs.pop_complaint() if self.components.graphs else ""
        if complaint:
            self._warn(complaint)
        self.context.activity.finished(progress.step, seconds)
        save_steps = self.placement.save_steps
        inside_epoch = step.images.stop < len(self.spec.train)
        self.stopped, self._regroup = result.orders.stop, result.orders.regroup
        ends = self.stopped or (self._regroup and result.orders.save)  # no other worker may take over the state
        due = not self.placement.nosave and (
            ends or (inside_epoch and (result.orders.save or (save_steps and progress.step % save_steps == 0))))
        if due or self._regroup or progress.step % STEPS_PER_COMPARISON == 0:
            self.compare_weights()
        if due:
            self._save_agreed()

    def _emit_balance(self, step: Step, balance: Balance) -> None:
        """Record that the workers' shards change."""
        progress, components = self.state.progress, self.components
        later = [other for other in components.plan.steps(progress.epoch) if step.batch < other.batch < balance.batch]
        self._emit(BalanceEvent(
            step=progress.step, from_step=progress.step + len(later) + 1,
            microbatches=components.balancer.microbatches(balance), seconds=balance.seconds))

    def after_epoch(self, epoch: int) -> bool:
        """Validate, record and save. Returns whether training is over or continues with other settings."""
        recipe, state, plan = self.spec.recipe, self.state, self.components.plan
        self.timer.trained = time.perf_counter()
        self.compare_weights()
        self._agreed = state.progress.step
        evaluation = self.validate() if epoch + 1 == recipe.epochs or not recipe.noval else None
        self._await_saver()  # the log has an epoch's checkpoint before the next epoch
        self._emit(self.timer.shard_event(state.progress, self.context.collectives.rank))
        if self.is_writer and state.skipped:
            self._warn(f"epoch {epoch + 1}: {state.skipped} of its steps were skipped, the first at step "
                       f"{state.first_skipped}: loss or gradient was not finite")
        if self.is_writer and evaluation:
            self.context.callbacks.call(VAL_END, lambda: {
                "epoch": epoch, "step": state.progress.step, "val": evaluation.losses, "metrics": evaluation.summary,
                "per_class": [row.model_dump() for row in per_class(evaluation, self.spec.val)],
                "images": self.spec.val.paths, "detections": evaluation.detections})
        losses = state.close_epoch()
        fitness, best = self._rank(epoch, evaluation) if evaluation else (None, False)
        self._check_patience()
        state.last_epoch = self.timer.epoch_event(
            epoch, state.progress.step, plan.rates(plan.steps(epoch)[-1], epoch), self.context.device,
            train=dict(zip(self.components.loss.names, losses, strict=True)), fitness=fitness, best=best,
            val=evaluation and evaluation.losses, metrics=evaluation and evaluation.summary,
            per_class=per_class(evaluation, self.spec.val) if evaluation else ())
        if self.is_writer:
            self._emit(state.last_epoch)
        if not self.placement.nosave:
            self._save_agreed()
        self._start_timer()
        return self.is_over or recipe.last_change(epoch + 1) == epoch + 1

    def _rank(self, epoch: int, evaluation: Evaluation) -> tuple[float | None, bool]:
        """Add an epoch's validation to the state. Returns its fitness, and whether it is the best so far."""
        state = self.state
        state.class_maps = tuple(evaluation.metrics.ap.mean(1).tolist())
        fitness = self.spec.recipe.objective.fitness(evaluation.summary)
        if fitness is None or fitness <= state.best_fitness:
            return fitness, False
        state.best_fitness, state.best_epoch = fitness, epoch
        self._keep_detections(evaluation)
        return fitness, True

    def validate(self) -> Evaluation:
        """Validate the moving average over all workers. Collective."""
        components, recipe = self.components, self.spec.recipe
        self.context.activity.enter("validating")
        batches = self._saving_on_stop(components.val_batches)
        return evaluate(components.ema.model, components.family, components.loss, batches, self.spec.val,
                        recipe.evaluate, recipe.precision, self.context.collectives, self.context.device)

    def _saving_on_stop(self, batches: Batches) -> Iterator[Mapping[str, Tensor]]:
        """The batches of a validation. If a stop is requested meanwhile, the epoch's last step is saved at once: the
        validation may take longer than the command waits for it."""
        for batch in batches:
            has_unsaved = self.is_writer and self.state.progress.step > self.saver.step
            if has_unsaved and not self.placement.nosave and self._rendezvous.orders.stop:
                self._save()
            self.context.activity.enter("validating")  # each batch is progress
            yield batch

    def compare_weights(self) -> None:
        """Check that all workers have equal weights. A worker that differs has computed wrongly. Collective.

        Raises:
            WrongWeightsError: on workers without a majority. They count as lost.
            PeerLostError: on the others, which have added the wrong gradients. They no longer have a state, and `join`
                restores the newest checkpoint whose weights were compared.
        """
        self.context.activity.enter("exchanging")
        self._compare(self.context.collectives)
        self.context.activity.enter("computing")

    def _compare(self, collectives: Collectives) -> None:
        """Compare the weights of those workers of a group that have its newest state. All workers get `_agreed`.

        Raises:
            WrongWeightsError, PeerLostError: see `compare_weights`.
        """
        step = self.state.progress.step if self._has_state else -1
        own = _Standing(step, self._agreed, int(fingerprint(self.components)))
        standings = [_Standing(*row) for row in collectives.gather(torch.tensor([own])).tolist()]
        self._agreed = max(each.agreed for each in standings)
        newest = max(each.step for each in standings)
        votes = Counter(each.weights for each in standings if each.step == newest)
        if len(votes) == 1:
            return
        self._has_state = False
        self._await_saver()
        with contextlib.suppress(PeerLostError), collective_errors():
            # a barrier: a worker that left earlier would appear lost to one that has not compared yet
            collectives.gather(torch.zeros(1, 1))
        if collectives.rank == 0:  # faulty workers have contributed to checkpoints since the last comparison
            self._warn(f"the workers' weights differ after step {newest}: training goes back to the newest checkpoint "
                       "on which they agreed")
            self._remove_uncompared()
        has_majority = 2 * votes[own.weights] > votes.total()
        if own.step == newest and not has_majority:
            raise WrongWeightsError(f"the weights after step {newest} are not those of the other workers: memory or "
                                    "arithmetic that is broken, or a processor of another kind")
        raise PeerLostError(f"a worker had other weights than the rest after step {newest}")

    def _remove_uncompared(self) -> None:
        """Remove the checkpoints after the last step on which all workers agreed.

        Raises:
            TrainingError: if storage fails. Training must not continue from one of them.
        """
        run_dir, stored = self.spec.run_dir, self.context.stored
        try:
            checkpoint.remove_newer(run_dir, self._agreed)
            if stored:
                stored.remove_newer(self._agreed)
        except OSError as error:
            raise TrainingError(f"{run_dir}: its checkpoints after step {self._agreed} may be wrong, and could not be "
                                f"removed ({error}); remove them, and run the same command again") from error

    def _warn(self, message: str) -> None:
        self._emit(WarningEvent(message=message))

    def _check_patience(self) -> None:
        """Stop early if the last epoch was the `patience`-th without a better fitness, and epochs remain."""
        state, recipe, epoch = self.state, self.spec.recipe, self.state.progress.epoch
        if state.best_epoch < recipe.last_change(epoch):  # its fitness is not comparable
            state.best_fitness, state.best_epoch = -1.0, -1
        is_over = 0 < recipe.patience < epoch - state.best_epoch and state.best_epoch >= 0
        self.stopped_early = is_over and epoch < recipe.epochs

    def _poll_orders(self) -> Orders:
        """This worker's orders. The recording worker adds a save if the last one is too old. If it is ordered to save
        because all workers leave, it saves at once and again after every `LEAVING_SECONDS`. If they leave after this
        step, this step is saved, whichever worker learns of it first. A function of the user that has asked for the end
        is an order to stop, too.
        """
        orders, now = self._rendezvous.orders, time.monotonic()
        leaving = orders.save and now - self._save_requested >= LEAVING_SECONDS
        since = now - max(self._saved, self._save_requested)
        late = since >= save_interval(self.placement.save_seconds, self.saver)
        save = self.is_writer and (leaving or late)
        if save:  # noted here, because on a GPU the next step polls before this save starts
            self._save_requested = now
        return orders._replace(stop=orders.stop or bool(self.context.callbacks.stopped_by),
                               save=save or (orders.save and orders.regroup))

    def _save_agreed(self) -> None:
        """Save on the recording worker, after all workers have compared their weights."""
        self._agreed = self.state.progress.step
        if self.is_writer:
            self._save()

    def _save(self) -> None:
        """Start to save the state; between two epochs, also under the names that the last epoch is entitled to."""
        progress, period, kinds = self.state.progress, self.placement.save_period, ["last"]
        if (last_epoch := self.state.last_epoch) and not progress.images_in_epoch:
            kinds += ["best"] * last_epoch.best
            kinds += [f"epoch{last_epoch.epoch}"] * (period > 0 and progress.epoch % period == 0)
        self.context.activity.enter("saving")
        self._saved = time.monotonic()
        self.saver.save(capture(self.components, self.state, about(self.spec)), progress.step, progress.epoch, kinds,
                        compared=progress.step == self._agreed)

    def _await_saver(self, *, needed: bool = False) -> None:
        """Wait for the save in progress, within its time limit."""
        self.context.activity.enter("saving")
        self.saver.wait(needed=needed)
        self.context.activity.enter("computing")

    def _keep_detections(self, evaluation: Evaluation) -> None:
        """Store the best epoch's detections, from which plots are drawn at the end of training, in a thread."""
        if not self.is_writer:
            return
        self._await_detections()
        path, stored = self.spec.run_dir / DETECTIONS_FILE, self.context.stored

        def write() -> None:
            self.saver.check_in_place()
            with replacing(path, durable=False) as temporary:  # plots are drawn by another process
                np.save(temporary, evaluation.detections, allow_pickle=False)
            if stored:
                stored.put_file(path)

        self._detections = run_in_thread(write, "detections")

    def _await_detections(self) -> None:
        """Wait until the best epoch's detections are stored. A failure is a warning: they only serve plots."""
        pending, self._detections = self._detections, None
        if pending is None:
            return
        self.context.activity.enter("saving")
        try:
            pending.result(WRITE_SECONDS)
        except OSError as error:  # a TimeoutError is one
            self._warn(f"{DETECTIONS_FILE} could not be written: {error}")
        self.context.activity.enter("computing")


class _Standing(NamedTuple):
    """What a worker knows when weights are compared."""

    step: int  # of its state; -1: it has none
    agreed: int  # newest step after which it has compared its weights
    weights: int  # their fingerprint


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
