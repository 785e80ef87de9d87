"""The training loop. The phases of a step are: load, forward, backward, gather, clip, step, log.

The microbatches of a step are distributed over the workers. Each microbatch is one forward pass, one set of BatchNorm
statistics and one loss mean. One gather per step gives every worker the same measurements, so all workers make the same
decisions.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from ray_yolo.core.errors import DivergedError, PeerDepartedError
from ray_yolo.core.structures import Orders, Progress
from ray_yolo.engine.balance import Balance, SpeedReport, StepWork
from ray_yolo.engine.callbacks import BATCH_END
from ray_yolo.engine.devices import mark, to_device
from ray_yolo.engine.evaluate import autocast
from ray_yolo.engine.learner import Learner
from ray_yolo.engine.plan import Microbatch, Step
from ray_yolo.engine.team import Loaders, Team, draw_weights
from ray_yolo.engine.update import read_numbers
from ray_yolo.engine.worker_rows import Gathered, RowLayout, write_row
from ray_yolo.ops.network_input import unit_range
from ray_yolo.ops.recolour import RecolouredInput
from ray_yolo.ops.schedule import Rates
from ray_yolo.ops.seeding import image_size
from ray_yolo.ops.torch_internals import scaler_tensors
from ray_yolo.ops.views import RenderedInput

MAX_SKIPPED = 10  # consecutive steps with a non-finite loss or gradient before training fails
REMEDY = "lower optimizer.lr0, or use --set precision=fp32"


class StepResult(NamedTuple):
    """The outcome of a step, equal on every worker except for `wait_seconds` and `images`."""

    losses: Tensor  # (terms,) mean over the step's images
    gradient_norm: float  # it is measured before clipping
    skipped: bool  # something was not finite: neither weights nor statistics have changed
    wait_seconds: float  # this worker's wait for its loader
    images: int  # forwarded by this worker
    orders: Orders  # what any worker was ordered: stop, regroup, save
    balance: Balance | None = None  # it is valid from a later step on; None: nothing changes


class Summed(NamedTuple):
    """A step after its backward passes. The summed gradient is in `.grad`; weights and statistics are unchanged."""

    step: Step
    number: int  # optimiser steps count from 0
    gathered: Gathered
    layout: RowLayout  # It says what the gathered rows contain.
    statistics: Tensor  # the argument of `Statistics.apply`
    wait_seconds: float
    images: int  # forwarded by this worker
    work: StepWork | None  # None: this worker had no microbatch, or the load is not balanced


class Launched(NamedTuple):
    """A step whose update the device is computing."""

    summed: Summed
    rates: Rates
    read: Callable[[], list[float]]  # waits for the device; for `read_numbers`


StepHook = Callable[[Step, Rates, StepResult], None]
EpochHook = Callable[[int], bool]
PollOrders = Callable[[], Orders]


def train(learner: Learner, team: Team, after_step: StepHook, after_epoch: EpochHook,
          poll_orders: PollOrders = Orders, until: int | None = None) -> None:
    """Train to the last epoch, or until `after_epoch` returns True or a worker's orders end it.

    Collective: if any worker is ordered to stop or to regroup, all return after the same step. `after_epoch` closes the
    epoch in the learner's state; a training interrupted before that resumes with `after_epoch`.

    Args:
        until: number of epochs after which `after_epoch` will end the training, so that no later one is loaded.

    Raises:
        DivergedError: after `MAX_SKIPPED` non-finite steps in a row.
        PeerDepartedError: if a worker has departed in a step; the step has then changed nothing.
    """
    recipe, state = learner.spec.recipe, learner.state
    batches: Iterator[Mapping[str, Tensor]] | None = None
    for epoch in range(state.progress.epoch, recipe.epochs):
        if batches is None:
            batches = start_loading(learner, team, epoch, until)
        for launched in launch_steps(learner, team, batches, poll_orders):
            step, result = launched.summed.step, finish_step(learner, team, launched)
            state.progress = Progress(epoch, step.images.stop, state.progress.step + 1)
            state.count(result.losses, len(step.images), result.skipped)
            state.moved |= not result.skipped and math.isfinite(result.gradient_norm)  # fp16 may have overflowed
            after_step(step, launched.rates, result)
            if state.skipped_in_row >= MAX_SKIPPED:
                raise DivergedError(f"step {state.progress.step}: loss or gradient not finite {MAX_SKIPPED} times in a "
                                    f"row; {REMEDY}")
            if result.orders.stop or result.orders.regroup:
                learner.optimizer.zero_grad(set_to_none=True)  # the next step may have started: abandon it
                return
        if recipe.image_weights:  # the draws of the next epoch follow its validation
            batches = None
        if after_epoch(epoch):
            return


def start_loading(learner: Learner, team: Team, epoch: int, until: int | None) -> Iterator[Mapping[str, Tensor]]:
    """This worker's batches of the rest of an epoch, and of those after it unless `image_weights` draws each anew.

    Loader processes begin at once. They go on while this process ends an epoch and validates. If settings change with
    an epoch, `after_epoch` ends the loop, and what they have loaded of it is not used.
    """
    recipe, state = learner.spec.recipe, learner.state
    progress = state.progress
    images_done = progress.images_in_epoch if epoch == progress.epoch else 0
    end = recipe.epochs if until is None else until
    last = epoch if recipe.image_weights else end - 1
    team.loaders.sampler.start(epoch, images_done, draw_weights(learner.spec, state.class_maps), last)
    return iter(team.loaders.train)


def launch_steps(learner: Learner, team: Team, batches: Iterator[Mapping[str, Tensor]], poll_orders: PollOrders
                 ) -> Iterator[Launched]:
    """The remaining steps of an epoch. The caller finishes each step before it requests the next one. Collective."""
    progress = learner.state.progress
    steps = [step for step in learner.plan.steps(progress.epoch) if step.images.start >= progress.images_in_epoch]
    in_order = one_behind if runs_ahead(team.context.device) else one_by_one
    return in_order(learner, team, steps, progress, batches, poll_orders)


def one_by_one(learner: Learner, team: Team, steps: Sequence[Step], progress: Progress,
               batches: Iterator[Mapping[str, Tensor]], poll_orders: PollOrders) -> Iterator[Launched]:
    """Each step as soon as it is computed: on a CPU."""
    for number, step in enumerate(steps, progress.step):
        summed = sum_microbatches(learner, team, step, batches, number, poll_orders)
        yield update_weights(learner, team, summed, learner.plan.rates(step, progress.epoch))


def one_behind(learner: Learner, team: Team, steps: Sequence[Step], progress: Progress,
               batches: Iterator[Mapping[str, Tensor]], poll_orders: PollOrders) -> Iterator[Launched]:
    """Each step after the next one is queued behind it: on a GPU, which works asynchronously.

    The next step's forward and backward passes change no weights. The host therefore waits only for finished work, and
    the device never waits for the host.
    """
    launched = None
    for number, step in enumerate(steps, progress.step):
        try:
            summed = sum_microbatches(learner, team, step, batches, number, poll_orders)
        except Exception:
            if launched:  # the device may have completed it: the caller reads it before the error ends the loop
                yield launched
            raise
        if launched:
            yield launched
        launched = update_weights(learner, team, summed, learner.plan.rates(step, progress.epoch))
    if launched:
        yield launched


def runs_ahead(device: torch.device) -> bool:
    """Whether the device queues kernels and runs them asynchronously."""
    return device.type == "cuda"


def sum_microbatches(learner: Learner, team: Team, step: Step, batches: Iterator[Mapping[str, Tensor]], number: int,
                     poll_orders: PollOrders) -> Summed:
    """Run forward and backward of this worker's microbatches; sum and gather over the workers. Collective."""
    plan, gradients, loaders = learner.plan, team.gradients, team.loaders
    activity, device, recipe = team.context.activity, team.context.device, plan.recipe
    rank, num_workers = team.collectives.rank, team.collectives.num_workers
    speeds = loaders.balancer.seconds(step)
    counts = plan.shard_sizes(step, num_workers, speeds)
    shard = plan.shard(step, rank, num_workers, speeds)
    size = image_size(recipe.seed, number, recipe.imgsz, learner.model.grid) if recipe.multi_scale else None
    rows, wait_seconds, work = [], 0.0, None
    learner.model.train()
    gradients.start(counts)
    step_began = mark(device) if loaders.balancer.is_active else None
    for microbatch in shard:
        began, last = time.perf_counter(), microbatch is shard[-1]
        activity.enter("loading")
        batch = next(batches) if microbatch.images else blank_batch(0, recipe.imgsz)
        wait_seconds += time.perf_counter() - began
        activity.enter("computing")
        with gradients.microbatch(last=last):
            loss, terms = forward(learner, team, step, microbatch, batch, size)
            gradients.attach_row(weighted_statistics(learner, team, step, microbatch))
            if last:  # from here on this worker waits for others
                activity.enter("exchanging")
            loss.backward()
        rows.append(terms)
        if rank == 0:
            team.context.callbacks.call(BATCH_END, partial(batch_event, learner, step, number, microbatch, terms))
    if not shard:
        activity.enter("exchanging")
        blank_loss(learner, team).backward()
    elif step_began is not None:
        work = StepWork(len(shard), step_began, mark(device), gradients.waits)
    statistics = gradients.finish()
    report = loaders.balancer.report(step, loaders.sampler)
    layout = RowLayout(tuple(counts), len(learner.criterion.names), recipe.sync_bn)
    row = write_row(poll_orders(), report, team.collectives.was_cut(device), rows, layout)
    gathered = Gathered(*team.collectives.gather_step(row, number))
    images = sum(len(microbatch.images) for microbatch in shard)
    return Summed(step, number, gathered, layout, statistics, wait_seconds, images, work)


