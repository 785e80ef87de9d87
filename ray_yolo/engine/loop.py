"""The training loop, as the story of a step. Nothing here asks which worker it runs on.

A step's microbatches are shared out over the workers; each is one forward, one set of BatchNorm statistics and one
loss mean. What they measured is gathered once per step, so that every worker takes the same decisions.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator, Mapping
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from ray_yolo.core.errors import PeerLostError, TrainingError
from ray_yolo.core.structures import Progress
from ray_yolo.engine.build import TrainComponents, draw_weights
from ray_yolo.engine.evaluate import autocast
from ray_yolo.engine.plan import Microbatch, Step
from ray_yolo.engine.state import TrainState
from ray_yolo.ops.schedule import Rates
from ray_yolo.ops.seeding import image_size

MAX_SKIPPED = 10  # steps in a row with a non-finite loss or gradient before training gives up
REMEDY = "lower optimizer.lr0, or use --set precision=fp32"


class ControlFlags(NamedTuple):
    """What a worker was told: heard by all of them with the step in hand."""

    stop: bool = False  # training shall stop
    regroup: bool = False  # somebody waits to join, or is to leave
    save: bool = False  # all are to leave, and nobody takes the state over


class StepResult(NamedTuple):
    """What a step did, equal on every worker except for the times."""

    losses: Tensor  # (terms,) mean over the step's images
    gradient_norm: float  # before clipping
    skipped: bool  # non-finite somewhere: no weight and no statistic has changed
    wait_seconds: float  # this worker's wait for its loader
    images: int  # forwarded by this worker
    flags: ControlFlags  # of all workers


class Summed(NamedTuple):
    """What a step's microbatches come to; the sum of their gradients is in `.grad`. Nothing trained has changed."""

    step: Step
    number: int  # of the optimiser step, from 0
    losses: Tensor  # (microbatches, terms), each times its images
    statistics: Tensor  # what `Statistics.apply` takes
    whole: Tensor  # () bool: no exchange of any worker was aborted; otherwise all of this may be anything
    flags: Tensor  # (3,) bool: those of any worker
    wait_seconds: float


class Launched(NamedTuple):
    """A step whose update is under way on the device."""

    summed: Summed
    rates: Rates
    read: Callable[[], list[float]]  # waits for the device: losses, gradient norm, whether finite, whole, wishes


StepHook = Callable[[Step, Rates, StepResult], None]
EpochHook = Callable[[int], bool]
PollControls = Callable[[], ControlFlags]


def train(components: TrainComponents, state: TrainState, after_step: StepHook, after_epoch: EpochHook,
          poll_controls: PollControls = ControlFlags) -> None:
    """Train from `state` to the last epoch, or until `after_epoch` says stop or a worker wishes it to. Moves `state`.

    Collective: whichever worker was told to stop or to regroup, all return after the same step. It is for `after_epoch`
    to close the epoch: who comes back between its last step and that begins with `after_epoch`.

    Raises:
        TrainingError: after `MAX_SKIPPED` non-finite steps in a row.
    """
    for epoch in range(state.progress.epoch, components.plan.recipe.epochs):
        components.sampler.start(epoch, state.progress.images_in_epoch, draw_weights(components.spec, state.class_maps))
        for launched in launch_steps(components, state.progress, poll_controls):
            step, result = launched.summed.step, finish_step(components, launched)
            state.progress = Progress(epoch, step.images.stop, state.progress.step + 1)
            state.count(result.losses, len(step.images), result.skipped)
            state.moved |= not result.skipped and math.isfinite(result.gradient_norm)  # fp16 may have overflowed
            after_step(step, launched.rates, result)
            if state.skipped_in_row >= MAX_SKIPPED:
                raise TrainingError(f"step {state.progress.step}: loss or gradient not finite {MAX_SKIPPED} times in "
                                    f"a row; {REMEDY}")
            if result.flags.stop or result.flags.regroup:
                components.optimizer.zero_grad(set_to_none=True)  # the next step may have begun: it is given up
                return
        if after_epoch(epoch):
            return


