"""Training samples whose pictures the device renders: labels and views, from the draws of the host's way."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ray_yolo.core.structures import SampleKey
from ray_yolo.data.dataset import Batch, TrainDataset, without_pixels
from ray_yolo.data.mosaic import Tile, room
from ray_yolo.ops.views import LENGTH, Source, mirror_view, view_of


class ViewDataset(TrainDataset):
    """Samples as those of `TrainDataset`, with a view in the place of pixels (`ops.views`).

    Settings that need pixels on the host (`config.effects.needs_host`) are off.

    Args:
        readable: (images,) bool, whether the device holds an image; the next such image is shown instead of another.
    """

    def __init__(self, *args: Any, readable: np.ndarray, **settings: Any) -> None:
        super().__init__(*args, **settings)
        self.readable = readable

    def __getitems__(self, keys: Sequence[SampleKey]) -> Batch:
        """The batch of several keys' samples: as that of `collate`, with views (B, 28) int64 instead of images."""
        views = self._empty(keys)
        return {**without_pixels(self._samples(keys, views)), "views": views}

    def _empty(self, keys: Sequence[SampleKey]) -> Tensor:
        return torch.empty((len(keys), LENGTH), dtype=torch.int64)

    def _shown(self, out: np.ndarray) -> dict[str, Tensor]:
        return {"view": torch.from_numpy(out)}

    def _flip(self, out: np.ndarray, mirrored: tuple[bool, bool]) -> None:
        mirror_view(out, mirrored)

    def _render(self, out: np.ndarray, tiles: list[Tile[int]], seam: tuple[int, int], canvas: tuple[int, int],
                size: tuple[int, int], matrix: np.ndarray) -> range:
        sources = []
        for image, before in tiles:
            start = int(self.pictures.starts[image])
            sources.append(Source(start, self._loaded_size(image), before, room(before, seam, canvas)))
        out[:] = view_of(size, sources, seam, matrix)
        return range(size[0])

    def _readable(self, number: int) -> int:
        image = number
        while not self.readable[image]:
            image = (image + 1) % len(self)
        return image
