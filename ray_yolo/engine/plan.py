"""The plan of an epoch: which images form which batch, microbatch and optimiser step.

The plan is a pure function of the recipe and the number of images. The number of workers affects only the shards: any
number of workers trains the same microbatches.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple, cast

import numpy as np
from torch.utils.data import Dataset, DistributedSampler

from ray_yolo.config.recipe import Recipe, batches_per_epoch, resolved_batch, warmup_batches
from ray_yolo.core.structures import SampleKey
from ray_yolo.ops import schedule, sharding
from ray_yolo.ops.seeding import epoch_order


class Step(NamedTuple):
    """One optimiser step: the positions `images` in the epoch's order; `batch` is its last batch, counted over all
    epochs."""

    images: range
    batch: int


class Microbatch(NamedTuple):
    """A worker's part of one microbatch."""

    number: int  # within the step
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

    def loader_batch(self, num_workers: int, worker: int) -> int:
        """Images of a worker's full microbatch, the batch size of its loader."""
        _, size = resolved_batch(self.recipe)
        return len(range(worker, size, num_workers)) if self.recipe.sync_bn else size

    def rates(self, step: Step, epoch: int) -> schedule.Rates:
        """Learning rates and momentum of a step. Warm-up depends on its last batch, decay on the integer epoch."""
        optimizer, plan = self.recipe.optimizer, self.recipe.schedule
        lr = optimizer.lr0 * schedule.decay_factor(epoch, self.recipe.epochs, plan.lrf, cosine=plan.cos_lr)
        return schedule.warm_rates(step.batch, self.warmup, lr, plan.warmup_bias_lr, optimizer.momentum,
                                   plan.warmup_momentum)


@dataclass
class _EpochKeys:
    """The keys of one worker for the rest of an epoch. Arrays, because a list of keys takes 144 bytes for each."""

    epoch: int
    order: np.ndarray  # the image at each position
    batches: np.ndarray  # the last batch of each step
    positions: np.ndarray  # of each key
    ends: np.ndarray  # number of keys up to the end of each step
    yielded: int = 0  # keys

    def step_number(self, batch: int) -> int:
        """The number, within these steps, of the first one whose last batch is `batch` or a later one."""
        return int(np.searchsorted(self.batches, batch))


class ShardSampler(DistributedSampler[SampleKey]):
    """Sample keys of one worker for the rest of one epoch, in the order of its microbatches.

    It subclasses DistributedSampler so that Ray's `prepare_data_loader` keeps it. Call `start` before iterating.

    Args:
        speeds: the last argument of `Plan.shard` for a step.
    """

    def __init__(self, plan: Plan, worker: int, num_workers: int, fixed_order: np.ndarray | None = None,
                 speeds: Callable[[Step], tuple[float, ...]] = lambda step: ()) -> None:
        positions = cast("Dataset[int]", range(plan.num_images))  # DistributedSampler needs its length only
        super().__init__(positions, num_replicas=num_workers, rank=worker, shuffle=False)
        self._plan, self._worker, self._num_workers = plan, worker, num_workers
        self._fixed_order, self._speeds = fixed_order, speeds
        none = np.zeros(0, np.int32)
        self._keys = _EpochKeys(0, none, none, none, none)

    def start(self, epoch: int, images_done: int = 0, weights: np.ndarray | None = None) -> None:
        """Prepare an epoch's keys after its first `images_done` images (whole steps); `weights` biases the draw."""
        order = self._fixed_order
        if order is None:
            order = epoch_order(self._plan.recipe.seed, epoch, self._plan.num_images, weights)
        steps = [step for step in self._plan.steps(epoch) if step.images.start >= images_done]
        batches = np.array([step.batch for step in steps], np.int32)
        self._keys = _EpochKeys(epoch, order.astype(np.int32), batches, *self._shards(steps))

    def restart(self, batch: int) -> None:
        """Distribute the steps anew whose last batch is `batch` or a later one. No key of them was yielded."""
        keys = self._keys
        kept = keys.step_number(batch)
        num_kept = int(keys.ends[kept - 1]) if kept else 0
        assert keys.yielded <= num_kept, "a loader has begun to load these steps"
        steps = [step for step in self._plan.steps(keys.epoch) if step.batch >= batch]
        positions, ends = self._shards(steps)
        keys.positions = np.concatenate([keys.positions[:num_kept], positions])
        keys.ends = np.concatenate([keys.ends[:kept], num_kept + ends])

    def newest_loading(self, step: Step) -> int:
        """The last batch of the newest step that may be loading when the step after `step` has been computed.

        For each batch that a loader returns, it requests one more.
        """
        keys = self._keys
        number = keys.step_number(step.batch)
        following = min(number + 1, len(keys.batches) - 1)
        requested = keys.yielded + keys.ends[following] - keys.ends[number]
        if requested >= len(keys.positions):  # the loader may have met the end, and asks for nothing more in this epoch
            return int(keys.batches[-1])
        newest = int(np.searchsorted(keys.ends, requested))  # the step of the last of them
        return int(keys.batches[max(newest, following)])

    def _shards(self, steps: Sequence[Step]) -> tuple[np.ndarray, np.ndarray]:
        """The positions of this worker's images in some steps, and their number up to the end of each step."""
        parts, sizes = [np.zeros(0, np.int32)], []
        for step in steps:
            microbatches = self._plan.shard(step, self._worker, self._num_workers, self._speeds(step))
            for microbatch in microbatches:
                images = microbatch.images
                parts.append(np.arange(images.start, images.stop, images.step, dtype=np.int32))
            sizes.append(sum(len(microbatch.images) for microbatch in microbatches))
        return np.concatenate(parts), np.cumsum(sizes, dtype=np.int32)

    def __iter__(self) -> Iterator[SampleKey]:
        keys = self._keys  # a running iteration keeps its epoch
        for number in itertools.count():
            if number >= len(keys.positions):  # `restart` changes the length
                return
            position = int(keys.positions[number])
            keys.yielded = max(keys.yielded, number + 1)
            yield SampleKey(keys.epoch, position, int(keys.order[position]), self._block(keys.order, position))

    def _block(self, order: np.ndarray, position: int) -> tuple[int, ...]:
        """The images of the block that a position is in, in the epoch's order. The last block is a whole one, too."""
        size = self._plan.recipe.augment.partners
        if size == 0:
            return ()
        last_start = max(len(order) - size, 0)
        start = min(position // size * size, last_start)
        return tuple(order[start:start + size].tolist())

    def __len__(self) -> int:
        return len(self._keys.positions)
