"""The plan of an epoch: which images form which batch, microbatch and optimiser step.

The plan is a pure function of the recipe and the number of images. The number of workers affects only the shards: any
number of workers trains the same microbatches.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import NamedTuple, cast

import numpy as np
from torch.utils.data import Dataset, DistributedSampler

from ray_yolo.config.recipe import Recipe, batches_per_epoch, resolved_batch, warmup_batches
from ray_yolo.core.structures import MicrobatchPart, SampleKey
from ray_yolo.ops import schedule, sharding
from ray_yolo.ops.seeding import epoch_order


class Step(NamedTuple):
    """One optimiser step: the positions `images` in the epoch's order; `batch` is its last batch, counted over all
    epochs."""

    images: range
    batch: int


class Microbatch(NamedTuple):
    """A worker's part of one microbatch."""

    number: int  # a step's microbatches count from 0
    images: range  # positions that the worker forwards
    num_images: int
    """The images of the whole microbatch, over all workers; more than the worker's own under sync_bn alone."""


@dataclass(frozen=True)
class Plan:
    """The order in which a training visits its images."""

    recipe: Recipe
    num_images: int

    @property
    def batches(self) -> int:
        """Batches per epoch."""
        return batches_per_epoch(self.recipe, self.num_images)

    @property
    def warmup(self) -> int:
        """Batches of warm-up."""
        return warmup_batches(self.recipe, self.batches)

    def steps(self, epoch: int) -> list[Step]:
        """The steps of an epoch, in order.

        A step ends when it contains as many batches as accumulation requires at its last batch. It also ends at the end
        of the epoch: no image is dropped or carried over. The last step may be short.
        """
        batch_size, _ = resolved_batch(self.recipe)
        steps, first, held = [], 0, 0
        for number in range(self.batches):
            batch = epoch * self.batches + number
            held += 1
            wanted = schedule.accumulation(batch, self.warmup, batch_size, self.recipe.optimizer.nominal_batch)
            if held >= wanted or number == self.batches - 1:
                end = min((number + 1) * batch_size, self.num_images)
                steps.append(Step(range(first, end), batch))
                first, held = end, 0
        return steps

    def share_trained(self, step: Step) -> float:
        """e / (E - 1) in epoch e of E, from 0 to 1; constant within an epoch."""
        return step.batch // self.batches / max(self.recipe.epochs - 1, 1)

    def microbatches(self, step: Step) -> int:
        """Number of microbatches of a step; the epoch's last one may be short."""
        return math.ceil(len(step.images) / resolved_batch(self.recipe)[1])

    def shard(self, step: Step, worker: int, num_workers: int, seconds: tuple[float, ...] = ()) -> list[Microbatch]:
        """The microbatches that a worker forwards in a step. They are whole and consecutive.

        Under sync_bn, each worker takes every n-th image of every microbatch, possibly none. Its part of a short batch
        is therefore never larger than its part of a full one.

        Args:
            seconds: per microbatch, of each worker; (): of equal speed.
        """
        _, size = resolved_batch(self.recipe)
        numbers, part = range(self.microbatches(step)), slice(worker, None, num_workers)
        if not self.recipe.sync_bn:
            numbers = sharding.shards_by_speed(len(numbers), seconds or (1.0,) * num_workers)[worker]
            part = slice(None)
        microbatches = ((number, step.images[number * size : (number + 1) * size]) for number in numbers)
        return [Microbatch(number, images[part], len(images)) for number, images in microbatches]

    def shard_sizes(self, step: Step, num_workers: int, seconds: tuple[float, ...] = ()) -> list[int]:
        """The number of microbatches in each worker's shard; the arguments are those of `shard`."""
        count = self.microbatches(step)
        if self.recipe.sync_bn:
            return [count] * num_workers
        return [len(numbers) for numbers in sharding.shards_by_speed(count, seconds or (1.0,) * num_workers)]

    def idle_share(self, epoch: int, num_workers: int) -> float:
        """The share of the workers' time in an epoch's steps in which they have no microbatch, at equal speed.

        With W workers, a step of m microbatches takes the time of ceil(m / W) of them. So over the steps of the epoch

            idle = 1 - sum of m / sum of W ceil(m / W)

        Under sync_bn, each worker has a part of every microbatch.
        """
        if self.recipe.sync_bn:
            return 0.0
        counts = [self.microbatches(step) for step in self.steps(epoch)]
        return 1 - sum(counts) / sum(num_workers * math.ceil(count / num_workers) for count in counts)

    def worker_images(self, num_workers: int, worker: int) -> int:
        """Images of a worker's full microbatch."""
        _, size = resolved_batch(self.recipe)
        return len(range(worker, size, num_workers)) if self.recipe.sync_bn else size

    def rates(self, step: Step, epoch: int) -> schedule.Rates:
        """Learning rates and momentum of a step. Warm-up depends on its last batch, decay on the integer epoch."""
        optimizer, plan = self.recipe.optimizer, self.recipe.schedule
        lr = optimizer.lr0 * schedule.decay_factor(epoch, self.recipe.epochs, plan.lrf, cosine=plan.cos_lr)
        return schedule.warm_rates(step.batch, self.warmup, lr, plan.warmup_bias_lr, optimizer.momentum,
                                   plan.warmup_momentum)


