"""Randomness as a value: every draw belongs to a key, so nothing random is ever saved or restored."""

from __future__ import annotations

from enum import IntEnum

import numpy as np

LARGEST_SCALE = 1.5  # of imgsz, in multi-scale training


class Stream(IntEnum):
    """What a draw is for; keeps streams with equal numbers apart."""

    ORDER = 1
    SAMPLE = 2
    IMAGE_SIZE = 3
    ANCHORS = 4
    TRIALS = 6


def generator(stream: Stream, *key: int) -> np.random.Generator:
    """The generator of one key: equal keys give equal draws in any process, on any machine.

    Seeded with the list of integers, never with their sum: (seed 1, epoch 2) and (seed 2, epoch 1) must differ.
    """
    return np.random.default_rng([int(stream), *key])


def epoch_order(seed: int, epoch: int, num_images: int, weights: np.ndarray | None = None) -> np.ndarray:
    """Image of each position of an epoch, (num_images,) int64.

    A permutation; with `weights` (num_images,) >= 0, a draw with replacement in proportion to them.
    """
    rng = generator(Stream.ORDER, seed, epoch)
    if weights is None:
        return rng.permutation(num_images)
    return rng.choice(num_images, size=num_images, p=weights / weights.sum())


def image_size(seed: int, step: int, imgsz: int, stride: int) -> int:
    """Multi-scale size of one optimiser step: uniform in [0.5, 1.5) x imgsz + stride, floored to the stride.

    At least two strides, as `imgsz` is: one image of one stride has a single value per channel, and no variance.
    """
    rng = generator(Stream.IMAGE_SIZE, seed, step)
    size = int(rng.integers(int(0.5 * imgsz), int(LARGEST_SCALE * imgsz) + stride)) // stride * stride
    return max(size, 2 * stride)
