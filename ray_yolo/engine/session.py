"""One worker's training from a start or restart to the end: restore, loop, validate, record, save.

All workers run the same code on the same numbers. Only the recording worker (rank 0) writes checkpoints.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator, Mapping
from functools import partial

import torch
from torch import Tensor

from ray_yolo.config.placement import Placement
from ray_yolo.core.errors import DivergedError, PeerDepartedError
from ray_yolo.core.events import BalanceEvent, Emit, EndEvent, StartEvent, Summary, WarningEvent
from ray_yolo.core.formatting import format_count
from ray_yolo.core.structures import Orders
from ray_yolo.engine.balance import Balance
from ray_yolo.engine.callbacks import STEP_END, VAL_END
from ray_yolo.engine.collectives import Collectives, collective_errors
from ray_yolo.engine.devices import device_name, gpus_held
from ray_yolo.engine.evaluate import Evaluation, evaluate, per_class
from ray_yolo.engine.keeper import Keeper
from ray_yolo.engine.learner import build_learner
from ray_yolo.engine.loop import REMEDY, StepResult, train
from ray_yolo.engine.membership import Generation, Rendezvous
from ray_yolo.engine.plan import Step
from ray_yolo.engine.spec import TrainSpec, WorkerContext
from ray_yolo.engine.state import resume, sync_from_peer
from ray_yolo.engine.step_timer import StepTimer
from ray_yolo.engine.team import Batches, Team, form_team, image_stores, make_loaders, repeated_loss
from ray_yolo.engine.weight_check import STEPS_PER_COMPARISON, WeightCheck
from ray_yolo.ops.schedule import Rates


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
        rendezvous: forms the group of workers, again after each loss; None: this worker trains alone. It has this
            worker's orders: if any worker is ordered to stop, all stop after the same step, the step is saved, and the
            summary's `stopped` is True.

    Returns:
        The training's outcome, equal on all workers; None if this worker has left and the training continues.

    Raises:
        TrainingError: if the loss stays non-finite, or checkpoints cannot be written.
        PeerDepartedError: if a worker has departed and `rendezvous` cannot form another group.
        CheckpointError: if there are checkpoints and none of them can be resumed.
    """
    session = Session(spec, context, placement, emit, rendezvous or Rendezvous(Collectives()))
    try:
        return session.train()
    finally:
        session.close()


