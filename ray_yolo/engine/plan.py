"""The plan of an epoch: which images form which batch, microbatch and optimiser step.

The plan is a pure function of the recipe and the number of images. The number of workers affects only the shards: any
number of workers trains the same microbatches.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
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
    num_images: int  # of the whole microbatch, over all workers (more than the worker's own under sync_bn alone)


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

    def shard(self, step: Step, worker: int, num_workers: int) -> list[Microbatch]:
        """The microbatches that a worker forwards in a step. They are whole and consecutive.

        Under sync_bn, each worker takes every n-th image of every microbatch, possibly none. Its part of a short batch
        is therefore never larger than its part of a full one.
        """
        _, size = resolved_batch(self.recipe)
        numbers, part = range(self.microbatches(step)), slice(worker, None, num_workers)
        if not self.recipe.sync_bn:
            numbers, part = sharding.shard(len(numbers), worker, num_workers), slice(None)
        microbatches = ((number, step.images[number * size : (number + 1) * size]) for number in numbers)
        return [Microbatch(number, images[part], len(images)) for number, images in microbatches]

    def shard_sizes(self, step: Step, num_workers: int) -> list[int]:
        """The number of microbatches in each worker's shard."""
        count = self.microbatches(step)
        if self.recipe.sync_bn:
            return [count] * num_workers
        return [len(sharding.shard(count, worker, num_workers)) for worker in range(num_workers)]

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


class ShardSampler(DistributedSampler[SampleKey]):
    """Sample keys of one worker for the rest of one epoch, in the order of its microbatches.

    It subclasses DistributedSampler so that Ray's `prepare_data_loader` keeps it. Call `start` before iterating.
    """

    def __init__(self, plan: Plan, worker: int, num_workers: int, fixed_order: np.ndarray | None = None) -> None:
        positions = cast("Dataset[int]", range(plan.num_images))  # DistributedSampler needs its length only
        super().__init__(positions, num_replicas=num_workers, rank=worker, shuffle=False)
        self._plan, self._worker, self._num_workers = plan, worker, num_workers
        self._fixed_order = fixed_order
        self._epoch = 0
        self._positions = self._images = np.zeros(0, np.int32)  # of each sample: a list of keys takes 144 bytes for it

    def start(self, epoch: int, images_done: int = 0, weights: np.ndarray | None = None) -> None:
        """Prepare an epoch's keys after its first `images_done` images (whole steps); `weights` biases the draw."""
        order = self._fixed_order
        if order is None:
            order = epoch_order(self._plan.recipe.seed, epoch, self._plan.num_images, weights)
        parts = [np.zeros(0, np.int32)]
        for step in self._plan.steps(epoch):
            if step.images.start >= images_done:
                for microbatch in self._plan.shard(step, self._worker, self._num_workers):
                    images = microbatch.images
                    parts.append(np.arange(images.start, images.stop, images.step, dtype=np.int32))
        self._epoch, self._positions = epoch, np.concatenate(parts)
        self._images = order[self._positions].astype(np.int32)

    def __iter__(self) -> Iterator[SampleKey]:
        epoch = self._epoch
        for position, image in zip(self._positions, self._images, strict=True):
            yield SampleKey(epoch, int(position), int(image))

    def __len__(self) -> int:
        return len(self._positions)
