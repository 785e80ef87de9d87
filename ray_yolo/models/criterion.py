"""The interface of all families' losses, and the share of each image in a batch's loss."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple, Protocol

import torch
from torch import Tensor


class LossSums(NamedTuple):
    """Sums of a loss over some images, one row per term; sums of several microbatches may be added."""

    numerators: Tensor  # (terms, k) float32, differentiable
    counts: Tensor  # (terms, k) float32, without gradient; 0 where nothing was summed


class Criterion(Protocol):
    """A loss measured as sums: the caller decides over which images the means are taken."""

    names: tuple[str, ...]  # names of the terms
    num_counts: int  # k of `LossSums`

    def measure(self, levels: Sequence[Tensor], targets: Tensor, image_size: tuple[int, int]) -> LossSums:
        """Sums of a batch in float32. The numerators are connected to the gradients of all predictions, even for B = 0.

        Args:
            levels: outputs of the detector for images of this size; B may be 0.
            targets: (n, 6) rows [image, class, x1, y1, x2, y2], pixels of the network input; n may be 0.
            image_size: (height, width) of the network input.
        """

    def terms(self, numerators: Tensor, counts: Tensor, progress: float = 1.0) -> Tensor:
        """(terms,) means times gains at this progress of training (0..1); linear in the numerators."""


@torch.no_grad()
def image_numerators(loss: Criterion, levels: Sequence[Tensor], targets: Tensor, image_size: tuple[int, int]) -> Tensor:
    """The numerators of each image of a batch, (B, terms, k): those of the image alone. Arguments as in `measure`.

    Assignment treats each image by itself, so their sum over the images is the batch's, up to rounding. `terms` is
    linear in the numerators. With the batch's counts as the denominators, the terms of the images therefore add up to
    the terms of the batch:

        terms(n_0 + n_1 + ..., counts) = terms(n_0, counts) + terms(n_1, counts) + ...
    """
    rows = [torch.zeros(0, len(loss.names), loss.num_counts, device=targets.device)]
    for image in range(len(levels[0])):
        own_targets = targets[targets[:, 0] == image].clone()
        own_targets[:, 0] = 0
        own_levels = [level[image : image + 1] for level in levels]
        rows.append(loss.measure(own_levels, own_targets, image_size).numerators[None])
    return torch.cat(rows)