@dataclass
class _Iteration:
    """One iteration over a worker's parts: what it has still to yield, and what it has yielded last."""

    epoch: int  # the next one whose steps will be added
    images_done: int  # this many images of the epoch are trained
    last: int  # the epoch after which it ends
    ahead: deque[tuple[int, Step]] = field(default_factory=deque)
    """Steps that have not begun, and their epochs."""
    begun: deque[tuple[int, int]] = field(default_factory=lambda: deque(maxlen=4096))
    """The last batches of the steps that have begun, and their numbers of parts: more than loaders request ahead."""
    left: int = 0
    """The parts of the newest of them that are still to be yielded."""


class ShardSampler(DistributedSampler[MicrobatchPart]):
    """The parts of one worker's microbatches, in their order, for the rest of an epoch and for those after it.

    It subclasses DistributedSampler so that Ray's `prepare_data_loader` keeps it. Call `start` before iterating.

    Args:
        speeds: the last argument of `Plan.shard` for a step. It is asked when the step begins to load.
        part_images: of a part; the last one of a microbatch may be smaller.
    """

    def __init__(self, plan: Plan, worker: int, num_workers: int, fixed_order: np.ndarray | None = None,
                 speeds: Callable[[Step], tuple[float, ...]] = lambda step: (), part_images: int = 2**31) -> None:
        positions = cast("Dataset[int]", range(plan.num_images))  # DistributedSampler needs its length only
        super().__init__(positions, num_replicas=num_workers, rank=worker, shuffle=False)
        self._plan, self._worker, self._num_workers = plan, worker, num_workers
        self._fixed_order, self._speeds, self._part_images = fixed_order, speeds, part_images
        self.start(0)

    def start(self, epoch: int, images_done: int = 0, weights: np.ndarray | None = None, last: int = 0) -> None:
        """Prepare an iteration from an epoch's first `images_done` images on (whole steps).

        Args:
            weights: bias the draw of images.
            last: the epoch after which the iteration ends, if it is later than `epoch`.
        """
        self._started, self._weights = (epoch, images_done, max(epoch, last)), weights
        self._stream = _Iteration(*self._started)

    def order(self, epoch: int) -> np.ndarray:
        """The image at each position of an epoch, int32."""
        if self._fixed_order is not None:
            return self._fixed_order.astype(np.int32)
        return epoch_order(self._plan.recipe.seed, epoch, self._plan.num_images, self._weights).astype(np.int32)

    def newest_loading(self, step: Step) -> int:
        """The last batch of the newest step that may be loading when the step after `step` has been computed.

        For each part that a loader returns, it requests one more. The step after `step` returns as many as it has, so
        the loader goes on by as many: through what is left of the step that it loads now, then through those ahead.
        """
        stream = self._stream
        while stream.begun and stream.begun[0][0] < step.batch:  # no later call looks at these
            stream.begun.popleft()
        newest = stream.begun[-1][0] if stream.begun else step.batch
        later = [parts for batch, parts in stream.begun if batch > step.batch]
        requested = later[0] if later else None  # None: the step after `step` has not begun to load
        number = 0  # of steps ahead that are looked at
        while requested is None or requested > stream.left:
            if number == len(stream.ahead) and not self._extend(stream):
                break  # the loader asks for nothing after the end
            _, following = stream.ahead[number]
            number += 1
            if following.batch <= step.batch:  # without a part of this worker
                continue
            parts = len(self._parts(following))
            if requested is None:
                requested = parts
            requested -= parts
            newest = following.batch
        return newest

    def check_not_begun(self, batch: int) -> None:
        """Check that no loader has begun to load a step whose last batch is `batch` or a later one."""
        begun = self._stream.begun
        assert not begun or begun[-1][0] < batch, "a loader has begun to load these steps"

    def _extend(self, stream: _Iteration) -> bool:
        """Add the steps of one more epoch, of which there are some; False after the last one."""
        while stream.epoch <= stream.last:
            steps = [step for step in self._plan.steps(stream.epoch) if step.images.start >= stream.images_done]
            stream.ahead.extend((stream.epoch, step) for step in steps)
            stream.epoch, stream.images_done = stream.epoch + 1, 0
            if steps:  # none if the training was stopped between an epoch's last step and its end
                return True
        return False

    def _parts(self, step: Step) -> list[tuple[range, int, int]]:
        """The parts of this worker's microbatches in a step: positions, place in the microbatch, size of that."""
        parts = []
        for microbatch in self._plan.shard(step, self._worker, self._num_workers, self._speeds(step)):
            positions = microbatch.images
            for first in range(0, len(positions), self._part_images):
                parts.append((positions[first : first + self._part_images], first, len(positions)))
        return parts

    def __iter__(self) -> Iterator[MicrobatchPart]:
        self._stream = _Iteration(*self._started)
        return self._iterate(self._stream)

    def _iterate(self, stream: _Iteration) -> Iterator[MicrobatchPart]:
        ordered, order = -1, np.zeros(0, np.int32)  # the order of the images in an epoch
        while stream.ahead or self._extend(stream):
            epoch, step = stream.ahead.popleft()
            if epoch != ordered:
                ordered, order = epoch, self.order(epoch)
            parts = self._parts(step)
            stream.begun.append((step.batch, len(parts)))
            stream.left = len(parts)
            for positions, first, size in parts:
                keys = tuple(SampleKey(epoch, position, int(order[position]), self._block(order, position))
                             for position in positions)
                stream.left -= 1
                yield MicrobatchPart(keys, first, size)

    def _block(self, order: np.ndarray, position: int) -> tuple[int, ...]:
        """The images of the block that a position is in, in the epoch's order. The last block is a whole one, too."""
        size = self._plan.recipe.augment.partners
        if size == 0:
            return ()
        last_start = max(len(order) - size, 0)
        start = min(position // size * size, last_start)
        return tuple(order[start:start + size].tolist())