class Session:
    """The loop of `run_session`: a learner that trains in one team after another."""

    def __init__(
        self, spec: TrainSpec, context: WorkerContext, placement: Placement, emit: Emit, rendezvous: Rendezvous
    ) -> None:
        self.spec, self.context, self.placement = spec, context, placement
        self._emit, self._rendezvous = emit, rendezvous
        self.learner = build_learner(spec, context)
        self.stores = image_stores(spec, context)
        self.keeper = Keeper(spec, context, placement, emit)
        self.check = WeightCheck(spec, context, self.keeper, emit)
        self.timer = StepTimer(0)
        self.orders = Orders()
        """The orders of all workers after the last step of this generation: it ends if they are to stop or regroup."""
        self.stopped_early = False
        """Whether training ends after `patience` epochs without a better fitness."""
        self._rank = 0
        """The rank in the newest generation."""
        self._until = min(spec.recipe.epochs, placement.stop_after or spec.recipe.epochs)
        """Epochs to train before the end or a pause."""

    @property
    def is_writer(self) -> bool:
        """Whether this worker writes the checkpoints, and the events that are equal on all workers."""
        return self._rank == 0

    @property
    def is_over(self) -> bool:
        """Whether nothing is left to train, or training was stopped or paused."""
        return self.orders.stop or self.stopped_early or self.learner.state.progress.epoch >= self._until

    def train(self) -> Summary | None:
        """Train to the end, in as many generations of workers as needed. Collective.

        Workers that do not record wait for the end in `join`. If the recording worker departs before its last
        checkpoint is on storage, the others form another generation in `join`, and its first worker saves.

        Returns:
            As `run_session`.
        """
        while True:
            try:
                with collective_errors(), self.join() as team:
                    if not isinstance(team, Team):
                        return team
                    while not (self.is_over or self.orders.regroup):
                        if self.spec.recipe.changes:
                            self._apply_settings(team)
                        train(self.learner, team, partial(self.after_step, team), partial(self.after_epoch, team),
                              self._poll_orders, self._until)
            except PeerDepartedError:
                if not self._rendezvous.may_regroup():
                    raise
                self._abandon_step()
            else:
                if summary := self._end():
                    return summary

    @contextlib.contextmanager
    def join(self) -> Iterator[Team | Summary | None]:
        """Context in which this worker is in the next generation, with the state of its most advanced worker.
        Collective.

        Yields this worker's part in the generation; the summary if training has ended meanwhile; None if this worker
        leaves and training continues.
        """
        learner, keeper, activity = self.learner, self.keeper, self.context.activity
        if self.orders.regroup:  # another worker may record next: this one's checkpoint has to be older than its
            keeper.wait()
        activity.enter("joining")
        progress = learner.state.progress if self.check.has_state else None
        generation = self._rendezvous.join(progress, is_saved=keeper.has_stored(learner))
        if not isinstance(generation, Generation):
            yield generation
            return

        # Orders hold until they are carried out: all workers read them again.
        self._rank, self.orders, before = generation.collectives.rank, Orders(), learner.state
        keeper.forget_request()
        if generation.source is None:
            resume(learner, self.context, generation.collectives, self._warn)
            self.check.agreed = learner.state.progress.step
            keeper.continue_from(learner.state.progress.step)
        else:
            self.check.compare(learner, generation.collectives)
            sync_from_peer(learner, generation)
        self.check.has_state, activity.step = True, learner.state.progress.step

        # After the sync: DDP would give every worker the weights of worker 0.
        with form_team(learner, self.context, generation.collectives, self.stores) as team:
            if self.is_writer:
                self._emit_start(generation)
            else:
                keeper.wait()  # as above, after a loss
            if generation.source is not None and learner.state is before:  # it continues between the same two steps
                self.timer.resume()
            else:
                self._start_timer()
            self._check_patience()
            yield team

    def _emit_start(self, generation: Generation) -> None:
        """Record the start of a generation. Also record the last epoch again: its event may be lost with a worker."""
        state, device = self.learner.state, self.context.device
        self._emit(StartEvent(
            step=state.progress.step, epoch=state.progress.epoch, images_in_epoch=state.progress.images_in_epoch,
            num_workers=generation.collectives.num_workers, epochs=self.spec.recipe.epochs,
            terms=self.learner.criterion.names, regrouped=generation.source is not None, device=device_name(device),
            threads=torch.get_num_threads(), members=generation.members,
            gpus=gpus_held(device, self.placement.gpus_per_worker)))
        if state.last_epoch:
            self._emit(state.last_epoch)

    def _start_timer(self) -> None:
        self.timer = StepTimer(len(self.learner.plan.steps(self.learner.state.progress.epoch)))

    def _apply_settings(self, team: Team) -> None:
        """Let the present epoch have its settings."""
        recipe = self.spec.recipe.at(self.learner.state.progress.epoch)
        if recipe != self.learner.spec.recipe:
            self.learner.change_settings(recipe)
            team.criterion = repeated_loss(self.learner, self.context, team.graphs, team.complaints)
            team.loaders = make_loaders(self.learner.spec, self.learner.model.grid, self.context, team.collectives,
                                        self.stores)

    def _abandon_step(self) -> None:
        """Abandon the step in progress. One of the remaining workers saves the last completed one."""
        self.learner.optimizer.zero_grad(set_to_none=True)
        if self.check.has_state and self.keeper.lacks(self.learner) and self._rendezvous.elect_saver():
            self._save()

    def _end(self) -> Summary | None:
        """If training is over, the recording worker saves and announces the end. The others wait for it in `join`.

        Raises:
            DivergedError: if every step was skipped.
            TrainingError: if the last checkpoint cannot be written.
        """
        if not self.is_over:
            return None
        state, stopped = self.learner.state, self.orders.stop
        ended_by = self.context.callbacks.stopped_by if stopped else ""
        if ended_by:  # by the user's function: nothing continues this training
            stopped, self.stopped_early = False, True
        paused = not (stopped or self.stopped_early) and state.progress.epoch < self.spec.recipe.epochs
        if not (stopped or state.moved):
            raise DivergedError(f"loss or gradient was not finite in any of the {state.progress.step} steps: nothing "
                                f"was trained; {REMEDY}")
        if self.is_writer:
            self.keeper.save_last(self.learner, self.check.agreed, stopped=stopped)
        elif not self._rendezvous.lasting:
            return None
        summary = Summary(
            step=state.progress.step, epoch=state.progress.epoch - 1, best_epoch=state.best_epoch,
            best_fitness=state.best_fitness, stopped_early=self.stopped_early, stopped=stopped,
            last_epoch=state.last_epoch, paused=paused)
        if self.is_writer and not stopped:
            reason = (f"{ended_by} returned 'stop'" if ended_by else
                      f"paused after {format_count(self._until, 'epoch')}" if paused else
                      "early stop" if self.stopped_early else "all epochs")
            self._emit(EndEvent(status="stopped" if paused else "done", reason=reason, step=state.progress.step,
                                epoch=state.progress.epoch - 1, best_epoch=state.best_epoch,
                                best_fitness=state.best_fitness, stopped_early=self.stopped_early))
        self._rendezvous.finish(summary)
        return summary

    def close(self) -> None:
        """Wait until everything is on storage, and release what the training holds outside of memory."""
        with contextlib.ExitStack() as all_of_these:  # from the last one to the first, also if one of them raises
            for store in (self.stores.train, self.stores.val):
                all_of_these.callback(store.close)
            all_of_these.callback(self.keeper.close)

    def after_step(self, team: Team, step: Step, rates: Rates, result: StepResult) -> None:
        """Log a step, and save if a save inside the epoch is due. `after_epoch` saves the epoch's last step."""
        progress, timer, orders = self.learner.state.progress, self.timer, result.orders
        self.context.activity.enter("computing")  # no more exchange in this step
        seconds = timer.stop_step(result, len(step.images))
        if self.is_writer:
            self.context.callbacks.call(STEP_END, lambda: {
                **timer.step_event(progress, step, rates, result, seconds).fields,
                "loss": dict(zip(self.learner.criterion.names, result.losses.tolist(), strict=True))})
        if self.is_writer and timer.should_log(progress.step, result):
            self._emit(timer.step_event(progress, step, rates, result, seconds))
        if self.is_writer and result.balance:
            self._emit_balance(team, step, result.balance)
        while team.complaints:
            self._warn(team.complaints.pop(0))
        self.context.activity.finished(progress.step, seconds)
        self.orders = orders
        due = self.keeper.is_due(step, progress.step, orders)
        if due or orders.regroup or progress.step % STEPS_PER_COMPARISON == 0:
            self.compare_weights(team)
        if due:
            self._save_agreed()

    def _emit_balance(self, team: Team, step: Step, balance: Balance) -> None:
        """Record that the workers' shards change."""
        progress, plan = self.learner.state.progress, self.learner.plan
        later = [other for other in plan.steps(progress.epoch) if step.batch < other.batch < balance.batch]
        self._emit(BalanceEvent(
            step=progress.step, from_step=progress.step + len(later) + 1,
            microbatches=team.loaders.balancer.microbatches(balance), seconds=balance.seconds))

    def after_epoch(self, team: Team, epoch: int) -> bool:
        """Validate, record and save. Returns whether training is over or continues with other settings."""
        recipe, learner, plan = self.spec.recipe, self.learner, self.learner.plan
        state = learner.state
        self.timer.trained = time.perf_counter()
        self.compare_weights(team)
        self.check.agreed = state.progress.step
        evaluation = self.validate(team) if epoch + 1 == recipe.epochs or not recipe.noval else None
        self.keeper.wait()  # the log has an epoch's checkpoint before the next epoch
        self._emit(self.timer.shard_event(state.progress, self._rank))
        if self.is_writer and state.skipped:
            self._warn(f"epoch {epoch + 1}: {state.skipped} of its steps were skipped, the first at step "
                       f"{state.first_skipped}: loss or gradient was not finite")
        if self.is_writer and evaluation:
            self.context.callbacks.call(VAL_END, lambda: {
                "epoch": epoch, "step": state.progress.step, "val": evaluation.losses, "metrics": evaluation.summary,
                "per_class": [row.model_dump() for row in per_class(evaluation, self.spec.val)],
                "images": self.spec.val.paths, "detections": evaluation.detections})
        losses = state.close_epoch()
        fitness, best = self._rank_epoch(epoch, evaluation) if evaluation else (None, False)
        self._check_patience()
        state.last_epoch = self.timer.epoch_event(
            epoch, state.progress.step, plan.rates(plan.steps(epoch)[-1], epoch), self.context.device,
            train=dict(zip(learner.criterion.names, losses, strict=True)), fitness=fitness, best=best,
            val=evaluation and evaluation.losses, metrics=evaluation and evaluation.summary,
            per_class=per_class(evaluation, self.spec.val) if evaluation else ())
        if self.is_writer:
            self._emit(state.last_epoch)
        if not self.placement.nosave:
            self._save_agreed()
        self._start_timer()
        return self.is_over or recipe.last_change(epoch + 1) == epoch + 1

    def _rank_epoch(self, epoch: int, evaluation: Evaluation) -> tuple[float | None, bool]:
        """Add an epoch's validation to the state. Returns its fitness, and whether it is the best so far."""
        state = self.learner.state
        state.class_maps = tuple(evaluation.metrics.ap.mean(1).tolist())
        fitness = self.spec.recipe.objective.fitness(evaluation.summary)
        if fitness is None or fitness <= state.best_fitness:
            return fitness, False
        state.best_fitness, state.best_epoch = fitness, epoch
        if self.is_writer:
            self.keeper.keep_detections(evaluation)
        return fitness, True

    def validate(self, team: Team) -> Evaluation:
        """Validate the moving average over all workers. Collective."""
        learner, recipe = self.learner, self.spec.recipe
        self.context.activity.enter("validating")
        return evaluate(learner.ema.model, learner.family, learner.criterion, self._saving_on_stop(team.loaders.val),
                        self.spec.val, recipe.evaluate, recipe.precision, team.collectives, self.context.device)

    def _saving_on_stop(self, batches: Batches) -> Iterator[Mapping[str, Tensor]]:
        """The batches of a validation. If a stop is requested meanwhile, the epoch's last step is saved at once: the
        validation may take longer than the command waits for it."""
        for batch in batches:
            if self.is_writer and self.keeper.lacks(self.learner) and self._rendezvous.orders.stop:
                self._save()
            self.context.activity.enter("validating")  # each batch is progress
            yield batch

    def compare_weights(self, team: Team) -> None:
        """Check that all workers have equal weights, as `WeightCheck.compare`. Collective."""
        self.context.activity.enter("exchanging")
        self.check.compare(self.learner, team.collectives)
        self.context.activity.enter("computing")

    def _warn(self, message: str) -> None:
        self._emit(WarningEvent(message=message))

    def _check_patience(self) -> None:
        """Stop early if the last epoch was the `patience`-th without a better fitness, and epochs remain."""
        state, recipe = self.learner.state, self.spec.recipe
        epoch = state.progress.epoch
        if state.best_epoch < recipe.last_change(epoch):  # its fitness is not comparable
            state.best_fitness, state.best_epoch = -1.0, -1
        is_over = 0 < recipe.patience < epoch - state.best_epoch and state.best_epoch >= 0
        self.stopped_early = is_over and epoch < recipe.epochs

    def _poll_orders(self) -> Orders:
        """This worker's orders, as the others get them. A function of the user that has asked for the end is an order
        to stop, too."""
        orders = self._rendezvous.orders
        if self.context.callbacks.stopped_by:
            orders = orders._replace(stop=True)
        return self.keeper.add_save(orders, is_writer=self.is_writer)

    def _save_agreed(self) -> None:
        """Save on the recording worker, after all workers have compared their weights."""
        self.check.agreed = self.learner.state.progress.step
        if self.is_writer:
            self._save()

    def _save(self) -> None:
        self.keeper.save(self.learner, self.check.agreed)