def batch_event(learner: Learner, step: Step, number: int, microbatch: Microbatch, terms: Tensor) -> dict[str, Any]:
    """What `on_batch_end` gets of a microbatch of the step after `number` others."""
    losses = (terms / microbatch.num_images).tolist()
    epoch = step.batch // learner.plan.batches
    return {"epoch": epoch, "step": number + 1, "microbatch": microbatch.number, "images": len(microbatch.images),
            "loss": dict(zip(learner.criterion.names, losses, strict=True))}


def forward(learner: Learner, team: Team, step: Step, microbatch: Microbatch, batch: Mapping[str, Tensor],
            size: int | None) -> tuple[Tensor, Tensor]:
    """Forward one microbatch, resized to a long side of `size` pixels. Returns its loss, scaled for backward, and the
    loss terms times its number of images.

    Under sync_bn `batch` is this worker's part of the microbatch, and counts are summed over workers before the loss.
    Assignment processes each image separately, so no count depends on the distribution of images. Counts carry no
    gradient.
    """
    plan, device, criterion = learner.plan, team.context.device, team.criterion
    images, targets = to_network_input(batch, device, size, learner.model.grid, team.loaders.colours,
                                       team.loaders.rendered)
    team.statistics.clear()
    with autocast(device, plan.recipe.precision):
        levels = team.network(images)
    sums = criterion.measure(levels, targets, (images.shape[2], images.shape[3]))
    counts = team.collectives.global_sum(sums.counts) if plan.recipe.sync_bn else sums.counts
    terms = criterion.terms(sums.numerators, counts, plan.share_trained(step)) * microbatch.num_images
    return learner.scaler.scale(terms.sum()), terms.detach()


