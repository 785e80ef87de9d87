"""Validation batches: cut once as a function of the data set, so that any number of workers scores the same bits."""

from __future__ import annotations

from collections import defaultdict
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import Dataset

from ray_yolo.data.augment import letterbox
from ray_yolo.data.dataset import targets
from ray_yolo.data.image_cache import ImageStore
from ray_yolo.structures import AnnotationIndex


class ValBatch(NamedTuple):
    """Images of one padded shape."""

    indices: tuple[int, ...]
    shape: tuple[int, int]  # (height, width)


def padded_shapes(sizes: np.ndarray, imgsz: int, stride: int = 32, pad: float = 0.5) -> np.ndarray:
    """Network input (height, width) of each image, (n, 2) int64, from its own size alone.

    ceil(side x imgsz / long side / stride + pad) x stride.
    """
    ratios = imgsz / sizes.max(axis=1, keepdims=True)
    return (np.ceil(np.round(sizes * ratios / stride + pad, 9)) * stride).astype(np.int64)


def cut_batches(index: AnnotationIndex, imgsz: int, batch_size: int, stride: int = 32,
                pad: float = 0.5) -> tuple[ValBatch, ...]:
    """All images in batches of equal padded shape and at most `batch_size`; shapes and images in ascending order."""
    groups: dict[tuple[int, int], list[int]] = defaultdict(list)
    for image, (height, width) in enumerate(padded_shapes(index.sizes, imgsz, stride, pad).tolist()):
        groups[height, width].append(image)
    return tuple(ValBatch(tuple(images[first:first + batch_size]), shape)
                 for shape, images in sorted(groups.items()) for first in range(0, len(images), batch_size))


class ValDataset(Dataset[dict[str, Tensor]]):
    """Whole validation batches; item i is batch i."""

    def __init__(self, index: AnnotationIndex, store: ImageStore, batches: tuple[ValBatch, ...]) -> None:
        self.index, self.store, self.batches = index, store, batches

    def __len__(self) -> int:
        return len(self.batches)

    def __getitem__(self, number: int) -> dict[str, Tensor]:
        """A batch as `collate` makes it, and what maps its boxes back to the original pixels.

        ratios, pads (B, 2) float32, (y, x): input = original x ratio + pad. sizes (B, 2) int64: original
        (height, width).
        """
        batch = self.batches[number]
        images, labels, ratios, pads = [], [], [], []
        for image in batch.indices:
            pixels = self.store.load_or_grey(image)
            padded, (top, left) = letterbox(pixels, batch.shape)
            shown = self.index[image]
            ratio = np.array(pixels.shape[:2]) / np.array(shown.size)
            boxes = shown.boxes * ratio[[1, 0, 1, 0]] + np.array([left, top, left, top])
            images.append(torch.from_numpy(padded))
            labels.append((torch.tensor(shown.classes), torch.from_numpy(boxes.astype(np.float32))))
            ratios.append(ratio)
            pads.append((top, left))
        return {"images": torch.stack(images).permute(0, 3, 1, 2), "targets": targets(labels),
                "indices": torch.tensor(batch.indices, dtype=torch.int64),
                "ratios": torch.tensor(np.array(ratios), dtype=torch.float32),
                "pads": torch.tensor(pads, dtype=torch.float32),
                "sizes": torch.from_numpy(self.index.sizes[list(batch.indices)].astype(np.int64))}