def launch_steps(components: TrainComponents, progress: Progress, poll_controls: PollControls) -> Iterator[Launched]:
    """The steps of the rest of an epoch, each to be finished before the next one is asked for. Collective.

    Where the device runs on its own, a step is handed out once the next one's forward and backward, which change
    nothing, are queued behind it: the host waits for what the device is done with, and the device never for the host.
    A step that was handed to the device before a peer was lost is handed out, too: it may have been finished.
    """
    batches, unread = iter(components.loader), None
    steps = [step for step in components.plan.steps(progress.epoch) if step.images.start >= progress.images_in_epoch]
    for number, step in enumerate(steps, progress.step):
        try:
            summed = sum_microbatches(components, step, batches, number, poll_controls)
        except RuntimeError:
            if unread:
                yield unread
            raise
        if unread:
            yield unread
        unread = update_weights(components, summed, components.plan.rates(step, progress.epoch))
        if not runs_ahead(components.context.device):
            yield unread
            unread = None
    if unread:
        yield unread


def runs_ahead(device: torch.device) -> bool:
    """Whether kernels are queued rather than run at once."""
    return device.type == "cuda"


def sum_microbatches(components: TrainComponents, step: Step, batches: Iterator[Mapping[str, Tensor]], number: int,
                     poll_controls: PollControls) -> Summed:
    """Forward and backward over the worker's shard of a step, summed and gathered over the workers. Collective."""
    collectives, recipe = components.context.collectives, components.plan.recipe
    counts = components.plan.shard_sizes(step, collectives.num_workers)
    components.model.train()
    components.gradients.start(counts)
    size = image_size(recipe.seed, number, recipe.imgsz, components.model.grid) if recipe.multi_scale else None
    rows, waited = forward_backward(components, step, batches, size)
    statistics = components.gradients.finish()
    losses, whole, flags = gather_measurements(components, rows, counts, poll_controls(), number)
    return Summed(step, number, losses, statistics, whole, flags, waited)


def forward_backward(components: TrainComponents, step: Step, batches: Iterator[Mapping[str, Tensor]],
                     size: int | None) -> tuple[list[Tensor], float]:
    """Forward and backward of the worker's microbatches. Collective.

    Returns the losses of each, and the seconds waited for the loader.
    """
    collectives, recipe = components.context.collectives, components.plan.recipe
    mine, count = (
        components.plan.shard(step, collectives.worker, collectives.num_workers),
        components.plan.microbatches(step),
    )
    rows, waited, activity = [], 0.0, components.context.activity
    for microbatch in mine:
        began, last = time.perf_counter(), microbatch is mine[-1]
        activity.enter("loading")
        batch = next(batches) if microbatch.images else blank_batch(0, recipe.imgsz)
        waited += time.perf_counter() - began
        activity.enter("computing")
        with components.gradients.microbatch(last=last):
            loss, terms = forward(components, batch, len(whole_microbatch(components, step, microbatch)), size,
                                  components.plan.share_trained(step))
            statistics = components.statistics.recorded(count - 1 - microbatch.number)
            if last:  # from here on others are waited for
                activity.enter("exchanging")
            components.gradients.backward(loss, statistics / collectives.num_parts(recipe.sync_bn), last=last)
        rows.append(terms)
    if not mine:
        activity.enter("exchanging")
        components.gradients.backward_of_nothing(blank_loss(components))
    return rows, waited