def weighted_statistics(learner: Learner, team: Team, step: Step, microbatch: Microbatch) -> Tensor:
    """The BatchNorm statistics of the last forward pass, as this worker's term of the step's sum.

    Under sync_bn every worker has the statistics of the whole microbatch, so each adds an equal part of them.
    """
    plan, num_workers = learner.plan, team.collectives.num_workers
    later = plan.microbatches(step) - 1 - microbatch.number
    recorded = team.statistics.recorded(later)
    return recorded / num_workers if plan.recipe.sync_bn else recorded


def blank_loss(learner: Learner, team: Team) -> Tensor:
    """The loss of a worker without a microbatch: a blank image with weight 0.

    DDP reduces in every worker's backward pass. The blank image's statistics are not recorded.
    """
    images, _ = to_network_input(blank_batch(1, 2 * learner.model.grid), team.context.device)
    return learner.scaler.scale(sum(level.float().sum() for level in team.network(images)) * 0.0)


def update_weights(learner: Learner, team: Team, summed: Summed, rates: Rates) -> Launched:
    """Clip the gradient and step. Weights stay unchanged if the step is incomplete, or its loss or gradient not finite.

    The device decides this through the optimiser's `found_inf`, so the host need not wait here. After an fp16 overflow
    the scaler lowers its scale.
    """
    optimizer, scaler = learner.optimizer, learner.scaler
    set_rates(optimizer, rates)
    scaler.unscale_(optimizer)
    judged = team.update.judge(learner, summed.gathered, summed.layout, len(summed.step.images))
    vars(optimizer)["found_inf"] = judged.found_inf
    optimizer.step()
    update_scale(scaler, judged.complete)
    optimizer.zero_grad(set_to_none=True)
    return Launched(summed, rates, send_to_host(judged.numbers))


def update_scale(scaler: torch.amp.GradScaler, complete: Tensor) -> None:
    """Update the scaler, and undo that on the device if the step is incomplete.

    Otherwise workers could get different scales, and would sum gradients of different scales.
    """
    state = scaler_tensors(scaler)
    before = [value.clone() for value in state]
    scaler.update()
    for value, old in zip(state, before, strict=True):
        value.copy_(torch.where(complete, value, old))


