"""Counter-based randomness: every draw is a function of a key, so no generator state is saved or restored."""

from __future__ import annotations

from enum import IntEnum

import numpy as np

LARGEST_SCALE = 1.5  # the largest multiple of imgsz in multi-scale training


class Stream(IntEnum):
    """Purpose of a draw; separates streams with equal keys."""

    ORDER = 1
    SAMPLE = 2
    IMAGE_SIZE = 3
    ANCHORS = 4
    TRIALS = 6
    PAIRS = 7


def generator(stream: Stream, *key: int) -> np.random.Generator:
    """The generator of a key: equal keys give equal draws in any process on any machine.

    The seed is the list of integers, not their sum: (seed 1, epoch 2) and (seed 2, epoch 1) must differ.
    """
    return np.random.default_rng([int(stream), *key])


def epoch_order(seed: int, epoch: int, num_images: int, weights: np.ndarray | None = None) -> np.ndarray:
    """Image at each position of an epoch, (num_images,) int64.

    A permutation; with `weights` (num_images,) >= 0 a sample with replacement in proportion to them.
    """
    rng = generator(Stream.ORDER, seed, epoch)
    if weights is None:
        return rng.permutation(num_images)
    return rng.choice(num_images, size=num_images, p=weights / weights.sum())


def image_size(seed: int, step: int, imgsz: int, stride: int) -> int:
    """Multi-scale size of one optimiser step: uniform in [0.5, 1.5) x imgsz + stride, rounded down to the stride.

    At least two strides: one image of one stride has a single value per channel, for which BatchNorm has no variance.
    """
    rng = generator(Stream.IMAGE_SIZE, seed, step)
    size = int(rng.integers(int(0.5 * imgsz), int(LARGEST_SCALE * imgsz) + stride)) // stride * stride
    return max(size, 2 * stride)
