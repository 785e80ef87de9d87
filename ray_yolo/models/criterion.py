"""The interface of all families' losses."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple, Protocol

from torch import Tensor


class LossSums(NamedTuple):
    """Sums of a loss over some images, one row per term; sums of several microbatches may be added."""

    numerators: Tensor  # (terms, k) float32, differentiable
    counts: Tensor  # (terms, k) float32, without gradient; 0 where nothing was summed


class Criterion(Protocol):
    """A loss measured as sums: the caller decides over which images the means are taken."""

    names: tuple[str, ...]  # of the terms
    num_counts: int  # k of `LossSums`

    def measure(self, levels: Sequence[Tensor], targets: Tensor, image_size: tuple[int, int]) -> LossSums:
        """Sums of a batch in float32. The numerators are connected to the gradients of all predictions, even for B = 0.

        Args:
            levels: outputs of the detector for images of this size; B may be 0.
            targets: (n, 6) rows [image, class, x1, y1, x2, y2], pixels of the network input; n may be 0.
            image_size: (height, width) of the network input.
        """

    def terms(self, numerators: Tensor, counts: Tensor, progress: float = 1.0) -> Tensor:
        """(terms,) means times gains at this progress of training (0..1)."""