def send_to_host(numbers: Tensor) -> Callable[[], list[float]]:
    """Start to copy numbers to the host. Returns a function that waits for them, the only wait for the device in a
    step."""
    copy = numbers.to("cpu", non_blocking=True)
    if not numbers.is_cuda:
        return copy.tolist
    arrived = torch.cuda.Event()
    arrived.record()  # not the end of the stream, which has more work queued

    def read() -> list[float]:
        arrived.synchronize()
        return copy.tolist()

    return read


def finish_step(learner: Learner, team: Team, launched: Launched) -> StepResult:
    """Read a step's numbers from the device; unless it was skipped, update statistics and moving average.

    The gather is the last exchange of a step. If all of its rows have arrived, all earlier exchanges have too.

    Raises:
        PeerDepartedError: if the step is incomplete; the device has skipped it.
    """
    summed = launched.summed
    numbers = read_numbers(launched.read(), summed.layout.terms)
    if not numbers.complete:
        raise PeerDepartedError("the exchange was aborted")
    if numbers.finite:
        team.update.average(learner, summed.statistics, summed.layout.microbatches, summed.number + 1)
    return StepResult(
        losses=torch.tensor(numbers.losses),
        gradient_norm=numbers.norm,
        skipped=not numbers.finite,
        wait_seconds=summed.wait_seconds,
        images=summed.images,
        orders=numbers.orders,
        balance=rebalance(team.loaders, summed, numbers.reports),
    )


def rebalance(loaders: Loaders, summed: Summed, reports: Sequence[SpeedReport]) -> Balance | None:
    """Measure this worker's speed in a step. Returns the balance of a later step if the workers' reports change it."""
    if summed.work:
        loaders.balancer.measure(summed.work)
    balance = loaders.balancer.rebalance(summed.step, reports)
    if balance:
        loaders.sampler.check_not_begun(balance.batch)
    return balance


def to_network_input(batch: Mapping[str, Tensor], device: torch.device, size: int | None = None, grid: int = 1,
                     colours: RecolouredInput | None = None, rendered: RenderedInput | None = None
                     ) -> tuple[Tensor, Tensor]:
    """Images as float32 in 0..1, (B, 3, H, W) channels last, and targets.

    With `size`, both are resized to a long side of `size` pixels, rounded up to a multiple of `grid` on each side. If
    the loaders have left the colours to the device, it changes them first, by `colours`. If they have sent views, it
    renders those, by `rendered`.
    """
    shown = batch["views"] if "views" in batch else batch["images"]
    height, width = shown[0, :2].tolist() if "views" in batch else shown.shape[2:]
    shown, targets = to_device(device, shown, batch["targets"])
    [scaled] = to_device(device, batch["colours"]) if "colours" in batch else [None]
    keeps_size = size is None or not len(shown) or size == max(height, width)
    # resizing has other bits with channels last
    memory_format = torch.channels_last if keeps_size else torch.contiguous_format
    if rendered is not None and "views" in batch:  # a blank batch has images
        images = rendered(shown, scaled, (height, width), memory_format)
    elif colours is not None and scaled is not None:
        images = colours(shown, scaled, memory_format)
    else:
        images = unit_range(shown, memory_format)
    if size is not None and not keeps_size:
        factor = size / max(height, width)
        shape = [math.ceil(side * factor / grid) * grid for side in (height, width)]
        images = F.interpolate(images, size=shape, mode="bilinear", align_corners=False)
        targets = targets.clone()
        targets[:, 2::2].mul_(shape[1] / width)  # floats: the copy of a tensor of factors would make the host wait
        targets[:, 3::2].mul_(shape[0] / height)
    return images.contiguous(memory_format=torch.channels_last), targets


def blank_batch(num_images: int, imgsz: int) -> dict[str, Tensor]:
    """Black images without targets."""
    return {"images": torch.zeros(num_images, 3, imgsz, imgsz, dtype=torch.uint8), "targets": torch.zeros(0, 6)}


def set_rates(optimizer: torch.optim.Optimizer, rates: Rates) -> None:
    """Set learning rate and momentum (beta1 for Adam) of the optimiser's groups."""
    groups = optimizer.param_groups
    parts = len(groups) // len(rates.lr)  # 2 if the backbone has rates of its own, else 1
    for number, group in enumerate(groups):
        group["lr"] = rates.lr[number // parts] * group.get("lr_factor", 1.0)
        if "momentum" in group:
            group["momentum"] = rates.momentum
        else:
            group["betas"] = (rates.momentum, group["betas"][1])