def forward(components: TrainComponents, batch: Mapping[str, Tensor], num_images: int, size: int | None, trained: float
            ) -> tuple[Tensor, Tensor]:
    """One microbatch. Returns its loss, scaled for backward, and the loss's terms times its images.

    Under sync_bn the batch is this worker's part of a microbatch of `num_images`: counts are summed over workers
    before the loss. Boxes are assigned image by image, by anchors alone or by the image's own predictions, so that no
    count depends on how the images are shared out; counts carry no gradient. `trained` is the share
    of training that is done.
    """
    precision, collectives = components.plan.recipe.precision, components.context.collectives
    images, targets = to_network_input(batch, components.context.device, size, components.model.grid)
    components.statistics.clear()
    with autocast(components.context.device, precision):
        levels = components.replica(images)
    measured = components.loss.measure(levels, targets, (images.shape[2], images.shape[3]))
    counts = collectives.global_sum(measured.counts) if components.plan.recipe.sync_bn else measured.counts
    terms = components.loss.terms(measured.numerators, counts, trained) * num_images
    return components.scaler.scale(terms.sum()), terms.detach()


def blank_loss(components: TrainComponents) -> Tensor:
    """For a worker without a microbatch: a blank image at no weight, because DDP reduces in every worker's backward.

    What the blank image does to the statistics is not recorded.
    """
    images, _ = to_network_input(blank_batch(1, 2 * components.model.grid), components.context.device)
    return components.scaler.scale(sum(level.float().sum() for level in components.replica(images)) * 0.0)


def gather_measurements(components: TrainComponents, rows: list[Tensor], counts: list[int], flags: ControlFlags,
                        number: int) -> tuple[Tensor, Tensor, Tensor]:
    """Losses of all microbatches of step `number` in their order, whether the step is whole, and the wishes of any
    worker (bools on the device); the same on every worker. Collective.

    Each worker's rows travel behind a header that it has whether it has a microbatch or not. The header also says
    whether the worker's group was cut before its gradients had come, and so whether it may have passed on garbage.
    """
    width, collectives, device = len(components.loss.names), components.context.collectives, components.context.device
    mine = torch.cat(rows) if rows else torch.zeros(0, device=device)
    header = torch.stack([*(mine.new_full((), float(wish)) for wish in flags), collectives.was_cut(device)])
    room = mine.new_zeros(max(counts) * width - len(mine))
    gathered, of_this_step = collectives.gather_step(torch.cat([header, mine, room]), number)
    *wished, cut = gathered[:, : len(header)].unbind(1)
    whole = of_this_step & ~cut.any()
    if components.plan.recipe.sync_bn:  # every worker has a part of every microbatch
        losses = gathered.sum(0)[len(header):].view(-1, width)
    else:
        losses = torch.cat([row[len(header):][: count * width].view(count, width)
                            for row, count in zip(gathered, counts, strict=True)])
    return losses, whole, torch.stack(wished).any(1)


def update_weights(components: TrainComponents, summed: Summed, rates: Rates) -> Launched:
    """Clip and step; the weights stay as they are if the step is not whole, or any loss or the gradient not finite.

    The device decides that itself, so that the host need not wait for it here: the optimiser's kernel is told.
    fp16 overflow with finite losses is the scaler's business, which lowers its scale, until that cannot be the reason
    any more; such a step counts as finite.
    """
    optimizer, scaler = components.optimizer, components.scaler
    set_rates(optimizer, rates)
    scaler.unscale_(optimizer)
    trained = [p for group in optimizer.param_groups for p in group["params"]]
    norm = nn.utils.clip_grad_norm_(trained, components.plan.recipe.optimizer.clip_norm, foreach=True)
    overflow = scaler.scale(torch.ones_like(norm)) >= 1 if scaler.is_enabled() else False
    finite = summed.whole & summed.losses.isfinite().all() & (norm.isfinite() | overflow)
    vars(optimizer)["found_inf"] = 1 - (finite & norm.isfinite()).float()  # what torch's fused optimisers look for
    optimizer.step()
    update_scale(scaler, summed.whole)
    optimizer.zero_grad(set_to_none=True)
    mean = summed.losses.sum(0) / len(summed.step.images)
    told = [mean, torch.stack([norm, finite, summed.whole]), summed.flags]
    return Launched(summed, rates, send_to_host(torch.cat(told)))


def update_scale(scaler: torch.amp.GradScaler, whole: Tensor) -> None:
    """The scaler's own update, undone on the device if the step is not whole: workers of different scales would sum
    gradients of different scales."""
    state = [vars(scaler)[name] for name in ("_scale", "_growth_tracker")] if scaler.is_enabled() else []
    before = [value.clone() for value in state]
    scaler.update()
    for value, old in zip(state, before, strict=True):
        value.copy_(torch.where(whole, value, old))


def send_to_host(numbers: Tensor) -> Callable[[], list[float]]:
    """Start to copy numbers to the host. Returns the wait for them, the only one for the device in a step."""
    copy = numbers.to("cpu", non_blocking=True)
    if not numbers.is_cuda:
        return copy.tolist
    arrived = torch.cuda.Event()
    arrived.record()  # not the end of the stream, which runs on

    def read() -> list[float]:
        arrived.synchronize()
        return copy.tolist()

    return read


def finish_step(components: TrainComponents, launched: Launched) -> StepResult:
    """Read what a step has told; statistics and moving average follow the weights unless it was skipped.

    The gather is a step's last exchange: where all rows of the step have come, so has all else.

    Raises:
        PeerLostError: if the step is not whole; the device has skipped it.
    """
    summed, collectives = launched.summed, components.context.collectives
    *losses, norm, finite, whole, stop, regroup, save = launched.read()
    if not whole:
        raise PeerLostError("the exchange was aborted")
    if finite:
        components.statistics.apply(summed.statistics, len(summed.losses))
        components.ema.update(components.model, summed.number + 1)
    images = sum(
        len(part.images) for part in components.plan.shard(summed.step, collectives.worker, collectives.num_workers)
    )
    return StepResult(torch.tensor(losses), norm, not finite, summed.wait_seconds, images,
                      ControlFlags(bool(stop), bool(regroup), bool(save)))


def to_network_input(batch: Mapping[str, Tensor], device: torch.device, size: int | None = None, grid: int = 1
                     ) -> tuple[Tensor, Tensor]:
    """Images as float32 in 0..1, (B, 3, H, W) channels last, and targets; resized to a long side of `size` pixels and
    to
    sides in multiples of `grid`."""
    images = batch["images"].to(device, non_blocking=True).float().div_(255)
    targets = batch["targets"].to(device, non_blocking=True)
    if size is not None and len(images) and size != max(images.shape[2:]):
        factor, (height, width) = size / max(images.shape[2:]), images.shape[2:]
        shape = [math.ceil(side * factor / grid) * grid for side in (height, width)]
        images = F.interpolate(images, size=shape, mode="bilinear", align_corners=False)
        targets = targets.clone()
        targets[:, 2::2].mul_(shape[1] / width)  # numbers, not a tensor of them: its copy to the device would wait
        targets[:, 3::2].mul_(shape[0] / height)
    return images.contiguous(memory_format=torch.channels_last), targets


def whole_microbatch(components: TrainComponents, step: Step, microbatch: Microbatch) -> range:
    """Positions of a microbatch over all workers (they differ from the worker's own under sync_bn only)."""
    size = components.plan.recipe.microbatch
    assert size is not None
    return step.images[microbatch.number * size : (microbatch.number + 1) * size]


def blank_batch(num_images: int, imgsz: int) -> dict[str, Tensor]:
    """Images without content and without targets."""
    return {"images": torch.zeros(num_images, 3, imgsz, imgsz, dtype=torch.uint8), "targets": torch.zeros(0, 6)}


def set_rates(optimizer: torch.optim.Optimizer, rates: Rates) -> None:
    """Set learning rate and momentum (beta1 for Adam) of the optimiser's groups."""
    for group, lr in zip(optimizer.param_groups, rates.lr, strict=True):
        group["lr"] = lr
        if "momentum" in group:
            group["momentum"] = rates.momentum
        else:
            group["betas"] = (rates.momentum, group["betas"][1])
